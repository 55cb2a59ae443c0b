"""The way out of a sequencer: every item is made here, and only here does the cursor move."""

from __future__ import annotations

from collections import Counter

from kvindex.rank import Rank
from kvindex.sequencer.applied import Applied
from kvindex.sequencer.config import SequencerConfig
from kvindex.sequencer.held import Held, HeldBatch
from kvindex.sequencer.repair import Replay
from kvindex.sequencer.values import Action, Batch, RankBatch, RankLost, RankRestarted

__all__ = ["Stream"]

_MAX_COUNT = 2**63 - 1
"""No counter passes this: a publisher chooses its numbers, and 64 bits must hold their sum."""


class Stream:
    """Delivers what follows, and declares what is lost and what begins anew.

    Attributes:
        rank: whose stream it is.
        now: the present, as the sequencer was told last.
        applied: what was delivered.
        held: what waits behind it.
        replay: what is known of the replay endpoint.
        counters: what happened how often, by name.
        out: what the sequencer's owner is to do next.
        refused: batches refused in a row for their age.

    Owner: one sequencer.
    """

    def __init__(self, rank: Rank, config: SequencerConfig, now: float) -> None:
        self.rank = rank
        self.now = now
        self.applied = Applied(recent=config.recent)
        self.held = Held(
            max_batches=config.max_held,
            max_bytes=config.max_held_bytes,
            # One replay may have been a moment too early.
            refuted_by=max(2, config.replay_policy.attempts),
        )
        self.replay = Replay(config, now)
        self.counters: Counter[str] = Counter()
        self.out: list[Action] = []
        self.refused = 0
        self._reset = config.on_loss == "reset"

    def deliver(self, batch: Batch, *, replayed: bool) -> None:
        """Deliver the next batch."""
        applied = self.applied
        starts_epoch = applied.seq is None
        self.held.pop(batch.seq)
        applied.apply(batch)
        self.counters["replayed"] += replayed
        self.note_delivered(1)
        self.out.append(RankBatch(self.rank, applied.epoch, batch.seq, batch.content, replayed))
        if starts_epoch and self.replay.exists:
            self.counters["old_epoch"] += self.held.discard(self._is_straggler)

    def note_delivered(self, count: int) -> None:
        """Count batches delivered."""
        self.counters["delivered"] += count
        self.refused = 0
        if self.replay.keeps is not False:
            self.replay.quiet_since = self.now

    def _is_straggler(self, entry: HeldBatch) -> bool:
        """Return whether a held batch is older than the epoch and no replay has it."""
        return not entry.confirmed and entry.batch.ts < self.applied.oldest_ts

    def drain(self, *, confirmed_only: bool = False) -> None:
        """Deliver the held batches that follow; of some, only those that replay has, too."""
        applied = self.applied
        while not applied.unproven and (seq := applied.next_seq) is not None:
            entry = self.held.get(seq)
            if entry is None:
                return
            in_doubt = confirmed_only or (applied.start_in_doubt and self.replay.usable)
            if in_doubt and not entry.confirmed:
                return
            self.deliver(entry.batch, replayed=entry.confirmed)

    def lose(self, reason: str) -> None:
        """Declare the hole in front lost: to what is held behind it, or one batch."""
        first = last = self.applied.next_seq
        if first is None or last is None:
            return
        if self.held.is_damaged(first):
            reason = "undecodable"
            while self.held.is_damaged(last + 1):
                last += 1
        elif (end := self.held.hole_end) is not None:
            last = end - 1
        self.applied.skip_to(last + 1)
        self.declare_lost(reason, first, last)

    def lose_all_gaps(self, reason: str) -> None:
        """Deliver everything held, with a loss at each hole."""
        if self.applied.unproven:
            return
        if self.applied.next_seq is None and (first := self.held.first) is not None:
            self.applied.start(first)
        self.drain()
        while self.held:
            self.lose(reason)
            self.drain()

    def lose_damaged(self) -> None:
        """Declare the next batches lost as far as they came damaged."""
        while self.held.is_damaged(self.applied.next_seq):
            self.lose("undecodable")
            self.drain()

    def lose_dropped(self) -> None:
        """Declare what was dropped for want of room, and will not come again, lost."""
        first, last = self.applied.next_seq, self.held.dropped
        if first is not None and first <= last and not len(self.held):
            self.applied.skip_to(last + 1)
            self.declare_lost("held_overflow", first, last)

    def declare_lost(self, reason: str, first: int, last: int) -> None:
        """Say that these batches will never come."""
        self.counters["losses"] += 1
        lost = self.counters["lost_batches"] + last - first + 1
        self.counters["lost_batches"] = min(lost, _MAX_COUNT)
        self.held.forget_damaged(last)
        self.out.append(RankLost(self.rank, self.applied.epoch, reason, first, last, self._reset))

    def restart(self, reason: str, trigger: Batch | None) -> None:
        """Begin a new epoch; `trigger` is the batch of it that gave it away, if one did."""
        self.counters["restarts"] += 1
        if self.replay.exists:
            self.held.clear()
        elif trigger is not None:
            oldest = trigger.ts
            self.held.discard(lambda entry: entry.batch.ts < oldest)
        self.held.forget_losses()
        self.applied.restart(trigger)
        self.refused = 0
        self.replay.wanted = False
        if self.replay.keeps is False:
            self.replay.keeps = None
        self.out.append(RankRestarted(self.rank, self.applied.epoch, reason))
