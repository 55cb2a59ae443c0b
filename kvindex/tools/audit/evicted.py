"""A rank's evictions, newest last: how long ago, and how much larger its cache had to be."""

from __future__ import annotations

from array import array
from typing import NamedTuple

__all__ = ["Evicted", "Returned"]

_FIRST_SLOTS = 1024


class Returned(NamedTuple):
    """An evicted block that is computed again.

    Attributes:
        at: when it was evicted, by the rank's clock, in seconds.
        distance: how many more blocks the cache would have needed to hold it still, if it evicts
            what was used least recently: the blocks evicted since that are still missing, and
            itself.
    """

    at: float
    distance: int


class Evicted:
    """The keys of evicted blocks, at most `limit` of them: the oldest are forgotten first.

    Each has a slot in the order of eviction. A Fenwick tree counts the slots in use behind one of
    them, so that a distance is exact and costs O(log limit).

    Attributes:
        forgotten: how many keys had to go for newer ones.
    """

    __slots__ = ("_counts", "_first", "_keys", "_limit", "_next", "_slots", "_times", "forgotten")

    def __init__(self, limit: int) -> None:
        self.forgotten = 0
        self._limit = limit
        self.clear()

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Forget all keys; they do not count as forgotten for newer ones."""
        self._slots: dict[bytes, int] = {}
        self._arrange(_FIRST_SLOTS)

    def add(self, key: bytes, at: float) -> None:
        """Note that a block was evicted."""
        self.discard(key)
        if len(self._slots) >= self._limit:
            self._forget_oldest()
        if self._next == len(self._keys):
            self._make_slots()
        slot = self._next
        self._next += 1
        self._slots[key] = slot
        self._keys[slot] = key
        self._times[slot] = at
        self._count(slot, 1)

    def find(self, key: bytes) -> Returned | None:
        """Return when a block was evicted, and its distance; None if that is not known."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        return Returned(self._times[slot], len(self._slots) - self._before(slot))

    def discard(self, key: bytes) -> None:
        """Remember a block no longer: the rank holds it again."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._keys[slot] = None
            self._count(slot, -1)

    def _forget_oldest(self) -> None:
        while (key := self._keys[self._first]) is None:
            self._first += 1
        self.discard(key)
        self.forgotten += 1

    def _make_slots(self) -> None:
        """Close up the slots, and double them where more than half are in use."""
        slots = len(self._keys)
        used = [(key, self._times[i]) for i, key in enumerate(self._keys) if key is not None]
        self._arrange(slots * 2 if len(used) * 2 > slots else slots)
        for key, at in used:
            self._slots[key] = self._next
            self._keys[self._next] = key
            self._times[self._next] = at
            self._count(self._next, 1)
            self._next += 1

    def _arrange(self, slots: int) -> None:
        self._keys: list[bytes | None] = [None] * slots
        self._times = array("d", bytes(8 * slots))
        self._counts = array("l", bytes(array("l").itemsize * (slots + 1)))
        self._first = self._next = 0

    def _count(self, slot: int, change: int) -> None:
        counts, slots = self._counts, len(self._keys)
        slot += 1
        while slot <= slots:
            counts[slot] += change
            slot += slot & -slot

    def _before(self, slot: int) -> int:
        """How many slots before this one are in use."""
        counts, total = self._counts, 0
        while slot:
            total += counts[slot]
            slot &= slot - 1
        return total
