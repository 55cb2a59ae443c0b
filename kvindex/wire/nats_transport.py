"""The sockets of a connection to NATS, of which none stays open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nats.aio.transport import TcpTransport

if TYPE_CHECKING:
    from urllib.parse import ParseResult

_LAST_SECONDS = 0.5  # for what is still unsent when a connection is closed


class PromptTransport(TcpTransport):
    """What nats-py connects with, but that closing ends even if the server stands still.

    asyncio closes a socket when all is sent, which a server that stands still prevents, and nats-py
    waits for that before it connects to another server. And of an attempt that was not answered,
    nats-py forgets the socket.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect; a socket of an earlier attempt is closed."""
        self._abort(self._io_writer)
        await super().connect(uri, buffer_size, connect_timeout)

    def close(self) -> None:
        """Close, within half a second."""
        writer = self._io_writer
        if writer is not None:
            writer.close()
            asyncio.get_running_loop().call_later(_LAST_SECONDS, self._abort, writer)

    def _abort(self, writer: asyncio.StreamWriter | None) -> None:
        if writer is not None:
            writer.transport.abort()

    def __bool__(self) -> bool:
        return True  # or nats-py would make one of its own at first
