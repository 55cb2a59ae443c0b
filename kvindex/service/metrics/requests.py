"""What a server was asked over HTTP, as Prometheus series, in our names and in Dynamo's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvindex.service.metrics.ranks import SeriesLabels

__all__ = ["BUCKETS", "DynamoCollector", "Queries", "RequestCollector", "Requests"]

BUCKETS: Final = (50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3, 51.2e-3)
"""Upper bounds of `kvindex_query_duration_seconds`, in seconds; one more bucket has no bound."""

Requests: TypeAlias = Mapping[tuple[str, str, int], int]
"""How many requests were answered, by method, route and status code."""


class Queries(NamedTuple):
    """What was asked of one model's routing group so far.

    Attributes:
        labels: which.
        tokens: tokens of the prompts.
        best_match_tokens: of those, the tokens that the rank with the most held.
        seconds: for which the queries were worked on.
        buckets: how many queries took at most as long as each of BUCKETS, and not less than the one
            before; at the end those that took longer.
    """

    labels: SeriesLabels
    tokens: int
    best_match_tokens: int
    seconds: float
    buckets: Sequence[int]


class RequestCollector(Collector):
    """Requests by route and code, and what queries asked for and found.

    Args:
        requests: returns what was answered so far.
        queries: returns what was asked so far.

    Thread safety: any thread may collect, if it may call both.
    """

    def __init__(
        self, requests: Callable[[], Requests], queries: Callable[[], Iterable[Queries]]
    ) -> None:
        self._requests = requests
        self._queries = queries

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are depends on who asks."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        by_route: Counter[tuple[str, str]] = Counter()
        for (_, route, code), count in self._requests().items():
            by_route[route, str(code)] += count
        yield _counter(
            "kvindex_http_requests", "Answered requests", ("route", "code"), by_route.items()
        )
        queries = list(self._queries())
        labels = SeriesLabels._fields
        yield _counter(
            "kvindex_query_tokens",
            "Tokens of the prompts that queries asked for",
            labels,
            [(each.labels, each.tokens) for each in queries],
        )
        yield _counter(
            "kvindex_query_best_match_tokens",
            "Of these, tokens that the rank with the most of them held",
            labels,
            [(each.labels, each.best_match_tokens) for each in queries],
        )
        durations = HistogramMetricFamily(
            "kvindex_query_duration_seconds", "Time that queries were worked on", labels=labels
        )
        for each in queries:
            durations.add_metric(each.labels, _cumulative(each.buckets), each.seconds)
        yield durations


class DynamoCollector(Collector):
    """The same under the names of NVIDIA Dynamo's indexer (1.6.1), so that its dashboards work.

    Durations are those of queries only, in our own buckets.

    Args:
        requests, queries: as for RequestCollector.
        listeners: returns how many registered ranks there are by what Dynamo calls their status
            ("pending", "active", "paused", "failed").
        models, workers: return how many models and instances are registered.

    Thread safety: any thread may collect, if it may call all of them.
    """

    def __init__(
        self,
        requests: Callable[[], Requests],
        queries: Callable[[], Iterable[Queries]],
        *,
        listeners: Callable[[], Mapping[str, int]],
        models: Callable[[], int],
        workers: Callable[[], int],
    ) -> None:
        self._requests = requests
        self._queries = queries
        self._listeners = listeners
        self._models = models
        self._workers = workers

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are depends on who asks."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        by_method: Counter[tuple[str, str]] = Counter()
        errors: Counter[tuple[str, str]] = Counter()
        for (method, route, code), count in self._requests().items():
            by_method[route, method] += count
            if code >= 400:
                errors[route, f"{code // 100}xx"] += count
        yield _counter(
            "dynamo_kvindexer_requests",
            "Requests received",
            ("endpoint", "method"),
            by_method.items(),
        )
        yield _counter(
            "dynamo_kvindexer_errors",
            "Requests answered with an error",
            ("endpoint", "status_class"),
            errors.items(),
        )
        durations = HistogramMetricFamily(
            "dynamo_kvindexer_request_duration_seconds", "Time of requests", labels=["endpoint"]
        )
        queries = list(self._queries())
        buckets = [sum(column) for column in zip(*(each.buckets for each in queries), strict=True)]
        if buckets:
            seconds = sum(each.seconds for each in queries)
            durations.add_metric(["/query"], _cumulative(buckets), seconds)
        yield durations
        yield GaugeMetricFamily(
            "dynamo_kvindexer_models", "Models with an instance", self._models()
        )
        yield GaugeMetricFamily("dynamo_kvindexer_workers", "Registered instances", self._workers())
        listeners = GaugeMetricFamily(
            "dynamo_kvindexer_listeners", "Registered ranks by status", labels=["status"]
        )
        for status, count in self._listeners().items():
            listeners.add_metric([status], count)
        yield listeners


def _counter(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], int]],
) -> Metric:
    counter = CounterMetricFamily(name, text, labels=labels)
    for of, count in values:
        counter.add_metric(of, count)
    return counter


def _cumulative(buckets: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
    return list(zip(bounds, accumulate(buckets), strict=True))
