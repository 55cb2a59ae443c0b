"""The batches that wait behind the next expected one: bounded, sorted, each with its evidence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from sortedcontainers import SortedDict

from kvindex.subscribe.sequencer.values import Batch

__all__ = ["Held", "HeldBatch"]


class HeldBatch:
    """A held batch and the evidence for it.

    Attributes:
        batch: the batch.
        asked: the newest replay request when it came; only later requests can testify.
        confirmed: whether a replay contained it.
        missed: how many replays that should have contained it ended without it.
        denied: whether one of them ended below it with nothing but what was applied already.
        arrived_at: when it came.
    """

    __slots__ = ("arrived_at", "asked", "batch", "confirmed", "denied", "missed")

    def __init__(self, batch: Batch, *, asked: int, confirmed: bool, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.batch = batch
        self.asked = asked
        self.confirmed = confirmed
        self.denied = False
        self.missed = 0


class Held:
    """The batches that came out of order, and the seqs of known batches that came damaged.

    A seq is held or damaged, never both; `bool` returns whether any is.

    Args:
        max_batches: most batches held, and most damaged seqs remembered.
        max_bytes: most bytes held.
        refuted_by: how many replays must have ended without a held batch for it to be discarded.

    Attributes:
        size: bytes held.
        dropped: highest seq of a batch that was not held for want of room; -1 if none.

    Owner: one sequencer.
    """

    def __init__(self, *, max_batches: int, max_bytes: int, refuted_by: int = 2) -> None:
        self.size = 0
        self.dropped = -1
        self._entries: SortedDict[int, HeldBatch] = SortedDict()
        self._damaged: SortedDict[int, float] = SortedDict()  # seqs, and when they came damaged
        # The same in the order of arrival. A plain dict would step over all removed entries.
        self._arrivals: OrderedDict[int, float] = OrderedDict()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._refuted_by = refuted_by

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries or self._damaged)

    def __contains__(self, seq: object) -> bool:
        return seq in self._entries

    @property
    def first(self) -> int | None:
        """Lowest seq held, or None."""
        return self._entries.peekitem(0)[0] if self._entries else None

    @property
    def hole_end(self) -> int | None:
        """Lowest seq held or damaged: the hole in front ends before it. None without any."""
        ends = [seqs.peekitem(0)[0] for seqs in (self._entries, self._damaged) if seqs]
        return min(ends, default=None)

    @property
    def highest(self) -> int:
        """Highest seq known to exist: held, damaged or dropped; -1 if none is."""
        known = [self.dropped]
        known += [seqs.peekitem(-1)[0] for seqs in (self._entries, self._damaged) if seqs]
        return max(known)

    @property
    def waiting_since(self) -> float | None:
        """When the batch held for longest came, or the first damaged one; or None."""
        times = [next(iter(self._arrivals.values()))] if self._arrivals else []
        if self._damaged:
            times.append(self._damaged.peekitem(0)[1])
        return min(times, default=None)

    def get(self, seq: int) -> HeldBatch | None:
        """Return the entry of `seq`, or None."""
        entry: HeldBatch | None = self._entries.get(seq)
        return entry

    def add(self, entry: HeldBatch) -> bool:
        """Hold an entry in place of any of the same seq; return False when there is no room.

        One batch is always accepted, however large, so that the owner can go on past it.
        Complexity: O(log n).
        """
        self.pop(entry.batch.seq)
        size = entry.batch.size
        full = len(self) >= self._max_batches or self.size + size > self._max_bytes
        if full and self._entries:
            return False
        self._entries[entry.batch.seq] = entry
        self._arrivals[entry.batch.seq] = entry.arrived_at
        self.size += size
        return True

    def pop(self, seq: int) -> HeldBatch | None:
        """Remove `seq`; return its entry, or None."""
        self._damaged.pop(seq, None)
        entry: HeldBatch | None = self._entries.pop(seq, None)
        if entry is not None:
            self.size -= entry.batch.size
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
        """Forget everything; return how many batches there were."""
        count = len(self._entries)
        self._entries.clear()
        self._arrivals.clear()
        self.size = 0
        self.forget_losses()
        return count

    def start_of_run(self, seq: int) -> int:
        """Return the lowest h such that h … seq - 1 are all held (`seq` itself if none is)."""
        while seq - 1 in self._entries:
            seq -= 1
        return seq

    # Damaged batches --------------------------------------------------------------------------

    def note_damaged(self, seq: int, now: float) -> None:
        """Remember that the batch of `seq` came damaged, unless it is held or too many came so."""
        if seq not in self._entries and len(self._damaged) < self._max_batches:
            self._damaged.setdefault(seq, now)

    def is_damaged(self, seq: int | None) -> bool:
        """Return whether the batch of `seq` came damaged."""
        return seq in self._damaged

    def forget_damaged(self, last: int) -> None:
        """Forget the damaged batches up to and with `last`."""
        for seq in list(self._damaged.irange(maximum=last)):
            del self._damaged[seq]

    def forget_losses(self) -> None:
        """Forget every batch that came damaged or found no room."""
        self._damaged.clear()
        self.dropped = -1

    # Evidence ---------------------------------------------------------------------------------

    def testify(self, request: int, *, ends_at: int | None = None) -> None:
        """Note that the replay `request` has ended without batches that it should have contained.

        `ends_at` is the seq that it ended with, if it brought nothing new.
        """
        for seq, entry in self._entries.items():
            if not entry.confirmed and entry.asked < request:
                entry.missed += 1
                entry.denied |= ends_at is not None and ends_at < seq

    def is_refuted(self, seq: int) -> bool:
        """Return whether enough replays ended without the held batch of `seq`."""
        entry = self.get(seq)
        return entry is not None and entry.missed >= self._refuted_by

    def is_any_denied(self) -> bool:
        """Return whether a refuted batch was denied: the replay may not be its publisher's."""
        entries = self._entries.values()
        return any(entry.missed >= self._refuted_by and entry.denied for entry in entries)

    def discard_refuted(self) -> int:
        """Remove the batches that enough replays ended without; return how many."""
        return self.discard(lambda entry: entry.missed >= self._refuted_by)

    def equals(self, batch: Batch) -> bool:
        """Return whether `batch` is held, and came live."""
        entry = self.get(batch.seq)
        return (
            entry is not None
            and not entry.confirmed
            and entry.batch.fingerprint == batch.fingerprint
        )

    def precedes(self, seq: int, request: int) -> bool:
        """Return whether the batch of `seq` was held before the replay `request` was asked for."""
        entry = self.get(seq)
        return entry is not None and entry.asked < request

    def contradicts(self, batch: Batch) -> bool:
        """Return whether another batch of the same seq is held, and a newer one."""
        entry = self.get(batch.seq)
        return (
            entry is not None
            and entry.batch.fingerprint != batch.fingerprint
            and entry.batch.ts > batch.ts
        )

    def is_first_unconfirmed(self) -> bool:
        """Return whether no replay has contained the lowest batch held: it may be bogus."""
        return bool(self._entries) and not self._entries.peekitem(0)[1].confirmed

    def is_hole_older_than(self, request: int) -> bool:
        """Return whether a batch in replay has shown the hole in front since before `request`."""
        first = self.first
        if first is None or first != self.hole_end:
            return False
        entry: HeldBatch = self._entries[first]
        return entry.confirmed and entry.asked < request
