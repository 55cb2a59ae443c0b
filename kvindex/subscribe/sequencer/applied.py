"""The batches applied in the current epoch, and how certain their publisher is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from kvindex.subscribe.sequencer.values import MAX_SEQ, Batch
from kvindex.wire.errors import ConfigurationError

__all__ = ["Applied", "Cursor"]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """How far a stream was applied: all that a sequencer needs to go on from there.

    Attributes:
        epoch: restarts so far.
        seq: the last batch applied.
        ts: its timestamp, in seconds of the publisher's clock.
        next_seq: the seq that must follow; above `seq` + 1 where a loss was declared.
        complete: whether every batch from the publisher's first on was applied.
        oldest_ts: batches older than this belong to an earlier epoch.
        kept_losses: whether batches were lost and the rank's contents were kept nevertheless.
        recent: fingerprints of the last batches applied, by seq; that of `seq` is among them.

    Raises:
        ConfigurationError: values that no sequencer can have had.
    """

    epoch: int
    seq: int
    ts: float
    next_seq: int
    complete: bool
    oldest_ts: float
    kept_losses: bool
    recent: dict[int, int]

    def __post_init__(self) -> None:
        follows = 0 <= self.seq < self.next_seq <= MAX_SEQ + 1
        known = self.seq in self.recent and min(self.recent) >= 0 and max(self.recent) == self.seq
        whole = self.next_seq == self.seq + 1 and not self.kept_losses
        if self.epoch < 0 or not follows or not known or (self.complete and not whole):
            raise ConfigurationError(
                f"no stream stands at epoch {self.epoch}, seq {self.seq}, next {self.next_seq}, "
                f"{len(self.recent)} fingerprints, complete {self.complete}"
            )


class Applied:
    """The batches applied so far, as far as they are remembered. Owner: one sequencer.

    Attributes:
        epoch: restarts so far.
        count: batches applied, over all epochs.
        seq, ts: the last batch applied; seq is None before the first one of the epoch.
        next_seq: the seq that must follow; None while the epoch may start anywhere.
        complete: whether every batch from the publisher's first on was applied.
        oldest_ts: batches older than this belong to an earlier epoch (unless replay contains them).
        skipped: whether there was a loss in this epoch.
        unproven: whether the connection broke since; another publisher may be sending.
        start_in_doubt: whether the first batch of the epoch must come by replay: a live one may
            be a straggler of another publisher.
        replayed_to: the last seq that came by replay, -1 if none of the epoch did.
    """

    def __init__(self, *, recent: int) -> None:
        self.epoch = 0
        self.count = 0
        self.seq: int | None = None
        self.ts = -math.inf
        self.next_seq: int | None = None
        self.complete = False
        self.oldest_ts = -math.inf
        self.skipped = False
        self.unproven = False
        self.start_in_doubt = False
        self.replayed_to = -1
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
        self.start_in_doubt = False
        self._advance(batch.seq + 1, batch.ts)
        self._remember([(batch.seq, batch.fingerprint)])

    def apply_run(self, timestamps: Sequence[float], fingerprints: Sequence[int]) -> None:
        """Advance over several batches, the next ones, none of them older than `oldest_ts`.

        The same as `apply` for each; an epoch that has yet to begin needs `apply`.
        """
        assert self.seq is not None
        assert self.next_seq is not None
        first, end = self.next_seq, self.next_seq + len(fingerprints)
        self._advance(end, timestamps[-1], len(fingerprints))
        self._remember(zip(range(first, end), fingerprints, strict=True))

    def _advance(self, next_seq: int, ts: float, count: int = 1) -> None:
        self.count += count
        self.seq = next_seq - 1
        self.next_seq = next_seq
        self.ts = ts

    def _remember(self, fingerprints: Iterable[tuple[int, int]]) -> None:
        self._recent.update(fingerprints)
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
        """Return whether `batch` was applied under its seq; None if not remembered."""
        known = self._recent.get(batch.seq)
        return None if known is None else known == batch.fingerprint

    def restart(self, trigger: Batch | None) -> None:
        """Begin a new epoch; `trigger` is the batch that showed the restart, if one did."""
        self.epoch += 1
        if trigger is not None:
            self.oldest_ts = trigger.ts
        elif self.seq is not None:
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
        """Stand where the cursor says, and wait for proof that the publisher is the same."""
        self.epoch = cursor.epoch
        self.seq = cursor.seq
        self.ts = cursor.ts
        self.next_seq = cursor.next_seq
        self.complete = cursor.complete
        self.oldest_ts = cursor.oldest_ts
        self.skipped = cursor.kept_losses
        self.unproven = True
        self._remember(sorted(cursor.recent.items()))
