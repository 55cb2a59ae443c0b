"""Connections that are bounded: in number, in requests that wait, in the size of a head, in time.

uvicorn itself waits for ever for the rest of a request, and for readers, and queues as many
requests as one connection sends. Here one sweep each second closes overdue connections, so
an ordinary request costs a few assignments and no timer.

This overrides and reads undocumented parts of uvicorn (`pipeline`, `flow`, `cycle`,
`_start_asgi_task`, `_unset_keepalive_if_required`): pyproject.toml bounds its version.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from contextlib import suppress
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvindex.service.guards import Guard, Refusal

__all__ = ["ABORT", "GuardedProtocol", "protocol_of", "sweep", "sweep_always"]

ABORT: Final = "kvindex.abort"
"""What a request's scope has under this name ends its connection, what is not sent yet included."""

_SWEEP: Final = 1.0  # seconds between looks for overdue connections
_MOST_WAITING: Final = 16  # requests of one connection that wait for the one that is answered
_LONG: Final = 64 << 10  # bytes that wait for a client: more are a long answer
_LEAST_RATE: Final = 4096  # bytes a second that a client reads of a long answer
_REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class GuardedProtocol(HttpToolsProtocol):
    """One HTTP connection whose peer cannot hold it for ever. Owner: the event loop.

    Attributes:
        guard: whose limits hold, and who counts.
    """

    guard: Guard
    parser: Any
    headers: list[tuple[bytes, bytes]]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_since: float | None = None
        self._body_since: float | None = None
        self._unused = 0  # bytes that came and were no body
        self._running: RequestResponseCycle | None = None  # the request that the app answers
        self._unread = 0  # bytes that waited for the client to read when this was last noted,
        self._unread_since = 0.0  # and when that was

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._head_since = self.loop.time()
        limit = self.guard.limits.connections
        if len(self.connections) > limit:
            self.refuse(
                Refusal(503, "connections", f"{limit} connections are open, the most served")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the answering app that the client is gone."""
        self._abandon()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; refuse a head, or bytes behind a body, that grow too long."""
        self._unused += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self.refuse(Refusal(400, "malformed", "this is not HTTP/1.1"))
            return
        limit = self.guard.limits.head_bytes
        is_within = self._head_since is not None or self._body_since is not None
        if is_within and self._unused > limit and not self.transport.is_closing():
            self.refuse(
                Refusal(431, "head", f"the request line and its headers exceed {limit} bytes")
            )

    def _feed(self, data: bytes) -> None:
        """Parse bytes, deaf to offers to speak another protocol: Java and curl make them.

        The parser would take what follows such a request for that protocol, so it is given the head
        once more without the offer.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = data[offer.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT":
                raise httptools.HttpParserError("there is no way through here")
            head = [b"%b %b HTTP/%b\r\n" % (method, self.url, version.encode())]
            head += [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            data = b"".join([*head, b"\r\n", rest])

    def on_message_begin(self) -> None:
        """Begin to measure a request."""
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        if self._head_since is None:
            self._head_since = self.loop.time()
            self._unused = 0

    def on_headers_complete(self) -> None:
        """Measure its body from now on."""
        if self.parser.should_upgrade():
            return  # the head comes once more
        if len(self.pipeline) >= _MOST_WAITING:
            self.refuse(
                Refusal(503, "pipelined", f"{_MOST_WAITING} requests wait on this connection")
            )
            raise httptools.HttpParserError("too many requests at once")
        super().on_headers_complete()
        self.begin_body()

    def on_body(self, body: bytes) -> None:
        """Receive a part of a body."""
        self._unused = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there."""
        if self.parser.should_upgrade():
            return
        self.end_body()
        super().on_message_complete()

    def begin_body(self) -> None:
        """Measure a body from now on."""
        self._head_since = None
        self._body_since = self.loop.time()
        self.headers = []  # what follows a body in chunks counts for nothing

    def end_body(self) -> None:
        """Measure it no longer."""
        self._body_since = None

    def check_time(self, now: float) -> None:
        """Close the connection if the rest of a request is overdue."""
        limits = self.guard.limits
        if self._reads_too_slowly(now):
            self.guard.counters.add("slow_reader")
            self._forget_unsent()
            self.transport.abort()
        if self.transport.is_closing():
            return
        if self._head_since is not None and now - self._head_since > limits.head_seconds:
            if self._unused:
                self.refuse(
                    Refusal(408, "slow_head", f"no whole head within {limits.head_seconds:g} s")
                )
            else:  # it never asked anything: browsers open connections in advance
                self.guard.counters.add("slow_head")
                self.transport.close()
        elif self._body_since is not None and now - self._body_since > limits.body_seconds:
            self.refuse(
                Refusal(408, "slow_body", f"no whole body within {limits.body_seconds:g} s")
            )

    def _reads_too_slowly(self, now: float) -> bool:
        """Return whether the client has read nothing, or too little of a long answer, for long.

        What is left of a long answer shows how much was read, since no more is written before
        `resume_writing`; of a short one only whether anything was.
        """
        unread = self._unsent()
        if unread > self._unread or (unread != self._unread and unread < _LONG):
            self._unread, self._unread_since = unread, now
        seconds = now - self._unread_since
        is_slow = self._unread - unread < _LEAST_RATE * seconds
        return unread > 0 and is_slow and seconds > self.guard.limits.body_seconds

    def _unsent(self) -> int:
        """Return how many bytes wait for the client, in the system's buffer as well."""
        waiting: int = self.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sys.platform == "linux":
            with suppress(OSError):
                queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
                waiting += int.from_bytes(queued, sys.byteorder)
        return waiting

    def _forget_unsent(self) -> None:
        """Make the system drop its unsent buffer, too."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def resume_writing(self) -> None:
        """Note that the client has read enough for more to be written."""
        self._unread = 0
        super().resume_writing()

    def refuse(self, refusal: Refusal) -> None:
        """Answer, unless other answers are on their way, and close."""
        self.guard.refuse(refusal)
        if self._may_answer():
            self._write(refusal)
        self._abandon()
        self.transport.close()

    def _may_answer(self) -> bool:
        """Return whether what is written now is the answer to the request that is received."""
        running = self._running
        if running is None:
            return True
        if running is self.cycle and self._body_since is not None:
            return not running.response_started
        return bool(running.response_complete)

    def _write(self, refusal: Refusal) -> None:
        head = [b"HTTP/1.1 %d %b\r\n" % (refusal.status, _REASONS[refusal.status])]
        head += [b"%b: %b\r\n" % field for field in refusal.headers]
        if not any(name == b"connection" for name, _ in refusal.headers):
            head.append(b"connection: close\r\n")
        self.transport.write(b"".join([*head, b"\r\n", refusal.body]))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _abandon(self) -> None:
        """Notify the app that answers a request that the client is gone."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()


def protocol_of(guard: Guard, base: type[GuardedProtocol]) -> type[GuardedProtocol]:
    """Return a class of connections under this guard, for uvicorn, which wants a class."""
    return type("Connection", (base,), {"guard": guard})


def sweep(state: ServerState, now: float) -> None:
    """Close the connections whose requests are overdue.

    Complexity: O(connections).
    """
    for connection in list(state.connections):
        if isinstance(connection, GuardedProtocol):
            connection.check_time(now)


async def sweep_always(state: ServerState) -> None:
    """Sweep once a second, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_SWEEP)
        sweep(state, loop.time())
