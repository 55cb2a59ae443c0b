"""The requests to a server: counted on its event loop, read by any thread, also over time."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
time taken; finished requests that routers report, in tokens (see `dialects.Outcome`); and of those
whose engine reported its cached tokens, the tokens asked and delivered."""

MOST_PARTITIONS: Final = 256
"""Partitions that are counted by name; those that come later count as OTHER together."""

_BOUNDS: Final = [int(bound * 1e9) for bound in BUCKETS]


class Sums(msgspec.Struct):
    """What was asked of one partition so far."""

    tokens: int = 0  # of the prompts of queries
    best_match: int = 0  # of those, the tokens that the rank with the most held
    nanoseconds: int = 0  # for which the queries were worked on
    # Queries that took at most as long as each of BUCKETS, and longer than the one before; at the
    # end those that took longer than all.
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    # Of requests that routers report: `requests`, and the tokens `asked`, `attainable`, `chosen`.
    finished: Counter[str] = msgspec.field(default_factory=Counter)
    # The same of those whose engine reported cached tokens, and these as `delivered`.
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
        """Count a finished request that a router reports, in tokens: see `dialects.Outcome`."""
        sums = self._of(partition)
        more = {"requests": 1, "asked": asked, "attainable": attainable, "chosen": chosen}
        sums.finished.update(more)
        if delivered is not None:
            sums.reported.update(more, delivered=delivered)

    def _of(self, partition: Partition) -> Sums:
        sums = self._partitions.get(partition)
        if sums is None:
            # Clients may register any names, one after the other: each would stay for ever.
            if len(self._partitions) >= MOST_PARTITIONS:
                partition = Partition(OTHER)
            sums = self._partitions.setdefault(partition, Sums())
        return sums

    # For readers, on any thread. A dict is copied in one step, so that no key comes meanwhile.

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
                *(sum(sums.buckets), sums.tokens, sums.best_match, sums.nanoseconds),
                *(sums.finished[name] for name in ("requests", "asked", "attainable", "chosen")),
                *(sums.reported["asked"], sums.reported["delivered"]),
            ]
            for partition, sums in self.sums().items()
        }

    def outcomes(self) -> list[Mapping[str, Any]]:
        """Return the routers' reports for each model, as `Router.statistics` does."""
        finished: dict[str, Counter[str]] = {}
        reported: dict[str, Counter[str]] = {}
        for partition, sums in self.sums().items():
            if sums.finished["requests"]:
                finished.setdefault(partition.model, Counter()).update(sums.finished)
                reported.setdefault(partition.model, Counter()).update(sums.reported)
        return [
            {
                "model": model,
                "bookings": {"finished": counts["requests"]},
                "funnel": {"finished": counts, "reported": reported[model]},
                "ranks": {},
            }
            for model, counts in finished.items()
        ]


WINDOWS: Final[Mapping[int, int]] = {300: 5, 900: 10, 3600: 30, 21_600: 180, 86_400: 720}
"""Seconds that may be asked for, each with the seconds of one of its points: at most 120."""

_RINGS: Final = ((5, 726), (180, 484))  # seconds of a slot, and how many: one point more than asked
_MOST_PARTITIONS: Final = 16  # that have sums of their own: others count in those of all
_ALL: Final = None

_Partition = Partition | None
_Sums = dict[_Partition, list[int]]


@dataclass(slots=True)
class _Slot:
    """What happened in a piece of time."""

    at: int
    seconds: float = 0.0  # of it that were looked at
    asked: _Sums = field(default_factory=dict)
    live: int = 0
    ranks: int = 0

    def add(self, seconds: float, asked: _Sums, live: int, ranks: int) -> None:
        self.seconds += seconds
        self.live, self.ranks = live, ranks
        for partition, rise in asked.items():
            before = self.asked.get(partition)
            self.asked[partition] = (
                rise if before is None else [a + b for a, b in zip(before, rise, strict=True)]
            )


class Trends:
    """Sums of what was asked, by slots of time: of the queries, and of how many ranks were live.

    Counters are read now and then, and what they rose by is added to a slot of time. Slots of
    seconds reach back an hour, slots of minutes a day; so the memory is bounded, and a page that is
    opened later has a past.

    `read` returns the counters of each partition, ASKED; they only rise.

    Thread safety: every method from any thread.

    Examples:
        >>> traffic, now = Traffic(), [1000.0]
        >>> trends = Trends(traffic.asked, clock=lambda: now[0])
        >>> traffic.query(Partition("m"), 100, 60, 5_000)
        >>> now[0] += 5
        >>> trends.sample(live=3, ranks=4)
        >>> points = trends.points(300)["points"]
        >>> points["at"], points["queries"], points["best_match"], points["live"]
        ([1005], [1], [60], [3])
    """

    def __init__(
        self,
        read: Callable[[], Mapping[Partition, list[int]]],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._rings = [(step, deque[_Slot](maxlen=slots)) for step, slots in _RINGS]
        self._partitions: dict[Partition, None] = {}
        self._before = dict(read())
        self._began = self._at = clock()

    def sample(self, live: int, ranks: int) -> None:
        """Add what the counters rose by since the last call; so many of the ranks are live now."""
        with self._lock:
            rises: _Sums = {}
            for partition, counters in self._read().items():
                before = self._before.get(partition) or [0] * len(counters)
                rise = [max(0, a - b) for a, b in zip(counters, before, strict=True)]
                self._before[partition] = counters
                if not any(rise):
                    continue
                # Each one costs its numbers in every slot; so only those that are asked count.
                if partition in self._partitions or len(self._partitions) < _MOST_PARTITIONS:
                    self._partitions[partition] = None
                    rises[partition] = rise
                whole = rises.get(_ALL) or [0] * len(rise)
                rises[_ALL] = [a + b for a, b in zip(whole, rise, strict=True)]
            now = self._clock()
            seconds, self._at = max(0.0, now - self._at), now
            for step, ring in self._rings:
                _slot(ring, now, step).add(seconds, rises, live, ranks)

    def points(self, seconds: int, partition: Partition | None = None) -> dict[str, Any]:
        """Return what is known of so many last seconds (one of WINDOWS), as JSON-ready values.

        `points` are columns, oldest first: `at`, where a point begins, `seconds` of it that were
        looked at, `live` and `ranks` at its end, and ASKED. A time without a point is unknown.
        """
        step = WINDOWS[seconds]
        now = self._clock()
        slots: deque[_Slot] = deque()
        with self._lock:
            # The finest that reaches back so far; its slots are added up to points.
            ring = next(ring for size, ring in self._rings if size * (ring.maxlen or 0) >= seconds)
            for slot in ring:
                if slot.at > now - seconds - step:
                    asked: _Sums = {_ALL: slot.asked[partition]} if partition in slot.asked else {}
                    made = _slot(slots, slot.at, step)
                    made.add(slot.seconds, asked, slot.live, slot.ranks)
            partitions = [
                {"model": p.model, "routing_group": p.routing_group} for p in self._partitions
            ]
        nothing = [0] * len(ASKED)
        rows = [slot.asked.get(_ALL, nothing) for slot in slots]
        return {
            "now": now,
            "since": self._began,
            "seconds": seconds,
            "step": step,
            "partitions": partitions,
            "points": {
                "at": [slot.at for slot in slots],
                "seconds": [round(slot.seconds, 3) for slot in slots],
                "live": [slot.live for slot in slots],
                "ranks": [slot.ranks for slot in slots],
                **{name: [row[place] for row in rows] for place, name in enumerate(ASKED)},
            },
        }


def _slot(slots: deque[_Slot], at: float, step: int) -> _Slot:
    """Return the slot of a time, the last one or a new one."""
    # A clock that is set back adds to the last: slots are in order, and each time has one.
    start = int(at // step * step)
    if not slots or start > slots[-1].at:
        slots.append(_Slot(start))
    return slots[-1]
