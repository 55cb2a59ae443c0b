"""A gateway's front between a client's socket and engines that do as they are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvindex import Rank
from kvindex.gateway.access import Access
from kvindex.gateway.calls import Call
from kvindex.gateway.front import Front, refusal_reply
from kvindex.gateway.routing import NoRankError
from kvindex.gateway.tokens import Tokens
from kvindex.gateway.upstream import Answer, UpstreamError
from kvindex.service.http import Guard, Limits, Site
from kvindex.service.http.connections import Connection
from tests.gateway.lives import DONE, HEAD, ROLE, USAGE, LoggedReservation, event

STREAM = (ROLE, event("x"), event("y"), event("z") + USAGE, DONE)


class Hang:
    """Waits until it is cancelled, or for an event, once `begun` is set."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def wait(self, until: asyncio.Event | None = None) -> None:
        self.begun.set()
        await (until or asyncio.Event()).wait()


class Engine:
    """What one try meets.

    Args:
        status: of the answer.
        pieces: of its body; a Hang waits, a str breaks off for this reason.
        headers: of the answer.
        fails: the reason for which there is no head; a Hang waits for it, an exception is a bug.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | Hang | str] = STREAM,
        status: int = 200,
        headers: Sequence[tuple[bytes, bytes]] = HEAD,
        fails: str | Hang | Exception | None = None,
    ) -> None:
        self.pieces, self.status, self.headers, self.fails = pieces, status, headers, fails


class ScriptedWire:
    """An engine's connection: each piece comes once the one before has been taken."""

    name = "an engine"

    def __init__(self, log: list[tuple[Any, ...]], engine: Engine) -> None:
        wire: Any = self
        self.answer = Answer(wire)
        self.answer.begin(engine.status, list(engine.headers))
        self.sent = 0
        self._log = log
        self._taken = asyncio.Event()
        self._task = asyncio.ensure_future(self._send(engine.pieces))

    async def _send(self, pieces: Sequence[bytes | Hang | str]) -> None:
        for piece in pieces:
            await asyncio.sleep(0)
            if isinstance(piece, Hang):
                await piece.wait()
            elif isinstance(piece, str):
                self.answer.fail(piece, "it broke off")
                return
            else:
                self.sent += 1
                self._taken.clear()
                self.answer.add(piece)
                self.answer.wake()
                await self._taken.wait()
        self._log.append(("complete",))
        self.answer.complete()
        self.answer.wake()

    def resume(self) -> None:
        self._taken.set()

    def abort(self) -> None:
        self._log.append(("close",))
        self._task.cancel()


class Scripted:
    """Routing, tokenizing and upstream in one: each try meets the next engine of the script."""

    def __init__(self, *engines: Engine) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.engines = list(engines)
        self.ranks = [Rank(f"e{number}") for number in range(4)]
        self.role = ""
        self.roles: dict[Rank, str] = {}  # of ranks that have another one
        self.prefillers: list[Rank] = []
        self.places: list[LoggedReservation] = []  # all that were reserved, in order
        self.body_fields: dict[str, Any] = {}
        self.token_ids: list[int] | None = list(range(10))
        self.tokenizing: Hang | None = None
        self.queue: Hang | None = None
        self.refusal: Exception | None = None
        self.reserved: list[dict[str, Any]] = []
        self.sent: list[tuple[str, str, bytes, dict[bytes, bytes]]] = []
        self.within: list[float] = []  # seconds for whole answers
        self.wires: list[ScriptedWire] = []
        self.names: Sequence[str] = ("m",)
        self.is_ready = True
        self.makers: dict[str, Any] = {}  # servings, by the ids of responses
        self.silent: Sequence[str] = ()

    async def tokens(self, call: Call, engines: Any) -> Tokens:
        if self.tokenizing is not None:
            await self.tokenizing.wait()
        return Tokens(self.token_ids, "local")

    async def reserve(self, model: str, token_ids: Any, **details: Any) -> LoggedReservation:
        if self.queue is not None:
            await self.queue.wait()
        if self.refusal is not None:
            raise self.refusal
        left = [rank for rank in self.ranks if rank not in details["exclude"]]
        if not left:
            raise NoRankError({"excluded": len(self.ranks)})
        self.reserved.append({"model": model, "token_ids": token_ids, **details})
        return self._place(left[0], self.roles.get(left[0], self.role))

    def reserve_prefill(
        self, model: str, token_ids: Any, *, exclude: Sequence[Rank], **details: Any
    ) -> LoggedReservation | None:
        left = [rank for rank in self.prefillers if rank not in exclude]
        return self._place(left[0], "prefill") if left else None

    def _place(self, rank: Rank, role: str) -> LoggedReservation:
        self.log.append(("reserve", rank))
        place = LoggedReservation(self.log, rank, body_fields=self.body_fields, role=role)
        self.places.append(place)
        return place

    def servings(self, model: str) -> Sequence[Any]:
        return [LoggedReservation(self.log, rank).serving for rank in self.ranks]

    async def known(self, model: str) -> Sequence[Any]:
        return self.servings(model)

    def drained(self) -> set[str]:
        return set()

    def listed(self) -> list[dict[str, Any]]:
        return [{"id": name, "max_model_len": 9} for name in self.names if name not in self.silent]

    async def maker(self, response_id: str) -> Any:
        return self.makers.get(response_id)

    def counters(self) -> dict[str, int]:
        return {}

    def models(self) -> Mapping[str, Sequence[Any]]:
        servings = {name: list(self.servings(name)) for name in self.names}
        for name in self.silent:
            servings[name] = [msgspec.structs.replace(servings[name][0], is_silent=True)]
        return servings

    async def send(
        self,
        url: str,
        path: str,
        body: bytes,
        headers: Any,
        *,
        method: str = "POST",
        head_within: float,
        purpose: str = "",
    ) -> Answer:
        named = path if method == "POST" else f"{method} {path}"
        self.sent.append((url, named, body, dict(headers)))
        engine = self.engines.pop(0)
        if isinstance(engine.fails, Hang):
            try:
                await engine.fails.wait()
            finally:
                self.log.append(("unsent",))
        if isinstance(engine.fails, str):
            raise UpstreamError("no head", reason=engine.fails)
        self.wires.append(ScriptedWire(self.log, engine))
        return self.wires[-1].answer

    async def ask(
        self, url: str, path: str, body: bytes, headers: Any, *, within: float
    ) -> tuple[int, bytes]:
        self.sent.append((url, path, body, dict(headers)))
        self.within.append(within)
        engine = self.engines.pop(0)
        if isinstance(engine.fails, Hang):
            await engine.fails.wait()
        if isinstance(engine.fails, Exception):
            raise engine.fails
        if isinstance(engine.fails, str):
            raise UpstreamError("no answer", reason=engine.fails)
        return engine.status, b"".join(piece for piece in engine.pieces if isinstance(piece, bytes))


class Client:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def post(self, path: str, body: bytes, *headers: bytes, version: bytes = b"1.1") -> None:
        lines = [b"POST %b HTTP/%b" % (path.encode(), version), b"host: localhost", *headers]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body)]
        self.writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    async def head(self) -> tuple[int, dict[bytes, bytes]]:
        """Read the head of an answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        pairs = [line.partition(b": ")[::2] for line in lines[1:-2]]
        return int(lines[0].split()[1]), dict(pairs)

    async def chunks(self) -> tuple[bytes, bool]:
        """Read a body in chunks; return it, and whether it is whole."""
        body = b""
        while line := await self.reader.readline():
            size = int(line, 16)
            body += (await self.reader.readexactly(size + 2))[:-2]
            if not size:
                return body, True
        return body, False

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """Read a whole answer."""
        status, headers = await self.head()
        if b"content-length" not in headers:
            body, is_whole = await self.chunks()
            assert is_whole
            return status, headers, body
        return status, headers, await self.reader.readexactly(int(headers[b"content-length"]))


class Fronted:
    """A front with its script, at a port."""

    def __init__(self, scripted: Scripted, options: dict[str, Any]) -> None:
        self.scripted = scripted
        self.port = 0
        self.clients: list[Client] = []
        self.access = Access(options.pop("tenant_header", None), options.pop("tracer", None))
        given: Any = scripted
        self.front = Front(given, given, given, access=self.access, **options)
        guard = Guard(limits=Limits(body_bytes=4096), form=refusal_reply)
        self.site = Site(self.front.routes(), guard, otherwise=self.front.not_found)

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        self.clients.append(Client(reader, writer))
        return self.clients[-1]

    async def begin(self, *, version: bytes = b"1.1", **fields: Any) -> Client:
        """Send a request, and leave its answer unread."""
        client = await self.connect()
        client.post("/v1/chat/completions", body_of(**fields), version=version)
        return client

    async def ask(
        self, *headers: bytes, path: str = "/v1/chat/completions", **fields: Any
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Send a request, that of a stream by default; return its whole answer."""
        client = await self.connect()
        client.post(path, body_of(**fields), *headers)
        return await client.answer()

    async def until(self, is_so: Callable[[], object]) -> None:
        """Run the loop until something is so. A bug ends in the time-out of the run."""
        while not is_so():
            await asyncio.sleep(0)

    async def ended(self) -> None:
        """Wait until no request is open."""
        await self.until(lambda: not self.access.open)


def body_of(**fields: Any) -> bytes:
    """Return the body of a chat that streams, by default."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    options = {"stream_options": {"include_usage": True}} if fields.get("stream", True) else {}
    return msgspec.json.encode({**chat, **options, **fields})


@asynccontextmanager
async def fronted(*engines: Engine, **options: Any) -> AsyncIterator[Fronted]:
    """Serve a front whose tries meet these engines, in order."""
    fronted = Fronted(Scripted(*engines), options)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(fronted.site), "127.0.0.1", 0)
    fronted.port = server.sockets[0].getsockname()[1]
    try:
        yield fronted
        await fronted.ended()
    finally:
        server.close()
        for client in fronted.clients:
            client.writer.close()
        for connection in list(fronted.site.connections):
            connection.abort()
        await fronted.until(lambda: not fronted.site.connections)
