"""What was delivered in the current epoch: the cursor that every decision starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from kvindex.subscribe.actions import Batch
from kvindex.subscribe.cursor import Cursor

__all__ = ["Applied"]


class Applied:
    """The cursor of one epoch. Owner: one sequencer.

    Attributes:
        epoch: restarts so far.
        seq, ts: the last batch applied; seq is None before the first one of the epoch.
        next_seq: the seq that must follow; None while the epoch may start anywhere.
        complete: whether every batch from the publisher's first on was applied.
        oldest_ts: batches older than this belong to an earlier epoch (unless replay has them).
        skipped: whether there was a loss in this epoch.
    """

    def __init__(self, *, recent: int) -> None:
        self.epoch = 0
        self.seq: int | None = None
        self.ts = -math.inf
        self.next_seq: int | None = None
        self.complete = False
        self.oldest_ts = -math.inf
        self.skipped = False
        self._recent: dict[int, int] = {}
        self._capacity = recent

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
        self.seq = batch.seq
        self.ts = batch.ts
        self.next_seq = batch.seq + 1
        self._recent[batch.seq] = batch.fingerprint
        self._forget_oldest()

    def apply_run(self, timestamps: Sequence[float], fingerprints: Sequence[int]) -> None:
        """Advance over several batches, the next ones, none of them older than `oldest_ts`.

        The same as `apply` for each, unless the epoch has yet to begin: that takes `apply`.
        """
        assert self.seq is not None
        assert self.next_seq is not None
        first, end = self.next_seq, self.next_seq + len(fingerprints)
        self.seq = end - 1
        self.ts = timestamps[-1]
        self.next_seq = end
        self._recent.update(zip(range(first, end), fingerprints, strict=True))
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        excess = len(self._recent) - self._capacity
        if excess > 0:
            for seq in list(islice(self._recent, excess)):
                del self._recent[seq]

    def skip_to(self, seq: int) -> None:
        """Advance over a loss that ends before `seq`."""
        self.next_seq = seq
        self.complete = False
        self.skipped = True

    def recognise(self, batch: Batch) -> bool | None:
        """Return whether `batch` is the one applied under its seq; None if not remembered."""
        known = self._recent.get(batch.seq)
        return None if known is None else known == batch.fingerprint

    def restart(self, trigger: Batch | None) -> None:
        """Begin a new epoch; `trigger` is the batch of it that gave it away, if one did."""
        self.epoch += 1
        if trigger is not None:
            self.oldest_ts = trigger.ts
        elif self.seq is not None:
            self.oldest_ts = math.nextafter(self.ts, math.inf)
        self.seq = None
        self.ts = -math.inf
        self.skipped = False
        self.forget_start()
        self._recent.clear()

    def cursor(self, *, losses_kept: bool) -> Cursor | None:
        """Return all this as a value; None before the first batch of the epoch.

        `losses_kept` is whether a loss leaves what was applied before it in place.
        """
        if self.seq is None or self.next_seq is None:
            return None
        return Cursor(
            epoch=self.epoch,
            seq=self.seq,
            ts=self.ts,
            next_seq=self.next_seq,
            complete=self.complete,
            oldest_ts=self.oldest_ts,
            kept_losses=self.skipped and losses_kept,
            recent=dict(self._recent),
        )

    def resume(self, cursor: Cursor) -> None:
        """Stand where the cursor says."""
        self.epoch = cursor.epoch
        self.seq = cursor.seq
        self.ts = cursor.ts
        self.next_seq = cursor.next_seq
        self.complete = cursor.complete
        self.oldest_ts = cursor.oldest_ts
        self.skipped = cursor.kept_losses
        self._recent = dict(sorted(cursor.recent.items()))
        self._forget_oldest()
