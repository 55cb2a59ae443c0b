"""Prometheus metrics of streams, the index and routers; needs the extra `server`.

    from prometheus_client import REGISTRY
    REGISTRY.register(kvindex.service.metrics.RankCollector(client))

Nothing is counted twice: the collectors read `statistics()` when Prometheus asks, so a rank's
series go when it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kvindex import BACKEND, State, __version__
from kvindex.routing import Router

__all__ = ["FunnelCollector", "PoolCollector", "RankCollector", "SeriesLabels"]

Rows: TypeAlias = Iterable[tuple[Sequence[str], float]]


class Statistics(Protocol):
    """A `Client`, `Replica` or whatever else has their statistics."""

    def statistics(self) -> dict[str, Any]:
        """Return counters as `Client.statistics` does."""


class ReadCollector(Collector):
    """A collector that reads its numbers when Prometheus asks."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are is only known when they are read."""
        return ()


def counter(name: str, text: str, rows: Rows | float, *labels: str) -> Metric:
    """Return a family of counters; a number instead of rows has no labels."""
    return _filled(CounterMetricFamily(name, text, labels=labels), rows)


def gauge(name: str, text: str, rows: Rows | float, *labels: str) -> Metric:
    """Return a family of gauges, as `counter`."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), rows)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows | float) -> Metric:
    for labels, number in [((), rows)] if isinstance(rows, (int, float)) else rows:
        family.add_metric(labels, number)
    return family


# Ranks --------------------------------------------------------------------------------------------

_Rank: TypeAlias = Mapping[str, Any]  # an entry of `statistics()["ranks"]`


class SeriesLabels(NamedTuple):
    """The labels of a worker's series, besides its name.

    Attributes:
        model: the model that it serves; "" if that is not known.
        routing_group: which of the model's groups it belongs to.
    """

    model: str = ""
    routing_group: str = "default"


class _Series(NamedTuple):
    """Series of each rank: one, or one for each value of a further label."""

    family: Callable[..., Metric]
    name: str
    text: str
    read: Callable[[_Rank], Any]
    label: str = ""


def _held(name: str) -> Callable[[_Rank], Any]:
    return lambda rank: rank["index"].get(name, 0)


# Counters with series of their own: all others, also those to come, are `stream_events`.
_COUNTED: Final = {
    *("delivered", "gaps", "losses", "restarts", "duplicates", "decode_failures"),
    *("replays_asked", "replays_ended", "replays_failed", "replay_timeouts"),
}
_SERIES: Final = (
    _Series(
        *(gauge, "rank_state", "1 for the state that the rank is in"),
        lambda rank: {state.value: rank["state"] == state.value for state in State},
        "state",
    ),
    _Series(
        *(gauge, "rank_complete"),
        "Whether every batch since the publisher's first was applied",
        itemgetter("complete"),
    ),
    _Series(
        *(gauge, "rank_connected", "Whether the publisher is connected"), itemgetter("connected")
    ),
    _Series(gauge, "rank_lag_batches", "Batches known of but not applied yet", itemgetter("lag")),
    _Series(
        *(gauge, "rank_last_event_age_seconds"),
        "Time since the last batch was applied",
        itemgetter("last_event_age"),
    ),
    _Series(
        *(gauge, "rank_epoch", "How often the publisher was seen to restart"), itemgetter("epoch")
    ),
    _Series(gauge, "rank_last_seq", "Number of the last applied batch", itemgetter("seq")),
    _Series(
        *(gauge, "rank_orphan_blocks", "Stored blocks that wait for their parent"),
        itemgetter("orphans"),
    ),
    _Series(
        *(gauge, "rank_blocks", "Resident blocks by medium"),
        lambda rank: rank["index"].get("media", {}),
        "medium",
    ),
    _Series(
        counter, "batches", "Batches applied", lambda rank: rank["counters"].get("delivered", 0)
    ),
    _Series(counter, "gaps", "Holes found in the numbering of batches", itemgetter("gaps")),
    _Series(counter, "losses", "Holes that could not be filled", itemgetter("losses")),
    _Series(counter, "restarts", "Changes of publisher", itemgetter("restarts")),
    _Series(counter, "duplicates", "Batches that came again", itemgetter("duplicates")),
    _Series(
        *(counter, "decode_failures", "Messages that could not be decoded"),
        itemgetter("decode_failures"),
    ),
    _Series(counter, "blocks_stored", "Blocks that events stored", _held("stored")),
    _Series(counter, "blocks_removed", "Blocks that events removed", _held("removed")),
    _Series(counter, "caches_cleared", "Events that cleared a whole cache", _held("cleared")),
    _Series(
        *(counter, "replays", "Replay requests"),
        lambda rank: {name: rank[f"replays_{name}"] for name in ("asked", "filled", "failed")},
        "outcome",
    ),
    _Series(
        *(counter, "ignored_blocks", "Blocks that the index left out"),
        itemgetter("ignored"),
        "reason",
    ),
    _Series(
        *(counter, "stream_events", "What else happened to a stream, by its counter"),
        lambda rank: {
            kind: count for kind, count in rank["counters"].items() if kind not in _COUNTED
        },
        "kind",
    ),
)
_INDEX: Final = {
    "blocks": ("blocks", "Resident blocks over all ranks"),
    "unique_blocks": (
        "unique_blocks",
        "Blocks of the shared tree: one that many ranks hold counts once",
    ),
    "orphan_blocks": ("orphans", "Stored blocks that wait for their parent, over all ranks"),
}


class RankCollector(ReadCollector):
    """Every rank's stream and what the index holds of it, read when Prometheus asks.

    Series are named `kvindex_rank_…` (gauges) and `kvindex_…_total` (counters), with the labels
    `model`, `routing_group`, `worker` and `dp_rank`. docs/reference/metrics.md lists them.

    Args:
        source: the client (or replica) whose `statistics()` are read.
        labels_of: the model and routing group of a worker, by its name; nothing is known of them
            by default.
        workers: only the ranks of these workers; all by default.
        per_rank: whether each rank has series of its own. Without them there are sums only: 512
            ranks have some 13,000 series, 1 MB a scrape.

    Thread safety: any thread may collect.

    Complexity: O(ranks) for each scrape; some 0.1 ms a rank.
    """

    def __init__(
        self,
        source: Statistics,
        *,
        labels_of: Callable[[str], SeriesLabels] = lambda worker: SeriesLabels(),
        workers: Collection[str] | None = None,
        per_rank: bool = True,
    ) -> None:
        self._source = source
        self._labels_of = labels_of
        self._workers = workers
        self._per_rank = per_rank

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        statistics = self._source.statistics()
        ranks = [
            ([*self._labels_of(worker), worker, dp_rank], rank)
            for name, rank in statistics["ranks"].items()
            for worker, _, dp_rank in [name.rpartition("/")]
            if self._workers is None or worker in self._workers
        ]
        info = {"version": __version__, "backend": BACKEND}
        yield InfoMetricFamily("kvindex_build", "Which kvindex runs", info)
        for name, (key, text) in _INDEX.items():
            yield gauge(f"kvindex_index_{name}", text, statistics["index"][key])
        # Every state, those that no rank is in as well: a series that comes and goes is no alarm's.
        states = [((s.value,), sum(rank["state"] == s.value for _, rank in ranks)) for s in State]
        yield gauge("kvindex_ranks", "Ranks by state", states, "state")
        complete = sum(rank["complete"] for _, rank in ranks)
        yield gauge("kvindex_ranks_complete", "Ranks of which all history was seen", complete)
        yield from pool_series(statistics)
        labels = (*SeriesLabels._fields, "worker", "dp_rank")
        for series in _SERIES if self._per_rank else ():
            values = ((place, series.read(rank)) for place, rank in ranks)
            further: tuple[str, ...] = ()
            rows: Rows
            if series.label:
                further = (series.label,)
                rows = (
                    ([*place, kind], number)
                    for place, by_kind in values
                    for kind, number in by_kind.items()
                )
            else:
                # None: nothing was applied yet, and a 0 would be taken for a number.
                rows = ((place, number) for place, number in values if number is not None)
            name = f"kvindex_{series.name}"
            yield series.family(name, series.text, rows, *labels, *further)


# Routers ------------------------------------------------------------------------------------------

_STAGES: Final = {
    "asked": "Tokens of the prompts of finished requests",
    "attainable": "Of these, tokens that the best rank held when the request was routed",
    "chosen": "Of these, tokens that the chosen rank was expected to find cached",
}
_REPORTED: Final = {
    "asked": "Tokens of the prompts of those requests whose engine reported what it found cached",
    "attainable": "Of these, tokens that the best rank held when the request was routed",
    "chosen": "Of these, tokens that the chosen rank was expected to find cached",
    "delivered": "Of these, tokens that the engine did find cached",
}
_ENDS: Final = ("finished", "cancelled", "expired")
_LOADS: Final = {
    "queued_tokens": "Tokens that wait for their prefill, as the router booked them",
    "open_requests": "Requests that are under way, as the router booked them",
}


class FunnelCollector(ReadCollector):
    """What became of the tokens that were asked for, read from routers when Prometheus asks.

    The stages of `kvindex_routed_…_tokens_total` have one denominator, `asked`: divide the rates of
    two of them for a share, and never average shares. Stages named `reported_…` are of those
    requests only whose engine reported cached tokens: divide `delivered` by `reported_asked`.

    Args:
        routers: each with a `model` of its own. Or a function that returns what
            `Router.statistics` would of routers elsewhere.

    Thread safety: any thread may collect.
    """

    def __init__(self, routers: Iterable[Router] | Callable[[], list[Mapping[str, Any]]]) -> None:
        if callable(routers):
            self._read = routers
        else:
            known = tuple(routers)
            self._read = lambda: [router.statistics() for router in known]

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        routers = self._read()
        ends = (
            ((router["model"], end), router["bookings"][end])
            for router in routers
            for end in _ENDS
            # Of reports over HTTP only those that finished are known.
            if end in router["bookings"]
        )
        yield counter(
            "kvindex_routed_requests", "Routed requests by how they ended", ends, "model", "end"
        )
        for group, prefix, texts in (
            ("finished", "", _STAGES),
            ("reported", "reported_", _REPORTED),
        ):
            for stage, text in texts.items():
                # Only of reported requests it is known, so this stage needs no prefix.
                name = f"kvindex_routed_{'' if stage == 'delivered' else prefix}{stage}_tokens"
                rows = [((router["model"],), router["funnel"][group][stage]) for router in routers]
                yield counter(name, text, rows, "model")
        text = "Requests whose engine was told which rank to pull KV from, by whether it did"
        pulls = (
            ((router["model"], outcome), count)
            for router in routers
            # Reports over HTTP name no sources.
            for outcome, count in router["funnel"].get("sources", {}).items()
        )
        yield counter("kvindex_routed_sources", text, pulls, "model", "outcome")
        for name, text in _LOADS.items():
            loads = (
                ((router["model"], worker, dp_rank), load[name])
                for router in routers
                for rank, load in router["ranks"].items()
                for worker, _, dp_rank in [rank.rpartition("/")]
            )
            yield gauge(f"kvindex_routed_{name}", text, loads, "model", "worker", "dp_rank")


# Pools --------------------------------------------------------------------------------------------

_APPENDS: Final = {
    "appends": "Bodies that were appended to the log",
    "appended_bytes": "Their bytes",
    "appended_again": "Bodies that were appended again after trouble",
    "forgotten": "Bodies that NATS acknowledged and lost",
    "fenced": "How often another relay took over",
    "foreign": "Epochs given up since another client wrote in their subject",
    "failures": "Steps of the relay that NATS did not answer, or refused",
    "moves": "Changes to another server, since JetStream did not answer for 10 s",
    "epochs": "Epochs that the relay began",
    "snapshots": "Snapshots that were stored",
    "snapshots_lost": "Snapshots that were not in the bucket any more as they were stored",
}


class PoolCollector(ReadCollector):
    """Collects the counters of a relay, or of a replica that follows a pool on NATS.

    Args:
        source: a `kvindex.replicas.nats.Relay`, or a replica; any other source has no such series.

    Thread safety: any thread may collect.
    """

    def __init__(self, source: Statistics) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        return pool_series(self._source.statistics())


def pool_series(statistics: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the series of what statistics have of a pool."""
    # The statistics tell a relay, a replica of a pool, and one that follows a fan-out here.
    if "relay" in statistics:
        yield from _relay_series(statistics["relay"])
    if "lag_messages" in statistics.get("replica", ()):
        yield from _replica_series(statistics["replica"])


def _relay_series(relay: Mapping[str, Any]) -> Iterator[Metric]:
    writes = relay["state"] == "writing"
    yield gauge("kvindex_relay_writing", "Whether this relay writes the pool's log", writes)
    text = "Number of the last message in the log that is known"
    yield gauge("kvindex_relay_head", text, [((relay["epoch"],), relay["head"])], "epoch")
    for name, text in _APPENDS.items():
        yield counter(f"kvindex_relay_{name}", text, relay.get(name, 0))
    queue = relay["queue"]
    yield gauge("kvindex_relay_queue_bytes", "Bytes that wait for NATS", queue["waiting_bytes"])
    text = "Epochs that ended since NATS accepted too little"
    yield counter("kvindex_relay_queue_overflows", text, queue["overflows"])
    text = "Seconds for which the subscriber waited for NATS"
    yield counter("kvindex_relay_blocked_seconds", text, queue["blocked_seconds"])
    failures = [((reason,), count) for reason, count in relay.get("snapshot_failures", {}).items()]
    text = "Snapshots that could not be stored"
    yield counter("kvindex_relay_snapshot_failures", text, failures, "reason")
    newest = relay.get("last_snapshot")
    if newest is not None:
        yield gauge("kvindex_relay_snapshot_age_seconds", "Of the newest", newest["age"])
        yield gauge("kvindex_relay_snapshot_bytes", "Of the newest", newest["bytes"])


def _replica_series(replica: Mapping[str, Any]) -> Iterator[Metric]:
    following = bool(replica["following"])
    yield gauge("kvindex_replica_following", "Whether this replica follows the log", following)
    if replica["number"] is not None:
        rows = [((replica["epoch"],), replica["number"])]
        yield gauge("kvindex_replica_log_number", "Of the last message applied", rows, "epoch")
        text = "Messages in the log that were not received yet"
        yield gauge("kvindex_replica_lag_messages", text, replica["lag_messages"])
        text = "How old the last message is"
        yield gauge("kvindex_replica_lag_seconds", text, replica["lag_seconds"])
    rejoins = [((reason,), count) for reason, count in replica["rejoins"].items()]
    text = "How often it fetched a snapshot again"
    yield counter("kvindex_replica_rejoins", text, rejoins, "reason")
    refused = [((reason,), count) for reason, count in replica["snapshots_refused"].items()]
    yield counter("kvindex_replica_snapshots_refused", "Snapshots of no use", refused, "reason")
