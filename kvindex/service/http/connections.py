"""One HTTP/1.1 connection: parsed by httptools, bounded in memory and time, answered in order.

A request is passed to its route once its body has come. A route that answers at once is answered
in the same turn of the event loop: no task, no queue. Requests that come meanwhile wait, a few of
them, and no more is read then. One sweep each second closes overdue connections, so a request
costs no timer.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import sys
import termios
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from io import BytesIO
from typing import Any, Final

import httptools

from kvindex.service.http.guards import Refusal, is_loopback
from kvindex.service.http.messages import (
    PEER,
    BrokenOffError,
    Headers,
    Reply,
    Request,
    Stream,
    Writer,
    has_room,
)
from kvindex.service.http.site import Site

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 16  # requests of one connection that wait for the one that is answered
_MOST_AT_ONCE: Final = 16  # requests of one connection that are answered in one turn of the loop
_DRAINED: Final = 4  # times the limit that is read of a long body, so that its sender sees why
_LONG: Final = 64 << 10  # bytes that wait for a client: more are a long answer
_LEAST_RATE: Final = 4096  # bytes a second that a client reads of a long answer
_STATUS: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


@dataclass(slots=True, eq=False)
class _Incoming:
    """A request that is being received or waits, and its state."""

    request: Request
    is_old: bool = False  # HTTP/1.0
    is_last: bool = False  # the connection is closed after it
    expects: bool = False  # the client sends the body once it is asked to go on
    refusal: Refusal | None = None
    is_answered: bool = False
    body: BytesIO = field(default_factory=BytesIO)
    size: int = 0  # of what has arrived of the body
    held: int = 0  # of what is kept of it


def _unsupported(version: str, request: Request) -> Refusal | None:
    if version not in ("1.0", "1.1"):
        return Refusal(505, "malformed", f"this server speaks HTTP/1.1, not {version[:8]}")
    # RFC 9112, 6.1: a body that is coded otherwise cannot be read.
    coding = request.header(b"transfer-encoding")
    if coding is not None and coding.strip().lower() != b"chunked":
        return Refusal(501, "malformed", "of the transfer codings this server reads chunked only")
    return None


class Unread:
    """The bytes that a client has not read yet: whether it reads, and fast enough."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._waited = 0  # bytes that waited when this was last noted,
        self._since = 0.0  # and when that was

    def note_progress(self) -> None:
        """Note that the client has read enough for more to be written."""
        self._waited = 0

    def is_overdue(self, now: float, limit: float) -> bool:
        """Return whether the client has read nothing, or too little of a long answer, for long."""
        # What waits in the system's buffer counts, too: the transport's own is empty until then.
        unread: int = self._transport.get_write_buffer_size()
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sys.platform == "linux":
            with suppress(OSError):
                queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
                unread += int.from_bytes(queued, sys.byteorder)
        # What is left of a long answer shows how much was read, since no more is written before
        # `note_progress`; of a short one only whether anything was.
        if unread > self._waited or (unread != self._waited and unread < _LONG):
            self._waited, self._since = unread, now
        seconds = now - self._since
        is_slow = self._waited - unread < _LEAST_RATE * seconds
        return unread > 0 and is_slow and seconds > limit

    def forget(self) -> None:
        """Make the system drop its unsent buffer, once the connection is aborted."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Connection(asyncio.Protocol):
    """A connection with the bounds of its site on memory and time. Owner: the event loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._incoming: _Incoming | None = None  # whose body is received
        self._waiting: deque[_Incoming] = deque()  # to be answered, the first one next
        self._task: asyncio.Task[None] | None = None  # answers a request
        self._stream: Stream | None = None  # that is being sent
        self._cancels = False  # whether what `_task` does is cancelled once the client has gone
        self._at_once = 0  # requests answered in this turn of the event loop
        self._is_reading = True
        self._writable = asyncio.Event()
        self._writable.set()
        self._head_since: float | None = None
        self._body_since: float | None = None
        self._idle_since: float | None = None
        self._unused = 0  # bytes that came and were no body
        self._is_local: bool | None = None  # None: our own proxy says of each request who asks

    # The transport's calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or refuse it if there are too many."""
        self.transport: Any = transport
        self._unread = Unread(self.transport)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._is_local = is_loopback(peer[0])
        self._head_since = self._loop.time()
        connections = self._site.connections
        connections.add(self)
        if not self._site.has_room(len(connections)):
            text = f"{len(connections) - 1} connections are open, the most served"
            self._refuse(Refusal(503, "connections", text))

    def connection_lost(self, exc: Exception | None) -> None:
        """End a stream; another answer is worked out to its end, unless its route cancels."""
        self._site.connections.discard(self)
        for incoming in (self._incoming, *self._waiting):
            self._release(incoming)
        self._waiting.clear()
        # The parser and its connection hold each other, and a body until the collector comes.
        self._incoming = self._parser = None
        self._writable.set()
        if self._task is not None and (self._cancels or self._stream is not None):
            # A turn later: a task that is cancelled before it began would never await its handler,
            # and what that holds would not be given back.
            self._loop.call_soon(self._task.cancel)

    def pause_writing(self) -> None:
        """Answer no further request until the client has read enough."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on with the answers."""
        self._unread.note_progress()
        self._writable.set()
        self._begin_turn()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; refuse a head, or bytes behind a body, that grow too long."""
        self._unused += len(data)
        self._at_once = 0
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self._refuse(Refusal(400, "malformed", "this is not HTTP/1.1"))
            return
        limit = self._site.guard.limits.head_bytes
        # Between two requests there is nothing to be too long: `_unused` counts the last one's.
        is_within = self._head_since is not None or self._body_since is not None
        if is_within and self._unused > limit and not self.transport.is_closing():
            self._refuse(
                Refusal(431, "head", f"the request line and its headers exceed {limit} bytes")
            )

    def _feed(self, data: bytes) -> None:
        """Parse bytes; pass over offers of another protocol (`Upgrade`: Java, curl)."""
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = data[offer.args[0] :]
            # The parser would take what follows such a request for that protocol, so a new one
            # parses the head once more, without the offer.
            method, version = self._parser.get_method(), self._parser.get_http_version()
            if method == b"CONNECT":
                raise httptools.HttpParserError("this is no proxy")
            head = [b"%b %b HTTP/%b\r\n" % (method, self._url, version.encode())]
            head += [b"%b: %b\r\n" % field for field in self._headers if field[0] != b"upgrade"]
            self._parser = httptools.HttpRequestParser(self)
            data = b"".join([*head, b"\r\n", rest])

    # The parser's calls -------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin to measure a request."""
        self._url = b""
        self._headers = []
        self._idle_since = None
        if self._head_since is None:
            self._head_since = self._loop.time()
            self._unused = 0

    def on_url(self, url: bytes) -> None:
        """Receive a part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a field."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Refuse the request, or wait for its body."""
        parser = self._parser
        if parser.should_upgrade():
            return  # the head comes once more
        if len(self._waiting) >= _MOST_WAITING:
            self._refuse(
                Refusal(503, "pipelined", f"{_MOST_WAITING} requests wait on this connection")
            )
            # Only an error stops the parser amid the bytes that it was fed.
            raise httptools.HttpParserError("too many requests at once")
        self._head_since, self._body_since = None, self._loop.time()
        headers, self._headers = self._headers, []  # what follows a body is no field of the request
        site, limit = self._site, self._site.guard.limits.head_bytes
        # Once more: a whole head may have come with one piece.
        if len(self._url) + sum(len(name) + len(value) for name, value in headers) > limit:
            text = f"the request line and its headers exceed {limit} bytes"
            self._refuse(Refusal(431, "head", text))
            raise httptools.HttpParserError("the head is too long")
        request = Request.of(parser.get_method().decode("ascii"), self._url, headers)
        incoming = self._incoming = _Incoming(request)
        incoming.is_old = parser.get_http_version() == "1.0"
        incoming.is_last = incoming.is_old or not parser.should_keep_alive()
        expected = None if incoming.is_old else request.header(b"expect")
        incoming.expects = expected is not None and expected.lower() == b"100-continue"
        if self._is_local is None:
            peer = request.header(PEER) or b""
            request.is_local = is_loopback(peer.decode("latin-1"))
        else:
            request.is_local = self._is_local
        refusal = site.admit(request)
        unsupported = _unsupported(parser.get_http_version(), request)
        if refusal is None and unsupported is not None:
            refusal = site.guard.refuse(unsupported)
        length = request.header(b"content-length")
        if refusal is not None:
            self._refuse_request(incoming, refusal)
        elif length is not None and int(length) > self._site.guard.limits.body_bytes:
            self._refuse_request(incoming, self._too_long())
            # A sender that is cut off amid its body sees a reset and never the answer. So the body
            # is read and forgotten, unless that would take too long.
            if int(length) > _DRAINED * self._site.guard.limits.body_bytes:
                self.transport.close()
        else:
            self._go_on()

    def on_body(self, body: bytes) -> None:
        """Receive a part of a body."""
        incoming, limit = self._incoming, self._site.guard.limits.body_bytes
        self._unused = 0
        if incoming is None:
            return
        incoming.size += len(body)
        if incoming.refusal is None:
            if incoming.size <= limit and self._hold(incoming, len(body)):
                incoming.body.write(body)
                return
            incoming.body = BytesIO()
            self._release(incoming)
            is_long = incoming.size > limit
            self._refuse_request(incoming, self._too_long() if is_long else self._no_room())
        if incoming.size > _DRAINED * limit:
            self.transport.close()

    def on_message_complete(self) -> None:
        """Answer the request, after those before it."""
        incoming = self._incoming
        if self._parser.should_upgrade() or incoming is None:
            return
        self._incoming = self._body_since = None
        if self.transport.is_closing():
            return
        if incoming.is_answered:
            self._finish(incoming)
        else:
            incoming.request.body = incoming.body.getvalue()
            incoming.request.hold = partial(self._hold, incoming)
            self._waiting.append(incoming)
        self._advance()

    # Answers ------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        """Return whether what is written now answers the request that is received."""
        return self._task is None and not self._waiting

    def _begin_turn(self) -> None:
        self._at_once = 0
        self._advance()

    def _advance(self) -> None:
        """Answer the waiting requests, in order, until one takes its time or all are answered."""
        waiting = self._waiting
        while waiting and self._task is None and self._writable.is_set():
            if self.transport.is_closing():
                return
            if self._at_once >= _MOST_AT_ONCE:  # other connections have their turn
                self._loop.call_soon(self._begin_turn)
                break
            self._at_once += 1
            incoming = waiting.popleft()
            if incoming.refusal is not None:
                self._reply(incoming, self._form(incoming.refusal, incoming))
                continue
            answer = self._site.answer(incoming.request)
            if isinstance(answer, Reply):  # in the same turn: no task, no queue
                self._reply(incoming, answer)
            else:
                self._cancels = incoming.request.cancels
                self._task = self._loop.create_task(self._answer_later(incoming, answer))
        # No more is read while requests wait, so that their number is bounded by the client's own
        # sending; and read again once none does.
        if self._is_reading and waiting:
            self._is_reading = False
            self.transport.pause_reading()
        elif not self._is_reading and not waiting and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()
        if self._is_idle():
            if self._incoming is not None:
                self._go_on()
            elif self._head_since is None:
                self._idle_since = self._loop.time()

    def _go_on(self) -> None:
        """Refuse the request whose body is to come, or ask for the body if the client waits."""
        incoming = self._incoming
        if incoming is None or incoming.is_answered or not self._is_idle():
            return
        if incoming.refusal is None:
            if incoming.expects:
                incoming.expects = False
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Refusals are bounded as answers are: a client that never reads gets no more of them.
        elif self._at_once >= _MOST_AT_ONCE:
            self._loop.call_soon(self._begin_turn)
        elif self._writable.is_set():
            self._at_once += 1
            self._reply(incoming, self._form(incoming.refusal, incoming))
            if incoming.expects:  # its body will not come
                self.transport.close()

    async def _answer_later(
        self, incoming: _Incoming, answering: Awaitable[Reply | Stream]
    ) -> None:
        try:
            answer = await answering
            if isinstance(answer, Stream):
                await self._send(incoming, answer)
            elif not self.transport.is_closing():  # the client has not gone meanwhile
                self._reply(incoming, answer)
        finally:
            self._task = None
            self._release(incoming)
        self._advance()

    def _hold(self, incoming: _Incoming, size: int) -> bool:
        """Count bytes that are kept for a request; return whether there is room for them."""
        site = self._site
        if site.held_bytes + size > site.guard.limits.bodies_bytes:
            return False
        incoming.held += size
        site.held_bytes += size
        return True

    def _release(self, incoming: _Incoming | None) -> None:
        """Count a body no longer among those that are held: its request has ended."""
        if incoming is not None:
            self._site.held_bytes -= incoming.held
            incoming.held = 0
            # It would hold the request that holds it, and the body until the collector comes.
            incoming.request.hold = has_room

    async def _send(self, incoming: _Incoming, stream: Stream) -> None:
        """Send a stream to its end, or until the client is gone or cut off."""
        # HTTP/1.0 knows no chunks: the end of the connection is the end of the answer.
        fields = list(stream.headers)
        is_chunked = stream.length is None and not incoming.is_old
        if stream.length is not None:
            fields.append((b"content-length", b"%d" % stream.length))
        elif is_chunked:
            fields.append((b"transfer-encoding", b"chunked"))
        if not self.transport.is_closing():
            self.transport.write(self._head(incoming, stream.status, fields))
        self._stream = stream
        try:
            if incoming.request.method != "HEAD":
                await self._send_pieces(stream, is_chunked)
            self._finish(incoming)
        except Exception as error:
            # The client must not take a part for the whole. With chunks or a length it sees at an
            # ordinary end that something is missing; else the end must be a reset.
            is_expected = isinstance(error, BrokenOffError)
            if is_expected and (is_chunked or stream.length is not None):
                self.transport.close()
            else:
                if not (is_expected or isinstance(error, OSError)):
                    logger.exception("an answer broke off")
                self._unread.forget()
                self.transport.abort()
        finally:
            self._stream = None

    async def _send_pieces(self, stream: Stream, is_chunked: bool) -> None:
        write = self._write_chunk if is_chunked else self.transport.write
        try:
            await stream.send(Writer(write, self._is_writable, partial(self._drain, stream)))
        except asyncio.CancelledError:
            # By `end`: an endless stream ends as a whole answer does. By all else: amid it.
            if not (self._site.is_ending and stream.is_endless) or self.transport.is_closing():
                raise
        if is_chunked:
            self.transport.write(b"0\r\n\r\n")

    def _write_chunk(self, piece: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _is_writable(self) -> bool:
        return self._writable.is_set() and not self.transport.is_closing()

    async def _drain(self, stream: Stream) -> None:
        """Wait until the client has read enough of a stream."""
        if not self._writable.is_set():  # a wait that need not be costs a task
            try:
                await asyncio.wait_for(self._writable.wait(), stream.send_within)
            except asyncio.TimeoutError:
                stream.on_cut_off()
                raise ConnectionAbortedError("the client does not read") from None
        if self.transport.is_closing():
            raise ConnectionAbortedError("the client has gone")

    def _reply(self, incoming: _Incoming, reply: Reply) -> None:
        """Write a whole answer."""
        fields = list(reply.headers)
        if reply.content_type:
            fields.append((b"content-type", reply.content_type))
        if reply.status not in (204, 304):
            fields.append((b"content-length", b"%d" % len(reply.body)))
        head = self._head(incoming, reply.status, fields)
        has_body = reply.body and incoming.request.method != "HEAD"
        self.transport.write(head + reply.body if has_body else head)
        self._finish(incoming)

    def _head(self, incoming: _Incoming, status: int, fields: Headers) -> bytes:
        """Return the head of an answer, and count it."""
        self._site.count(incoming.request, status)
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status, self._site.date]
        lines += [b"%b: %b\r\n" % field for field in fields]
        origin = incoming.request.header(b"origin")
        if origin is not None and self._site.guard.allows_origin(origin):
            lines.append(b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin)
        incoming.is_last |= self._site.is_ending
        if incoming.is_last:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _finish(self, incoming: _Incoming) -> None:
        """Note that a request is answered; close the connection after the last."""
        incoming.is_answered = True
        self._release(incoming)
        if (incoming.is_last or self._site.is_ending) and incoming is not self._incoming:
            self.transport.close()

    # Refusals -----------------------------------------------------------------------------------

    def _form(self, refusal: Refusal, incoming: _Incoming | None) -> Reply:
        path = "" if incoming is None else incoming.request.path
        return self._site.guard.form(refusal, path)

    def _no_room(self) -> Refusal:
        most = self._site.guard.limits.bodies_bytes
        text = f"bodies of {most} bytes are being served, the most at a time"
        return self._site.guard.refuse(Refusal(503, "bodies", text))

    def _too_long(self) -> Refusal:
        limit = self._site.guard.limits.body_bytes
        text = f"the body is longer than {limit} bytes: see --max-body"
        return self._site.guard.refuse(Refusal(413, "body", text))

    def _refuse_request(self, incoming: _Incoming, refusal: Refusal) -> None:
        """Answer a request whose body is still to come; the body is read, and forgotten."""
        incoming.refusal = refusal
        incoming.is_last |= refusal.closes or incoming.expects
        self._go_on()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, unless other answers are on their way, and close."""
        self._site.guard.refuse(refusal)
        incoming = self._incoming
        # Amid other answers this one would be taken for one of them.
        if self._is_idle() and not (incoming is not None and incoming.is_answered):
            _, body, _, headers = self._form(refusal, incoming)
            fields = [b"%b: %b\r\n" % field for field in headers]
            length = b"content-length: %d\r\n\r\n" % len(body)
            close = b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(b"".join([_STATUS[refusal.status], *fields, close, length, body]))
        self.transport.close()

    # Time ---------------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """Close the connection if something of it is overdue."""
        limits = self._site.guard.limits
        if self._unread.is_overdue(now, limits.body_seconds):
            self._site.guard.counters["slow_reader"] += 1
            self._unread.forget()
            self.transport.abort()
        if self.transport.is_closing():
            return
        if self._idle_since is not None and now - self._idle_since > limits.idle_seconds:
            self.transport.close()
        elif not self._is_reading:  # the rest of a request may have come already
            return
        elif self._head_since is not None and now - self._head_since > limits.head_seconds:
            if self._unused:
                self._refuse(
                    Refusal(408, "slow_head", f"no whole head within {limits.head_seconds:g} s")
                )
            else:  # no byte came: browsers open connections in advance
                self._site.guard.counters["slow_head"] += 1
                self.transport.close()
        elif self._body_since is not None and now - self._body_since > limits.body_seconds:
            self._refuse(
                Refusal(408, "slow_body", f"no whole body within {limits.body_seconds:g} s")
            )

    def end(self) -> None:
        """Close the connection, after the requests that have begun to come."""
        if self._stream is not None and self._stream.is_endless and self._task is not None:
            self._task.cancel()
        elif self._is_idle() and self._incoming is None:
            self.transport.close()

    def abort(self) -> None:
        """Close the connection now."""
        if self._task is not None:
            self._task.cancel()
        self.transport.abort()
