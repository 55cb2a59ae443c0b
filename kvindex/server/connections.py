"""Connections that are bounded: in number, in the size of a head, and in time.

uvicorn itself waits for ever for the rest of a request. Here one sweep each second closes what
took too long, so an ordinary request costs two assignments and no timer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvindex.server.guards import Guard, Refusal

__all__ = ["GuardedProtocol", "protocol_of", "sweep", "sweep_always"]

_SWEEP: Final = 1.0  # seconds between looks at what takes too long
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
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._head_since = self.loop.time()
        limit = self.guard.limits.connections
        if len(self.connections) > limit:
            self.refuse(
                Refusal(503, "connections", f"{limit} connections are open, the most served")
            )

    def data_received(self, data: bytes) -> None:
        """Take bytes; refuse a head that grows too long."""
        in_head = self._head_since is not None
        super().data_received(data)
        if not in_head or self._head_since is None:
            return
        self._head_bytes += len(data)
        limit = self.guard.limits.head_bytes
        if self._head_bytes > limit and not self.transport.is_closing():
            self.refuse(
                Refusal(431, "head", f"the request line and its headers exceed {limit} bytes")
            )

    def on_message_begin(self) -> None:
        """Begin to measure a request."""
        super().on_message_begin()
        if self._head_since is None:
            self._head_since = self.loop.time()
            self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Measure its body from now on."""
        self.begin_body()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there."""
        self.end_body()
        super().on_message_complete()

    def begin_body(self) -> None:
        """Measure a body from now on."""
        self._head_since = None
        self._body_since = self.loop.time()

    def end_body(self) -> None:
        """Measure it no longer."""
        self._body_since = None

    def check_time(self, now: float) -> None:
        """Close the connection if the rest of a request is overdue."""
        limits = self.guard.limits
        if self.transport.is_closing():
            return
        if self._head_since is not None and now - self._head_since > limits.head_seconds:
            if self._head_bytes:
                self.refuse(
                    Refusal(408, "slow_head", f"no whole head within {limits.head_seconds:g} s")
                )
            else:  # it never asked anything: browsers open connections in advance
                self.guard.counters.add("slow_head")
                self.transport.close()
        elif self._body_since is not None and now - self._body_since > limits.body_seconds:
            if self.cycle is not None and self.cycle.response_started:
                self.guard.counters.add("slow_body")
                self.transport.close()
            else:
                self.refuse(
                    Refusal(408, "slow_body", f"no whole body within {limits.body_seconds:g} s")
                )

    def refuse(self, refusal: Refusal) -> None:
        """Answer, and close."""
        self.guard.refuse(refusal)
        head = [b"HTTP/1.1 %d %b\r\n" % (refusal.status, _REASONS[refusal.status])]
        head += [b"%b: %b\r\n" % field for field in refusal.headers]
        if not any(name == b"connection" for name, _ in refusal.headers):
            head.append(b"connection: close\r\n")
        self.transport.write(b"".join([*head, b"\r\n", refusal.body]))
        self.transport.close()


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
