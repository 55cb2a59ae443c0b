"""A router's funnel and loads as Prometheus series: all stages in tokens, of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import Metric

from kvindex.routing import Router
from kvindex.service.metrics.families import ReadCollector, counter, gauge

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
        statistics = self._read()
        ends = (
            ((of["model"], end), of["bookings"][end])
            for of in statistics
            for end in _ENDS
            if end in of["bookings"]
        )
        yield counter(
            "kvindex_routed_requests", "Routed requests by how they ended", ends, "model", "end"
        )
        for group, prefix, texts in (
            ("finished", "", _STAGES),
            ("reported", "reported_", _REPORTED),
        ):
            for stage, text in texts.items():
                name = f"kvindex_routed_{'' if stage == 'delivered' else prefix}{stage}_tokens"
                rows = [((of["model"],), of["funnel"][group][stage]) for of in statistics]
                yield counter(name, text, rows, "model")
        for name, text in _LOADS.items():
            loads = (
                ((of["model"], worker, dp_rank), load[name])
                for of in statistics
                for rank, load in of["ranks"].items()
                for worker, _, dp_rank in [rank.rpartition("/")]
            )
            yield gauge(f"kvindex_routed_{name}", text, loads, "model", "worker", "dp_rank")
