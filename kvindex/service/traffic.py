"""The requests to a server: counted on its event loop, read by any thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvindex.service.catalog import Partition
from kvindex.service.http.site import OTHER

BUCKETS: Final = (50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3, 51.2e-3)
"""Upper bounds of the durations that are counted together, in seconds; one more has no bound."""

ASKED: Final = (
    *("queries", "tokens", "best_match", "nanoseconds"),
    *("requests", "asked", "attainable", "chosen"),
    *("reported", "delivered"),
)
"""Columns of `Traffic.asked`: queries, with their tokens, those that the best rank held, and the
time taken; finished requests that routers report, in tokens (see `outcomes.Outcome`); and of those
whose engine reported its cached tokens, the tokens asked and delivered."""

MOST_PARTITIONS: Final = 256
"""Partitions that are counted by name; those that come later count as OTHER together."""

_BOUNDS: Final = [int(bound * 1e9) for bound in BUCKETS]


class Sums(msgspec.Struct):
    """What was asked of one partition so far.

    Attributes:
        tokens: of the prompts of queries.
        best_match: of those, the tokens that the rank with the most held.
        nanoseconds: for which the queries were worked on.
        buckets: how many queries took at most as long as each of BUCKETS, and not less than the one
            before; at the end those that took longer.
        finished: of requests that routers report their number (`requests`), and the tokens `asked`,
            `attainable` and `chosen`.
        reported: the same of those whose engine reported cached tokens, and those `delivered`.
    """

    tokens: int = 0
    best_match: int = 0
    nanoseconds: int = 0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    finished: Counter[str] = msgspec.field(default_factory=Counter)
    reported: Counter[str] = msgspec.field(default_factory=Counter)


class Traffic:
    """Counts requests, queries and what routers report.

    Thread safety: `request`, `query` and `outcome` on one thread; the rest on any.

    Examples:
        >>> traffic = Traffic()
        >>> traffic.query(Partition("m"), 100, 60, 5_000)
        >>> traffic.sums()[Partition("m")].best_match
        60
    """

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._partitions: dict[Partition, Sums] = {}

    def request(self, method: str, route: str, code: int) -> None:
        """Count an answered request; methods and routes that there are not are OTHER."""
        self._requests[method, route, code] += 1

    def query(
        self, partition: Partition, tokens: int, best_match_tokens: int, nanoseconds: int
    ) -> None:
        """Count an answered query."""
        sums = self._of(partition)
        sums.tokens += tokens
        sums.best_match += best_match_tokens
        sums.nanoseconds += nanoseconds
        sums.buckets[bisect_left(_BOUNDS, nanoseconds)] += 1

    def outcome(
        self,
        partition: Partition,
        asked: int,
        attainable: int,
        chosen: int,
        delivered: int | None = None,
    ) -> None:
        """Count a finished request that a router reports, in tokens: see `Outcome`."""
        sums = self._of(partition)
        more = {"requests": 1, "asked": asked, "attainable": attainable, "chosen": chosen}
        sums.finished.update(more)
        if delivered is not None:
            sums.reported.update(more, delivered=delivered)

    def _of(self, partition: Partition) -> Sums:
        sums = self._partitions.get(partition)
        if sums is None:
            if len(self._partitions) >= MOST_PARTITIONS:  # clients may register any names
                partition = Partition(OTHER)
            sums = self._partitions.setdefault(partition, Sums())
        return sums

    # For readers. A copy of a dict is made at once, so that no key comes meanwhile.

    def requests(self) -> Counter[tuple[str, str, int]]:
        """Return how many requests were answered, by method, route and status code."""
        return self._requests.copy()

    def sums(self) -> dict[Partition, Sums]:
        """Return what was asked of each partition; the sums go on rising."""
        return self._partitions.copy()

    def asked(self) -> dict[Partition, list[int]]:
        """Return the numbers of ASKED for each partition."""
        return {
            partition: [
                *(sum(of.buckets), of.tokens, of.best_match, of.nanoseconds),
                *(of.finished[name] for name in ("requests", "asked", "attainable", "chosen")),
                *(of.reported["asked"], of.reported["delivered"]),
            ]
            for partition, of in self.sums().items()
        }

    def outcomes(self) -> list[Mapping[str, Any]]:
        """Return the routers' reports for each model, as `Router.statistics` does."""
        finished: dict[str, Counter[str]] = {}
        reported: dict[str, Counter[str]] = {}
        for partition, of in self.sums().items():
            if of.finished["requests"]:
                finished.setdefault(partition.model, Counter()).update(of.finished)
                reported.setdefault(partition.model, Counter()).update(of.reported)
        return [
            {
                "model": model,
                "bookings": {"finished": counts["requests"]},
                "funnel": {"finished": counts, "reported": reported[model]},
                "ranks": {},
            }
            for model, counts in finished.items()
        ]
