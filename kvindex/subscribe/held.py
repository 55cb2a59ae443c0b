"""Batches that came out of order, sorted, bounded, each with what replay said of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from sortedcontainers import SortedDict

from kvindex.subscribe.actions import Batch

__all__ = ["Held", "HeldBatch"]


class HeldBatch:
    """A held batch and the evidence for it.

    Attributes:
        batch: the batch.
        asked: the newest replay request when it came; only later requests can testify.
        confirmed: whether a replay contained it.
        missed: how many replays that should have contained it ended without it.
        arrived_at: when it came.
    """

    __slots__ = ("arrived_at", "asked", "batch", "confirmed", "missed")

    def __init__(self, batch: Batch, *, asked: int, confirmed: bool, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.batch = batch
        self.asked = asked
        self.confirmed = confirmed
        self.missed = 0


class Held:
    """A bounded map from seq to held batch. Owner: one sequencer."""

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._entries: SortedDict[int, HeldBatch] = SortedDict()
        # The same in the order of arrival. A plain dict would pass over all that left before it.
        self._arrivals: OrderedDict[int, float] = OrderedDict()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: object) -> bool:
        return seq in self._entries

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._bytes

    @property
    def first(self) -> int | None:
        """Lowest seq held, or None."""
        return self._entries.peekitem(0)[0] if self._entries else None

    @property
    def last(self) -> int | None:
        """Highest seq held, or None."""
        return self._entries.peekitem(-1)[0] if self._entries else None

    @property
    def oldest(self) -> float | None:
        """When the entry came that has been held for longest, or None."""
        return next(iter(self._arrivals.values()), None)

    def get(self, seq: int) -> HeldBatch | None:
        """Return the entry of `seq`, or None."""
        entry: HeldBatch | None = self._entries.get(seq)
        return entry

    def add(self, entry: HeldBatch) -> bool:
        """Hold an entry in place of any of the same seq; return False when there is no room.

        One batch is always held, however large, so that its owner can go on past it.
        Complexity: O(log n).
        """
        self.pop(entry.batch.seq)
        size = entry.batch.size
        full = len(self) >= self._max_batches or self._bytes + size > self._max_bytes
        if full and self._entries:
            return False
        self._entries[entry.batch.seq] = entry
        self._arrivals[entry.batch.seq] = entry.arrived_at
        self._bytes += size
        return True

    def pop(self, seq: int) -> HeldBatch | None:
        """Remove and return the entry of `seq`, or None."""
        entry: HeldBatch | None = self._entries.pop(seq, None)
        if entry is not None:
            self._bytes -= entry.batch.size
            del self._arrivals[seq]
        return entry

    def discard(self, unwanted: Callable[[HeldBatch], bool]) -> int:
        """Remove the entries that `unwanted` names; return how many. Complexity: O(n)."""
        seqs = [seq for seq, entry in self._entries.items() if unwanted(entry)]
        for seq in seqs:
            self.pop(seq)
        return len(seqs)

    def discard_below(self, seq: int) -> int:
        """Remove the entries below `seq`; return how many."""
        seqs = list(self._entries.irange(maximum=seq, inclusive=(True, False)))
        for below in seqs:
            self.pop(below)
        return len(seqs)

    def clear(self) -> int:
        """Remove everything; return how many there were."""
        count = len(self._entries)
        self._entries.clear()
        self._arrivals.clear()
        self._bytes = 0
        return count

    def start_of_run(self, seq: int) -> int:
        """Return the lowest h such that h … seq - 1 are all held (`seq` itself if none is)."""
        while seq - 1 in self._entries:
            seq -= 1
        return seq

    def testify(self, request: int) -> None:
        """Note that the replay `request` has ended: what it should have contained, it missed."""
        for entry in self._entries.values():
            if not entry.confirmed and entry.asked < request:
                entry.missed += 1
