"""`GET /metrics`: every collector of one server, and what the server itself counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvindex.service.dialects import dynamo
from kvindex.service.metrics import (
    DynamoCollector,
    FunnelCollector,
    RankCollector,
    RequestCollector,
    SeriesLabels,
)
from kvindex.service.service import Service
from kvindex.service.traffic import AllTraffic

__all__ = ["Exposition"]


class Exposition:
    """Writes a server's metrics.

    Args:
        service: whose ranks they are of.
        totals: what all processes were asked.
        statistics: returns what the server counts, as `Running.statistics`.
        dynamo_names: add series with the names of Dynamo's indexer.

    Thread safety: any thread.
    """

    def __init__(
        self,
        service: Service,
        totals: AllTraffic,
        statistics: Callable[[], Mapping[str, Any]],
        *,
        dynamo_names: bool = False,
    ) -> None:
        self._service = service
        self._others: list[Collector] = [
            RequestCollector(totals.requests, totals.queries),
            FunnelCollector(totals.outcomes),
            _ServerCollector(statistics),
        ]
        if dynamo_names:
            self._others.append(self._dynamo(totals))

    def write(
        self, workers: Collection[str] | None = None, *, per_rank: bool = True
    ) -> tuple[bytes, str]:
        """Return all series as Prometheus reads them, and their content type.

        Args:
            workers: only the ranks of these; all by default.
            per_rank: whether each rank has series of its own.
        """
        registry = CollectorRegistry()
        ranks = RankCollector(
            self._service.source, labels_of=self._labels_of(), workers=workers, per_rank=per_rank
        )
        for collector in (ranks, *self._others):
            registry.register(collector)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def _labels_of(self) -> Callable[[str], SeriesLabels]:
        instances = self._service.catalog.instances

        def labels_of(worker: str) -> SeriesLabels:
            ranks = instances.get(worker)
            return SeriesLabels(*next(iter(ranks.values())).partition) if ranks else SeriesLabels()

        return labels_of

    def _dynamo(self, totals: AllTraffic) -> Collector:
        service = self._service
        return DynamoCollector(
            totals.requests,
            totals.queries,
            listeners=self._listeners,
            models=lambda: len({partition.model for partition in service.catalog.partitions}),
            workers=lambda: len(service.catalog.instances),
        )

    def _listeners(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter(dict.fromkeys(("pending", "active", "paused", "failed"), 0))
        for _, status in self._service.statuses():
            counts["failed" if status is None else dynamo.STATUS[status.state]] += 1
        return counts


class _ServerCollector(Collector):
    """What a server counts besides answers."""

    def __init__(self, statistics: Callable[[], Mapping[str, Any]]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        statistics = self._statistics()
        refused = CounterMetricFamily("kvindex_http_refused", "Refused requests", labels=["reason"])
        for reason, count in statistics["refused"].items():
            refused.add_metric([reason], count)
        yield refused
        streams = statistics["streams"]
        yield GaugeMetricFamily(
            "kvindex_http_streams", "Event streams that are open", streams["open_now"]
        )
        yield CounterMetricFamily(
            "kvindex_http_streams_cut_off",
            "Event streams closed because their reader was too slow",
            streams["cut_off"],
        )
        yield from _state(statistics["state"])
        failures = CounterMetricFamily(
            "kvindex_discovery_failures",
            "Failed attempts to read or ask a source of workers",
            labels=["source"],
        )
        for source, counted in statistics["discovery"]["sources"].items():
            failures.add_metric([source], counted["failures"])
        yield failures
        processes = statistics["processes"]
        if processes is not None:
            yield GaugeMetricFamily(
                "kvindex_http_processes", "Processes that answer HTTP", processes["running"]
            )
            exits = CounterMetricFamily(
                "kvindex_http_process_exits",
                "Processes that ended unexpectedly",
                labels=["cause"],
            )
            for cause, count in processes["exits"].items():
                exits.add_metric([cause], count)
            yield exits


def _state(state: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Yield how the state file fares, if there is one."""
    if state is None:
        return
    saves = CounterMetricFamily(
        "kvindex_state_saves", "Attempts to save the state file", labels=["outcome"]
    )
    for outcome in ("saved", "failed"):
        saves.add_metric([outcome], state[outcome])
    yield saves
    if state["saved_at"] is not None:
        yield GaugeMetricFamily(
            "kvindex_state_saved_timestamp_seconds",
            "When the state was saved last, in seconds since 1970",
            state["saved_at"],
        )
