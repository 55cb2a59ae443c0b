"""Decides what each live batch means for the stream."""

from __future__ import annotations

from collections.abc import Sequence

from kvindex.subscribe.sequencer.machine import Machine
from kvindex.subscribe.sequencer.repair import Purpose
from kvindex.subscribe.sequencer.values import MAX_SEQ, Batch, State

__all__ = ["LiveBatches"]

MAX_REFUSED = 16
"""Without replay: batches refused in a row for their age until the clock is taken as set back."""


class LiveBatches:
    """Delivers, holds or refuses live batches, and detects restarts. Owner: one sequencer."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._applied = machine.applied
        self._held = machine.held
        self._replay = machine.replay
        self._counters = machine.counters

    def take(self, batch: Batch) -> None:
        """Accept one batch."""
        self._counters["live"] += 1
        applied = self._applied
        if applied.seq is not None and batch.seq <= applied.seq:
            self._take_fallen_back(batch)
        elif applied.next_seq is not None and batch.seq < applied.next_seq:
            if self._replay.foreign and batch.ts >= applied.oldest_ts:
                self._machine.restart("seq_fell_back", batch)
            else:
                self._counters["delayed"] += 1
        elif batch.ts < applied.oldest_ts:
            self._refuse(batch, "old_epoch")
        elif self._machine.state is State.CONNECTING:
            self._machine.hold(batch)
        elif applied.unproven and not self._replay.usable:
            self._machine.restart("unproven_reconnect", batch)
        elif self._follows(batch):
            if batch.seq in self._held:  # it waited for a replay that proved empty
                self._counters["duplicates"] += 1
            self._machine.deliver(batch, replayed=False)
            self._machine.drain()
            self._machine.after_advance()
        elif self._machine.hold(batch):
            self._machine.notice_gap()

    def _follows(self, batch: Batch) -> bool:
        """Return whether a live batch may be delivered at once."""
        applied = self._applied
        if applied.unproven or self._machine.awaits_replay:
            return False
        if applied.next_seq is None:
            return self._machine.state is State.LIVE
        return batch.seq == applied.next_seq

    def _take_fallen_back(self, batch: Batch) -> None:
        """Judge a live batch that is not above the last applied one: a duplicate or a restart."""
        recognised = self._applied.recognise(batch)
        if recognised:
            self._counters["duplicates"] += 1
            if batch.seq <= self._applied.replayed_to:
                self._replay.agreed()
        elif batch.ts > self._applied.ts:
            self._machine.restart("seq_fell_back", batch)
        elif recognised is None and self._replay.exists:
            self._counters["delayed"] += 1
        else:
            self._refuse(batch, "delayed")

    def _refuse(self, batch: Batch, counter: str) -> None:
        """Drop a batch that seems too old; ask replay, or count, in case the clock is wrong."""
        self._counters[counter] += 1
        if self._replay.usable:
            if self._machine.state is State.LIVE and self._machine.repair is None:
                self._machine.begin(Purpose.PROBE)
            return
        self._machine.refused += 1
        if self._machine.refused >= MAX_REFUSED and self._machine.state is not State.CONNECTING:
            self._machine.restart("clock_fell_back", batch)

    def take_damaged(self, seq: int | None) -> None:
        """Record a batch that cannot be read, with its seq where legible."""
        self._counters["damaged"] += 1
        next_seq = self._applied.next_seq
        if seq is not None and next_seq is not None and seq < next_seq:
            return
        if self._replay.usable:
            self._replay.wanted = True
            if self._machine.state is not State.CONNECTING:
                self._machine.notice_gap()
        elif seq is not None and next_seq is not None and not self._applied.unproven:
            self._machine.note_damaged(seq)
            if self._machine.state is not State.CONNECTING:
                self._machine.lose_damaged()
                self._machine.go_live()

    @property
    def run_start(self) -> int | None:
        """The first seq that `take_run` accepts; None while `take` must see each batch."""
        applied = self._applied
        ordinary = (
            self._machine.state is State.LIVE
            and self._machine.repair is None
            and applied.seq is not None
            and not applied.start_in_doubt
            and not self._machine.missing
        )
        return applied.next_seq if ordinary else None

    def take_run(
        self, first_seq: int, timestamps: Sequence[float], fingerprints: Sequence[int]
    ) -> int:
        """Accept batches numbered from `first_seq` on, up to the first that is not ordinary.

        **Why this is the same as `take` for each.** `run_start` is a seq only while the stream is
        LIVE and nothing is held, damaged, under repair or in doubt. Then `take` of the batch with
        exactly that seq, if it is not older than the epoch, passes every test that could refuse or
        hold it, delivers it, and finds nothing to do afterwards. That leaves `run_start` one higher
        and all its other conditions unchanged, so the same is true of the next batch.
        Held against `take` by `tests/subscribe/sequencer/test_runs.py`.
        """
        if first_seq != self.run_start:
            return 0
        oldest_ts = self._applied.oldest_ts
        count = min(len(timestamps), MAX_SEQ + 1 - first_seq)
        if count and min(timestamps) < oldest_ts:
            older = (position for position, ts in enumerate(timestamps) if ts < oldest_ts)
            count = min(count, next(older))
        if count:
            self._counters["live"] += count
            self._machine.note_delivered(count)
            self._applied.apply_run(timestamps[:count], fingerprints[:count])
        return count
