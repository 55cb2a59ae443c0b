"""The states of a stream and the moves between them; every item and every request is made here.

Only this file changes a stream's state and its cursor (`applied`), except that `live_run` advances
the cursor by a whole run. `repairing.py` and `sequencer.py` decide which move to make.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from random import Random

from kvindex.subscribe.sequencer.batches import Applied, Held, HeldBatch
from kvindex.subscribe.sequencer.repair import Purpose, Repair, Replay
from kvindex.subscribe.sequencer.values import (
    MAX_COUNT,
    Action,
    AskReplay,
    Batch,
    CloseReplay,
    Cursor,
    RankBatch,
    RankLost,
    RankRestarted,
    SequencerConfig,
    State,
)
from kvindex.wire.rank import Rank

__all__ = ["Machine"]

_MOVES: Mapping[State, tuple[State, ...]] = {
    State.CONNECTING: (State.SYNCING, State.LIVE, State.CLOSED),
    State.SYNCING: (State.LIVE, State.REPAIRING, State.CONNECTING, State.CLOSED),
    State.LIVE: (State.SYNCING, State.REPAIRING, State.CONNECTING, State.CLOSED),
    State.REPAIRING: (State.LIVE, State.SYNCING, State.CONNECTING, State.CLOSED),
    State.CLOSED: (),
}
"""The states that may follow each state; `STALE` is `LIVE` to the machine."""

_STATE_DURING: Mapping[Purpose, State] = {
    Purpose.JOIN: State.SYNCING,
    Purpose.PROVE: State.SYNCING,
    Purpose.GAP: State.REPAIRING,
    Purpose.PROBE: State.LIVE,
}
"""The state during a replay, by its purpose."""


class Machine:
    """Moves a stream from state to state, and makes its items; the base of `Sequencer`.

    Attributes:
        held: the batches that wait behind the delivered ones.
        replay: the facts about the replay endpoint.
        repair: the replay that is under way, or None.
        now: the time of the latest entrance.
        alive_at: when the publisher last gave a sign of life.
    """

    def __init__(
        self, rank: Rank, config: SequencerConfig, *, now: float, random: Random | None = None
    ) -> None:
        self.rank = rank
        self.applied = Applied(recent=config.recent)
        self.held = Held(
            max_batches=config.max_held,
            max_bytes=config.max_held_bytes,
            # One replay may have been a moment too early.
            refuted_by=max(2, config.replay_policy.attempts),
        )
        self.replay = Replay(config, now)
        self.repair: Repair | None = None
        self.counters: Counter[str] = Counter()
        self._config = config
        self._random = Random() if random is None else random
        self.now = now
        self._state = State.CONNECTING
        self._out: list[Action] = []  # what the owner is to carry out next
        self.alive_at = now
        self._stale = False
        self._refused = 0  # batches refused in a row for their age
        self._disconnected_at = -math.inf

    # Questions --------------------------------------------------------------------------------

    @property
    def missing(self) -> bool:
        """Whether batches are missing, or may be."""
        return bool(self.held) or self.replay.wanted or self.applied.unproven

    @property
    def awaits_replay(self) -> bool:
        """Whether only batches that replay contains may be delivered for now."""
        repair = self.repair
        syncing = self._state is State.SYNCING and repair is not None and repair.request is not None
        return self.replay.usable and (syncing or self.applied.start_in_doubt)

    @property
    def gap_due(self) -> float | None:
        """Without replay: when the hole in front is given up; None while nothing waits behind one.

        No batch waits for longer than a time-out, however many holes are in front of it.
        """
        if self._state is not State.REPAIRING or self.replay.usable or self.applied.unproven:
            return None
        since = self.held.waiting_since
        return None if since is None else since + self._config.replay_policy.timeout

    # From state to state ----------------------------------------------------------------------

    def _be(self, state: State) -> None:
        assert state is self._state or state in _MOVES[self._state], (self._state, state)
        self._state = state

    def go_on_from(self, cursor: Cursor | None, refusal: str) -> None:
        """Stand at a cursor until the publisher proves to be the same; or begin a new epoch."""
        if cursor is None or refusal:
            self.counters["resumes_refused"] += 1
            self.counters[f"refused_{refusal}"] += 1
            self.applied.epoch = 0 if cursor is None else cursor.epoch
            self.restart(refusal)
        else:
            self.counters["resumed"] += 1
            self.applied.resume(cursor)

    def disconnect(self) -> None:
        """Be CONNECTING again; the next publisher may be another one."""
        self.counters["disconnects"] += 1
        self._disconnected_at = self.now
        self.abandon_repair()
        self.replay.forget_pair()
        if not self.replay.usable:
            # The missing batches were on their way over the broken connection: the gap stays.
            self.lose_all_gaps("gap_without_replay")
        self.applied.start_in_doubt = True
        self._be(State.CONNECTING)
        if self.applied.seq is None:
            # Later nothing shows whether these are the next publisher's.
            self.counters["held_dropped"] += self.held.clear()
            if self.applied.next_seq:
                # Losses were declared up to there; the next publisher starts afresh.
                self.restart("unproven_reconnect")
            self.applied.forget_start()
        else:
            self.applied.unproven = True
        if not self.replay.exists:
            self.applied.complete = False

    def restart(self, reason: str, trigger: Batch | None = None, *, resync: bool = True) -> None:
        """Begin a new epoch; with `resync`, by a join."""
        self.abandon_repair()
        self._begin_epoch(reason, trigger)
        if trigger is not None:
            self.hold(trigger)
        if self._state is State.CONNECTING:
            return
        if self.replay.exists and resync:
            self.begin(Purpose.JOIN)
        else:
            self.go_live()

    def _begin_epoch(self, reason: str, trigger: Batch | None) -> None:
        """Drop the held batches of the epoch that ends, and the facts about it."""
        self.counters["restarts"] += 1
        if self.replay.exists:
            self.held.clear()
        elif trigger is not None:
            oldest = trigger.ts
            self.held.discard(lambda entry: entry.batch.ts < oldest)
        self.held.forget_losses()
        self.applied.restart(trigger)
        self._refused = 0
        self.replay.wanted = self.replay.paired = False
        if self.replay.keeps is False:
            self.replay.keeps = None
        self._out.append(RankRestarted(self.rank, self.applied.epoch, reason))

    def disown_replay(self) -> None:
        """Go on with the live batches alone: the replay is another publisher's."""
        self.counters["foreign_replay"] += 1
        self.abandon_repair()
        self.replay.disown(foreign=True)
        self.held.discard(lambda entry: entry.confirmed)
        # Only a replay could prove that an earlier connection's batches are the same publisher's.
        broke_at = self._disconnected_at
        self.counters["held_dropped"] += self.held.discard(lambda e: e.arrived_at <= broke_at)
        first = self.held.first
        entry = None if first is None else self.held.get(first)
        applied = self.applied
        if entry is None and applied.seq is not None and applied.seq > applied.replayed_to:
            first = applied.seq + 1
        self._begin_epoch("foreign_replay", None if entry is None else entry.batch)
        self.lose_join("foreign_replay", first)
        self.go_live()

    def begin(self, purpose: Purpose) -> None:
        """Begin a repair."""
        self.repair = Repair(purpose, self._config.replay_policy, self.applied)
        self._be(_STATE_DURING[purpose])
        self.ask(self.repair)

    def notice_gap(self) -> None:
        """Begin a repair if batches are missing and no repair runs."""
        if not (self.held or self.replay.wanted):
            return
        if not self.replay.usable:
            if self._state is not State.REPAIRING and self.held:
                self.counters["gaps"] += 1
                self._be(State.REPAIRING)
                if self.replay.foreign:
                    self.abandon_repair()  # a probe, which must not delay the end of the gap
        elif self.repair is None:
            self.counters["gaps"] += 1
            self.begin(Purpose.GAP)
        elif self.repair.purpose is Purpose.PROBE:
            self.counters["gaps"] += 1
            self.repair.purpose = Purpose.GAP
            self._be(State.REPAIRING)

    def after_advance(self) -> None:
        """Be live again as soon as a gap has closed; the open request goes on as a probe."""
        repair = self.repair
        if repair is None:
            if self._state is State.REPAIRING and not len(self.held):
                self.go_live()
        elif repair.purpose is Purpose.GAP and not repair.until_end and not self.missing:
            if repair.request is None:
                self.go_live()
            else:
                repair.purpose = Purpose.PROBE
                self._be(State.LIVE)

    def go_live(self) -> None:
        """End the repair; deliver the batches that follow; look for a further gap."""
        self.abandon_repair()
        self._be(State.LIVE)
        if self.applied.unproven and (first := self.held.first) is not None:
            entry = self.held.get(first)
            assert entry is not None
            self.restart("unproven_reconnect", entry.batch)
            return
        if self.applied.next_seq is None and (start := self.held.hole_end) is not None:
            self.applied.start(start)
        self.drain()
        if not self.replay.usable:
            self.lose_damaged()
        self.notice_gap()

    # Delivering -------------------------------------------------------------------------------

    def start_at(self, seq: int) -> None:
        """Start the epoch at the first batch that the publisher still has."""
        self.applied.start(seq)
        self.held.discard_below(seq)

    def forget_start(self) -> None:
        """Let the epoch start anywhere after all, while nothing was delivered or lost."""
        if self.applied.next_seq == 0:
            self.applied.forget_start()

    def prove(self) -> None:
        """Go on with the publisher, which has proven to be the same."""
        self.applied.unproven = False
        self.drain()

    def trust_live(self) -> None:
        """Let the epoch start with live batches: no replay brings its first one."""
        self.applied.start_in_doubt = False
        self.drain()

    def deliver(self, batch: Batch, *, replayed: bool) -> None:
        """Deliver the next batch; where the epoch may start anywhere, start it there."""
        applied = self.applied
        starts_epoch = applied.seq is None
        if applied.next_seq is None:
            applied.start(batch.seq)
        self.held.pop(batch.seq)
        applied.apply(batch)
        if replayed:
            applied.replayed_to = batch.seq
            self.counters["replayed"] += 1
        self.note_delivered(1)
        self._out.append(RankBatch(self.rank, applied.epoch, batch.seq, batch.content, replayed))
        if starts_epoch and self.replay.exists:
            self.counters["old_epoch"] += self.held.discard(self._is_straggler)

    def note_delivered(self, count: int) -> None:
        """Count batches delivered."""
        self.counters["delivered"] += count
        self._refused = 0
        replay = self.replay
        if replay.paired and replay.usable:  # else check soon whose replay it is
            replay.quiet_since = self.now

    def _is_straggler(self, entry: HeldBatch) -> bool:
        """Return whether a held batch is older than the epoch and no replay contains it."""
        return not entry.confirmed and entry.batch.ts < self.applied.oldest_ts

    def drain(self) -> None:
        """Deliver the held batches that follow; where replay decides, only those it contains."""
        applied = self.applied
        while not applied.unproven and (seq := applied.next_seq) is not None:
            entry = self.held.get(seq)
            if entry is None or (self.awaits_replay and not entry.confirmed):
                return
            self.deliver(entry.batch, replayed=entry.confirmed)

    # Holding ----------------------------------------------------------------------------------

    def hold(self, batch: Batch, *, confirmed: bool = False) -> bool:
        """Hold a batch that does not follow yet; return whether the batch is new."""
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
            batch, asked=self.replay.requests, confirmed=confirmed, arrived_at=self.now
        )
        if self.held.add(entry):
            return True
        self._overflow(entry)
        return False

    def _overflow(self, entry: HeldBatch) -> None:
        """Drop the newest arrival, for replay to bring; without replay lose the gap before it."""
        batch = entry.batch
        if self.replay.usable or self._state is State.CONNECTING:
            self.counters["held_dropped"] += 1
            self.replay.wanted = self.replay.usable
            self.held.dropped = max(self.held.dropped, batch.seq)
            return
        self.lose_all_gaps("held_overflow")
        if batch.seq < (self.applied.next_seq or 0):
            self.counters["delayed"] += 1
            return
        self.held.add(entry)
        self.drain()
        self.notice_gap()

    def note_damaged(self, seq: int) -> None:
        """Remember a damaged batch as a hole at its seq."""
        if self.applied.next_seq is None and self.replay.usable:
            self.start_at(seq)
            self.drain()
        next_seq = self.applied.next_seq
        if next_seq is None or seq >= next_seq:
            self.held.note_damaged(seq, self.now)

    # Losing -----------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """Declare the hole in front lost: up to the held batch behind it, or one batch."""
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
        self._declare_lost(reason, first, last)
        self.drain()

    def lose_join(self, reason: str, first: int | None) -> None:
        """Start at `first`, behind the batches that replay did not bring; at any seq if None."""
        if first is None:
            return
        self.applied.start(first)
        if first > 0:
            self._declare_lost(reason, 0, first - 1)

    def lose_all_gaps(self, reason: str) -> None:
        """Deliver everything held, with a loss at each hole."""
        if self.applied.unproven:
            return
        if self.applied.next_seq is None and (first := self.held.first) is not None:
            self.applied.start(first)
        self.drain()
        while self.held:
            self.lose(reason)

    def lose_damaged(self) -> None:
        """Declare the next batches lost as far as they came damaged."""
        while self.held.is_damaged(self.applied.next_seq):
            self.lose("undecodable")

    def lose_dropped(self) -> None:
        """Declare lost the batches that were dropped for want of room and will not come again."""
        first, last = self.applied.next_seq, self.held.dropped
        if first is not None and first <= last and not len(self.held):
            self.applied.skip_to(last + 1)
            self._declare_lost("held_overflow", first, last)

    def _declare_lost(self, reason: str, first: int, last: int) -> None:
        """Report that these batches will never come."""
        self.counters["losses"] += 1
        lost = self.counters["lost_batches"] + last - first + 1
        self.counters["lost_batches"] = min(lost, MAX_COUNT)
        self.held.forget_damaged(last)
        reset = self._config.on_loss == "reset"
        self._out.append(RankLost(self.rank, self.applied.epoch, reason, first, last, reset))

    # Asking for replay ------------------------------------------------------------------------

    def ask(self, repair: Repair) -> None:
        """Make a request: from the last applied batch on."""
        replay = self.replay
        start_seq = 0 if replay.keeps is False else self.applied.seq or 0
        replay.requests += 1
        repair.until_end |= replay.wanted
        replay.wanted = False
        repair.ask(replay.requests, start_seq, self.now)
        self.counters["replays_asked"] += 1
        self._out.append(AskReplay(replay.requests, start_seq))

    def ask_later(self, repair: Repair) -> None:
        """Schedule the next request after a pause."""
        repair.back_off(self._random, self.now)

    def close_request(self, repair: Repair) -> None:
        """End the open request, if there is one."""
        if repair.request is not None:
            self._out.append(CloseReplay(repair.request))
        repair.close_try()

    def abandon_repair(self) -> None:
        """End the repair, if there is one."""
        if self.repair is not None:
            self.close_request(self.repair)
            self.repair = None

    def end(self) -> None:
        """End for good."""
        self.abandon_repair()
        self.held.clear()
        self._be(State.CLOSED)
