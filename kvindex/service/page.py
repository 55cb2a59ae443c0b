"""The page's files and requests: the fleet, prefixes, explanations and news.

`Page` is mounted by the server's app, which guards it: tokens, hosts, limits of bodies and streams.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvindex import ConfigurationError, Index, KVIndexError, Rank, RankStatus, State
from kvindex.service.assets import asset_routes
from kvindex.service.catalog import BY_CLIENTS, Catalog, Partition
from kvindex.service.event_stream import EventStreamResponse, StreamCounters
from kvindex.service.explaining import Explained, RefusedError, answer, read_question
from kvindex.service.metrics import SeriesLabels
from kvindex.service.overview import Counted, overview
from kvindex.service.timeline import Timeline, parse_id
from kvindex.service.traffic import Totals, Traffic
from kvindex.service.trends import WINDOWS, Trends

__all__ = ["FLEET_FOR", "MOST_NODES", "SWEEP", "Page", "Shown", "Source"]

SWEEP: Final = 5.0
"""Seconds between looks at what ranks count while their states stay the same."""

FLEET_FOR: Final = 0.5
"""Seconds for which one overview of the fleet answers all who ask."""

MOST_NODES: Final = 5_000
"""Nodes of the radix tree in one answer: about 1 MB."""

_MOST_EXPLAINING = 4
_MOST_TEXT = 1_000  # characters of a name in a query string
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Source(Counted, Explained, Protocol):
    """What the page asks of a `Client` or a `Replica`."""

    @property
    def ranks(self) -> tuple[Rank, ...]: ...

    @property
    def index(self) -> Index: ...

    def statuses(self) -> Mapping[Rank, RankStatus]: ...

    def on_change(self, callback: Callable[[RankStatus], object]) -> Callable[[], None]: ...


class Shown(Protocol):
    """What a page shows: a `Service`. Both are read from any thread."""

    @property
    def source(self) -> Any:
        """A `Source`: a client or a replica."""

    @property
    def catalog(self) -> Catalog:
        """The present registrations."""

    @property
    def traffic(self) -> Traffic:
        """The requests that this process received."""

    @property
    def missing(self) -> Callable[[], Mapping[str, str]]:
        """Returns the engines and sources that have not said where to subscribe, and why."""


class Page:
    """The routes of the page, and the timeline behind them.

    Args:
        service: what is shown.
        tokenizer: URL of an engine whose `/tokenize` is asked for tokens of text where neither
            the operator nor a discovery named one of the partition.
        timeline: a new one by default.
        traffic: of all processes that answer; of this one by default.

    Attributes:
        routes: for a Starlette app.
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
        traffic: Totals | None = None,
    ) -> None:
        self._service = service
        self._source: Source = service.source
        self._configured = tokenizer
        self.timeline = timeline or Timeline(self._partition)
        self.trends = Trends((traffic or Totals(lambda: [service.traffic])).asked)
        self.streams = StreamCounters()
        self._stop = self._source.on_change(self.timeline.observe)
        self.timeline.begin(self._source.statuses().values())
        self._fleet: tuple[float, bytes] = (0.0, b"")
        self._fleet_lock: asyncio.Lock | None = None
        self._explaining = 0
        self._closed = threading.Event()
        threading.Thread(target=self._sweep, name="kvindex-timeline", daemon=True).start()
        self.routes: list[BaseRoute] = [
            *asset_routes(),
            Route("/api/fleet", _told(self._get_fleet), methods=["GET"]),
            Route("/api/timeline", _told(self._get_timeline), methods=["GET"]),
            Route("/api/traffic", _told(self._get_traffic), methods=["GET"]),
            Route("/api/prefixes", _told(self._get_prefixes), methods=["GET"]),
            Route("/api/explain", _told(self._explain), methods=["POST"]),
            Route("/events", self._events, methods=["GET"]),
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

    async def _get_fleet(self, _: Request) -> Response:
        lock = self._fleet_lock = self._fleet_lock or asyncio.Lock()
        async with lock:
            made_at, body = self._fleet
            if not body or time.monotonic() - made_at >= FLEET_FOR:
                body = await asyncio.to_thread(self._read_fleet)
                self._fleet = time.monotonic(), body
        return _json(body)

    def _read_fleet(self) -> bytes:
        fleet = overview(
            self._source,
            self._partition,
            has_tokenizer=lambda partition: self._tokenizer(partition) is not None,
            missing=self._service.missing(),
        )
        return msgspec.json.encode(fleet)

    async def _get_timeline(self, _: Request) -> Response:
        since = self.timeline.since(0)
        happenings = since.happenings
        said = {
            "since": happenings[0].at if since.missed else self.timeline.began,
            "id": f"{self.timeline.life}-{since.position}",
            "dropped": since.missed,
            "happenings": happenings,
        }
        return _json(msgspec.json.encode(said))

    async def _get_traffic(self, request: Request) -> Response:
        asked = request.query_params
        seconds = asked.get("seconds", "900")
        if seconds not in map(str, WINDOWS):
            wanted = ", ".join(map(str, WINDOWS))
            raise RefusedError(422, f"seconds must be one of {wanted}, not {seconds[:20]!r}")
        partition = None
        if "model" in asked or "routing_group" in asked:
            partition = SeriesLabels(asked.get("model", ""), asked.get("routing_group", "default"))
        return _json(msgspec.json.encode(self.trends.points(int(seconds), partition)))

    async def _get_prefixes(self, request: Request) -> Response:
        asked = request.query_params
        max_nodes = _number(asked.get("max_nodes", "1000"), "max_nodes", MOST_NODES)
        min_blocks = _number(asked.get("min_blocks", "1"), "min_blocks", 2**31)
        ranks = None
        if "model" in asked or "routing_group" in asked:
            ranks = self._ranks_of(asked.get("model", ""), asked.get("routing_group", "default"))
        return _json(await asyncio.to_thread(self._prefixes, max_nodes, min_blocks, ranks))

    def _prefixes(self, max_nodes: int, min_blocks: int, ranks: list[Rank] | None) -> bytes:
        if ranks is not None and len(ranks) == len(self._source.ranks):
            ranks = None  # of all: with the holes, and with the size of the tree
        found = self._source.index.prefixes(max_nodes, min_blocks=min_blocks, ranks=ranks)
        told = msgspec.to_builtins(found)
        if ranks is not None:
            told["unique_blocks"] = None  # it counts the whole tree, with other ranks' blocks
        return msgspec.json.encode(told)

    async def _explain(self, request: Request) -> Response:
        question = read_question(await request.body())
        if self._explaining >= _MOST_EXPLAINING:
            raise RefusedError(503, f"{self._explaining} explanations are being made: ask again")
        ranks = self._ranks_of(question.model, question.routing_group)
        tokenizer = self._tokenizer(Partition(question.model, question.routing_group))
        self._explaining += 1
        try:
            found = await asyncio.to_thread(answer, self._source, question, ranks, tokenizer)
        finally:
            self._explaining -= 1
        return _json(msgspec.json.encode(found))

    def _ranks_of(self, model: str, routing_group: str) -> list[Rank]:
        wanted = Partition(model[:_MOST_TEXT], routing_group[:_MOST_TEXT])
        return [rank for rank in self._source.ranks if self._partition(rank.worker) == wanted]

    def _partition(self, worker: str) -> Partition:
        """Return a worker's partition; an unregistered worker has no model."""
        found = self._service.catalog.instances.get(worker)
        return next(iter(found.values())).partition if found else Partition("")

    def _tokenizer(self, partition: Partition) -> str | None:
        """Return the URL of an engine that the operator or a discovery named, never a client."""
        for one in self._service.catalog.of(partition):
            engine = one.details.get("engine")
            if isinstance(engine, str) and one.source != BY_CLIENTS:
                return engine
        return self._configured

    async def _events(self, request: Request) -> EventStreamResponse:
        asked = request.headers.get("last-event-id", "")
        if asked and parse_id(asked) is None:
            asked = "unknown-0"
        return EventStreamResponse(self.timeline, self._present, self.streams, asked)

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


def _told(
    serve: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler whose refusals are answered in words."""

    async def handler(request: Request) -> Response:
        try:
            return await serve(request)
        except RefusedError as error:
            return _json(msgspec.json.encode({"error": str(error)}), error.status)
        except ConfigurationError as error:
            return _json(msgspec.json.encode({"error": str(error)}), 422)
        except KVIndexError as error:
            return _json(msgspec.json.encode({"error": str(error)}), 503)

    return handler


def _json(body: bytes, status: int = 200) -> Response:
    headers = {**_HEADERS, "Retry-After": "1"} if status == 503 else _HEADERS
    return Response(body, status, headers, "application/json")


def _number(text: str, name: str, most: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not 1 <= number <= most:
        raise RefusedError(422, f"{name} must be from 1 to {most}, not {text[:20]!r}")
    return number
