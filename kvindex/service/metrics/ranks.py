"""The streams of ranks, and what the index holds of them, as Prometheus series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvindex import BACKEND, State, __version__

__all__ = ["RankCollector", "SeriesLabels", "Statistics"]

_Rank: TypeAlias = Mapping[str, Any]  # an entry of `statistics()["ranks"]`
_Read: TypeAlias = Callable[[_Rank], float | None]
_ReadSome: TypeAlias = Callable[[_Rank], Mapping[str, float]]


class SeriesLabels(NamedTuple):
    """The labels of a worker's series, besides its name.

    Attributes:
        model: the model that it serves; "" if that is not known.
        routing_group: which of the model's groups it belongs to.
    """

    model: str = ""
    routing_group: str = "default"


class Statistics(Protocol):
    """A `Client`, `Replica` or whatever else has their statistics."""

    def statistics(self) -> dict[str, Any]:
        """Return counters as `Client.statistics` does."""


def _field(name: str) -> _Read:
    return lambda rank: rank[name]


def _held(name: str) -> _Read:
    return lambda rank: rank["index"].get(name, 0)


_GAUGES: Final[tuple[tuple[str, str, _Read], ...]] = (
    ("complete", "Whether every batch since the publisher's first was applied", _field("complete")),
    ("connected", "Whether the publisher is connected", _field("connected")),
    ("lag_batches", "Batches known of but not applied yet", _field("lag")),
    (
        "last_event_age_seconds",
        "Time since the last batch was applied",
        _field("last_event_age"),
    ),
    ("epoch", "How often the publisher was seen to restart", _field("epoch")),
    ("last_seq", "Number of the last applied batch", _field("seq")),
    ("orphan_blocks", "Stored blocks that wait for their parent", _field("orphans")),
)
_COUNTERS: Final[tuple[tuple[str, str, _Read], ...]] = (
    ("batches", "Batches applied", lambda rank: rank["counters"].get("delivered", 0)),
    ("gaps", "Holes found in the numbering of batches", _field("gaps")),
    ("losses", "Holes that could not be filled", _field("losses")),
    ("restarts", "Changes of publisher", _field("restarts")),
    ("duplicates", "Batches that came again", _field("duplicates")),
    ("decode_failures", "Messages that could not be decoded", _field("decode_failures")),
    ("blocks_stored", "Blocks that events stored", _held("stored")),
    ("blocks_removed", "Blocks that events removed", _held("removed")),
    ("caches_cleared", "Events that cleared a whole cache", _held("cleared")),
)
_REPLAYS: Final = ("asked", "filled", "failed")
_NAMED: Final = {  # that have series of their own
    *("delivered", "gaps", "losses", "restarts", "duplicates", "decode_failures"),
    *("replays_asked", "replays_ended", "replays_failed", "replay_timeouts"),
}


def _replays(rank: _Rank) -> Mapping[str, float]:
    return {outcome: rank[f"replays_{outcome}"] for outcome in _REPLAYS}


def _other_counters(rank: _Rank) -> Mapping[str, float]:
    counters: Mapping[str, float] = rank["counters"]
    return {kind: count for kind, count in counters.items() if kind not in _NAMED}


def _states(rank: _Rank) -> Mapping[str, float]:
    return {state.value: rank["state"] == state.value for state in State}


_LABELLED_COUNTERS: Final[tuple[tuple[str, str, str, _ReadSome], ...]] = (
    ("replays", "Replay requests", "outcome", _replays),
    ("ignored_blocks", "Blocks that the index left out", "reason", lambda rank: rank["ignored"]),
    ("stream_events", "What else happened to a stream, by its counter", "kind", _other_counters),
)


class RankCollector(Collector):
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

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are depends on the ranks."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        statistics = self._source.statistics()
        ranks = [
            (self._rank_labels(worker, dp_rank), rank)
            for name, rank in statistics["ranks"].items()
            for worker, _, dp_rank in [name.rpartition("/")]
            if self._workers is None or worker in self._workers
        ]
        info = {"version": __version__, "backend": BACKEND}
        yield InfoMetricFamily("kvindex_build", "Which kvindex runs", info)
        yield from _index(statistics["index"])
        yield from _totals([rank for _, rank in ranks])
        if self._per_rank:
            yield from _rank_series(ranks)

    def _rank_labels(self, worker: str, dp_rank: str) -> list[str]:
        return [*self._labels_of(worker), worker, dp_rank]


_RANK: Final = (*SeriesLabels._fields, "worker", "dp_rank")


def _index(index: Mapping[str, Any]) -> Iterator[Metric]:
    texts = {
        "blocks": ("blocks", "Resident blocks over all ranks"),
        "unique_blocks": (
            "unique_blocks",
            "Blocks of the shared tree: one that many ranks hold counts once",
        ),
        "orphan_blocks": ("orphans", "Stored blocks that wait for their parent, over all ranks"),
    }
    for name, (key, text) in texts.items():
        yield GaugeMetricFamily(f"kvindex_index_{name}", text, index[key])


def _totals(ranks: Collection[_Rank]) -> Iterator[Metric]:
    by_state = GaugeMetricFamily("kvindex_ranks", "Ranks by state", labels=["state"])
    for state in State:
        count = sum(rank["state"] == state.value for rank in ranks)
        by_state.add_metric([state.value], count)
    yield by_state
    complete = sum(rank["complete"] for rank in ranks)
    yield GaugeMetricFamily(
        "kvindex_ranks_complete", "Ranks of which all history was seen", complete
    )


def _rank_series(ranks: Collection[tuple[list[str], _Rank]]) -> Iterator[Metric]:
    yield _one_each("kvindex_rank_state", "1 for the state that the rank is in", "state", ranks)
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(f"kvindex_rank_{name}", text, labels=_RANK)
        for labels, rank in ranks:
            value = read(rank)
            if value is not None:  # nothing was applied yet
                gauge.add_metric(labels, value)
        yield gauge
    blocks = GaugeMetricFamily(
        "kvindex_rank_blocks", "Resident blocks by medium", labels=[*_RANK, "medium"]
    )
    for labels, rank in ranks:
        for medium, count in rank["index"].get("media", {}).items():
            blocks.add_metric([*labels, medium], count)
    yield blocks
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(f"kvindex_{name}", text, labels=_RANK)
        for labels, rank in ranks:
            counter.add_metric(labels, read(rank) or 0)
        yield counter
    for name, text, label, read_some in _LABELLED_COUNTERS:
        counter = CounterMetricFamily(f"kvindex_{name}", text, labels=[*_RANK, label])
        for labels, rank in ranks:
            for kind, count in read_some(rank).items():
                counter.add_metric([*labels, kind], count)
        yield counter


def _one_each(
    name: str, text: str, label: str, ranks: Collection[tuple[list[str], _Rank]]
) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=[*_RANK, label])
    for labels, rank in ranks:
        for state, is_it in _states(rank).items():
            gauge.add_metric([*labels, state], is_it)
    return gauge
