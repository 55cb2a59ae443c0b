"""The page: its files, and what it asks for of the fleet, of prefixes, explanations and news."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.resources
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec

from kvindex import (
    Client,
    ConfigurationError,
    KVIndexError,
    Prefixes,
    Rank,
    State,
    TokenError,
    UnknownRankError,
)
from kvindex.replicas import Replica
from kvindex.service.catalog import BY_CLIENTS, Catalog, Partition
from kvindex.service.http.guards import Guard, Refusal
from kvindex.service.http.messages import (
    Handler,
    Headers,
    RefusedError,
    Reply,
    Request,
    Route,
    Stream,
    json_reply,
    refusal,
    refused,
)
from kvindex.service.openapi import COUNT, GROUP, json, media, objects, parameter, route
from kvindex.service.overview import Fleet, Routed, overview
from kvindex.service.timeline import Happening, StreamCounters, Timeline, event_stream, parse_id
from kvindex.service.traffic import ASKED, WINDOWS, Traffic, Trends
from kvindex.wire.errors import UNREADABLE, DiscoveryError
from kvindex.wire.web import Web

SWEEP: Final = 5.0
"""Seconds between looks at what ranks count while their states stay the same."""

FLEET_FOR: Final = 0.5
"""Seconds for which one overview of the fleet answers all requests."""

MOST_NODES: Final = 5_000
"""Nodes of the radix tree in one answer: about 1 MB."""

MOST_RANKS: Final = 1_000
"""Ranks in one explanation: those with the longest matches."""

_MOST_EXPLAINING: Final = 4
_MOST_CHARACTERS: Final = 1_000  # of a name in a query string
_MOST_BYTES: Final = 32 << 20  # of an engine's answer: some million tokens
_WORDS_OF_ERROR: Final = 300
_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


# The page's files ---------------------------------------------------------------------------------

ASSET_HEADERS: Final[Headers] = (
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),  # asked for again each time, and mostly answered by 304
)
"""Of the page and of each of its files. Nothing inline runs, and nothing comes from elsewhere."""

_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}


class Asset(NamedTuple):
    """One file: its bytes, media type and tag."""

    body: bytes
    media_type: bytes
    etag: bytes


def read_assets() -> dict[str, Asset]:
    """Return the package's static files by their name, e.g. "app.js"."""
    assets = {}
    for entry in (importlib.resources.files("kvindex.service") / "static").iterdir():
        media_type = _TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            body = entry.read_bytes()
            etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode()
            assets[entry.name] = Asset(body, media_type, etag)
    return assets


def asset_routes() -> list[Route]:
    """Return the routes of `/` and of each file under `/static/`, which are not described."""
    assets = read_assets()
    page = route(
        "GET /",
        partial(_serve, assets.pop("index.html")),
        "The page",
        {
            "200": media("text/html", "For a browser."),
            "304": {"description": "It has not changed."},
        },
        parameters=[parameter("If-None-Match", "the ETag of what is there", where="header")],
    )
    files = [
        Route("GET", f"/static/{name}", partial(_serve, asset)) for name, asset in assets.items()
    ]
    return [page, *files]


def _serve(asset: Asset, request: Request) -> Reply:
    fields = (*ASSET_HEADERS, (b"etag", asset.etag))
    # The field may name several tags, and proxies make them weak: W/"…".
    if asset.etag in (request.header(b"if-none-match") or b""):
        return Reply(304, b"", b"", fields)
    return Reply(200, asset.body, asset.media_type, fields)


# Explanations -------------------------------------------------------------------------------------

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=1_000)]


class Question(msgspec.Struct, frozen=True):
    """A question: a prompt of one partition, as token ids or as text."""

    model: _Name = ""
    routing_group: _Name = "default"
    token_ids: list[_Id] | None = None
    text: Annotated[str, msgspec.Meta(max_length=4 << 20)] | None = None
    lora: _Name | None = None
    salt: _Name | None = None


class Explained(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        tokens: of the prompt.
        ranks: the longest matches first, each with `worker`, `dp_rank` and its explanation.
        left_out: ranks that are not among them.
    """

    tokens: int
    ranks: list[dict[str, Any]]
    left_out: int


class _Tokens(msgspec.Struct):
    tokens: list[int]


def read_question(body: bytes) -> Question:
    """Return the question in a JSON body, or raise RefusedError."""
    try:
        question = msgspec.json.decode(body, type=Question)
    except msgspec.ValidationError as error:
        raise refusal(422, f"the question cannot be read: {error}") from None
    except UNREADABLE as error:
        raise refusal(400, f"the body is no JSON: {error}") from None
    if (question.token_ids is None) == (question.text is None):
        raise refusal(422, "give either token_ids or text")
    return question


def explain(
    source: Client | Replica, question: Question, ranks: list[Rank], tokenizer: str | None
) -> Explained:
    """Return how far the prompt matches on each of these ranks, longest first, or RefusedError.

    It blocks: `tokenizer` is the URL of the engine that knows the model's tokens, if there is one.
    """
    if not ranks:
        where = f"model={question.model} routing_group={question.routing_group}"
        raise refusal(404, f"no ranks for {where}")
    tokens = question.token_ids
    if tokens is None:
        if tokenizer is None:
            raise refusal(
                409, "no tokenizer is configured for this model: give token ids instead of text"
            )
        tokens = tokenize(tokenizer, question.model, question.text or "")
    try:
        why = source.explain(tokens, lora=question.lora, salt=question.salt, ranks=ranks)
    except (TokenError, ConfigurationError) as error:
        raise refusal(422, str(error)) from None
    except UnknownRankError as error:
        raise refusal(503, f"a rank was removed just now, ask again: {error}") from None
    # By the text of each rank; the order is that of `why`, and the answer is bounded.
    explained = why.to_dict()
    ranks = [part.match.rank for part, _ in zip(why, range(MOST_RANKS), strict=False)]
    return Explained(
        tokens=len(tokens),
        ranks=[
            {"worker": rank.worker, "dp_rank": rank.dp_rank, **explained[str(rank)]}
            for rank in ranks
        ],
        left_out=max(0, len(why) - MOST_RANKS),
    )


def tokenize(engine: str, model: str, text: str, *, timeout: float = 10.0) -> list[int]:
    """Return the tokens of a text as an engine's `/tokenize` (vLLM, SGLang) makes them; it blocks.

    An engine that cannot be reached in time, or answers something else, is a RefusedError (502).
    """
    body = msgspec.json.encode({"model": model, "prompt": text})
    try:
        answer = Web(engine).post("/tokenize", body, timeout, limit=_MOST_BYTES)
        if answer.status == 200:
            return msgspec.json.decode(answer.body, type=_Tokens).tokens
        words = answer.body[:_WORDS_OF_ERROR].decode(errors="replace")
        why = f"it answers {answer.status}: {words}"
    except (ConfigurationError, DiscoveryError) as error:
        why = str(error)
    except UNREADABLE as error:
        why = f"its answer is no list of tokens ({error})"
    url = engine.rstrip("/") + "/tokenize"
    raise refusal(502, f"{url} did not give the text's tokens: {why}")


# The page's requests ------------------------------------------------------------------------------


class Deployment(Protocol):
    """What the page shows: a `Service`, or a gateway."""

    @property
    def source(self) -> Client | Replica:
        """Follows the engines, or their relay."""

    @property
    def traffic(self) -> Traffic:
        """What was asked."""

    @property
    def catalog(self) -> Catalog:
        """The present ranks, by partition."""

    @property
    def missing(self) -> Callable[[], Mapping[str, str]]:
        """Returns the engines that are not found, and why."""


class History(msgspec.Struct):
    """The answer to GET /api/timeline.

    Attributes:
        since: from when on it is whole, in seconds since 1970.
        id: of the last happening.
        dropped: how many earlier ones it has no more.
        happenings: oldest first.
    """

    since: float
    id: str
    dropped: Annotated[int, msgspec.Meta(ge=0)]
    happenings: list[Happening]


class PartitionPrefixes(Prefixes, frozen=True, kw_only=True):
    """The answer to GET /api/prefixes.

    Attributes:
        unique_blocks: None for one partition: the tree is shared with other ranks' blocks.
    """

    unique_blocks: int | None  # type: ignore[assignment]


_COLUMNS: Final = ("at", "seconds", "live", "ranks", *ASKED)
_TRAFFIC: Final = objects(
    *("now", "since", "seconds", "step", "partitions", "points"),
    now=float,
    since=float,
    seconds=COUNT,
    step=COUNT,
    partitions={"type": "array", "items": objects("model", "routing_group")},
    points=objects(*_COLUMNS, **dict.fromkeys(_COLUMNS, list[float])),
)
_QUESTION: Final = {
    "allOf": [Question],
    "oneOf": [
        {"required": ["token_ids"], "properties": {"text": {"type": "null"}}},
        {"required": ["text"], "properties": {"token_ids": {"type": "null"}}},
    ],
}
_EVENTS: Final = media(
    "text/event-stream",
    "First `fleet` with the present states, then `state`, `gap`, `replay`, `loss`, `restart`, "
    "`added` and `removed`, each with a Happening as its data.",
)


class Page:
    """The routes of the page, and the timeline behind them.

    Args:
        service: what is shown.
        tokenizer: URL of an engine whose `/tokenize` is asked for tokens of text where neither
            the operator nor a discovery named one of the partition.
        routed: returns what is sent to each rank, as `overview` reads it; from any thread.
        timeline: a new one by default.
        guard: limits the event streams.

    Owner: the server's event loop; `close` may be called from any thread.
    """

    def __init__(
        self,
        service: Deployment,
        *,
        tokenizer: str | None = None,
        routed: Callable[[], Mapping[str, Routed]] = dict,
        timeline: Timeline | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._service = service
        self._guard = guard or Guard()
        self._source = service.source
        self._configured = tokenizer
        self._routed = routed
        self.timeline = timeline or Timeline(self._partition)
        self.trends = Trends(service.traffic.asked)
        self.streams = StreamCounters()
        # Listen first: a rank that is added between the two calls would be missed otherwise.
        self._stop = self._source.on_change(self.timeline.observe)
        self.timeline.begin(self._source.statuses().values())
        self._fleet: tuple[float, bytes] = (0.0, b"")
        self._fleet_lock: asyncio.Lock | None = None
        self._explaining = 0
        self._closed = threading.Event()
        # A daemon: a page that nobody closed must not keep its process alive.
        threading.Thread(target=self._sweep, name="kvindex-timeline", daemon=True).start()
        self.routes = [*asset_routes(), *self._api_routes()]

    def _api_routes(self) -> list[Route]:
        model = parameter("model", "of which; all by default")
        window = parameter("seconds", "how far back, 900 by default", {"enum": list(WINDOWS)})
        return [
            route(
                "GET /api/fleet",
                _answering(self._get_fleet),
                "How every rank stands, and sums",
                json(Fleet, "At most 0.5 s old."),
            ),
            route(
                "GET /api/timeline",
                _answering(self._get_timeline),
                "What has happened, oldest first",
                json(History),
            ),
            route(
                "GET /api/traffic",
                _answering(self._get_traffic),
                "What was asked over time",
                json(_TRAFFIC),
                codes=(422,),
                parameters=[model, GROUP, window],
            ),
            route(
                "GET /api/prefixes",
                _answering(self._get_prefixes),
                "Which prefixes are held by whom, the most widely held first",
                json(PartitionPrefixes),
                codes=(422,),
                parameters=[
                    model,
                    GROUP,
                    parameter("max_nodes", "1000 by default", _from_1(MOST_NODES)),
                    parameter("min_blocks", "1 by default", _from_1(2**31)),
                ],
            ),
            route(
                "POST /api/explain",
                _answering(self._explain),
                "How far a prompt matches on each rank, and where and why that ends",
                json(Explained, "Longest matches first."),
                codes=(404, 409, 502),
                body={"application/json": {"schema": _QUESTION}},
            ),
            route(
                "GET /events",
                _answering(self._events),
                "What happens, as server-sent events, until either side ends it",
                _EVENTS,
                parameters=[
                    parameter("Last-Event-ID", "the last that was received", where="header")
                ],
            ),
        ]

    def close(self) -> None:
        """Look at the source no longer. Idempotent."""
        self._stop()
        self._closed.set()

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP):
            self.look()

    def look(self) -> None:
        """Note the present counters. Any thread."""
        statuses = self._source.statuses().values()
        self.timeline.sweep(statuses)
        live = sum(status.state is State.LIVE for status in statuses)
        self.trends.sample(live, len(statuses))

    async def _get_fleet(self, _: Request) -> Reply:
        def read() -> bytes:
            fleet = overview(
                self._source.statistics(),
                self._partition,
                has_tokenizer=lambda partition: self._tokenizer(partition) is not None,
                missing=self._service.missing(),
                routed=self._routed(),
            )
            return msgspec.json.encode(fleet)

        # In a thread, since 512 ranks take 10 ms; and once for all tabs that ask at a time.
        lock = self._fleet_lock = self._fleet_lock or asyncio.Lock()
        async with lock:
            made_at, body = self._fleet
            if not body or time.monotonic() - made_at >= FLEET_FOR:
                body = await asyncio.to_thread(read)
                self._fleet = time.monotonic(), body
        return Reply(200, body)

    async def _get_timeline(self, _: Request) -> Reply:
        since = self.timeline.since(0)
        # Where happenings were dropped, the history is whole from the first one that is left on.
        history = History(
            since=since.happenings[0].at if since.missed else self.timeline.began,
            id=f"{self.timeline.life}-{since.position}",
            dropped=since.missed or 0,
            happenings=since.happenings,
        )
        return json_reply(200, history)

    async def _get_traffic(self, request: Request) -> Reply:
        seconds = request.parameter("seconds", "900")
        if seconds not in map(str, WINDOWS):
            windows = ", ".join(map(str, WINDOWS))
            raise refusal(422, f"seconds must be one of {windows}, not {seconds[:20]!r}")
        return json_reply(200, self.trends.points(int(seconds), _asked_partition(request)))

    async def _get_prefixes(self, request: Request) -> Reply:
        max_nodes = _number(request, "max_nodes", "1000", MOST_NODES)
        min_blocks = _number(request, "min_blocks", "1", 2**31)
        partition = _asked_partition(request)
        ranks = None if partition is None else self._ranks_of(partition)
        # Asked for all ranks, the index also tells the holes and the size of the tree.
        if ranks is not None and len(ranks) == len(self._source.ranks):
            ranks = None

        def read() -> bytes:
            prefixes = self._source.index.prefixes(max_nodes, min_blocks=min_blocks, ranks=ranks)
            if ranks is not None:
                fields = {**msgspec.structs.asdict(prefixes), "unique_blocks": None}
                prefixes = PartitionPrefixes(**fields)
            return msgspec.json.encode(prefixes)

        return Reply(200, await asyncio.to_thread(read))

    async def _explain(self, request: Request) -> Reply:
        question = read_question(request.body)
        # Each takes a thread, of which other requests need some, for as long as an engine likes.
        if self._explaining >= _MOST_EXPLAINING:
            raise refusal(503, f"{self._explaining} explanations are being made: ask again")
        partition = Partition(question.model, question.routing_group)
        ranks, tokenizer = self._ranks_of(partition), self._tokenizer(partition)
        self._explaining += 1
        try:
            explained = await asyncio.to_thread(explain, self._source, question, ranks, tokenizer)
        finally:
            self._explaining -= 1
        return json_reply(200, explained)

    def _ranks_of(self, partition: Partition) -> list[Rank]:
        return [rank for rank in self._source.ranks if self._partition(rank.worker) == partition]

    def _partition(self, worker: str) -> Partition:
        """Return a worker's partition; an unregistered worker has no model."""
        registered = self._service.catalog.instances.get(worker)
        return next(iter(registered.values())).partition if registered else Partition("")

    def _tokenizer(self, partition: Partition) -> str | None:
        """Return the URL of the engine that is asked for the tokens of a partition's text."""
        for registration in self._service.catalog.of(partition):
            engine = registration.details.get("engine")
            # Never one that a client registered: it could name any address of our network.
            if isinstance(engine, str) and registration.source != BY_CLIENTS:
                return engine
        return self._configured

    async def _events(self, request: Request) -> Stream:
        most = self._guard.limits.streams
        if self.streams.open_now >= most:
            text = f"{most} event streams are open, the most that are served"
            raise RefusedError(self._guard.refuse(Refusal(503, "streams", text)).reply)
        last_event_id = (request.header(b"last-event-id") or b"").decode("latin-1")
        if last_event_id and parse_id(last_event_id) is None:
            # As of another life: all that is kept comes, and the reader is told so.
            last_event_id = "unknown-0"
        return event_stream(self.timeline, self._present, self.streams, last_event_id)

    def _present(self) -> dict[str, Any]:
        statuses = self._source.statuses().values()
        # So that nothing which these count is told once more as news.
        self.timeline.sweep(statuses)
        ranks = []
        for status in statuses:
            partition = self._partition(status.rank.worker)
            ranks.append(
                {
                    "worker": status.rank.worker,
                    "dp_rank": status.rank.dp_rank,
                    "model": partition.model,
                    "routing_group": partition.routing_group,
                    "state": status.state,
                    "complete": status.complete,
                    "lag": status.lag,
                }
            )
        return {"now": time.time(), "ranks": ranks}


def _from_1(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _answering(serve: Callable[[Request], Awaitable[Reply | Stream]]) -> Handler:
    """Return a handler whose errors are answered as JSON, and whose answers nobody keeps."""

    async def handler(request: Request) -> Reply | Stream:
        try:
            reply = await serve(request)
        except RefusedError as error:
            reply = error.reply
        except ConfigurationError as error:
            reply = refused(422, str(error))
        except KVIndexError as error:  # a rank or a client that went just now: no bug, no 500
            reply = refusal(503, str(error)).reply
        if isinstance(reply, Stream):
            return reply
        return reply._replace(headers=(*reply.headers, *_HEADERS))

    return handler


def _asked_partition(request: Request) -> Partition | None:
    """Return the partition that the query names, None if it names none."""
    if not {"model", "routing_group"} & request.parameters.keys():
        return None
    group = request.parameter("routing_group", "default")
    model = request.parameter("model")
    return Partition(model[:_MOST_CHARACTERS], group[:_MOST_CHARACTERS])


def _number(request: Request, name: str, default: str, most: int) -> int:
    text = request.parameter(name, default)
    # Python refuses to read thousands of digits, with an error that would be a 500.
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not 1 <= number <= most:
        raise refusal(422, f"{name} must be from 1 to {most}, not {text[:20]!r}")
    return number
