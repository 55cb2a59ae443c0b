"""`GET /metrics`: every collector of one server, and what the server itself counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvindex.service.dialects import LISTENER_STATUS
from kvindex.service.metrics import (
    FunnelCollector,
    RankCollector,
    ReadCollector,
    SeriesLabels,
    counter,
    gauge,
)
from kvindex.service.service import Service
from kvindex.service.traffic import BUCKETS, Traffic


class Exposition:
    """Writes a server's metrics: those of its service, and `Server.statistics`. Any thread."""

    def __init__(
        self,
        service: Service,
        statistics: Callable[[], Mapping[str, Any]],
        *,
        dynamo_names: bool = False,
    ) -> None:
        self._service = service
        self._others: list[Collector] = [
            RequestCollector(service.traffic),
            FunnelCollector(service.traffic.outcomes),
            _ServerCollector(statistics),
        ]
        if dynamo_names:
            self._others.append(DynamoCollector(service))

    def write(
        self, workers: Collection[str] | None = None, *, per_rank: bool = True
    ) -> tuple[bytes, str]:
        """Return all series as Prometheus reads them, and their content type.

        `workers` are those whose ranks have series, all by default; `per_rank` says whether each
        rank has its own.
        """
        # One catalog for the whole scrape: registrations may change meanwhile.
        instances = self._service.catalog.instances

        def labels_of(worker: str) -> SeriesLabels:
            ranks = instances.get(worker)
            return SeriesLabels(*next(iter(ranks.values())).partition) if ranks else SeriesLabels()

        # Anew for each scrape: which ranks it is about depends on the request.
        registry = CollectorRegistry()
        ranks = RankCollector(
            self._service.source, labels_of=labels_of, workers=workers, per_rank=per_rank
        )
        for collector in (ranks, *self._others):
            registry.register(collector)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        return generate_latest(registry), CONTENT_TYPE_LATEST


class RequestCollector(ReadCollector):
    """Requests by route and code, and what queries asked for and found."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        by_route: Counter[tuple[str, str]] = Counter()
        for (_, route, code), count in self._traffic.requests().items():
            by_route[route, str(code)] += count
        yield counter(
            *("kvindex_http_requests", "Answered requests", by_route.items(), "route", "code")
        )
        by_partition = self._traffic.sums()
        labels = SeriesLabels._fields
        yield counter(
            "kvindex_query_tokens",
            "Tokens of the prompts that queries asked for",
            [(partition, sums.tokens) for partition, sums in by_partition.items()],
            *labels,
        )
        yield counter(
            "kvindex_query_best_match_tokens",
            "Of these, tokens that the rank with the most of them held",
            [(partition, sums.best_match) for partition, sums in by_partition.items()],
            *labels,
        )
        durations = HistogramMetricFamily(
            "kvindex_query_duration_seconds", "Time that queries were worked on", labels=labels
        )
        for partition, sums in by_partition.items():
            durations.add_metric(partition, _cumulative(sums.buckets), sums.nanoseconds / 1e9)
        yield durations


class DynamoCollector(ReadCollector):
    """The same under the names of NVIDIA Dynamo's indexer (1.6.1), so that its dashboards work.

    Durations are those of queries only, in our own buckets.
    """

    def __init__(self, service: Service) -> None:
        self._traffic = service.traffic
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        by_method: Counter[tuple[str, str]] = Counter()
        errors: Counter[tuple[str, str]] = Counter()
        for (method, route, code), count in self._traffic.requests().items():
            by_method[route, method] += count
            if code >= 400:
                errors[route, f"{code // 100}xx"] += count
        # Named as in Dynamo 1.6.1, also where a name of ours says more.
        name = "dynamo_kvindexer_"
        requests = by_method.items()
        yield counter(f"{name}requests", "Requests received", requests, "endpoint", "method")
        yield counter(
            *(f"{name}errors", "Requests answered with an error", errors.items()),
            *("endpoint", "status_class"),
        )
        durations = HistogramMetricFamily(
            f"{name}request_duration_seconds", "Time of requests", labels=["endpoint"]
        )
        all_sums = self._traffic.sums().values()
        buckets = [sum(column) for column in zip(*(s.buckets for s in all_sums), strict=True)]
        if buckets:
            seconds = sum(sums.nanoseconds for sums in all_sums) / 1e9
            durations.add_metric(["/query"], _cumulative(buckets), seconds)
        yield durations
        catalog = self._service.catalog
        yield gauge(f"{name}models", "Models with an instance", len(catalog.models))
        yield gauge(f"{name}workers", "Registered instances", len(catalog.instances))
        # Nothing of ours is paused, but dashboards sum over all of Dynamo's words.
        listeners = dict.fromkeys(("pending", "active", "paused", "failed"), 0)
        for _, status in self._service.statuses():
            listeners["failed" if status is None else LISTENER_STATUS[status.state]] += 1
        rows = _by_key(listeners)
        yield gauge(f"{name}listeners", "Registered ranks by status", rows, "status")


class _ServerCollector(ReadCollector):
    """What a server counts besides answers."""

    def __init__(self, statistics: Callable[[], Mapping[str, Any]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        statistics = self._statistics()
        refused = _by_key(statistics["refused"])
        yield counter("kvindex_http_refused", "Refused requests", refused, "reason")
        streams, state = statistics["streams"], statistics["state"]
        yield gauge("kvindex_http_streams", "Event streams that are open", streams["open_now"])
        yield counter(
            "kvindex_http_streams_cut_off",
            "Event streams closed because their reader was too slow",
            streams["cut_off"],
        )
        if state is not None:
            saves = _by_key({outcome: state[outcome] for outcome in ("saved", "failed")})
            yield counter(
                "kvindex_state_saves", "Attempts to save the state file", saves, "outcome"
            )
            if state["saved_at"] is not None:
                yield gauge(
                    "kvindex_state_saved_timestamp_seconds",
                    "When the state was saved last, in seconds since 1970",
                    state["saved_at"],
                )
        sources = statistics["discovery"]["sources"].items()
        yield counter(
            "kvindex_discovery_failures",
            "Failed attempts to read or ask a source of workers",
            [((source,), counts["failures"]) for source, counts in sources],
            "source",
        )


def _by_key(counts: Mapping[str, int]) -> list[tuple[tuple[str], int]]:
    return [((key,), count) for key, count in counts.items()]


def _cumulative(buckets: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
    return list(zip(bounds, accumulate(buckets), strict=True))
