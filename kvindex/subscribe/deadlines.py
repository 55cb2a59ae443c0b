"""Who of many wants to be called when: the subscriber's timers."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

__all__ = ["Deadlines"]

Owner = TypeVar("Owner")


class Deadlines(Generic[Owner]):
    """One deadline for each owner, the nearest at hand.

    Most deadlines are put off again and again before they come, so putting one off costs nothing:
    the owner is called at the earlier time once, and must set its deadline anew then.

    Thread safety: none.

    Examples:
        >>> deadlines = Deadlines()
        >>> deadlines.set("a", 5.0)
        >>> deadlines.set("a", 7.0)
        >>> deadlines.nearest, deadlines.due(6.0), deadlines.nearest
        (5.0, ['a'], None)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Owner]] = []
        self._called: dict[Owner, float] = {}  # when each will be called
        self._order = 0

    def set(self, owner: Owner, when: float | None) -> None:
        """See to it that the owner is called at `when`, if not before. O(log n), mostly O(1)."""
        if when is None or when >= self._called.get(owner, float("inf")):
            return
        self._called[owner] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, owner))

    @property
    def nearest(self) -> float | None:
        """When the next one is to be called."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Owner]:
        """Return the owners to be called, each once; they have no deadline until they set one."""
        owners = []
        while self._heap and self._heap[0][0] <= now:
            when, _, owner = heapq.heappop(self._heap)
            if self._called.get(owner) == when:  # else it was called earlier
                del self._called[owner]
                owners.append(owner)
        return owners

    def forget(self, owner: Owner) -> None:
        """Call this owner no more."""
        self._called.pop(owner, None)
