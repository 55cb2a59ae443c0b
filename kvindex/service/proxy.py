"""Passes requests that an HTTP process does not answer itself to the subscribing process.

Requests and responses stream both ways over a unix socket, so that event streams and snapshots of
any size take a few buffers here. Connections are kept and used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import httptools

from kvindex.service.connections import ABORT
from kvindex.service.gate import Message, Receive, Scope, Send, answer
from kvindex.service.guards import Guard, Refusal

__all__ = ["Proxy"]

_READ: Final = 64 << 10  # bytes at once
_IDLE: Final = 64  # connections kept for later
_CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 60.0  # for a response to begin: a registration may take half of that
# RFC 9110, 7.6.1: they belong to one connection. `expect` is answered here, `date` and `server`
# are added here.
_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"expect", b"date", b"server"}
)


class Proxy:
    """An ASGI app that passes every request on to a server at a unix socket.

    A server that is gone is a 503 with a reason, as long as nothing of its response was sent;
    afterwards the connection is closed, so that a cut-off response is not taken for a whole one.

    Args:
        path: of the unix socket.
        guard: counts the 503.
        answer_seconds: for a response to begin in.

    Owner: the event loop.
    """

    def __init__(self, path: str, guard: Guard, *, answer_seconds: float = _ANSWER_SECONDS) -> None:
        self._answer_seconds = answer_seconds
        self._path = path
        self._guard = guard
        self._idle: list[_Upstream] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        try:
            upstream = await self._connection()
        except (OSError, asyncio.TimeoutError) as error:
            await self._gone(send, error)
            return
        try:
            await self._exchange(upstream, scope, receive, send)
        except (OSError, httptools.HttpParserError) as error:
            if upstream.response.started:
                await _end(scope, receive)
                return
            await self._gone(send, error)
        finally:
            if upstream.reusable() and len(self._idle) < _IDLE:
                self._idle.append(upstream)
            else:
                upstream.close()

    def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> _Upstream:
        while self._idle:
            upstream = self._idle.pop()
            if upstream.alive():
                return upstream
            upstream.close()
        opening = asyncio.open_unix_connection(self._path)
        return _Upstream(*await asyncio.wait_for(opening, _CONNECT_SECONDS))

    async def _exchange(
        self, upstream: _Upstream, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the request and pass the response on; either ends with its own side."""
        upload = asyncio.ensure_future(_upload(upstream, scope, receive))
        download = asyncio.ensure_future(_download(upstream, scope, send))
        try:
            both, first = {upload, download}, asyncio.FIRST_COMPLETED
            ended, _ = await asyncio.wait(both, timeout=self._answer_seconds, return_when=first)
            if not ended and not upstream.response.started:
                raise OSError(f"no answer within {self._answer_seconds:g} s")
            await asyncio.wait(both, return_when=first)
            if download.done() or upload.exception() is not None:
                # A response that comes before all of the body counts: it says what is wrong.
                await download
            # else the client has gone: nobody wants the rest
        finally:
            for task in (upload, download):
                task.cancel()
            await asyncio.gather(upload, download, return_exceptions=True)

    async def _gone(self, send: Send, error: BaseException) -> None:
        message = f"the process that subscribes does not answer ({error or type(error).__name__})"
        await answer(send, self._guard.refuse(Refusal(503, "parent", message)))


async def _end(scope: Scope, receive: Receive) -> None:
    """End the connection of a response half sent."""
    scope[ABORT]()
    while (await receive())["type"] != "http.disconnect":
        pass


class _Response:
    """One response, as httptools parses it."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.whole_head = False
        self.started = False
        self.ended = False
        self.keeps = False

    def on_message_begin(self) -> None:
        """Begin anew: a 100 Continue may have come before."""
        self.headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a header field."""
        if name.lower() not in _HOP:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Know whether the connection can be used again."""
        self.whole_head = self.parser.get_status_code() >= 200
        self.keeps = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Receive a piece of the body."""
        self.parts.append(body)

    def on_message_complete(self) -> None:
        """Know the end."""
        self.ended = self.whole_head


class _Upstream:
    """One connection to the server, and the response that is read from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.response = _Response()
        self.uploaded = False

    def alive(self) -> bool:
        """Return whether it can accept a request, and begin a new response if so."""
        self.response = _Response()
        self.uploaded = False
        return not self._reader.at_eof() and not self.writer.is_closing()

    def reusable(self) -> bool:
        """Return whether request and response came to their ends."""
        return self.uploaded and self.response.ended and self.response.keeps

    async def pieces(self) -> AsyncIterator[None]:
        """Yield whenever more of the response was read, until its end."""
        while not self.response.ended:
            data = await self._reader.read(_READ)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self.response.parser.feed_data(data)
            yield

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.writer.close()


async def _upload(upstream: _Upstream, scope: Scope, receive: Receive) -> None:
    """Send a request; then return when the client has gone."""
    chunked = not any(name == b"content-length" for name, _ in scope["headers"])
    message = await receive()
    chunked = chunked and bool(message.get("body") or message.get("more_body"))
    upstream.writer.write(_head(scope, chunked))
    while message["type"] == "http.request":
        body = message.get("body", b"")
        if body:
            upstream.writer.write(b"%x\r\n%b\r\n" % (len(body), body) if chunked else body)
        if not message.get("more_body", False):
            if chunked:
                upstream.writer.write(b"0\r\n\r\n")
            upstream.uploaded = True
        await upstream.writer.drain()
        message = await receive()


def _head(scope: Scope, chunked: bool) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % field for field in scope["headers"] if field[0] not in _HOP]
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    return b"\r\n".join([*lines, b"", b""])


async def _download(upstream: _Upstream, scope: Scope, send: Send) -> None:
    """Pass the response on as it comes."""
    response = upstream.response
    bare = scope["method"] == "HEAD"
    async for _ in upstream.pieces():
        if response.whole_head and not response.started:
            response.started = True
            await send(_start(response))
            if bare:  # the parser waits for a body that never comes: not to be used again
                break
        parts, response.parts = response.parts, []
        if parts:
            await send(_body(b"".join(parts), more=True))
    await send(_body(b"", more=False))


def _start(response: _Response) -> Message:
    status = response.parser.get_status_code()
    return {"type": "http.response.start", "status": status, "headers": response.headers}


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
