"""Where a server listens, and the server: it accepts connections until it is stopped.

Connections are accepted here, also those with TLS: so they count from their start, handshake
included.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from kvindex.service.http.guards import Limits, check_tokens, is_loopback
from kvindex.service.http.site import Site
from kvindex.wire.errors import ConfigurationError

try:
    from uvloop import run as run_loop
except ImportError:
    from asyncio import run as run_loop  # type: ignore[assignment]

logger = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "KVINDEX_TOKEN"
"""The environment variable that may hold the token."""

Beside: TypeAlias = Callable[[asyncio.Event], Coroutine[Any, Any, None]]

_DESCRIPTORS: Final = 65_536
_OPEN_FILES: Final = "/proc/self/fd"
_BACKLOG: Final = 2048  # connections that wait to be accepted
_SWEEP: Final = 1.0  # seconds between looks for overdue connections
_ACCEPT_PAUSE: Final = 1.0  # seconds until the next connection is accepted after a failure
# Seconds that a thread may go on once another one waits for the GIL: by default (5 ms) a request
# waits that long for the thread that applies events.
_GIL_SECONDS: Final = 0.0005
_ENDING_PAUSE: Final = 0.02  # seconds between looks at what still ends


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens, and whom it admits.

    Attributes:
        host: the address or name to listen at.
        port: of it; 0 lets the operating system choose.
        token_file: a file with tokens, each on a line of its own; any of them opens.
        insecure: listen beyond loopback without a token.
        tls_cert: file with the certificate chain, in PEM.
        tls_key: file with its private key.
        allowed_hosts: names besides localhost and addresses that a Host header may have.
        allowed_origins: https://HOST of other sites whose pages may send requests; "*": any.
        limits: bounds on input from the network.

    Raises:
        ConfigurationError: a value cannot work, with what would.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token_file: str | None = None
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigurationError("TLS needs both: --tls-cert FILE and --tls-key FILE")

    @property
    def scheme(self) -> str:
        """Either "http" or "https"."""
        return "https" if self.tls_cert else "http"

    @property
    def tls(self) -> tuple[str, str | None] | None:
        """The files with the certificate chain and its private key, if there are any."""
        return None if self.tls_cert is None else (self.tls_cert, self.tls_key)

    def url(self, port: int) -> str:
        """Return where a server at this port is reached from this machine."""
        host = reachable(self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def tokens(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Return the tokens that open, of the file or the environment; none: none is wanted.

        Raises:
            ConfigurationError: one cannot be used, or there is none although the server listens
                beyond loopback and without --insecure.
        """
        if self.token_file is not None:
            return read_tokens(self.token_file)
        if environ.get(TOKEN_VARIABLE):
            return check_tokens((environ[TOKEN_VARIABLE],), TOKEN_VARIABLE)
        if is_loopback(self.host) or self.insecure:
            return ()
        raise ConfigurationError(
            f"{self.host} can be reached from other machines: give a token (--token-file FILE, or "
            f"{TOKEN_VARIABLE} in the environment), or say --insecure if anybody there may send "
            "requests"
        )

    def listen(self) -> socket.socket:
        """Return a socket that listens there; raises OSError."""
        raise_descriptors()
        with self._address() as (family, address):
            listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Accepted sockets inherit it; asyncio sets it only where the protocol's number was given.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening

    def reserve(self) -> socket.socket:
        """Return a socket that keeps the address and never listens; raises OSError.

        A server that sets SO_REUSEADDR can bind and listen beside it.
        """
        raise_descriptors()
        with self._address() as (family, address):
            holder = socket.socket(family, socket.SOCK_STREAM)
            try:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(address)
            except OSError:
                holder.close()
                raise
        return holder

    @contextmanager
    def _address(self) -> Iterator[tuple[socket.AddressFamily, Any]]:
        """Look the address up; what fails with it says where it was to listen."""
        try:
            family, *_, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            yield family, address
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"cannot listen at {self.host} port {self.port}: {why}") from error


def raise_descriptors() -> int:
    """Let this process, and those that it starts, open more files; return how many."""
    # Each rank and each connection needs some, and the usual soft limit is 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return max(soft, most)  # "infinity" is -1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def _open_files() -> int:
    """Return how many files this process has open; 0 where the system does not tell."""
    try:
        # Before Linux 6.2 its size is 0; a listing takes about 2 ms for each 1,000 files.
        return os.stat(_OPEN_FILES).st_size or len(os.listdir(_OPEN_FILES))
    except OSError:
        return 0


def reachable(host: str) -> str:
    """Return the host at which this machine reaches a listener at a host."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def read_tokens(file: str) -> tuple[str, ...]:
    """Return the tokens in a file, each on a line of its own; raises ConfigurationError."""
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token file cannot be read: {error}") from None
    return check_tokens((line.strip() for line in lines if line.strip()), file)


class HttpServer:
    """Serves a site at a listening socket, until `stop`.

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
        if descriptors != resource.RLIM_INFINITY:
            site.most_descriptors = descriptors
        self.shutdown_within = shutdown_within
        self._tls: ssl.SSLContext | None = None
        if tls is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*tls)
        self._shaking: set[asyncio.Task[None]] = set()  # TLS handshakes
        self._is_stopped = False
        self._stopped: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def run(self, listener: socket.socket, beside: Beside | None = None) -> None:
        """Serve at a listening socket until `stop`, then close it.

        Args:
            listener: it listens already.
            beside: a task for the same event loop; cancelled once all connections have ended.
                Connections are accepted from when it sets the event that it is given.

        Meanwhile the process's threads hand over the GIL after 0.5 ms instead of 5.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_GIL_SECONDS)
        try:
            run_loop(self._serve(listener, beside))
        finally:
            sys.setswitchinterval(interval)

    def stop(self) -> None:
        """Make `run` finish the open requests, and return."""
        # A signal may come before the loop is there: then `_serve` finds this flag.
        self._is_stopped = True
        if self._stopped is not None:
            loop, event = self._stopped
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def _serve(self, listener: socket.socket, beside: Beside | None) -> None:
        loop, site = asyncio.get_running_loop(), self.site
        stopped, accepts = asyncio.Event(), asyncio.Event()

        def end_after(companion: asyncio.Task[None]) -> None:
            if not companion.cancelled() and companion.exception() is not None:
                logger.error("what runs beside the server failed", exc_info=companion.exception())
                self.stop()

        companion = None if beside is None else asyncio.ensure_future(beside(accepts))
        if companion is None:
            accepts.set()
        else:
            companion.add_done_callback(end_after)
        self._stopped = loop, stopped
        tasks = [
            asyncio.ensure_future(self._sweep()),
            asyncio.ensure_future(self._accept(listener, accepts)),
        ]
        if not self._is_stopped:
            await stopped.wait()
        # First no further connections, so that their number can only fall from here on.
        tasks += self._shaking
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()
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
        # Last: the open requests needed it.
        if companion is not None:
            companion.cancel()
            await asyncio.gather(companion, return_exceptions=True)

    async def _sweep(self) -> None:
        """Look for overdue connections once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self.site.note_time()
            self.site.others = max(0, _open_files() - len(self.site.connections))
            await asyncio.sleep(_SWEEP)
            for connection in list(self.site.connections):
                connection.check_time(loop.time())

    async def _accept(self, listener: socket.socket, accepts: asyncio.Event) -> None:
        """Accept connections from the event on, until cancelled."""
        await accepts.wait()
        loop, guard = asyncio.get_running_loop(), self.site.guard
        listener.setblocking(False)
        readable = asyncio.Event()
        while True:
            try:  # not the loop's own call: a connection would be lost in it if it is cancelled
                accepted, _ = listener.accept()
                if self._tls is None:
                    await loop.connect_accepted_socket(self._connect, accepted)
                    continue
            except BlockingIOError:
                loop.add_reader(listener, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(listener)
                readable.clear()
                continue
            except OSError as error:  # no descriptor is left, or the client has gone already
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            # A handshake takes longer than to accept, so those under way count as connections.
            count = len(self.site.connections) + len(self._shaking) + 1
            if not self.site.has_room(count):
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
