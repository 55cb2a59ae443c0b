"""The streams of ranks, and what the index holds of them, as Prometheus series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client.core import InfoMetricFamily, Metric

from kvindex import BACKEND, State, __version__
from kvindex.service.metrics.families import ReadCollector, Rows, Statistics, counter, gauge
from kvindex.service.metrics.pools import pool_series

_Rank: TypeAlias = Mapping[str, Any]  # an entry of `statistics()["ranks"]`
_Ranks: TypeAlias = Collection[tuple[list[str], _Rank]]  # each with its labels


class SeriesLabels(NamedTuple):
    """The labels of a worker's series, besides its name.

    Attributes:
        model: the model that it serves; "" if that is not known.
        routing_group: which of the model's groups it belongs to.
    """

    model: str = ""
    routing_group: str = "default"


_NAMED: Final = {  # that have series of their own
    *("delivered", "gaps", "losses", "restarts", "duplicates", "decode_failures"),
    *("replays_asked", "replays_ended", "replays_failed", "replay_timeouts"),
}


def _field(name: str) -> Callable[[_Rank], Any]:
    return lambda rank: rank[name]


def _held(name: str) -> Callable[[_Rank], Any]:
    return lambda rank: rank["index"].get(name, 0)


def _states(rank: _Rank) -> Mapping[str, float]:
    return {state.value: rank["state"] == state.value for state in State}


def _replays(rank: _Rank) -> Mapping[str, float]:
    return {outcome: rank[f"replays_{outcome}"] for outcome in ("asked", "filled", "failed")}


def _other_counters(rank: _Rank) -> Mapping[str, float]:
    return {kind: count for kind, count in rank["counters"].items() if kind not in _NAMED}


class _Series(NamedTuple):
    """Series of each rank: one, or one for each value of a further label."""

    family: Callable[..., Metric]
    name: str
    text: str
    read: Callable[[_Rank], Any]
    label: str = ""

    def rows(self, ranks: _Ranks) -> Rows:
        for labels, rank in ranks:
            value = self.read(rank)
            if self.label:
                yield from (([*labels, kind], number) for kind, number in value.items())
            elif value is not None:  # None: nothing was applied yet
                yield labels, value


_SERIES: Final = (
    _Series(gauge, "rank_state", "1 for the state that the rank is in", _states, "state"),
    _Series(
        *(gauge, "rank_complete"),
        "Whether every batch since the publisher's first was applied",
        _field("complete"),
    ),
    _Series(gauge, "rank_connected", "Whether the publisher is connected", _field("connected")),
    _Series(gauge, "rank_lag_batches", "Batches known of but not applied yet", _field("lag")),
    _Series(
        *(gauge, "rank_last_event_age_seconds"),
        "Time since the last batch was applied",
        _field("last_event_age"),
    ),
    _Series(gauge, "rank_epoch", "How often the publisher was seen to restart", _field("epoch")),
    _Series(gauge, "rank_last_seq", "Number of the last applied batch", _field("seq")),
    _Series(
        gauge, "rank_orphan_blocks", "Stored blocks that wait for their parent", _field("orphans")
    ),
    _Series(
        *(gauge, "rank_blocks", "Resident blocks by medium"),
        lambda rank: rank["index"].get("media", {}),
        "medium",
    ),
    _Series(
        counter, "batches", "Batches applied", lambda rank: rank["counters"].get("delivered", 0)
    ),
    _Series(counter, "gaps", "Holes found in the numbering of batches", _field("gaps")),
    _Series(counter, "losses", "Holes that could not be filled", _field("losses")),
    _Series(counter, "restarts", "Changes of publisher", _field("restarts")),
    _Series(counter, "duplicates", "Batches that came again", _field("duplicates")),
    _Series(
        *(counter, "decode_failures", "Messages that could not be decoded"),
        _field("decode_failures"),
    ),
    _Series(counter, "blocks_stored", "Blocks that events stored", _held("stored")),
    _Series(counter, "blocks_removed", "Blocks that events removed", _held("removed")),
    _Series(counter, "caches_cleared", "Events that cleared a whole cache", _held("cleared")),
    _Series(counter, "replays", "Replay requests", _replays, "outcome"),
    _Series(
        counter, "ignored_blocks", "Blocks that the index left out", _field("ignored"), "reason"
    ),
    _Series(
        *(counter, "stream_events", "What else happened to a stream, by its counter"),
        *(_other_counters, "kind"),
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
        yield from _totals([rank for _, rank in ranks])
        yield from pool_series(statistics)
        labels = (*SeriesLabels._fields, "worker", "dp_rank")
        for series in _SERIES if self._per_rank else ():
            further = (series.label,) if series.label else ()
            name = f"kvindex_{series.name}"
            yield series.family(name, series.text, series.rows(ranks), *labels, *further)


def _totals(ranks: Collection[_Rank]) -> Iterator[Metric]:
    states = [((s.value,), sum(rank["state"] == s.value for rank in ranks)) for s in State]
    yield gauge("kvindex_ranks", "Ranks by state", states, "state")
    complete = sum(rank["complete"] for rank in ranks)
    yield gauge("kvindex_ranks_complete", "Ranks of which all history was seen", complete)
