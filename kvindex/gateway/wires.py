"""One connection to an engine, and the answer that it receives.

An answer is received as it comes. What its reader has not read yet is at most `MOST_UNREAD` bytes:
then the connection is not read from, and TCP holds the engine back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import httptools

from kvindex.wire.errors import KVIndexError

MOST_UNREAD: Final = 64 << 10
"""Bytes of an answer that wait for their reader."""

MOST_HEAD: Final = 64 << 10
"""Bytes of an answer's head."""

# RFC 9110, 7.6.1: they belong to one connection.
_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"trailer"})
_NO_BODY: Final = frozenset({204, 304})


class UpstreamError(KVIndexError):
    """An engine did not answer, or not to the end.

    Attributes:
        reason: "refused", "unreachable" or "timeout_connect": nothing was sent; "timeout_head",
            "garbage" or "head_too_long": no head arrived; "reset": the connection broke; "too_long"
            or "timeout": a whole answer was too long, or not there in time.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer:
    """An engine's answer, which is being received.

    Attributes:
        status: the HTTP status code.
        headers: the fields, with names in lower case, but for those of one connection.
        sink: receives pieces in place of the reader while that waits for one, unless it returns
            False. So the reader's task, which costs more than the piece, is not woken.

    Owner: one event loop; one task reads.
    """

    def __init__(self, wire: Wire) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._wire: Wire | None = wire  # until the answer is complete, or broken
        self._pieces: list[bytes] = []
        self._size = 0
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[bytes], bool] | None = None

    async def read(self) -> bytes:
        """Return all that has arrived and was not read yet; b"" at the end.

        Raises:
            UpstreamError: the answer breaks off here.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._wire is None:
                return b""
            await self._wait()
        data = self._joined()
        self._forget()
        return data

    def _joined(self) -> bytes:
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _forget(self) -> None:
        """Note that all pieces are read."""
        self._pieces, self._size = [], 0
        if self._wire is not None:
            self._wire.resume()

    def close(self) -> None:
        """Close the connection, unless the answer is complete: the engine stops working on it."""
        self.fail("closed", "it was closed here")

    def fail(self, reason: str, why: str) -> None:
        """Break the answer off, unless it is complete; `read` raises once all is read."""
        wire = self._wire
        if wire is not None:
            self._error = UpstreamError(f"{wire.name}: {why}", reason=reason)
            self._wire = None
            wire.abort()
            self._wake()

    async def head(self) -> None:
        """Wait for the head; raises UpstreamError if none arrives."""
        while not self.status and self._error is None:
            await self._wait()
        if self._error is not None and not self.status:
            raise self._error

    # Its connection's calls ---------------------------------------------------------------------

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Accept the head."""
        self.status, self.headers = status, headers

    def add(self, data: bytes) -> bool:
        """Accept a piece; return whether more may come now."""
        self._pieces.append(data)
        self._size += len(data)
        return self._size < MOST_UNREAD

    def complete(self) -> None:
        """Note that all has arrived."""
        self._wire = None

    def wake(self) -> None:
        """Pass on what has arrived: to the sink, or to the reader."""
        is_open = self._wire is not None and self._waiter is not None and self._pieces
        if is_open and self.sink is not None and self.sink(self._joined()):
            self._forget()
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Wire(asyncio.Protocol):
    """One connection to an engine, for one request at a time. Owner: one event loop.

    Args:
        name: of the engine, for messages.
        on_idle: called when an answer is complete and another request may be sent.
        on_closed: called when the connection is closed.

    Attributes:
        name: as given.
        is_open: whether a request can be sent.
        idle_since: when its last answer was complete, in seconds of the loop.
        is_reused: whether it had a request before the present one.
        has_received: whether anything of the present answer has arrived.
    """

    def __init__(
        self, name: str, on_idle: Callable[[Wire], None], on_closed: Callable[[Wire], None]
    ) -> None:
        self.name = name
        self.is_open = False
        self.idle_since = 0.0
        self.is_reused = False
        self.has_received = False
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._transport: Any = None
        self._answer: Answer | None = None
        self._parser: Any = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._unread = 0  # bytes since the head began
        self._in_head = False
        self._ends_by_closing = False
        self._is_paused = False

    def ask(self, request: bytes) -> Answer:
        """Send a request."""
        self._answer = answer = Answer(self)
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._unread = [], 0
        self._in_head, self.has_received, self._ends_by_closing = True, False, False
        self._transport.write(request)
        return answer

    def resume(self) -> None:
        """Read on."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection now."""
        self._answer = None
        self.is_open = False
        self._transport.abort()

    # The transport's calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that it is open."""
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer: it is broken off, unless it ends by closing."""
        self.is_open = False
        self._on_closed(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._ends_by_closing and exc is None:
            answer.complete()
            answer.wake()
        else:
            answer.fail("reset", "the engine closed the connection")

    def data_received(self, data: bytes) -> None:
        """Parse bytes; an idle connection that receives any is closed."""
        answer = self._answer
        if answer is None:
            self.abort()
            return
        self.has_received = True
        if self._in_head:
            self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.fail("garbage", f"its answer is no HTTP/1.1 ({type(error).__name__})")
            self.abort()  # also if more follows a whole answer
            return
        if self._in_head and self._unread > MOST_HEAD:
            self._fail_head(answer)
            return
        answer.wake()

    def _fail_head(self, answer: Answer) -> None:
        answer.fail("head_too_long", f"the head of its answer exceeds {MOST_HEAD} bytes")

    # The parser's calls -------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head; a second answer, which nobody asked for, closes the connection."""
        self._headers = []
        if self._answer is None:
            raise httptools.HttpParserError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a field."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Notify the reader of the head; a 1xx is not the answer."""
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None:
            return
        self._in_head = False
        headers = self._headers
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEAD:
            self._fail_head(self._answer)
            return
        names = {name for name, _ in headers}
        has_end = b"content-length" in names or b"transfer-encoding" in names
        self._ends_by_closing = not has_end and status not in _NO_BODY
        self._answer.begin(status, [field for field in headers if field[0] not in _HOP])

    def on_body(self, body: bytes) -> None:
        """Receive a piece; read no more if too much is unread."""
        if self._answer is not None and not self._answer.add(body) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """End the answer; the connection waits for the next request."""
        answer = self._answer
        if answer is None or self._in_head:
            return  # a 1xx
        self._answer = None
        answer.complete()
        answer.wake()
        self.resume()
        if self._parser.should_keep_alive() and not self._transport.is_closing():
            self._on_idle(self)
        else:
            self.is_open = False
            self._transport.close()
