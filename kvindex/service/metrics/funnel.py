"""A router's funnel and loads as Prometheus series: all stages in tokens, of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvindex.routing import Router

__all__ = ["FunnelCollector", "Outcomes"]

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
_ENDS: Final = {"finished", "cancelled", "expired"}
_LOADS: Final = {
    "queued_tokens": "Tokens that wait for their prefill, as the router booked them",
    "open_requests": "Requests that are under way, as the router booked them",
}


class Outcomes(NamedTuple):
    """What became of finished requests that were routed elsewhere.

    Attributes:
        model: whose.
        finished: of all of them their number (`requests`), and the tokens `asked`, `attainable` and
            `chosen`; as in `Router.statistics`.
        reported: the same of those whose engine reported cached tokens, and those `delivered`.
    """

    model: str
    finished: Mapping[str, int]
    reported: Mapping[str, int]

    def statistics(self) -> dict[str, Any]:
        """Return it as `Router.statistics` does."""
        return {
            "model": self.model,
            "bookings": {"finished": self.finished["requests"]},
            "funnel": {"finished": self.finished, "reported": self.reported},
            "ranks": {},
        }


class FunnelCollector(Collector):
    """What became of the tokens that were asked for, read from routers when Prometheus asks.

    The stages of `kvindex_routed_…_tokens_total` have one denominator, `asked`: divide the rates of
    two of them for a share, and never average shares. Stages named `reported_…` are of those
    requests only whose engine reported cached tokens: divide `delivered` by `reported_asked`.

    Args:
        routers: each with a `model` of its own. Or a function that returns what became of requests
            that were routed elsewhere.

    Thread safety: any thread may collect.
    """

    def __init__(self, routers: Iterable[Router] | Callable[[], Iterable[Outcomes]]) -> None:
        self._routers = routers if callable(routers) else tuple(routers)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: which series there are depends on the ranks."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        routers = self._routers() if callable(self._routers) else self._routers
        all_statistics = [router.statistics() for router in routers]
        requests = CounterMetricFamily(
            "kvindex_routed_requests", "Routed requests by how they ended", labels=["model", "end"]
        )
        for statistics in all_statistics:
            for end in _ENDS & statistics["bookings"].keys():
                requests.add_metric([statistics["model"], end], statistics["bookings"][end])
        yield requests
        yield from _stages(all_statistics, "finished", "", _STAGES)
        yield from _stages(all_statistics, "reported", "reported_", _REPORTED)
        yield from _loads(all_statistics)


def _stages(
    all_statistics: Iterable[Mapping[str, Any]], of: str, prefix: str, texts: Mapping[str, str]
) -> Iterator[Metric]:
    for stage, text in texts.items():
        name = f"kvindex_routed_{'' if stage == 'delivered' else prefix}{stage}_tokens"
        counter = CounterMetricFamily(name, text, labels=["model"])
        for statistics in all_statistics:
            counter.add_metric([statistics["model"]], statistics["funnel"][of][stage])
        yield counter


def _loads(all_statistics: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    for name, text in _LOADS.items():
        gauge = GaugeMetricFamily(
            f"kvindex_routed_{name}", text, labels=["model", "worker", "dp_rank"]
        )
        for statistics in all_statistics:
            for rank, load in statistics["ranks"].items():
                worker, _, dp_rank = rank.rpartition("/")
                gauge.add_metric([statistics["model"], worker, dp_rank], load[name])
        yield gauge
