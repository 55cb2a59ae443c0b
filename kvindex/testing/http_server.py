"""The fake engine's HTTP server: answers whole and streamed, and their faults.

asyncio on a thread of its own. Streams are server-sent events as vLLM and SGLang write them.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec

from kvindex.testing.blocks import Served
from kvindex.testing.http_requests import RequestError, text_of

_MAX_BODY: Final = 8 << 20  # bytes
_MAX_HEAD: Final = 64 << 10  # bytes
_PIECE: Final = 16 << 10  # bytes of an event without an end
_IDLE: Final = 30.0  # seconds that a connection may be silent
_SSE: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
JSON = "application/json"
_ERROR_TYPES = {403: "PermissionDeniedError", 404: "NotFoundError"}

FaultKind = Literal[
    "",
    "400",
    "500",
    "503",
    "die",
    "reset",
    "reset_after_head",
    "endless",
    "cut",
    "hang",
    "garbage",
    "half_head",
    "long_head",
    "error_event",
    "keep_alive",
    "two_usages",
]


class HttpFaults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong with answers of an `HttpEngine`, and how slow they are.

    A request's header `x-fake-faults` has the same fields as JSON, and replaces them, but for those
    of pulls.

    Attributes:
        kind: the fault; "" for none. Numbers are statuses; "die" closes the server with its next
            completion, which still leaves. "reset" is before the head, "reset_after_head" before
            the first event, "cut" after `after` tokens, "error_event" there too, under status 200,
            and "endless" an event without an end. "long_head" has 64 kB of fields, "keep_alive" has
            a comment before the first event.
        after: tokens that are sent before "cut", "error_event" or "endless".
        ttft: seconds from a stream's head to its first token.
        gap: seconds between tokens.
        pull: "refuse": nothing is pulled from peers; "lie": neither, but the usage has it.
        pull_seconds: seconds that a pull takes, or its failure; with a role, either phase.
        handoff: of P: "none": no `kv_transfer_params`; "lost": as if P had restarted after its
            answer. Of D: "refuse": 400, and P is told; "ignore": D computes all itself, and P is
            told nothing; "demand": requests without `kv_transfer_params` are refused.
    """

    kind: FaultKind = ""
    after: int = 0
    ttft: float = 0.0
    gap: float = 0.0
    pull: Literal["", "refuse", "lie"] = ""
    pull_seconds: float = 0.0
    handoff: Literal["", "none", "lost", "refuse", "ignore", "demand"] = ""


class Response(msgspec.Struct, frozen=True):
    """One HTTP answer."""

    code: int
    body: bytes
    content_type: str = JSON

    @classmethod
    def of_json(cls, value: object) -> Response:
        return cls(200, json.dumps(value).encode())

    @classmethod
    def of_error(cls, error: RequestError) -> Response:
        """Return an error as the engines write it."""
        kind = _ERROR_TYPES.get(error.code, "BadRequestError")
        detail = {"message": str(error), "type": kind, "param": None, "code": error.code}
        return cls(error.code, json.dumps({"error": detail}).encode())


class EventStream(msgspec.Struct, frozen=True):
    """A streamed answer: the prompts' results, and how they are written."""

    results: Sequence[tuple[Served, list[int]]]
    chat: bool
    model: str
    usage: bool
    reported: dict[str, Any]

    def first(self) -> list[bytes]:
        """Return the role events, which a chat begins with."""
        if not self.chat:
            return []
        role = {"role": "assistant", "content": ""}
        return [self._event(at, {"delta": role}, None) for at in range(len(self.results))]

    def tokens(self) -> Iterator[bytes]:
        """Yield an event for each token; the choices in turn."""
        longest = max((len(tokens) for _, tokens in self.results), default=0)
        for step in range(longest):
            for at, (_, tokens) in enumerate(self.results):
                if step < len(tokens):
                    text = text_of([tokens[step]])
                    part = {"delta": {"content": text}} if self.chat else {"text": text}
                    last = step == len(tokens) - 1
                    yield self._event(at, part, "length" if last else None)

    def end(self) -> list[bytes]:
        """Return the event of the usage, if it is wanted, and the end's."""
        usage = [_data({**self._head(), "choices": [], "usage": self.reported})]
        return [*(usage if self.usage else []), b"data: [DONE]\n\n"]

    def _head(self) -> dict[str, Any]:
        return {
            "id": "chatcmpl-fake" if self.chat else "cmpl-fake",
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": 0,
            "model": self.model,
        }

    def _event(self, at: int, part: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": at, **part, "logprobs": None, "finish_reason": reason}
        return _data({**self._head(), "choices": [choice]})


def error_event(message: str) -> bytes:
    detail = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return _data({"error": detail})


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


Answering = Callable[[str, str, dict[str, str], bytes], Response | EventStream]


class Server:
    """Serve connections until `close`. The loop's thread owns all but `counters` and `faults`."""

    def __init__(self, host: str, port: int, answer: Answering) -> None:
        self.faults = HttpFaults()
        self.counters: Counter[str] = Counter()
        self._answer = answer
        self.socket = socket.create_server((host, port), backlog=1024)
        self.socket.setblocking(False)
        # Accepted sockets inherit it: each token is sent at once.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A loop of its own, on a thread of its own: tests call from loops that they block.
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="kvindex-http-engine", daemon=True)
        self.address = self.socket.getsockname()
        self._thread.start()

    def close(self) -> None:
        """Cut all connections, and end the thread. Idempotent."""
        # A second call finds the thread's loop closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self) -> None:
        # Not by asyncio's own server: what it accepts while it closes stays open (CPython 3.11).
        self._loop.add_reader(self.socket, self._accept)
        await self._stop.wait()
        self._loop.remove_reader(self.socket)
        self.socket.close()
        await asyncio.sleep(0)  # each task begins: one that is cancelled before closes nothing
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self) -> None:
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return  # the client has gone already
        task = self._loop.create_task(self._converse(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, connection: socket.socket) -> None:
        """Answer one connection's requests, until it ends."""
        # A head beyond the limit ends the connection, as one that never ends must.
        reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_HEAD)
        try:
            while await self._exchange(reader, writer):
                pass
            writer.close()
            await writer.wait_closed()  # until the client has read all, or `close` cuts it
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # the client went away, or does not speak HTTP
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _IDLE)
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        body = await _body(reader, headers)
        if body is None:  # the rest of it is still to come: the connection cannot be used again
            refusal = RequestError(413, f"a body has at most {_MAX_BODY} bytes")
            _write(writer, Response.of_error(refusal), keep=False)
            await writer.drain()
            return False
        keep = headers.get("connection", "").lower() != "close"
        faults = self.faults
        if "x-fake-faults" in headers:
            try:
                faults = msgspec.json.decode(headers["x-fake-faults"], type=HttpFaults)
            except msgspec.DecodeError as error:
                refusal = RequestError(400, f"x-fake-faults: {error}")
                _write(writer, Response.of_error(refusal), keep=False)
                return False
        if method == "POST" and not await self._goes_on(faults, reader, writer):
            return False
        if b'"remote_kv_source"' in body or b'"do_remote_prefill"' in body:
            await asyncio.sleep(self.faults.pull_seconds)
        path = target.partition("?")[0]
        answer = self._answer(method, path, headers, body)
        if faults.kind == "die" and path.endswith("/completions"):
            # Before the answer leaves: who reads it finds nobody here any more.
            self._stop.set()
            keep = False
        if isinstance(answer, Response):
            _write(writer, answer, keep=keep)
            await writer.drain()
            return keep
        return await self._stream(answer, faults, reader, writer) and keep

    async def _goes_on(
        self, faults: HttpFaults, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        # What a front must survive before it has an answer's head.
        if faults.kind.isdigit():
            refusal = RequestError(int(faults.kind), "the engine is told to refuse")
            _write(writer, Response.of_error(refusal), keep=False)
        elif faults.kind == "reset":
            writer.transport.abort()
        elif faults.kind == "hang":
            await reader.read(1)  # until the client closes
        elif faults.kind == "garbage":
            writer.write(b"\x00\xffno HTTP\r\n\r\n")
        elif faults.kind == "long_head":
            writer.write(b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * _MAX_HEAD + b"\r\n\r\n")
        elif faults.kind == "half_head":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-ty")
        else:
            return True
        return False

    async def _stream(
        self,
        answer: EventStream,
        faults: HttpFaults,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        writer.write(_SSE)
        if faults.kind == "reset_after_head":
            await writer.drain()
            writer.transport.abort()
            return False
        self.counters["open"] += 1
        # Engines abort a request whose client has left, and free its blocks.
        sending = asyncio.ensure_future(self._send(answer, faults, writer))
        # No client sends a second request now: what can be read is its leaving.
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
            self.counters["cancelled"] += 1
            return False
        finally:
            self.counters["open"] -= 1
            # Both, whichever ended first: a task that is only forgotten logs an error later.
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(
        self, answer: EventStream, faults: HttpFaults, writer: asyncio.StreamWriter
    ) -> bool:
        if faults.kind == "keep_alive":
            writer.write(_chunk(b": keep-alive\n\n"))
        await asyncio.sleep(faults.ttft)
        for event in answer.first():
            writer.write(_chunk(event))
        for sent, event in enumerate(answer.tokens()):
            if sent == faults.after and faults.kind == "cut":
                writer.transport.abort()
                return False
            if sent == faults.after and faults.kind == "error_event":
                writer.write(_chunk(error_event("the engine failed")))
                break
            while sent == faults.after and faults.kind == "endless":
                writer.write(_chunk(b"x" * _PIECE))
                await writer.drain()
            if sent:  # before the first, `ttft` was waited
                await asyncio.sleep(faults.gap)
            # Each by itself, as engines send them.
            writer.write(_chunk(event))
            await writer.drain()
            self.counters["generated"] += 1
        if faults.kind == "two_usages":
            writer.write(_chunk(answer.end()[0]))
        for event in answer.end():
            writer.write(_chunk(event))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes | None:
    """Read a body, whole or in chunks; None if it is too long, or its length is none."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = headers.get("content-length") or "0"
        if not (length.isdecimal() and int(length) <= _MAX_BODY):
            return None
        return await reader.readexactly(int(length))
    body = bytearray()
    while True:
        size = (await reader.readuntil(b"\r\n")).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size) or len(body) + int(size, 16) > _MAX_BODY:
            return None
        chunk = await reader.readexactly(int(size, 16) + 2)
        if len(chunk) == 2:  # the last one; Envoy and others send no trailers
            return bytes(body)
        body += chunk[:-2]


def _write(writer: asyncio.StreamWriter, answer: Response, *, keep: bool) -> None:
    writer.write(
        f"HTTP/1.1 {answer.code} Answer\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"{'' if keep else 'Connection: close' + chr(13) + chr(10)}\r\n".encode()
        + answer.body
    )
