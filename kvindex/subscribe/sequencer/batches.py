"""The batches of a stream: those delivered, as far as they are remembered, and those that wait."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
from sortedcontainers import SortedDict

from kvindex.subscribe.sequencer.values import Batch, Cursor

_IN_CURSOR = ("epoch", "seq", "ts", "next_seq", "complete", "oldest_ts")


class AppliedBatches:
    """The batches applied so far, as far as they are remembered. Owner: one sequencer."""

    def __init__(self, *, recent: int) -> None:
        self.epoch = 0  # restarts so far
        # The last batch applied; no seq before the first one of the epoch.
        self.seq: int | None = None
        self.ts = -math.inf
        self.next_seq: int | None = None  # None while the epoch may start anywhere
        self.complete = False  # whether every batch from the publisher's first on was applied
        # Batches older than this belong to an earlier epoch, unless replay contains them.
        self.oldest_ts = -math.inf
        self.count = 0  # batches applied, over all epochs
        self.skipped = False  # whether there was a loss in this epoch
        # Whether the connection broke since: another publisher may be sending.
        self.unproven = False
        # Whether the first batch of the epoch must arrive by replay: a live one may be a straggler
        # of another publisher.
        self.start_in_doubt = False
        self.replayed_to = -1  # the last seq that arrived by replay; -1 if none of the epoch did
        self._recent: dict[int, int] = {}  # fingerprints by seq
        self._capacity = recent

    @property
    def arrived_live(self) -> bool:
        """Whether the last batch applied arrived live."""
        return self.seq is not None and self.seq > self.replayed_to

    def start(self, seq: int) -> None:
        """Let the epoch start at `seq`: complete if that is the publisher's first."""
        self.next_seq = seq
        self.complete = seq == 0

    def forget_start(self) -> None:
        """Take back `start` while nothing has been applied."""
        self.next_seq = None
        self.complete = False

    def apply(self, batch: Batch) -> None:
        """Advance over `batch`, which must be the next one."""
        # Replay is believed against the clock: a lower ts there means that the clock was set back.
        self.oldest_ts = batch.ts if self.seq is None else min(self.oldest_ts, batch.ts)
        self.start_in_doubt = False
        self.count += 1
        self.seq, self.next_seq, self.ts = batch.seq, batch.seq + 1, batch.ts
        self._recent[batch.seq] = batch.fingerprint
        self._forget_oldest()

    def apply_run(self, timestamps: Sequence[float], fingerprints: Sequence[int]) -> None:
        """Advance over several batches, the next ones, none of them older than `oldest_ts`."""
        # As `apply` for each, in one step. An epoch that has yet to begin needs `apply`.
        first = self.next_seq
        assert first is not None
        end = first + len(fingerprints)
        self.count += len(fingerprints)
        self.seq, self.next_seq, self.ts = end - 1, end, timestamps[-1]
        self._recent.update(zip(range(first, end), fingerprints, strict=True))
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        if (excess := len(self._recent) - self._capacity) > 0:
            for seq in list(islice(self._recent, excess)):
                del self._recent[seq]

    def skip_to(self, seq: int) -> None:
        """Advance over a loss that ends before `seq`."""
        self.next_seq = seq
        self.complete = False
        self.skipped = True

    def recognise(self, batch: Batch) -> bool | None:
        """Return whether `batch` was applied under its seq; None if not remembered."""
        known = self._recent.get(batch.seq)
        return None if known is None else known == batch.fingerprint

    def restart(self, trigger: Batch | None) -> None:
        """Begin a new epoch; `trigger` is the batch that showed the restart, if one did."""
        self.epoch += 1
        if trigger is not None:
            self.oldest_ts = trigger.ts
        elif self.seq is not None:
            # Nothing shows when the new publisher began: only what was applied is surely older.
            self.oldest_ts = math.nextafter(self.ts, math.inf)
        self.seq = None
        self.ts = -math.inf
        self.skipped = self.unproven = self.start_in_doubt = False
        self.replayed_to = -1
        self.forget_start()
        self._recent.clear()

    def cursor(self, *, losses_kept: bool) -> Cursor | None:
        """Return all this as a value; None before the first batch of the epoch.

        `losses_kept` is whether a loss leaves what was applied before it in place.
        """
        if self.seq is None:
            return None
        facts = {name: getattr(self, name) for name in _IN_CURSOR}
        kept = self.skipped and losses_kept
        return Cursor(**facts, kept_losses=kept, recent=dict(self._recent))

    def resume(self, cursor: Cursor) -> None:
        """Stand at a cursor, and wait for proof that the publisher is the same."""
        for name in _IN_CURSOR:
            setattr(self, name, getattr(cursor, name))
        self.skipped = cursor.kept_losses
        self.unproven = True
        self._recent.update(sorted(cursor.recent.items()))
        self._forget_oldest()


class HeldBatch(msgspec.Struct):
    """A held batch and the evidence for it."""

    batch: Batch
    arrived_at: float
    asked: int  # the newest replay request when it arrived; only later ones can testify
    confirmed: bool  # whether a replay contained it
    missed: int = 0  # replays that should have contained it and ended without it
    denied: bool = False  # whether one of them ended below it with nothing new


class ReorderBuffer:
    """The batches that arrived out of order, and the seqs of known batches that arrived damaged.

    A seq is held or damaged, never both; `bool` returns whether any is. Owner: one sequencer.
    """

    def __init__(self, *, max_batches: int, max_bytes: int, refuted_by: int = 2) -> None:
        self.size = 0  # bytes held
        self.dropped = -1  # highest seq of a batch that found no room
        self.entries: SortedDict[int, HeldBatch] = SortedDict()
        self.damaged: SortedDict[int, float] = SortedDict()  # when each arrived
        # The same in the order of arrival. A plain dict would step over all removed entries.
        self._arrivals: OrderedDict[int, float] = OrderedDict()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._refuted_by = refuted_by  # replays that ended without a batch, for it to be bogus

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries or self.damaged)

    @property
    def first(self) -> int | None:
        """Lowest seq held, or None."""
        return self.entries.peekitem(0)[0] if self.entries else None

    @property
    def hole_end(self) -> int | None:
        """Lowest seq held or damaged: the hole in front ends before it. None without any."""
        ends = [seqs.peekitem(0)[0] for seqs in (self.entries, self.damaged) if seqs]
        return min(ends, default=None)

    @property
    def highest(self) -> int:
        """Highest seq known to exist: held, damaged or dropped; -1 if none is."""
        known = [self.dropped]
        known += [seqs.peekitem(-1)[0] for seqs in (self.entries, self.damaged) if seqs]
        return max(known)

    @property
    def waiting_since(self) -> float | None:
        """When the batch held for longest arrived, or the first damaged one; or None."""
        times = [next(iter(self._arrivals.values()))] if self._arrivals else []
        times += [self.damaged.peekitem(0)[1]] if self.damaged else []
        return min(times, default=None)

    def get(self, seq: int | None) -> HeldBatch | None:
        """Return the entry of `seq`, or None."""
        entry: HeldBatch | None = self.entries.get(seq)
        return entry

    def add(self, entry: HeldBatch) -> bool:
        """Hold an entry in place of any of the same seq; return False when there is no room."""
        self.pop(entry.batch.seq)
        size = entry.batch.size
        full = len(self) >= self._max_batches or self.size + size > self._max_bytes
        # One is always accepted, however large, so that the owner can go on past it.
        if full and self.entries:
            return False
        self.entries[entry.batch.seq] = entry
        self._arrivals[entry.batch.seq] = entry.arrived_at
        self.size += size
        return True

    def pop(self, seq: int) -> HeldBatch | None:
        """Remove `seq`; return its entry, or None."""
        self.damaged.pop(seq, None)
        entry: HeldBatch | None = self.entries.pop(seq, None)
        if entry is not None:
            self.size -= entry.batch.size
            del self._arrivals[seq]
        return entry

    def discard(self, unwanted: Callable[[HeldBatch], bool]) -> int:
        """Remove the entries that `unwanted` names; return how many. Complexity: O(n)."""
        seqs = [seq for seq, entry in self.entries.items() if unwanted(entry)]
        for seq in seqs:
            self.pop(seq)
        return len(seqs)

    def discard_below(self, seq: int) -> int:
        """Remove the entries below `seq`; return how many."""
        seqs = list(self.entries.irange(maximum=seq, inclusive=(True, False)))
        for below in seqs:
            self.pop(below)
        return len(seqs)

    def clear(self) -> int:
        """Forget everything; return how many batches there were."""
        count = len(self.entries)
        self.entries.clear()
        self._arrivals.clear()
        self.size = 0
        self.forget_losses()
        return count

    def start_of_run(self, seq: int) -> int:
        """Return the lowest h such that h … seq - 1 are all held (`seq` itself if none is)."""
        while seq - 1 in self.entries:
            seq -= 1
        return seq

    # Damaged batches --------------------------------------------------------------------------

    def note_damaged(self, seq: int, now: float) -> None:
        """Remember that the batch of `seq` arrived damaged, unless it is held or too many did."""
        if seq not in self.entries and len(self.damaged) < self._max_batches:
            self.damaged.setdefault(seq, now)

    def is_damaged(self, seq: int | None) -> bool:
        """Return whether the batch of `seq` arrived damaged."""
        return seq in self.damaged

    def forget_damaged(self, last: int) -> None:
        """Forget the damaged batches up to and with `last`."""
        for seq in list(self.damaged.irange(maximum=last)):
            del self.damaged[seq]

    def forget_losses(self) -> None:
        """Forget every batch that arrived damaged or found no room."""
        self.damaged.clear()
        self.dropped = -1

    # Evidence ---------------------------------------------------------------------------------

    def testify(self, request: int, *, ends_at: int | None = None) -> None:
        """Note that a replay has ended without batches that it should have contained.

        `ends_at` is the seq that it ended with, if it brought nothing new.
        """
        for seq, entry in self.entries.items():
            if not entry.confirmed and entry.asked < request:
                entry.missed += 1
                entry.denied |= ends_at is not None and ends_at < seq

    def is_refuted(self, entry: HeldBatch) -> bool:
        """Return whether enough replays ended without a held batch."""
        return entry.missed >= self._refuted_by

    def is_any_denied(self) -> bool:
        """Return whether a refuted batch was denied: the replay may not be its publisher's."""
        return any(self.is_refuted(entry) and entry.denied for entry in self.entries.values())

    def is_first_unconfirmed(self) -> bool:
        """Return whether no replay has contained the lowest batch held: it may be bogus."""
        return bool(self.entries) and not self.entries.peekitem(0)[1].confirmed

    def is_hole_older_than(self, request: int) -> bool:
        """Return whether a batch in replay has shown the hole in front since before `request`."""
        entry = self.get(self.hole_end)
        return entry is not None and entry.confirmed and entry.asked < request
