"""Replay as evidence: what replies, ends and failures of requests say (see `sequencer`)."""

from __future__ import annotations

from kvindex.subscribe.actions import Batch
from kvindex.subscribe.ordering import Ordering
from kvindex.subscribe.repair import Purpose, Repair

__all__ = ["Repairing"]

MAX_PROBE_FACTOR = 8
"""A replay endpoint that does not answer probes is probed this much more rarely."""


class Repairing(Ordering):
    """Judges replies and ends of replay, tries again, and gives up."""

    def _take_reply(self, repair: Repair, batch: Batch) -> bool:
        """Take a reply to the open request; return whether it brought something new."""
        if batch.seq < repair.start_seq:
            self._counters["below_start"] += 1
            return False
        if self._buffering is False and self._applied.seq is not None:
            # What was taken on trust while replay was empty may be another publisher's.
            self._buffering = True
            self._restart("replay_awoke")
            return True
        self._buffering = True
        if self._applied.next_seq is None:
            self._start_at(batch)
        next_seq = self._applied.next_seq
        if next_seq is not None and batch.seq < next_seq:
            return self._check_overlap(batch)
        if self._unproven:
            self._take_reply_without_overlap(repair)
            return True
        if self._contradicts_held(batch):
            self._counters["conflicting"] += 1
            self._counters["replays_failed"] += 1
            self._close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")
            return True
        return self._take_following_reply(batch)

    def _take_reply_without_overlap(self, repair: Repair) -> None:
        """Judge a proof that begins too late: its overlap was lost, or has left the buffer."""
        if repair.exhausted:
            # The buffer has wrapped past the overlap while nobody could see who was sending.
            self._restart("unproven_reconnect")
        else:
            self._counters["overlaps_missed"] += 1
            self._close_request(repair)
            self._ask_later(repair)

    def _start_at(self, batch: Batch) -> None:
        """Begin the epoch with the first batch that replay has, or with a held run before it."""
        seq = batch.seq
        if self._applied.epoch == 0 and not self._counters["disconnects"]:
            seq = self._held.start_of_run(seq)
        self._applied.start(seq)
        if seq > 0:
            self._counters["join_truncated"] += 1
        self._held.discard_below(seq)
        if seq < batch.seq:
            self._drain()

    def _check_overlap(self, batch: Batch) -> bool:
        """Compare a reply with what was applied under its seq: the proof of identity."""
        recognised = self._applied.recognise(batch)
        if recognised is False:
            self._restart("overlap_differs")
            return True
        if recognised and self._unproven:
            self._unproven = False
            self._drain()
            return True
        return False

    def _contradicts_held(self, batch: Batch) -> bool:
        """Return whether a newer live batch of that seq shows the replay to be a dead one's."""
        entry = self._held.get(batch.seq)
        return (
            entry is not None
            and entry.batch.fingerprint != batch.fingerprint
            and entry.batch.ts > batch.ts
        )

    def _take_following_reply(self, batch: Batch) -> bool:
        self._broken.pop(batch.seq, None)
        if batch.seq != self._applied.next_seq:
            advanced = self._hold(batch, confirmed=True)
            self._notice_gap()
            return advanced
        if self._repair is not None and self._repair.purpose is Purpose.PROBE:
            self._counters["tail_repaired"] += 1
        self._held.pop(batch.seq)
        self._deliver(batch, replayed=True)
        self._drain()
        self._after_advance()
        return True

    def _note_broken(self, seq: int) -> None:
        """Remember a damaged batch as a hole at its seq."""
        next_seq = self._applied.next_seq
        if next_seq is None:
            if self._asks_replay:
                self._applied.start(seq)
                self._held.discard_below(seq)
                self._drain()
            next_seq = self._applied.next_seq or seq
        if seq >= next_seq and seq not in self._held and len(self._broken) < self._config.max_held:
            self._broken.setdefault(seq, self._now)

    def _stop_flood(self, repair: Repair, advanced: bool) -> None:
        """Abandon a request whose replies go on for ever without bringing anything."""
        still_open = self._repair is repair and repair.request is not None
        if not repair.judge(advanced, self._now) and still_open:
            self._counters["replay_flood"] += 1
            self._close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")

    def _take_end(self, repair: Repair, request: int) -> None:
        """Judge a replay that has ended."""
        self._probe_factor = 1
        self._quiet_since = self._now
        self._held.testify(request)
        if repair.highest_seq is None and self._applied.seq is None:
            self._take_empty_end(repair)
        elif repair.highest_seq is None or repair.highest_seq < repair.start_seq:
            self._take_end_below(repair)
        else:
            self._discard_unconfirmed()
            self._drain()
            self._finish_or_retry(repair)

    def _take_empty_end(self, repair: Repair) -> None:
        """Judge an empty replay with nothing applied: nothing was published, or nothing is kept."""
        first = self._held.first
        if first is None or (first == 0 and not self._doubt_start):
            if self._applied.next_seq is None:
                self._applied.start(0)
            self._drain()
            self._finish_or_retry(repair)
        elif self._held_missed(first):
            if self._buffering:
                self._discard_unconfirmed()
                self._buffering = None
                self._take_empty_end(repair)
            else:
                self._counters["replay_empty"] += 1
                self._buffering = False
                if self._applied.next_seq == 0:
                    self._applied.forget_start()
                self._go_live()
                self._lose_dropped()
        else:
            self._ask_later(repair)

    def _take_end_below(self, repair: Repair) -> None:
        """Judge a replay that ended below what was applied: a restart, or nothing is kept."""
        if self._buffering or self._unproven:
            self._restart("replay_ends_below")
        elif self._buffering is None:
            # Nothing was ever seen from its buffer: ask from 0 whether there is one at all.
            self._buffering = False
            self._ask(repair)
        else:
            self._counters["replay_empty"] += 1
            self._go_live()

    def _repair_due(self, repair: Repair) -> None:
        if repair.request is None:
            self._ask(repair)
            return
        self._counters["replay_timeouts"] += 1
        self._unanswered += not repair.replies
        self._close_request(repair)
        self._retry_or_give_up(repair, "replay_timeout")

    def _finish_or_retry(self, repair: Repair) -> None:
        """Go on after a replay that ended: live if nothing is missing, else ask again."""
        if not self._missing:
            self._dropped = -1
            self._go_live()
        elif repair.progress:
            self._ask(repair)
        elif not repair.exhausted or self._awaits_evidence or not self._hole_known:
            self._ask_later(repair)
        else:
            self._give_up(repair, self._name_hole(repair))

    def _retry_or_give_up(self, repair: Repair, reason: str) -> None:
        """Go on after a request that failed."""
        if repair.purpose is Purpose.PROBE and not self._missing:
            self._counters["probes_failed"] += 1
            self._probe_factor = min(MAX_PROBE_FACTOR, 2 * self._probe_factor)
            self._quiet_since = self._now
            self._repair = None
        elif not repair.exhausted:
            self._ask_later(repair)
        else:
            self._give_up(repair, reason)

    def _give_up(self, repair: Repair, reason: str) -> None:
        """Go on without what replay did not bring."""
        self._counters["repairs_given_up"] += 1
        self._probe_factor = min(MAX_PROBE_FACTOR, 2 * self._probe_factor)
        if self._unproven:
            self._restart("unproven_reconnect", resync=reason == "undecodable")
            return
        self._doubt_start = False
        self._drain()
        if self._applied.next_seq is None:
            self._lose_join(f"join_{reason}")
            self._drain()
        if reason in ("replay_timeout", "replay_failed"):
            # Nobody answers: each further hole would cost as much time for nothing.
            self._ask_again = False
            self._lose_all_gaps(reason)
            self._lose_dropped()
        else:
            first_try = self._last_request + 1 - repair.tries
            self._lose(reason)
            self._drain()
            while self._missed_since(first_try):
                self._lose(self._name_hole(repair))
                self._drain()
        if self._missing:
            repair.tries = 0
            self._ask(repair)
        else:
            self._go_live()

    def _missed_since(self, first_try: int) -> bool:
        """Return whether every try from `first_try` on could have filled the hole in front.

        All of them asked from the same seq on, so they were tries for each hole known before them.
        """
        first = self._held.first
        if first is None or first != self._first_behind:
            return False
        entry = self._held.get(first)
        assert entry is not None
        return entry.confirmed and entry.asked < first_try

    def _lose_join(self, reason: str) -> None:
        """Start behind what a dead replay endpoint did not bring; with nothing held, anywhere."""
        first = self._held.first
        if first is None:
            return
        self._applied.start(first)
        if first > 0:
            self._declare(reason, 0, first - 1)

    @property
    def _hole_known(self) -> bool:
        """Whether something behind a hole tells where it ends, or identity could not be proven."""
        return bool(self._held or self._broken or self._unproven)

    @property
    def _awaits_evidence(self) -> bool:
        """Whether the batch behind the hole may still prove to be bogus."""
        if self._applied.next_seq in self._broken or self._held.first is None:
            return False
        entry = self._held.get(self._held.first)
        return entry is not None and not entry.confirmed

    @property
    def _enough_evidence(self) -> int:
        """How many replays without a held batch refute it: one may have been a moment too early."""
        return max(2, self._config.replay_policy.attempts)

    def _held_missed(self, seq: int) -> bool:
        """Return whether enough replays ended without the held batch."""
        entry = self._held.get(seq)
        return entry is not None and entry.missed >= self._enough_evidence

    def _discard_unconfirmed(self) -> None:
        enough = self._enough_evidence
        dropped = self._held.discard(lambda entry: entry.missed >= enough)
        self._counters["unconfirmed"] += dropped

    def _name_hole(self, repair: Repair) -> str:
        """Return why replay could not fill the hole at the next expected seq."""
        next_seq = self._applied.next_seq
        if next_seq in self._broken:
            return "undecodable"
        begins_behind = next_seq is not None and (repair.first_seq or 0) > next_seq
        return "evicted" if begins_behind else "unreplayable"
