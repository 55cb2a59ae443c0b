"""The prefix cache of one simulated engine: blocks in use, and the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Which blocks an engine holds.

    A block is *cached* under its name once it was computed. A sequence *pins* the cached blocks
    that it uses, and has blocks of its own for what is not cached. Cached blocks that nobody pins
    are given up when room is needed.

    Args:
        capacity: blocks that the engine has room for.

    Attributes:
        own: blocks that belong to one sequence and are not cached.
        evicted: names of blocks that were given up; whoever publishes them empties it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.own = 0
        self.evicted: list[int] = []
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __contains__(self, name: int) -> bool:
        return name in self._pins or name in self._idle

    @property
    def used(self) -> int:
        """Blocks that are not free to be given away at once."""
        return self.own + len(self._pins)

    def leading(self, names: Sequence[int]) -> int:
        """Return how many leading blocks are cached."""
        for place, name in enumerate(names):
            if name not in self:
                return place
        return len(names)

    def take(self, pinned: Sequence[int], own: int) -> bool:
        """Pin cached blocks and take so many more; do nothing and say no if there is no room."""
        idle = sum(name in self._idle for name in pinned)
        if self.used + idle + own > self.capacity:
            return False
        for name in pinned:
            self._idle.pop(name, None)
            self._pins[name] = self._pins.get(name, 0) + 1
        self.own += own
        while self.used + len(self._idle) > self.capacity:
            name, _ = self._idle.popitem(last=False)
            self.evicted.append(name)
        return True

    def store(self, names: Sequence[int]) -> list[int]:
        """Cache blocks that a sequence has computed, pinned by it; return which were new."""
        new = [name for name in names if name not in self]
        self._pins.update(dict.fromkeys(new, 1))
        self.own -= len(new)
        return new

    def release(self, pinned: Sequence[int], own: int) -> None:
        """Give back what a sequence had; the end of a chain is given up before its beginning."""
        self.own -= own
        for name in reversed(pinned):
            if self._pins[name] > 1:
                self._pins[name] -= 1
            else:
                del self._pins[name]
                self._idle[name] = None
