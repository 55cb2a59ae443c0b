"""The page's files and requests: the fleet, prefixes, explanations and news."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec

from kvindex import (
    ConfigurationError,
    Index,
    KVIndexError,
    Prefixes,
    Rank,
    RankStatus,
    State,
)
from kvindex.service.assets import asset_routes
from kvindex.service.catalog import BY_CLIENTS, Catalog, Partition
from kvindex.service.event_stream import StreamCounters, event_stream
from kvindex.service.explaining import Explained, Explainer, Question, explain, read_question
from kvindex.service.http.guards import Guard, Refusal
from kvindex.service.http.messages import (
    Handler,
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
from kvindex.service.overview import Counted, Fleet, overview
from kvindex.service.timeline import Happening, Timeline, parse_id
from kvindex.service.traffic import ASKED, Traffic
from kvindex.service.trends import WINDOWS, Trends

SWEEP: Final = 5.0
"""Seconds between looks at what ranks count while their states stay the same."""

FLEET_FOR: Final = 0.5
"""Seconds for which one overview of the fleet answers all requests."""

MOST_NODES: Final = 5_000
"""Nodes of the radix tree in one answer: about 1 MB."""

_MOST_EXPLAINING = 4
_MOST_TEXT = 1_000  # characters of a name in a query string
_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class Watched(Counted, Explainer, Protocol):
    """The methods of a `Client` or a `Replica` that the page calls."""

    @property
    def ranks(self) -> tuple[Rank, ...]: ...

    @property
    def index(self) -> Index: ...

    def statuses(self) -> Mapping[Rank, RankStatus]: ...

    def on_change(self, callback: Callable[[RankStatus], object]) -> Callable[[], None]: ...


class Shown(Protocol):
    """What the page shows: a `Service`, or a gateway."""

    @property
    def source(self) -> Any:
        """A `Watched`."""

    @property
    def traffic(self) -> Traffic:
        """What was asked."""

    @property
    def catalog(self) -> Catalog:
        """The present ranks, by partition."""

    @property
    def missing(self) -> Callable[[], Mapping[str, str]]:
        """Returns the engines that are not found, and why."""


class Page:
    """The routes of the page, and the timeline behind them.

    Args:
        service: what is shown.
        tokenizer: URL of an engine whose `/tokenize` is asked for tokens of text where neither
            the operator nor a discovery named one of the partition.
        timeline: a new one by default.
        guard: limits the event streams.

    Attributes:
        routes: of the page.
        timeline: what has happened since this was made.
        trends: what was asked since then.
        streams: counters of `/events`.

    Owner: the server's event loop; `close` may be called from any thread.
    """

    def __init__(
        self,
        service: Shown,
        *,
        tokenizer: str | None = None,
        timeline: Timeline | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._service = service
        self._guard = guard or Guard()
        self._source: Watched = service.source
        self._configured = tokenizer
        self.timeline = timeline or Timeline(self._partition)
        self.trends = Trends(service.traffic.asked)
        self.streams = StreamCounters()
        self._stop = self._source.on_change(self.timeline.observe)
        self.timeline.begin(self._source.statuses().values())
        self._fleet: tuple[float, bytes] = (0.0, b"")
        self._fleet_lock: asyncio.Lock | None = None
        self._explaining = 0
        self._closed = threading.Event()
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

    # Requests ---------------------------------------------------------------------------------

    async def _get_fleet(self, _: Request) -> Reply:
        lock = self._fleet_lock = self._fleet_lock or asyncio.Lock()
        async with lock:
            made_at, body = self._fleet
            if not body or time.monotonic() - made_at >= FLEET_FOR:
                body = await asyncio.to_thread(self._read_fleet)
                self._fleet = time.monotonic(), body
        return Reply(200, body)

    def _read_fleet(self) -> bytes:
        fleet = overview(
            self._source,
            self._partition,
            has_tokenizer=lambda partition: self._tokenizer(partition) is not None,
            missing=self._service.missing(),
        )
        return msgspec.json.encode(fleet)

    async def _get_timeline(self, _: Request) -> Reply:
        since = self.timeline.since(0)
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
            wanted = ", ".join(map(str, WINDOWS))
            raise refusal(422, f"seconds must be one of {wanted}, not {seconds[:20]!r}")
        return json_reply(200, self.trends.points(int(seconds), _named(request)))

    async def _get_prefixes(self, request: Request) -> Reply:
        max_nodes = _number(request, "max_nodes", "1000", MOST_NODES)
        min_blocks = _number(request, "min_blocks", "1", 2**31)
        named = _named(request)
        ranks = None if named is None else self._ranks_of(named)
        return Reply(200, await asyncio.to_thread(self._prefixes, max_nodes, min_blocks, ranks))

    def _prefixes(self, max_nodes: int, min_blocks: int, ranks: list[Rank] | None) -> bytes:
        if ranks is not None and len(ranks) == len(self._source.ranks):
            ranks = None  # of all: with the holes, and with the size of the tree
        prefixes = self._source.index.prefixes(max_nodes, min_blocks=min_blocks, ranks=ranks)
        if ranks is not None:
            fields = {**msgspec.structs.asdict(prefixes), "unique_blocks": None}
            prefixes = PartitionPrefixes(**fields)
        return msgspec.json.encode(prefixes)

    async def _explain(self, request: Request) -> Reply:
        question = read_question(request.body)
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

    def _ranks_of(self, wanted: Partition) -> list[Rank]:
        return [rank for rank in self._source.ranks if self._partition(rank.worker) == wanted]

    def _partition(self, worker: str) -> Partition:
        """Return a worker's partition; an unregistered worker has no model."""
        registered = self._service.catalog.instances.get(worker)
        return next(iter(registered.values())).partition if registered else Partition("")

    def _tokenizer(self, partition: Partition) -> str | None:
        """Return the URL of an engine that the operator or a discovery named, never a client."""
        for registration in self._service.catalog.of(partition):
            engine = registration.details.get("engine")
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
            last_event_id = "unknown-0"
        return event_stream(self.timeline, self._present, self.streams, last_event_id)

    def _present(self) -> dict[str, Any]:
        statuses = self._source.statuses().values()
        self.timeline.sweep(statuses)
        return {"now": time.time(), "ranks": [self._stands(status) for status in statuses]}

    def _stands(self, status: RankStatus) -> dict[str, Any]:
        partition = self._partition(status.rank.worker)
        return {
            "worker": status.rank.worker,
            "dp_rank": status.rank.dp_rank,
            "model": partition.model,
            "routing_group": partition.routing_group,
            "state": status.state,
            "complete": status.complete,
            "lag": status.lag,
        }


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
        except KVIndexError as error:
            reply = refusal(503, str(error)).reply
        return (
            reply._replace(headers=(*reply.headers, *_HEADERS))
            if isinstance(reply, Reply)
            else reply
        )

    return handler


def _named(request: Request) -> Partition | None:
    """Return the partition that the query names, None if it names none."""
    if not {"model", "routing_group"} & request.parameters.keys():
        return None
    group = request.parameter("routing_group", "default")
    return Partition(request.parameter("model")[:_MOST_TEXT], group[:_MOST_TEXT])


def _number(request: Request, name: str, default: str, most: int) -> int:
    text = request.parameter(name, default)
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not 1 <= number <= most:
        raise refusal(422, f"{name} must be from 1 to {most}, not {text[:20]!r}")
    return number
