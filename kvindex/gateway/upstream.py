"""The connections of a gateway to its engines: HTTP/1.1, kept alive, bounded in time and memory.

An answer is passed on as it comes, in the turn of the event loop in which it comes: no task is
woken for a piece. While nobody takes it, at most `MOST_UNREAD` bytes wait: then the connection is
not read from, and TCP holds the engine back.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httptools

from kvindex.service.http import Headers
from kvindex.wire.errors import ConfigurationError, KVIndexError

_CONNECT_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 4.0  # uvicorn, and so vLLM and SGLang, close after five
_MOST_IDLE: Final = 256  # connections to one engine
_NO_DESCRIPTOR: Final = os.strerror(errno.EMFILE)
_NEVER: Final = select.POLLIN | select.POLLHUP | select.POLLERR  # of an idle connection


class _Origin(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int
    is_secure: bool
    prefix: str  # of all paths
    field: bytes  # the Host header


class Upstream:
    """The connections of a gateway to its engines.

    `token` returns their API key, for requests that bring none. Owner: one event loop.
    """

    def __init__(
        self,
        token: Callable[[], str | None] = lambda: None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._token = token
        self._context = context
        self._origins: dict[str, _Origin] = {}
        # By the engine, and by what they are for: an answer that nobody asked for, and that comes
        # too late to be noticed, must at least be no answer to another kind of request.
        self._idle: defaultdict[tuple[_Origin, str], list[Wire]] = defaultdict(list)
        self._sweep: asyncio.TimerHandle | None = None
        self._wires: set[Wire] = set()
        self._counters: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def send(
        self,
        url: str,
        path: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        method: str = "POST",
        head_within: float,
        purpose: str = "",
    ) -> Answer:
        """Send a request; return the answer once its head has arrived.

        `headers` are all but Host and Content-Length; `head_within` counts once it is connected.
        Requests of another `purpose` use other connections.

        Raises:
            UpstreamError: there is no answer; see its `reason`.
            ConfigurationError: the URL cannot be used.
        """
        origin = self._origins.get(url)
        if origin is None:
            if len(self._origins) > 4096:  # engines come and go
                self._origins.clear()
            origin = self._origins[url] = _parse(url)
        lines = [f"{method} {origin.prefix}{path} HTTP/1.1".encode(), b"host: " + origin.field]
        lines += [b"%b: %b" % field for field in headers]
        token = self._token()
        if token is not None and not any(name == b"authorization" for name, _ in headers):
            lines.append(b"authorization: Bearer " + token.encode())
        if body or method != "GET":
            lines.append(b"content-length: %d" % len(body))
        request = b"\r\n".join((*lines, b"", body))  # one write, and so often one packet
        loop, pool = asyncio.get_running_loop(), (origin, purpose)
        # Twice at most: an engine that closes without an answer may well have carried it out.
        wire = self._idle_wire(pool) or await self._connect(pool)
        while True:
            answer = wire.ask(request)
            answer.failures = self._failures
            why = f"no head of an answer within {head_within:g} s"
            timer = loop.call_later(head_within, partial(answer.fail, "timeout_head", why))
            try:
                await answer.head()
                return answer
            except UpstreamError as error:
                # An engine may close an idle connection just when it is used again.
                if not (wire.is_reused and error.reason == "reset" and not wire.has_received):
                    self._failures[error.reason] += 1
                    raise
                self._counters["sent_again"] += 1
                wire = await self._connect(pool)
            except BaseException:  # cancelled: the engine must not work for a client that has gone
                answer.close()
                raise
            finally:
                timer.cancel()

    async def ask(
        self,
        url: str,
        path: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        within: float,
        most: int = 16 << 20,
    ) -> tuple[int, bytes]:
        """Return status and body of an answer of at most so many bytes, all `within` seconds.

        Raises: as `send`.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await self.send(url, path, body, headers, head_within=within, purpose="asked")
        # One bound for head and body: `head_within` alone would let a body trickle for ever.
        left = max(0.0, began + within - loop.time())
        why = f"no whole answer within {within:g} s"
        timer = loop.call_later(left, partial(answer.fail, "timeout", why))
        received = bytearray()

        def receive(piece: bytes) -> bool:
            received.extend(piece)
            return len(received) <= most

        try:
            if await answer.pass_to(receive):
                self._failures["too_long"] += 1
                text = f"{url}{path}: the answer is longer than accepted"
                raise UpstreamError(text, reason="too_long")
        finally:
            timer.cancel()
            answer.close()
        return answer.status, bytes(received)

    async def close(self) -> None:
        """Close all connections."""
        if self._sweep is not None:
            self._sweep.cancel()
        for wire in list(self._wires):
            if wire.is_open:
                wire.abort()
        await asyncio.sleep(0)  # the transports notify their protocols

    def statistics(self) -> dict[str, Any]:
        """Return counters: connections `opened`, `reused`, `idle` now; `failures` by reason.

        `sent_again`: requests whose kept connection had just been closed by the engine.
        """
        return {
            **{name: self._counters[name] for name in ("opened", "reused", "sent_again")},
            "idle": sum(map(len, self._idle.values())),
            "failures": dict(self._failures),
        }

    # Connections --------------------------------------------------------------------------------

    def _idle_wire(self, pool: tuple[_Origin, str]) -> Wire | None:
        """Return a kept connection, on which nothing waits."""
        idle, now = self._idle[pool], asyncio.get_running_loop().time()
        while idle:
            wire = idle.pop()  # the last used: the engine closes the others first
            # What has come since, and was not read yet, would be taken for the next answer.
            if now - wire.idle_since < _IDLE_SECONDS and wire.is_quiet():
                self._counters["reused"] += 1
                wire.is_reused = True
                return wire
            if wire.is_open:
                wire.abort()
        return None

    def _close_idle(self, seconds: float = _IDLE_SECONDS) -> None:
        """Close what was idle for so long; look again as long as there is something idle."""
        loop = asyncio.get_running_loop()
        if self._sweep is not None:
            self._sweep.cancel()
        oldest = loop.time() - seconds
        for idle in list(self._idle.values()):
            for wire in [wire for wire in idle if wire.idle_since <= oldest]:
                idle.remove(wire)
                wire.abort()
        is_idle = any(self._idle.values())
        self._sweep = loop.call_later(_IDLE_SECONDS, self._close_idle) if is_idle else None

    async def _connect(self, pool: tuple[_Origin, str]) -> Wire:
        origin, idle = pool[0], self._idle
        name, loop = origin.field.decode(), asyncio.get_running_loop()

        def keep(wire: Wire) -> None:
            wire.idle_since = loop.time()
            if len(idle[pool]) >= _MOST_IDLE:
                wire.abort()
                return
            idle[pool].append(wire)
            if self._sweep is None:
                self._sweep = loop.call_later(_IDLE_SECONDS, self._close_idle)

        def forget(wire: Wire) -> None:
            self._wires.discard(wire)
            if wire in idle[pool]:
                idle[pool].remove(wire)
            if not idle[pool]:  # engines come and go
                del idle[pool]

        wire = Wire(name, keep, forget)
        context = None
        if origin.is_secure:
            # Once: reading the certificates of all authorities takes some 20 ms.
            context = self._context = self._context or ssl.create_default_context()

        async def connect() -> None:
            connecting = loop.create_connection(lambda: wire, origin.host, origin.port, ssl=context)
            await asyncio.wait_for(connecting, _CONNECT_SECONDS)

        try:
            try:
                await connect()
            except OSError as error:
                if not _lacks_descriptor(error):
                    raise
                self._close_idle(0.0)  # theirs will do
                await asyncio.sleep(0)
                await connect()
        except (OSError, asyncio.TimeoutError) as error:
            reason = "unreachable"
            if isinstance(error, ConnectionRefusedError):  # nobody listens: the engine is down
                reason = "refused"
            elif isinstance(error, asyncio.TimeoutError):
                reason = "timeout_connect"
            elif _lacks_descriptor(error):
                reason = "no_descriptor"
            self._failures[reason] += 1
            text = f"{name} cannot be connected to: {error or type(error).__name__}"
            raise UpstreamError(text, reason=reason) from None
        self._counters["opened"] += 1
        self._wires.add(wire)
        return wire


def _lacks_descriptor(error: OSError) -> bool:
    """Return whether this process has failed to connect since it has too many files open."""
    # By its text: of several addresses' errors asyncio makes one, without a number.
    if _NO_DESCRIPTOR in str(error):
        return True
    if isinstance(error, socket.gaierror):  # a look-up does not tell why it fails
        try:
            for descriptor in os.pipe():
                os.close(descriptor)
        except OSError:
            return True
    return False


def _parse(url: str) -> _Origin:
    """Return where the engine at a URL listens; raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is no URL of an engine: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigurationError(f"{url!r} is no URL of an engine: expected http://HOST:PORT")
    # As in the URL, without a user: engines behind a proxy are told apart by it.
    is_secure = parts.scheme == "https"
    field = parts.netloc.rpartition("@")[2].encode()
    return _Origin(
        host, port or (443 if is_secure else 80), is_secure, parts.path.rstrip("/"), field
    )


# One connection -----------------------------------------------------------------------------------


MOST_UNREAD: Final = 64 << 10
"""Bytes of an answer that wait to be passed on."""

MOST_HEAD: Final = 64 << 10
"""Bytes of an answer's head."""

# RFC 9110, 7.6.1: they belong to one connection.
_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"trailer"})
_CLOSED: Final = "closed"  # by us: that is no failure
_NO_BODY: Final = frozenset({204, 304})


class UpstreamError(KVIndexError):
    """An engine did not answer, or not to the end.

    Its `reason` is "refused", "unreachable", "timeout_connect" or, if this process has too many
    files open, "no_descriptor": nothing was sent; "timeout_head", "garbage" or "head_too_long": no
    head arrived; "reset": the connection broke; "silent": nothing came for too long; "too_long" or
    "timeout": a whole answer was too long, or not there in time.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer:
    """An engine's answer, which is being received. Owner: one event loop; one task awaits it."""

    def __init__(self, wire: Wire) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # but those of one connection
        self.failures: Counter[str] = Counter()  # its upstream's: `pass_to` counts what it raises
        self._wire: Wire | None = wire  # until the answer is complete, or broken
        self._pieces: list[bytes] = []  # that nobody has taken yet
        self._size = 0
        self._error: UpstreamError | None = None
        self._loop = asyncio.get_running_loop()
        self._receive: Callable[[bytes], bool] | None = None  # while a task waits in `pass_to`
        self._waiter: asyncio.Future[bool] | None = None
        self._is_stopped = False
        self._heard_at: float | None = None  # None while what comes is not taken
        self._silence: asyncio.TimerHandle | None = None

    async def head(self) -> None:
        """Wait for the head; raises UpstreamError if none arrives."""
        while not self.status and self._error is None:
            await self._wait()
        if self._error is not None and not self.status:
            raise self._error

    async def pass_to(
        self, receive: Callable[[bytes], bool], silent_within: float | None = None
    ) -> bool:
        """Pass on all that has arrived and arrives, until `receive` returns False.

        Return whether there may be more: False at the end. Nothing may arrive for `silent_within`
        seconds. Raises UpstreamError where the answer breaks off.
        """
        if silent_within is not None and self._silence is None and self._wire is not None:
            self._silence = self._loop.call_later(silent_within, self._check_silence, silent_within)
        while self._pieces or self._wire is not None:
            if self._pieces:
                if not receive(self._taken()):
                    return True
                continue
            if self._is_stopped:
                self._is_stopped = False
                return True
            self._receive, self._heard_at = receive, self._loop.time()
            try:
                if await self._wait():
                    return True
            finally:
                # What the client takes to read does not count as the engine's silence.
                self._receive = self._heard_at = None
        if self._error is not None:
            if self._error.reason != _CLOSED:
                self.failures[self._error.reason] += 1
            raise self._error
        return False

    def stop(self) -> None:
        """Make `pass_to` return True once, now or after what has arrived."""
        self._is_stopped = True
        if self._waiter is not None and not self._waiter.done():
            self._receive = None
            self._waiter.set_result(False)

    def close(self) -> None:
        """Close the connection, unless the answer is complete: the engine stops working on it."""
        self.fail(_CLOSED, "it was closed here")

    def fail(self, reason: str, why: str) -> None:
        """Break the answer off, unless it is complete: `pass_to` raises after the last piece."""
        wire = self._wire
        if wire is not None:
            self._error = UpstreamError(f"{wire.name}: {why}", reason=reason)
            self._end()
            wire.abort()
            self.wake()

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
        self._end()

    def wake(self) -> None:
        """Pass on what has arrived; wake the task at the end, or once its `receive` wants it."""
        is_stopped = False
        if self._receive is not None and self._pieces:
            is_stopped = not self._receive(self._taken())
            self._heard_at = self._loop.time()
        if self._receive is None or is_stopped or self._wire is None:
            self._receive = None  # what comes before the task runs waits for it
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(is_stopped)

    def _taken(self) -> bytes:
        """Return all that waits, and let more come."""
        pieces = self._pieces
        self._pieces, self._size = [], 0
        if self._wire is not None:
            self._wire.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _end(self) -> None:
        self._wire = None
        if self._silence is not None:
            self._silence.cancel()

    async def _wait(self) -> bool:
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _check_silence(self, within: float) -> None:
        # One timer for an answer, none for a piece. It breaks the answer off and cancels no task:
        # only a client that leaves does that, even if both happen in one turn of the event loop.
        waited = 0.0 if self._heard_at is None else self._loop.time() - self._heard_at
        if waited >= within:
            self.fail("silent", f"nothing of its answer came for {within:g} s")
        else:
            self._silence = self._loop.call_later(within - waited, self._check_silence, within)


class Wire(asyncio.Protocol):
    """One connection to an engine, for one request at a time. Owner: one event loop."""

    def __init__(
        self, name: str, on_idle: Callable[[Wire], None], on_closed: Callable[[Wire], None]
    ) -> None:
        self.name = name
        self.is_open = False  # whether a request can be sent
        self.idle_since = 0.0
        self.is_reused = False
        self.has_received = False  # anything of the present answer
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._transport: Any = None
        self._answer: Answer | None = None
        self._parser: Any = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._unread = 0  # bytes since the head began
        self._in_head = False
        self._ends_by_closing = False  # the answer has neither a length nor chunks
        self._is_paused = False

    def ask(self, request: bytes) -> Answer:
        """Send a request."""
        self._answer = answer = Answer(self)
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._unread = [], 0
        self._in_head, self.has_received, self._ends_by_closing = True, False, False
        self._transport.write(request)
        return answer

    def is_quiet(self) -> bool:
        """Whether it is open, and nothing has arrived on it."""
        if not self.is_open:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), _NEVER)
        return not poll.poll(0)

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
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer: it is broken off, unless it ends by closing."""
        self.is_open = False
        self._on_closed(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        # An answer without a length ends so, in HTTP/1.0 style; any other is cut.
        if self._ends_by_closing and exc is None:
            answer.complete()
            answer.wake()
        else:
            answer.fail("reset", "the engine closed the connection")

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody has asked: what it would be the answer to is not known
            self.abort()
            return
        self.has_received = True
        if self._in_head:  # the parser does not bound it
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
        # A 1xx only announces the answer.
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None:
            return
        self._in_head = False
        headers = self._headers
        # Once more: the whole head may have come with one piece, together with the body.
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEAD:
            self._fail_head(self._answer)
            return
        names = {name for name, _ in headers}
        has_end = b"content-length" in names or b"transfer-encoding" in names
        self._ends_by_closing = not has_end and status not in _NO_BODY
        dropped = _HOP
        if b"connection" in names:  # which may name others that belong to it
            listed = (value for name, value in headers if name == b"connection")
            dropped |= {part.strip().lower() for value in listed for part in value.split(b",")}
        self._answer.begin(status, [field for field in headers if field[0] not in dropped])

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
        self.resume()  # else the next answer would not be read
        if self._parser.should_keep_alive() and not self._transport.is_closing():
            self._on_idle(self)
        else:
            self.is_open = False
            self._transport.close()
