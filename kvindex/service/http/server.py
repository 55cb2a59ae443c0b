"""The HTTP server: it listens, watches the connections, and ends them in order.

Connections are accepted here, also those with TLS: so they count from their start, handshake
included.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeAlias

from kvindex.service.http.site import Site

try:
    from uvloop import run as run_loop
except ImportError:
    from asyncio import run as run_loop  # type: ignore[assignment]

logger = logging.getLogger(__name__)

Beside: TypeAlias = Callable[[asyncio.Event], Coroutine[Any, Any, None]]

_SWEEP: Final = 1.0  # seconds between looks for overdue connections
_ACCEPT_PAUSE: Final = 1.0  # seconds until the next connection is accepted after a failure
# Seconds that a thread may go on once another one waits for the GIL: by default (5 ms) a request
# waits that long for the thread that applies events.
_GIL_SECONDS: Final = 0.0005
_ENDING_PAUSE: Final = 0.02  # seconds between looks at what still ends


class HttpServer:
    """Serves a site at listening sockets, until `stop`.

    Args:
        site: what is served.
        shutdown_within: seconds for open requests to end in.
        tls: files with the certificate chain and the private key, in PEM; None: plain HTTP.

    Raises:
        OSError: a file of `tls` cannot be used.

    Owner: the thread that calls `run`; `stop` from any, and from signal handlers.
    """

    def __init__(
        self,
        site: Site,
        *,
        shutdown_within: float = 10.0,
        tls: tuple[str, str | None] | None = None,
    ) -> None:
        from kvindex.service.http.connections import Connection  # httptools is an extra

        self.site = site
        self._connect = partial(Connection, site)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY:  # the other half is for engines
            site.most_connections = min(site.most_connections, descriptors // 2)
        self.shutdown_within = shutdown_within
        self._tls: ssl.SSLContext | None = None
        if tls is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*tls)
        self._shaking: set[asyncio.Task[None]] = set()  # TLS handshakes
        self._is_stopped = False
        self._stopped: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def run(
        self,
        sockets: Iterable[socket.socket],
        beside: Beside | None = None,
    ) -> None:
        """Serve at listening sockets until `stop`, then close them.

        Args:
            sockets: they listen already.
            beside: a task for the same event loop; cancelled once all connections have ended.
                Connections are accepted from when it sets the event that it is given.

        Meanwhile the process's threads hand over the GIL after 0.5 ms instead of 5.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_GIL_SECONDS)
        try:
            run_loop(self._serve(list(sockets), beside))
        finally:
            sys.setswitchinterval(interval)

    def stop(self) -> None:
        """Make `run` finish the open requests, and return."""
        self._is_stopped = True
        if self._stopped is not None:
            loop, event = self._stopped
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def _serve(
        self,
        sockets: list[socket.socket],
        beside: Beside | None,
    ) -> None:
        stopped, accepts = asyncio.Event(), asyncio.Event()
        companion = None if beside is None else asyncio.ensure_future(beside(accepts))
        if companion is None:
            accepts.set()
        else:
            companion.add_done_callback(self._end_after)
        self._stopped = asyncio.get_running_loop(), stopped
        tasks = [asyncio.ensure_future(self._sweep())]
        tasks += [asyncio.ensure_future(self._accept(listening, accepts)) for listening in sockets]
        if not self._is_stopped:
            await stopped.wait()
        tasks += self._shaking
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in sockets:
            listening.close()
        await self._end_connections()
        if companion is not None:
            companion.cancel()
            await asyncio.gather(companion, return_exceptions=True)

    def _end_after(self, companion: asyncio.Task[None]) -> None:
        """Stop serving if the task beside fails."""
        if not companion.cancelled() and companion.exception() is not None:
            logger.error("what runs beside the server failed", exc_info=companion.exception())
            self.stop()

    async def _end_connections(self) -> None:
        loop, site = asyncio.get_running_loop(), self.site
        site.is_ending = True
        deadline = loop.time() + self.shutdown_within
        for connection in list(site.connections):
            connection.end()
        while site.connections and loop.time() < deadline:
            await asyncio.sleep(_ENDING_PAUSE)
        if site.connections:
            logger.warning("%d connections did not end: they are closed", len(site.connections))
        for connection in list(site.connections):
            connection.abort()

    async def _sweep(self) -> None:
        """Look for overdue connections once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.site.note_time()
            await asyncio.sleep(_SWEEP)
            for connection in list(self.site.connections):
                connection.check_time(loop.time())

    async def _accept(self, listening: socket.socket, accepts: asyncio.Event) -> None:
        """Accept connections from the event on, until cancelled."""
        await accepts.wait()
        loop, guard = asyncio.get_running_loop(), self.site.guard
        listening.setblocking(False)
        readable = asyncio.Event()
        while True:
            try:  # not the loop's own call: a connection would be lost in it if it is cancelled
                accepted, _ = listening.accept()
                if self._tls is None:
                    await loop.connect_accepted_socket(self._connect, accepted)
                    continue
            except BlockingIOError:
                loop.add_reader(listening, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(listening)
                readable.clear()
                continue
            except OSError as error:  # no descriptor is left, or the client has gone already
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            if len(self.site.connections) + len(self._shaking) >= self.site.most_connections:
                guard.counters["connections"] += 1
                accepted.close()
                continue
            task = asyncio.ensure_future(self._shake_hands(accepted))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        guard = self.site.guard
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=guard.limits.head_seconds,
            )
        except OSError:
            guard.counters["handshake"] += 1
