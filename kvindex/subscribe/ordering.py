"""The core of a sequencer: what is delivered, held, lost and asked for (see `sequencer`)."""

from __future__ import annotations

from collections import Counter
from random import Random

from sortedcontainers import SortedDict

from kvindex.subscribe.actions import Action, Ask, Batch, Deliver, Drop, Lost, Restarted
from kvindex.subscribe.applied import Applied
from kvindex.subscribe.config import SequencerConfig
from kvindex.subscribe.held import Held, HeldBatch
from kvindex.subscribe.repair import Purpose, Repair
from kvindex.subscribe.state import State

__all__ = ["Ordering"]

_MAX_COUNT = 2**63 - 1
"""No counter passes this: a publisher chooses its numbers, and 64 bits must hold their sum."""


class Ordering:
    """Moves the cursor: every change of it, and every action, is made here."""

    def __init__(
        self, config: SequencerConfig, *, now: float, random: Random | None = None
    ) -> None:
        self._config = config
        self._random = Random() if random is None else random
        self._now = now
        self._out: list[Action] = []
        self._counters: Counter[str] = Counter()
        self._state = State.CONNECTING
        self._applied = Applied(recent=config.recent)
        self._held = Held(max_batches=config.max_held, max_bytes=config.max_held_bytes)
        # Seqs from next_seq on whose batches came damaged, and when.
        self._broken: SortedDict[int, float] = SortedDict()
        self._repair: Repair | None = None
        self._last_request = 0
        # A replay must be asked after the current one: it was too early to show what is missing.
        self._ask_again = False
        # Disconnected since the publisher was last known to be the one applied so far.
        self._unproven = False
        # The first batch of the epoch needs replay's word: it may be a straggler of another one.
        self._doubt_start = False
        # Highest seq of a live batch dropped for want of room, -1 if none.
        self._dropped = -1
        # Whether the publisher keeps batches for replay: None until it is seen.
        self._buffering: bool | None = None
        # Replay requests in a row that nothing answered.
        self._unanswered = 0
        self._refused = 0
        self._quiet_since = now
        self._probe_factor = 1
        self._alive_at = now
        self._stale = False
        self._delivered_at: float | None = None

    def _leave(self) -> list[Action]:
        """Hand over the actions that have piled up."""
        out, self._out = self._out, []
        return out

    @property
    def _asks_replay(self) -> bool:
        """Whether replay can help: there is an endpoint, and it did not prove to be empty."""
        return self._config.has_replay and self._buffering is not False

    @property
    def _awaits_replay(self) -> bool:
        """Whether only batches that replay has may be delivered for now."""
        repair = self._repair
        syncing = self._state is State.SYNCING and repair is not None and repair.request is not None
        return self._asks_replay and (syncing or self._doubt_start)

    @property
    def _missing(self) -> bool:
        """Whether something is known, or must be suspected, to be missing."""
        return bool(self._held or self._broken or self._ask_again or self._unproven)

    @property
    def _first_behind(self) -> int | None:
        """The lowest seq that is held or came damaged: the hole ends there. None without any."""
        first = self._held.first
        if not self._broken:
            return first
        broken: int = self._broken.peekitem(0)[0]
        return broken if first is None else min(first, broken)

    @property
    def _gap_due(self) -> float | None:
        """Without replay: when the hole in front is given up; None while nothing waits behind one.

        No batch waits for longer than a time-out, however many holes are in front of it.
        """
        if self._state is not State.REPAIRING or self._asks_replay or self._unproven:
            return None
        waiting = [] if self._held.oldest is None else [self._held.oldest]
        if self._broken:
            waiting.append(self._broken.peekitem(0)[1])
        return min(waiting) + self._config.replay_policy.timeout if waiting else None

    def _begin(self, purpose: Purpose) -> None:
        self._repair = Repair(purpose, self._config.replay_policy)
        if purpose is Purpose.GAP:
            self._state = State.REPAIRING
        elif purpose is not Purpose.PROBE:
            self._state = State.SYNCING
        self._ask(self._repair)

    def _ask(self, repair: Repair) -> None:
        start_seq = 0 if self._buffering is False else self._applied.seq or 0
        self._last_request += 1
        repair.until_end |= self._ask_again
        self._ask_again = False
        repair.ask(self._last_request, start_seq, self._now)
        self._counters["replays_asked"] += 1
        self._out.append(Ask(self._last_request, start_seq))

    def _ask_later(self, repair: Repair) -> None:
        repair.back_off(self._random, self._now)

    def _close_request(self, repair: Repair) -> None:
        if repair.request is not None:
            self._out.append(Drop(repair.request))
        repair.close_try()

    def _abandon_request(self) -> None:
        if self._repair is not None:
            self._close_request(self._repair)
            self._repair = None

    def _hold(self, batch: Batch, *, confirmed: bool = False) -> bool:
        """Hold a batch that does not follow yet; return whether that brought something new."""
        known = self._held.get(batch.seq)
        if known is not None and known.batch.fingerprint == batch.fingerprint:
            if not confirmed:
                self._counters["duplicates"] += 1
            known.confirmed |= confirmed
            return False
        if known is not None:
            self._counters["conflicting"] += 1
            if batch.ts < known.batch.ts:
                return False
        self._broken.pop(batch.seq, None)
        entry = HeldBatch(
            batch, asked=self._last_request, confirmed=confirmed, arrived_at=self._now
        )
        if self._held.add(entry):
            return True
        self._overflow(entry)
        return False

    def _overflow(self, entry: HeldBatch) -> None:
        """Drop the newest arrival for replay to bring; without replay lose the gap before it."""
        batch = entry.batch
        if self._asks_replay or self._state is State.CONNECTING:
            self._counters["held_dropped"] += 1
            self._ask_again = self._asks_replay
            self._dropped = max(self._dropped, batch.seq)
        else:
            self._lose_all_gaps("held_overflow")
            if batch.seq < (self._applied.next_seq or 0):
                self._counters["delayed"] += 1
                return
            self._held.add(entry)
            self._drain()
            self._notice_gap()

    def _deliver(self, batch: Batch, *, replayed: bool) -> None:
        """Deliver the next batch."""
        starts_epoch = self._applied.seq is None
        self._applied.apply(batch)
        self._counters["delivered"] += 1
        self._counters["replayed"] += replayed
        self._note_delivery()
        self._doubt_start = False
        self._broken.pop(batch.seq, None)
        if self._repair is not None:
            self._repair.progress = True
        self._out.append(Deliver(batch, replayed))
        if starts_epoch and self._config.has_replay:
            self._counters["old_epoch"] += self._held.discard(self._is_straggler)

    def _note_delivery(self) -> None:
        self._delivered_at = self._now
        self._refused = 0
        if self._buffering is not False:
            self._quiet_since = self._now

    def _prove_life(self) -> None:
        self._alive_at = self._now
        self._stale = False

    def _is_straggler(self, entry: HeldBatch) -> bool:
        """Return whether a held batch is older than the epoch and no replay has it."""
        return not entry.confirmed and entry.batch.ts < self._applied.oldest_ts

    def _drain(self) -> None:
        """Deliver the held batches that follow."""
        while not self._unproven and (seq := self._applied.next_seq) is not None:
            entry = self._held.get(seq)
            if entry is None or (self._awaits_replay and not entry.confirmed):
                return
            self._held.pop(seq)
            self._deliver(entry.batch, replayed=entry.confirmed)

    def _after_advance(self) -> None:
        """Be live again as soon as a gap has closed; the open request goes on as a probe."""
        repair = self._repair
        if repair is None:
            if self._state is State.REPAIRING and not self._held:
                self._go_live()
        elif repair.purpose is Purpose.GAP and not repair.until_end and not self._missing:
            if repair.request is None:
                self._go_live()
            else:
                repair.purpose = Purpose.PROBE
                self._state = State.LIVE

    def _go_live(self) -> None:
        """End the repair; deliver what can be; look for a further gap."""
        self._abandon_request()
        self._state = State.LIVE
        if self._unproven and (first := self._held.first) is not None:
            entry = self._held.get(first)
            assert entry is not None
            self._restart("unproven_reconnect", entry.batch)
            return
        if self._applied.next_seq is None and (first := self._first_behind) is not None:
            self._applied.start(first)
        self._drain()
        if not self._asks_replay:
            self._lose_broken_next()
        self._notice_gap()

    def _notice_gap(self) -> None:
        """Begin to repair if something is missing and no repair runs."""
        if not (self._held or self._broken or self._ask_again):
            return
        if not self._asks_replay:
            if self._state is not State.REPAIRING and (self._held or self._broken):
                self._counters["gaps"] += 1
                self._state = State.REPAIRING
        elif self._repair is None:
            self._counters["gaps"] += 1
            self._begin(Purpose.GAP)
        elif self._repair.purpose is Purpose.PROBE:
            self._counters["gaps"] += 1
            self._repair.purpose = Purpose.GAP
            self._state = State.REPAIRING

    def _lose(self, reason: str) -> None:
        """Declare the hole at the next expected seq lost."""
        first = last = self._applied.next_seq
        if first is None or last is None:
            return
        if first in self._broken:
            reason = "undecodable"
            while last + 1 in self._broken:
                last += 1
        else:
            behind = self._first_behind
            last = first if behind is None else behind - 1
        self._applied.skip_to(last + 1)
        self._declare(reason, first, last)

    def _lose_all_gaps(self, reason: str) -> None:
        """Deliver everything held, with a loss at each hole."""
        if self._unproven:
            return
        if self._applied.next_seq is None and (first := self._held.first) is not None:
            self._applied.start(first)
        self._drain()
        while self._held or self._broken:
            self._lose(reason)
            self._drain()

    def _lose_overdue(self) -> None:
        """Without replay: lose every hole behind which something has waited for a time-out."""
        while (due := self._gap_due) is not None and self._now >= due:
            self._lose("gap_without_replay")
            self._go_live()

    def _lose_broken_next(self) -> None:
        """Without replay: a damaged batch that is the next one is lost at once."""
        while self._applied.next_seq in self._broken:
            self._lose("undecodable")
            self._drain()

    def _lose_dropped(self) -> None:
        """Declare what was dropped for want of room, and will not come again, lost."""
        first = self._applied.next_seq
        if first is not None and first <= self._dropped and not self._held:
            self._applied.skip_to(self._dropped + 1)
            self._declare("held_overflow", first, self._dropped)

    def _declare(self, reason: str, first: int, last: int) -> None:
        self._counters["losses"] += 1
        lost = self._counters["lost_batches"] + last - first + 1
        self._counters["lost_batches"] = min(lost, _MAX_COUNT)
        for seq in list(self._broken.irange(maximum=last)):
            del self._broken[seq]
        self._out.append(Lost(reason, first, last, self._config.on_loss == "reset"))

    def _restart(self, reason: str, trigger: Batch | None = None, *, resync: bool = True) -> None:
        """Begin a new epoch; with `resync`, by a join."""
        self._counters["restarts"] += 1
        self._abandon_request()
        if self._config.has_replay:
            self._held.clear()
        elif trigger is not None:
            oldest = trigger.ts
            self._held.discard(lambda entry: entry.batch.ts < oldest)
        self._applied.restart(trigger)
        self._broken.clear()
        self._unproven = self._ask_again = False
        self._doubt_start = False
        self._dropped = -1
        self._refused = 0
        if self._buffering is False:
            self._buffering = None
        self._out.append(Restarted(self._applied.epoch, reason))
        if trigger is not None:
            self._hold(trigger)
        if self._state is State.CONNECTING:
            return
        if self._config.has_replay and resync:
            self._begin(Purpose.JOIN)
        else:
            self._go_live()
