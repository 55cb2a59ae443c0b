"""uvicorn as it runs here: bounded connections, no signals of its own, streams that end.

Where uvicorn listens with TLS, nobody sees a connection before its handshake is done, however long
that takes. So connections are accepted here then, which counts them from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

from kvindex.service.connections import GuardedProtocol, protocol_of, sweep_always
from kvindex.service.gate import Gate
from kvindex.service.guards import Guard

__all__ = ["HttpServer"]

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_ACCEPT_PAUSE = 1.0  # seconds until the next connection is accepted after a failure


class HttpServer(uvicorn.Server):
    """Serves a gate at sockets, until `stop`.

    Args:
        gate: the app behind its guard.
        guard: of the connections.
        base: the class of connections, to be put under this guard.
        shutdown_within: seconds for open requests to end in.
        idle_seconds: between two requests of a kept connection; that of the guard by default.
        bare: send no date: whoever passes the responses on adds it.
        tls: files with the certificate chain and the private key, in PEM; None: plain HTTP.
        settings: further ones of `uvicorn.Config`: `uds`.

    Raises:
        OSError: a file of `tls` cannot be used.

    Owner: the thread that calls `run`; `stop` from any, and from signal handlers.
    """

    def __init__(
        self,
        gate: Gate,
        guard: Guard,
        *,
        base: type[GuardedProtocol] = GuardedProtocol,
        shutdown_within: float = 10.0,
        idle_seconds: float | None = None,
        bare: bool = False,
        tls: tuple[str, str | None] | None = None,
        **settings: Any,
    ) -> None:
        self._gate = gate
        idle = guard.limits.idle_seconds if idle_seconds is None else idle_seconds
        self._guard = guard
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(*tls)
        super().__init__(
            uvicorn.Config(
                gate,
                http=protocol_of(guard, base),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=not bare,
                backlog=_BACKLOG,
                timeout_keep_alive=max(1, int(idle)),
                timeout_graceful_shutdown=max(1, int(shutdown_within)),
                **settings,
            )
        )
        self._running: set[asyncio.Task[None]] = set()  # of this class
        self._shaking: set[asyncio.Task[None]] = set()  # TLS handshakes

    def stop(self) -> None:
        """Finish the open requests, and end."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and watch the connections."""
        listening = sockets or []
        await super().startup(sockets if self._context is None else [])
        self._running = {asyncio.ensure_future(sweep_always(self.server_state))}
        if self._context is not None:
            self._running |= {asyncio.ensure_future(self._accept(one)) for one in listening}

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what has no end of its own, then wait for the rest."""
        ended = self._running | self._shaking
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        self._gate.end_streams()
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        """Accept connections that begin with a TLS handshake, until cancelled."""
        loop, most = asyncio.get_running_loop(), self._guard.limits.connections
        listening.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # no descriptor is left, or the client has gone already
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            if len(self.server_state.connections) + len(self._shaking) >= most:
                self._guard.counters.add("connections")
                connection.close()
                continue
            task = asyncio.ensure_future(self._shake_hands(connection))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        limits = self._guard.limits
        make: Any = self.config.http_protocol_class
        state, loop = self.server_state, asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: make(config=self.config, server_state=state, app_state=self.lifespan.state),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=limits.head_seconds,
            )
        except OSError:
            self._guard.counters.add("handshake")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever started this."""
        yield
