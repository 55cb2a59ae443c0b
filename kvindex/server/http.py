"""uvicorn as it runs here: bounded connections, no signals of its own, streams that end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from kvindex.server.connections import GuardedProtocol, protocol_of, sweep_always
from kvindex.server.gate import Gate
from kvindex.server.guards import Guard

__all__ = ["HttpServer"]

_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """Serves a gate at sockets, until `stop`.

    Args:
        gate: the app behind its guard.
        guard: of the connections.
        base: the class of connections, to be put under this guard.
        shutdown_within: seconds for open requests to end in.
        idle_seconds: between two requests of a kept connection; that of the guard by default.
        bare: send no date: whoever passes the responses on adds it.
        settings: further ones of `uvicorn.Config`: `uds`, `ssl_certfile`, `ssl_keyfile`.

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
        **settings: Any,
    ) -> None:
        self._gate = gate
        idle = guard.limits.idle_seconds if idle_seconds is None else idle_seconds
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
        self._sweeping: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Finish the open requests, and end."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and watch the connections."""
        await super().startup(sockets)
        self._sweeping = asyncio.ensure_future(sweep_always(self.server_state))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what has no end of its own, then wait for the rest."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._gate.end_streams()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever started this."""
        yield
