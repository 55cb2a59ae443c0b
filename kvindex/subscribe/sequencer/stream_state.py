"""The state of a stream and of its replays, and every move; items and requests are made here.

`gaps_and_restarts.py` decides which move to make. Only this file changes the state and delivers
batches, except that `Sequencer.live_run` delivers a whole run.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Mapping
from random import Random

import msgspec

from kvindex.subscribe.sequencer.batches import AppliedBatches, HeldBatch, ReorderBuffer
from kvindex.subscribe.sequencer.values import (
    MANY_RESTARTS,
    MAX_COUNT,
    Action,
    AskReplay,
    Batch,
    CloseReplay,
    Cursor,
    RankBatch,
    RankLost,
    RankRestarted,
    ReplayPolicy,
    SequencerConfig,
)
from kvindex.wire.rank import Rank, State

MAX_REPLIES = 1_000_000
"""Replies to one request; a longer replay is cut and asked for again from where it stood."""

MAX_IDLE_REPLIES = 100_000
"""Replies in a row that bring nothing new."""

MAX_IDLE_TIMEOUTS = 10
"""How many replay time-outs may pass with replies that bring nothing new."""

MAX_PROBE_FACTOR = 8
"""A replay endpoint that does not answer probes is probed this much more rarely."""

MAX_DISPUTES = 3
"""How often in a row replay may deny live batches until it counts as another publisher's."""


class Replay:
    """The facts about a publisher's replay endpoint, over all repairs. Owner: one sequencer."""

    def __init__(self, config: SequencerConfig, now: float) -> None:
        self.exists = config.has_replay
        # Whether the given endpoint is another publisher's, by all that it sent. It is asked now
        # and then, and its replies are compared and not applied.
        self.foreign = False
        # Whether it sent a batch that also arrived live, in this epoch and connection.
        self.paired = False
        # Whether the publisher keeps batches for replay; None while unknown.
        self.keeps: bool | None = None
        # Whether a replay must be asked after the current one, which began too early to show the
        # missing batches.
        self.wanted = False
        self.requests = 0  # how many were made; the number of the latest
        self.unanswered = 0  # how many in a row, up to now, had no reply
        # When the stream last brought a batch, or a replay showed that it is whole.
        self.quiet_since = now
        self._attempts = config.replay_policy.attempts
        self._probe_interval = config.probe_interval
        self._probe_factor = 1
        self._disputes = 0

    @property
    def usable(self) -> bool:
        """Whether replay can help: there is an endpoint, and it did not prove to be empty."""
        return self.exists and self.keeps is not False

    @property
    def probe_due(self) -> float:
        """When a stream that misses nothing is to be checked for a lost tail; inf if never."""
        if not (self.exists or self.foreign):
            return math.inf
        return self.quiet_since + self._probe_interval * self._probe_factor

    @property
    def trouble(self) -> str:
        """Why replay cannot help at present, for people; empty while it may."""
        if self.foreign:
            return "the replay endpoint is another publisher's, check replay="
        if not self.exists:
            return "no replay endpoint"
        if self.unanswered >= self._attempts:
            return f"the last {self.unanswered} replay requests were not answered"
        return "the publisher keeps no batches for replay" if self.keeps is False else ""

    def ended(self, now: float) -> None:
        """Record a replay that reached its end."""
        self.unanswered = 0
        self.quiet_since = now
        self._probe_factor = 1

    def pair(self, agreed: bool) -> None:
        """Record that replay and live batches agree, or that another publisher may answer now."""
        self.paired = agreed
        self._disputes = 0

    def dispute(self) -> bool:
        """Record that replay denied a live batch; return whether that was once too often."""
        self._disputes += 1
        return self._disputes >= MAX_DISPUTES

    def disown(self, foreign: bool) -> None:
        """Treat the endpoint as another publisher's from now on, or as this one's again."""
        self.foreign = foreign
        self.exists = not foreign
        self.pair(False)

    def probe_rarely(self) -> None:
        """Record that replay did not help: double the time between probes, up to a bound."""
        self._probe_factor = min(MAX_PROBE_FACTOR, 2 * self._probe_factor)


class Purpose(enum.Enum):
    """Why replay is asked."""

    JOIN = "join"
    """Nothing of this epoch was applied: everything that the publisher still has."""
    PROVE = "prove"
    """After a reconnect: is it the same publisher, and what was missed?"""
    GAP = "gap"
    """Batches are missing."""
    PROBE = "probe"
    """Nothing is known to be missing: was the last batch lost?"""


class Repair(msgspec.Struct):
    """The state of a repair: tries, back-off, time-outs and the replies to the open request."""

    purpose: Purpose
    policy: ReplayPolicy
    random: Random  # for the jitter of back-off
    applied: AppliedBatches  # whose count shows progress
    asked: int = 0  # requests in all
    tries: int = 0  # requests since the last progress
    request: int | None = None  # the open one; None between tries
    start_seq: int = 0  # the first seq that the latest request asked for
    due: float = 0.0  # when the open request times out, or the next one is to be made
    # Of the replies to the latest request, the damaged included:
    replies: int = 0
    first_seq: int | None = None
    highest_seq: int | None = None
    replied_at: float = 0.0  # or when it was asked
    until_end: bool = False  # whether only the end of a replay can show that nothing is missing
    applied_before: int = 0  # batches, before the latest request
    advanced_at: float = 0.0  # when a reply last brought something new
    idle_replies: int = 0  # replies since then

    @property
    def progress(self) -> bool:
        """Whether batches were applied since the latest request."""
        return self.applied.count != self.applied_before

    @property
    def exhausted(self) -> bool:
        """Whether all tries without progress are used up."""
        return self.tries >= self.policy.attempts

    def ask(self, request: int, start_seq: int, now: float) -> None:
        """Begin a try."""
        self.asked += 1
        self.tries += 1
        self.request = request
        self.start_seq = start_seq
        self.due = now + self.policy.timeout
        self.replies = self.idle_replies = 0
        self.first_seq = self.highest_seq = None
        self.applied_before = self.applied.count
        self.replied_at = self.advanced_at = now

    def saw(self, seq: int, now: float) -> None:
        """Note a reply, good or damaged, to the open request."""
        self.replies += 1
        self.replied_at = now
        self.due = now + self.policy.timeout
        if self.first_seq is None:
            self.first_seq = seq
        if self.highest_seq is None or seq > self.highest_seq:
            self.highest_seq = seq

    def judge(self, advanced: bool, now: float) -> bool:
        """Note whether the reply brought something new; return False when it is a flood."""
        if advanced:
            self.advanced_at = now
            self.idle_replies = 0
        else:
            self.idle_replies += 1
        return not (
            self.replies >= MAX_REPLIES
            or self.idle_replies >= MAX_IDLE_REPLIES
            or now - self.advanced_at > MAX_IDLE_TIMEOUTS * self.policy.timeout
        )

    def close_try(self) -> None:
        """End the open request; progress buys a fresh set of tries."""
        self.request = None
        if self.progress:
            self.tries = 0

    def back_off(self, now: float) -> None:
        """Set `due` to the next try: doubling from `backoff`, capped, less up to half of it."""
        # Less up to half: subscribers that lost the same engine must not ask in step.
        # The exponent is bounded too: a float power of thousands of tries would overflow.
        doublings = min(max(self.tries - 1, 0), 60)
        delay = min(self.policy.max_backoff, self.policy.backoff * 2.0**doublings)
        self.due = now + delay * self.random.uniform(0.5, 1.0)


_MOVES: Mapping[State, tuple[State, ...]] = {
    State.CONNECTING: (State.SYNCING, State.LIVE, State.CLOSED),
    State.SYNCING: (State.LIVE, State.REPAIRING, State.CONNECTING, State.CLOSED),
    State.LIVE: (State.SYNCING, State.REPAIRING, State.CONNECTING, State.CLOSED),
    State.REPAIRING: (State.LIVE, State.SYNCING, State.CONNECTING, State.CLOSED),
    State.CLOSED: (),
}
"""The states that may follow each state; a stale stream is LIVE here, with `is_stale`."""

_STATE_DURING: Mapping[Purpose, State] = {
    Purpose.JOIN: State.SYNCING,
    Purpose.PROVE: State.SYNCING,
    Purpose.GAP: State.REPAIRING,
    Purpose.PROBE: State.LIVE,
}
"""The state during a replay, by its purpose."""


class StreamState:
    """The facts about a stream, and its moves from state to state. Owner: one `Sequencer`."""

    def __init__(self, rank: Rank, config: SequencerConfig, now: float, random: Random) -> None:
        self.rank = rank
        self.config = config
        self.state = State.CONNECTING  # changed by a move only
        self.applied = AppliedBatches(recent=config.recent)
        self.held = ReorderBuffer(
            max_batches=config.max_held,
            max_bytes=config.max_held_bytes,
            # One replay may have been a moment too early.
            refuted_by=max(2, config.replay_policy.attempts),
        )
        self.replay = Replay(config, now)
        self.repair: Repair | None = None
        self.counters: Counter[str] = Counter()
        self.now = now  # of the latest entrance
        self.alive_at = now  # when the publisher last gave a sign of life
        self.is_stale = False  # whether that is too long ago
        self.refused = 0  # batches refused in a row for their age
        self.fell_back: deque[float] = deque(maxlen=MANY_RESTARTS)  # when, on this connection
        self.out: list[Action] = []  # what the sequencer's owner is to carry out next
        self._random = random
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
        syncing = self.state is State.SYNCING and repair is not None and repair.request is not None
        return self.replay.usable and (syncing or self.applied.start_in_doubt)

    @property
    def gap_due(self) -> float:
        """Without replay: when the hole in front is given up; inf while nothing waits behind one.

        No batch waits for longer than a time-out, however many holes are in front of it.
        """
        if self.state is not State.REPAIRING or self.replay.usable or self.applied.unproven:
            return math.inf
        since = self.held.waiting_since
        return math.inf if since is None else since + self.config.replay_policy.timeout

    # From state to state ----------------------------------------------------------------------

    def _be(self, state: State) -> None:
        assert state is self.state or state in _MOVES[self.state], (self.state, state)
        self.state = state

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

    def connect(self) -> None:
        """Join, or have the publisher prove that it is the same; without replay, be LIVE."""
        if self.state is not State.CONNECTING:
            self.disconnect()
        self.alive_at = self.replay.quiet_since = self.now
        if self.replay.exists:
            self.begin(Purpose.JOIN if self.applied.seq is None else Purpose.PROVE)
            return
        if self.applied.unproven:
            # Nothing can prove that the publisher is the same, nor which publisher sent the
            # batches since the connection broke.
            self.held.clear()
            self.restart("unproven_reconnect")
        self.go_live()

    def disconnect(self) -> None:
        """Be CONNECTING again; the next publisher may be another one."""
        self.counters["disconnects"] += 1
        self.fell_back.clear()  # an engine that restarts closes its connection
        self._disconnected_at = self.now
        self.abandon_repair()
        self.replay.pair(False)
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
        # Many of these on one connection show several publishers there, who do not share numbers.
        if reason == "seq_fell_back":
            self.fell_back.append(self.now)
        self.abandon_repair()
        self._begin_epoch(reason, trigger)
        # Held, not delivered: what the publisher sent before it may come by the join.
        if trigger is not None:
            self.hold(trigger)
        if self.state is State.CONNECTING:
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
            # Without replay nothing brings the new publisher's batches again: keep what may be its.
            oldest = trigger.ts
            self.held.discard(lambda entry: entry.batch.ts < oldest)
        self.held.forget_losses()
        self.applied.restart(trigger)
        self.refused = 0
        self.replay.wanted = self.replay.paired = False
        # The new publisher may keep batches though the old one did not.
        if self.replay.keeps is False:
            self.replay.keeps = None
        self.out.append(RankRestarted(self.rank, self.applied.epoch, reason))

    def disown_replay(self) -> None:
        """Go on with the live batches alone: the replay is another publisher's."""
        self.counters["foreign_replay"] += 1
        self.abandon_repair()
        self.replay.disown(foreign=True)
        self.held.discard(lambda entry: entry.confirmed)
        # Only a replay could prove that an earlier connection's batches are the same publisher's.
        broke_at = self._disconnected_at
        self.counters["held_dropped"] += self.held.discard(lambda e: e.arrived_at <= broke_at)
        first, applied = self.held.first, self.applied
        entry = self.held.get(first)
        if entry is None and applied.seq is not None and applied.arrived_live:
            first = applied.seq + 1
        self._begin_epoch("foreign_replay", None if entry is None else entry.batch)
        self.lose_join("foreign_replay", first)
        self.go_live()

    def begin(self, purpose: Purpose) -> None:
        """Begin a repair."""
        self.repair = Repair(purpose, self.config.replay_policy, self._random, self.applied)
        self._be(_STATE_DURING[purpose])
        self.ask(self.repair)

    def notice_gap(self) -> None:
        """Begin a repair if batches are missing and no repair runs."""
        if not (self.held or self.replay.wanted):
            return
        if not self.replay.usable:
            if self.state is not State.REPAIRING and self.held:
                self.counters["gaps"] += 1
                self._be(State.REPAIRING)
                if self.replay.foreign:
                    self.abandon_repair()  # a probe, which must not delay the end of the gap
        elif self.repair is None:
            self.counters["gaps"] += 1
            self.begin(Purpose.GAP)
        # A probe asks from the last applied batch on, as a repair does: it becomes one.
        elif self.repair.purpose is Purpose.PROBE:
            self.counters["gaps"] += 1
            self.repair.purpose = Purpose.GAP
            self._be(State.REPAIRING)

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
                self._be(State.LIVE)

    def go_live(self) -> None:
        """End the repair; deliver the batches that follow; look for a further gap."""
        self.abandon_repair()
        self._be(State.LIVE)
        if self.applied.unproven and (entry := self.held.get(self.held.first)) is not None:
            self.restart("unproven_reconnect", entry.batch)
            return
        # No join told where to start: so at what is there.
        if self.applied.next_seq is None and (start := self.held.hole_end) is not None:
            self.applied.start(start)
        self.drain()
        if not self.replay.usable:
            self.lose_damaged()
        self.notice_gap()

    def end(self) -> None:
        """End for good."""
        self.abandon_repair()
        self.held.clear()
        self._be(State.CLOSED)

    # Delivering -------------------------------------------------------------------------------

    def start_at(self, seq: int) -> None:
        """Start the epoch at the first batch that the publisher still has."""
        self.applied.start(seq)
        self.held.discard_below(seq)

    def deliver(self, batch: Batch, *, replayed: bool) -> None:
        """Deliver the next batch; where the epoch may start anywhere, start it there."""
        applied, replay = self.applied, self.replay
        starts_epoch = applied.seq is None
        if applied.next_seq is None:
            applied.start(batch.seq)
        self.held.pop(batch.seq)
        applied.apply(batch)
        if replayed:
            applied.replayed_to = batch.seq
            self.counters["replayed"] += 1
        self.counters["delivered"] += 1
        self.refused = 0
        if replay.paired and replay.usable:  # else check soon whose replay it is
            replay.quiet_since = self.now
        self.out.append(RankBatch(self.rank, applied.epoch, batch.seq, batch.content, replayed))
        if starts_epoch and replay.exists:  # stragglers of an earlier epoch may be held
            oldest = applied.oldest_ts
            self.counters["old_epoch"] += self.held.discard(
                lambda entry: not entry.confirmed and entry.batch.ts < oldest
            )

    def drain(self) -> None:
        """Deliver the held batches that follow; where replay decides, only those it contains."""
        while not self.applied.unproven:
            entry = self.held.get(self.applied.next_seq)
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
            # Two publishers' batches under one number: the later one is the living one's.
            self.counters["conflicting"] += 1
            if batch.ts < known.batch.ts:
                return False
        entry = HeldBatch(batch, self.now, self.replay.requests, confirmed)
        if self.held.add(entry):
            return True
        self._overflow(entry)
        return False

    def _overflow(self, entry: HeldBatch) -> None:
        """Drop the newest arrival, for replay to bring; without replay lose the gap before it."""
        seq = entry.batch.seq
        if self.replay.usable or self.state is State.CONNECTING:
            self.counters["held_dropped"] += 1
            self.replay.wanted = self.replay.usable
            self.held.dropped = max(self.held.dropped, seq)
            return
        self.lose_all_gaps("held_overflow")
        if seq < (self.applied.next_seq or 0):
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

    def discard_refuted(self) -> None:
        """Drop the held batches that enough replays ended without."""
        self.counters["unconfirmed"] += self.held.discard(self.held.is_refuted)

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
        """Declare the next batches lost as far as they arrived damaged."""
        while self.held.is_damaged(self.applied.next_seq):
            self.lose("undecodable")

    def lose_dropped(self) -> None:
        """Declare lost the batches that were dropped for want of room and are not sent again."""
        first, last = self.applied.next_seq, self.held.dropped
        if first is not None and first <= last and not len(self.held):
            self.applied.skip_to(last + 1)
            self._declare_lost("held_overflow", first, last)

    def _declare_lost(self, reason: str, first: int, last: int) -> None:
        self.counters["losses"] += 1
        lost = self.counters["lost_batches"] + last - first + 1
        self.counters["lost_batches"] = min(lost, MAX_COUNT)
        self.held.forget_damaged(last)
        reset = self.config.on_loss == "reset"
        self.out.append(RankLost(self.rank, self.applied.epoch, reason, first, last, reset))

    # Asking for replay ------------------------------------------------------------------------

    def ask(self, repair: Repair) -> None:
        """Make a request: from the last applied batch on."""
        replay = self.replay
        # With the last applied batch, which proves the publisher. Where nothing was kept so far,
        # everything: whatever it keeps by now may be another publisher's.
        start_seq = 0 if replay.keeps is False else self.applied.seq or 0
        replay.requests += 1
        repair.until_end |= replay.wanted
        replay.wanted = False
        repair.ask(replay.requests, start_seq, self.now)
        self.counters["replays_asked"] += 1
        self.out.append(AskReplay(replay.requests, start_seq))

    def close_request(self, repair: Repair) -> None:
        """End the open request, if there is one."""
        if repair.request is not None:
            self.out.append(CloseReplay(repair.request))
        repair.close_try()

    def abandon_repair(self) -> None:
        """End the repair, if there is one."""
        if self.repair is not None:
            self.close_request(self.repair)
            self.repair = None
