"""Queries over time, and how many ranks were live: rings of sums, for the page's charts.

Counters are read now and then, and what they rose by is added to a slot of time. Slots of seconds
reach back an hour, slots of minutes a day; so the memory is bounded, and a page that is opened
later has a past.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvindex.service.catalog import Partition
from kvindex.service.traffic import ASKED

WINDOWS: Final[Mapping[int, int]] = {300: 5, 900: 10, 3600: 30, 21_600: 180, 86_400: 720}
"""Seconds that may be asked for, each with the seconds of one of its points: at most 120."""

_RINGS: Final = ((5, 726), (180, 484))  # seconds of a slot, and how many: one point more than asked
_MOST_PARTITIONS: Final = 16  # that have sums of their own: others count in those of all
_ALL: Final = None

_Partition = Partition | None
_Sums = dict[_Partition, list[int]]


@dataclass(slots=True)
class _Slot:
    """What happened in a piece of time, which was looked at for so many `seconds`."""

    at: int
    seconds: float = 0.0
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
    """Sums of what was asked, by slots of time.

    Args:
        read: returns the counters of each partition, ASKED; they only rise.
        clock: seconds since 1970.

    Thread safety: every method from any thread.

    Examples:
        >>> from kvindex.service.catalog import Partition
        >>> from kvindex.service.traffic import Traffic
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
        """Add what the counters rose by since the last call.

        Args:
            live: ranks that are live now.
            ranks: all of them.

        Complexity: O(partitions).
        """
        with self._lock:
            asked = self._rise()
            now = self._clock()
            seconds, self._at = max(0.0, now - self._at), now
            for step, ring in self._rings:
                _slot(ring, now, step).add(seconds, asked, live, ranks)

    def points(self, seconds: int, partition: Partition | None = None) -> dict[str, Any]:
        """Return what is known of the last seconds, as JSON-ready values.

        Args:
            seconds: one of WINDOWS.
            partition: only what was asked of it; of all by default.

        Returns:
            `now`, and `since`, when this began, in seconds since 1970; `seconds` as asked and
            `step`, the seconds of a point; `partitions` that can be asked for; and `points` as
            columns, oldest first: `at`, where a point begins, `seconds` of it that were looked at,
            `live` and `ranks` at its end, and ASKED. A time without a point is unknown.

        Complexity: O(seconds / step of the ring).
        """
        step = WINDOWS[seconds]
        now = self._clock()
        slots: deque[_Slot] = deque()
        with self._lock:
            ring = next(ring for each, ring in self._rings if each * (ring.maxlen or 0) >= seconds)
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

    def _rise(self) -> _Sums:
        """Return what the counters of those that were asked rose by; under the lock."""
        rises: _Sums = {}
        for partition, counters in self._read().items():
            before = self._before.get(partition) or [0] * len(counters)
            rise = [max(0, a - b) for a, b in zip(counters, before, strict=True)]
            self._before[partition] = counters
            if not any(rise):
                continue
            if partition in self._partitions or len(self._partitions) < _MOST_PARTITIONS:
                self._partitions[partition] = None
                rises[partition] = rise
            whole = rises.get(_ALL) or [0] * len(rise)
            rises[_ALL] = [a + b for a, b in zip(whole, rise, strict=True)]
        return rises


def _slot(slots: deque[_Slot], at: float, step: int) -> _Slot:
    """Return the slot of a time, the last one or a new one; a clock set back adds to the last."""
    start = int(at // step * step)
    if not slots or start > slots[-1].at:
        slots.append(_Slot(start))
    return slots[-1]
