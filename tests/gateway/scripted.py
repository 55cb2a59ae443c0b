"""A server whose connections do as they are scripted, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

CLOSE = b""
"""Ends a script: the connection is closed."""


class ScriptedServer:
    """Answers each request with the next script, on whichever connection it arrives."""

    def __init__(self, scripts: Sequence[Sequence[bytes]]) -> None:
        self.url = ""
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()  # a client has closed
        self._scripts = list(scripts)
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                length = int(fields.get(b"content-length", b"0"))
                self.bodies.append(await reader.readexactly(length))
                for piece in self._scripts.pop(0):
                    if piece == CLOSE:
                        return
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def scripted(*scripts: Sequence[bytes]) -> AsyncIterator[ScriptedServer]:
    """Serve scripts, one for each request."""
    served = ScriptedServer(scripts)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        served.close()
        await asyncio.sleep(0)
