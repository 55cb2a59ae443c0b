"""The states of a stream, and the steps that lead from one to another.

What is decided elsewhere (`live_batches`, `replies`) is done here.
"""

from __future__ import annotations

from random import Random

from kvindex.rank import Rank
from kvindex.sequencer.config import SequencerConfig
from kvindex.sequencer.held import HeldBatch
from kvindex.sequencer.repair import Purpose, Repair
from kvindex.sequencer.stream import Stream
from kvindex.sequencer.values import AskReplay, Batch, CloseReplay, State

__all__ = ["Machine"]


class Machine:
    """Moves a stream from state to state.

    Attributes:
        state: the state; silence aside.
        repair: the replay that is under way, or None.
        stream: the way out; `applied`, `held`, `replay` and `counters` are its own.

    Owner: one sequencer.
    """

    def __init__(self, rank: Rank, config: SequencerConfig, now: float, random: Random) -> None:
        self.state = State.CONNECTING
        self.repair: Repair | None = None
        self.stream = Stream(rank, config, now)
        self.applied = self.stream.applied
        self.held = self.stream.held
        self.replay = self.stream.replay
        self.counters = self.stream.counters
        self._policy = config.replay_policy
        self._random = random

    def disconnect(self) -> None:
        """Be CONNECTING again, in doubt who will be met next."""
        self.counters["disconnects"] += 1
        self.abandon_repair()
        if not self.replay.usable:
            # What was missing was on its way over the broken connection: nothing can fill the gap.
            self.stream.lose_all_gaps("gap_without_replay")
        self.applied.start_in_doubt = True
        self.state = State.CONNECTING
        if self.applied.seq is None:
            # Nothing tells later whether these are of the publisher that is met next.
            self.counters["held_dropped"] += self.held.clear()
            if self.applied.next_seq:
                # Losses were declared up to there; whoever comes next starts afresh.
                self.restart("unproven_reconnect")
            self.applied.forget_start()
        else:
            self.applied.unproven = True
        if not self.replay.exists:
            self.applied.complete = False

    def restart(self, reason: str, trigger: Batch | None = None, *, resync: bool = True) -> None:
        """Begin a new epoch; with `resync`, by a join."""
        self.abandon_repair()
        self.stream.restart(reason, trigger)
        if trigger is not None:
            self.hold(trigger)
        if self.state is State.CONNECTING:
            return
        if self.replay.exists and resync:
            self.begin(Purpose.JOIN)
        else:
            self.go_live()

    def begin(self, purpose: Purpose) -> None:
        """Begin a repair."""
        self.repair = Repair(purpose, self._policy, self.applied)
        if purpose is Purpose.GAP:
            self.state = State.REPAIRING
        elif purpose is not Purpose.PROBE:
            self.state = State.SYNCING
        self.ask(self.repair)

    def ask(self, repair: Repair) -> None:
        """Make a request: from the last applied batch on."""
        start_seq = 0 if self.replay.keeps is False else self.applied.seq or 0
        self.replay.requests += 1
        repair.until_end |= self.replay.wanted
        self.replay.wanted = False
        repair.ask(self.replay.requests, start_seq, self.stream.now)
        self.counters["replays_asked"] += 1
        self.stream.out.append(AskReplay(self.replay.requests, start_seq))

    def ask_later(self, repair: Repair) -> None:
        """Have the next request made after a pause."""
        repair.back_off(self._random, self.stream.now)

    def close_request(self, repair: Repair) -> None:
        """End the open request, if there is one."""
        if repair.request is not None:
            self.stream.out.append(CloseReplay(repair.request))
        repair.close_try()

    def abandon_repair(self) -> None:
        """End the repair, if there is one."""
        if self.repair is not None:
            self.close_request(self.repair)
            self.repair = None

    @property
    def missing(self) -> bool:
        """Whether something is known, or must be suspected, to be missing."""
        return bool(self.held) or self.replay.wanted or self.applied.unproven

    @property
    def catching_up(self) -> bool:
        """Whether a replay is under way that decides what is delivered."""
        repair = self.repair
        syncing = self.state is State.SYNCING and repair is not None and repair.request is not None
        return syncing and self.replay.usable

    @property
    def gap_due(self) -> float | None:
        """Without replay: when the hole in front is given up; None while nothing waits behind one.

        No batch waits for longer than a time-out, however many holes are in front of it.
        """
        if self.state is not State.REPAIRING or self.replay.usable or self.applied.unproven:
            return None
        since = self.held.waiting_since
        return None if since is None else since + self._policy.timeout

    def hold(self, batch: Batch, *, confirmed: bool = False) -> bool:
        """Hold a batch that does not follow yet; return whether that brought something new."""
        known = self.held.get(batch.seq)
        if known is not None and known.batch.fingerprint == batch.fingerprint:
            if not confirmed:
                self.counters["duplicates"] += 1
            known.confirmed |= confirmed
            return False
        if known is not None:
            self.counters["conflicting"] += 1
            if batch.ts < known.batch.ts:
                return False
        entry = HeldBatch(
            batch, asked=self.replay.requests, confirmed=confirmed, arrived_at=self.stream.now
        )
        if self.held.add(entry):
            return True
        self._overflow(entry)
        return False

    def _overflow(self, entry: HeldBatch) -> None:
        """Drop the newest arrival for replay to bring; without replay lose the gap before it."""
        batch = entry.batch
        if self.replay.usable or self.state is State.CONNECTING:
            self.counters["held_dropped"] += 1
            self.replay.wanted = self.replay.usable
            self.held.dropped = max(self.held.dropped, batch.seq)
            return
        self.stream.lose_all_gaps("held_overflow")
        if batch.seq < (self.applied.next_seq or 0):
            self.counters["delayed"] += 1
            return
        self.held.add(entry)
        self.drain()
        self.notice_gap()

    def note_damaged(self, seq: int) -> None:
        """Remember a damaged batch as a hole at its seq."""
        applied = self.applied
        if applied.next_seq is None and self.replay.usable:
            applied.start(seq)
            self.held.discard_below(seq)
            self.drain()
        if applied.next_seq is None or seq >= applied.next_seq:
            self.held.note_damaged(seq, self.stream.now)

    def drain(self) -> None:
        """Deliver the held batches that follow."""
        self.stream.drain(confirmed_only=self.catching_up)

    def notice_gap(self) -> None:
        """Begin to repair if something is missing and no repair runs."""
        if not (self.held or self.replay.wanted):
            return
        if not self.replay.usable:
            if self.state is not State.REPAIRING and self.held:
                self.counters["gaps"] += 1
                self.state = State.REPAIRING
        elif self.repair is None:
            self.counters["gaps"] += 1
            self.begin(Purpose.GAP)
        elif self.repair.purpose is Purpose.PROBE:
            self.counters["gaps"] += 1
            self.repair.purpose = Purpose.GAP
            self.state = State.REPAIRING

    def after_advance(self) -> None:
        """Be live again as soon as a gap has closed; the open request goes on as a probe."""
        repair = self.repair
        if repair is None:
            if self.state is State.REPAIRING and not len(self.held):
                self.go_live()
        elif repair.purpose is Purpose.GAP and not repair.until_end and not self.missing:
            if repair.request is None:
                self.go_live()
            else:
                repair.purpose = Purpose.PROBE
                self.state = State.LIVE

    def go_live(self) -> None:
        """End the repair; deliver what can be; look for a further gap."""
        self.abandon_repair()
        self.state = State.LIVE
        if self.applied.unproven and (first := self.held.first) is not None:
            entry = self.held.get(first)
            assert entry is not None
            self.restart("unproven_reconnect", entry.batch)
            return
        if self.applied.next_seq is None and (start := self.held.hole_end) is not None:
            self.applied.start(start)
        self.drain()
        if not self.replay.usable:
            self.stream.lose_damaged()
        self.notice_gap()

    def lose_overdue(self) -> None:
        """Without replay: lose every hole behind which something has waited for a time-out."""
        while (due := self.gap_due) is not None and self.stream.now >= due:
            self.stream.lose("gap_without_replay")
            self.go_live()
