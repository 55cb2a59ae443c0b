"""Passes requests that an HTTP process does not answer itself to the subscribing process.

Each goes over a connection of its own through a unix socket. Responses stream, so that event
streams and snapshots of any size take a few buffers here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import httptools

from kvindex.service.http.guards import Guard, Refusal
from kvindex.service.http.messages import Reply, Request, Stream, in_threads

_READ: Final = 64 << 10  # bytes at once
_CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 60.0  # for a response to begin: a registration may take half of that
# RFC 9110, 7.6.1: they belong to one connection. `expect` is answered here, and the others are
# written anew.
_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"expect", b"date", b"content-length"}
)


class Proxy:
    """A handler that passes every request on to a server at a unix socket.

    A server that is gone is a 503 with a reason, as long as nothing of its response was sent;
    afterwards the connection is closed, so that a cut-off response is not taken for a whole one.

    A response begins within `answer_seconds`, and the guard counts the 503.

    Owner: the event loop.
    """

    def __init__(self, path: str, guard: Guard, *, answer_seconds: float = _ANSWER_SECONDS) -> None:
        self._path = path
        self._guard = guard
        self._answer_seconds = answer_seconds

    async def __call__(self, request: Request) -> Reply | Stream:
        """Return the server's answer."""
        upstream = None
        try:
            opening = asyncio.open_unix_connection(self._path)
            upstream = _Upstream(*await asyncio.wait_for(opening, _CONNECT_SECONDS))
            await asyncio.wait_for(upstream.ask(request), self._answer_seconds)
        except (OSError, asyncio.TimeoutError, httptools.HttpParserError) as error:
            if upstream is not None:
                upstream.close()
            why = f"the process that subscribes does not answer ({error or type(error).__name__})"
            return self._guard.refuse(Refusal(503, "parent", why)).reply
        pieces = upstream.pieces()
        if request.method == "HEAD":
            upstream.close()
            pieces = in_threads(iter(()))
        is_endless = any(value.startswith(b"text/event-stream") for _, value in upstream.headers)
        return Stream(
            pieces, upstream.headers, upstream.status, upstream.length, is_endless=is_endless
        )


class _Upstream:
    """One connection to the server, and the response that is read from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._is_ended = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.length: int | None = None
        self.status = 0

    async def ask(self, request: Request) -> None:
        """Send a request, and read the head of the response."""
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.target)]
        lines += [b"%b: %b" % field for field in request.headers if field[0] not in _HOP]
        lines.append(b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(request.body))
        self._writer.write(b"\r\n".join(lines) + request.body)
        await self._writer.drain()
        while not self.status:
            await self._read()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes; close the connection."""
        try:
            while self._parts or not self._is_ended:
                parts, self._parts = self._parts, []
                if parts:
                    yield b"".join(parts)
                else:
                    await self._read()
        finally:
            self.close()

    async def _read(self) -> None:
        data = await self._reader.read(_READ)
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._parser.feed_data(data)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._writer.close()

    # The parser's calls -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a field."""
        name = name.lower()
        if name == b"content-length":
            self.length = int(value)
        elif name not in _HOP:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Note the status."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Receive a piece of the body."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note the end."""
        self._is_ended = True
