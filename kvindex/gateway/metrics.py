"""A gateway's Prometheus series; the streams' and routers' come from `kvindex.service.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvindex import Client
from kvindex.gateway.access import SECONDS
from kvindex.replicas import Replica
from kvindex.routing import Router
from kvindex.service.metrics import FunnelCollector, RankCollector

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

_DURATIONS: Final = {
    "wait": "Seconds from a request's arrival to its first rank",
    "first_token": "Seconds from a request's arrival to its first content",
    "duration": "Seconds from a request's arrival to its end",
}
_COUNTERS: Final = {  # by the part of the statistics: name, text, label
    "failures": ("failures", "Tries that brought no answer", "reason"),
    "choices": ("choices", "Ranks that were chosen, by what decided", "reason"),
    "tokens_from": ("prompts", "Prompts by where their tokens are from", "source"),
    "tokens": ("tokens", "Tokens of whole answers", "kind"),
    "refused": ("refused", "Requests that the guard refused", "reason"),
    "token_failures": ("token_failures", "Questions for tokens without an answer", "reason"),
    "engine_failures": ("engine_failures", "Requests to engines without an answer", "reason"),
    "shed": ("shed", "Requests that found no room in time", "reason"),
}


class GatewayCollector(Collector):
    """The counters of one gateway.

    Args:
        read: returns them, as `Gateway.statistics` does.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are is only known when they are read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        given = self._read()
        requests = CounterMetricFamily(
            "kvindex_gateway_requests",
            "Requests by how they ended",
            labels=("path", "status", "end"),
        )
        for path, status, end, number in given["requests"]:
            requests.add_metric((path, str(status), end), number)
        yield requests
        for part, (name, text, label) in _COUNTERS.items():
            family = CounterMetricFamily(f"kvindex_gateway_{name}", text, labels=(label,))
            for value, number in given[part].items():
                family.add_metric((value,), number)
            yield family
        for name, text in (("open", "Requests that are open"), ("waiting", "Requests that wait")):
            yield GaugeMetricFamily(f"kvindex_gateway_{name}", text, value=given[name])
        for name, text in _DURATIONS.items():
            yield _histogram(f"kvindex_gateway_{name}_seconds", text, given[name])


def _histogram(name: str, text: str, durations: Mapping[str, Any]) -> Metric:
    bounds = [*map(str, SECONDS), "+Inf"]
    buckets = list(zip(bounds, accumulate(durations["buckets"]), strict=True))
    family = HistogramMetricFamily(name, text)
    family.add_metric((), buckets, durations["sum"])
    return family


class AllCollector(Collector):
    """The series of ranks, of routers, and of a gateway or picker; routers may come and go.

    Args:
        source: the index and its ranks.
        routers: returns the routers.
        read: returns the counters, as `Gateway.statistics` does.
    """

    def __init__(
        self,
        source: Client | Replica,
        routers: Callable[[], Iterable[Router]],
        read: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._source = source
        self._routers = routers
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are is only known when they are read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        yield from RankCollector(self._source).collect()
        yield from FunnelCollector(tuple(self._routers())).collect()
        yield from GatewayCollector(self._read).collect()


def exposition(
    source: Client | Replica, routers: Iterable[Router], read: Mapping[str, Any]
) -> bytes:
    """Return all series as text. It takes a moment for many ranks: not on an event loop."""
    registry = CollectorRegistry()
    registry.register(AllCollector(source, lambda: routers, lambda: read))
    text: bytes = generate_latest(registry)
    return text
