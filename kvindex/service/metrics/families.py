"""Metric families, made of rows: the values of their labels, and a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
