"""Decides what each reply, end and failure of a replay request means for the stream."""

from __future__ import annotations

from kvindex.subscribe.sequencer.machine import Machine
from kvindex.subscribe.sequencer.repair import Purpose, Repair
from kvindex.subscribe.sequencer.values import Batch

__all__ = ["Repairing"]


class Repairing(Machine):
    """Accepts the replies of replay, tries again, and gives up; a part of `Sequencer`."""

    def _accept_reply(self, repair: Repair, batch: Batch) -> None:
        """Accept a reply to the open request."""
        self.replay.unanswered = 0
        repair.saw(batch.seq, self.now)
        if self.replay.foreign:
            self._compare(batch)
        else:
            self._stop_flood(repair, advanced=self._judge_reply(repair, batch))

    def _accept_damaged_reply(self, repair: Repair, seq: int | None) -> None:
        """Record a reply that cannot be read, with its seq where legible."""
        self.counters["damaged"] += 1
        if self.replay.foreign:
            self._stay_without()
            return
        if seq is not None:
            repair.saw(seq, self.now)
            self.note_damaged(seq)
        self._stop_flood(repair, advanced=False)

    def _accept_end(self, repair: Repair, request: int) -> None:
        """Record the end of the open request."""
        self.counters["replays_ended"] += 1
        self.replay.ended(self.now)
        self.close_request(repair)
        if self.replay.foreign:
            self._stay_without()
            return
        overlaps = repair.highest_seq == repair.start_seq and not repair.progress
        self.held.testify(request, ends_at=repair.start_seq if overlaps else None)
        self._judge_end(repair)

    def _fail(self, repair: Repair) -> None:
        """Record that the socket of the open request failed."""
        self.counters["replays_failed"] += 1
        self.replay.unanswered += not repair.replies
        self._retry_or_give_up(repair, "replay_failed")

    def _time_out(self, repair: Repair) -> None:
        """Make the next try, or end a try that nothing has answered for too long."""
        if repair.request is None:
            self.ask(repair)
            return
        self.counters["replay_timeouts"] += 1
        self.replay.unanswered += not repair.replies
        self._retry_or_give_up(repair, "replay_timeout")

    # A replay that is another publisher's -------------------------------------------------------

    def _compare(self, batch: Batch) -> None:
        """Use replay again if it sends the batch that came live under this number."""
        if self.applied.recognise(batch):
            self.replay.disown(foreign=False)
            self.restart("replay_agrees")
        else:
            self._stay_without()

    def _stay_without(self) -> None:
        """Ask again later, and later each time."""
        self.replay.probe_rarely()
        self.replay.quiet_since = self.now
        self.abandon_repair()

    # What a reply shows -----------------------------------------------------------------------

    def _judge_reply(self, repair: Repair, batch: Batch) -> bool:
        """Judge a reply; return whether it brought something new."""
        applied, replay = self.applied, self.replay
        if batch.seq < repair.start_seq:
            self.counters["below_start"] += 1
            return False
        was_empty, replay.keeps = replay.keeps is False, True
        if was_empty and applied.seq is not None:
            # Batches accepted unproven while replay was empty may be another publisher's.
            self.restart("replay_awoke")
            return True
        if applied.next_seq is None:
            self._join_at(batch)
        if applied.next_seq is not None and batch.seq < applied.next_seq:
            return self._check_overlap(batch)
        if applied.unproven:
            self._judge_missing_overlap(repair)
            return True
        if self.held.contradicts(batch):  # the replay is a dead publisher's, or another's
            self.counters["conflicting"] += 1
            self.counters["replays_failed"] += 1
            if self.held.precedes(batch.seq, replay.requests) and replay.dispute():
                self.disown_replay()
            else:
                self._retry_or_give_up(repair, "replay_failed")
            return True
        return self._accept_following(repair, batch)

    def _join_at(self, batch: Batch) -> None:
        """Begin the epoch with the first batch in replay, or with a held run before it."""
        seq = batch.seq
        if self.applied.epoch == 0 and not self.counters["disconnects"]:
            seq = self.held.start_of_run(seq)
        self.counters["join_truncated"] += seq > 0
        self.start_at(seq)
        if seq < batch.seq:
            self.drain()

    def _check_overlap(self, batch: Batch) -> bool:
        """Compare a reply with the batch that was applied under its seq: the proof of identity."""
        recognised = self.applied.recognise(batch)
        if recognised is False:
            self._restart_or_disown("overlap_differs")
            return True
        if recognised and batch.seq > self.applied.replayed_to:
            self.replay.agreed()
        if recognised and self.applied.unproven:
            self.prove()
            return True
        return False

    def _restart_or_disown(self, reason: str) -> None:
        """Begin a new epoch, unless replay has denied live batches once too often."""
        applied = self.applied
        came_live = applied.seq is not None and applied.seq > applied.replayed_to
        if came_live and not applied.unproven and self.replay.dispute():
            self.disown_replay()
        else:
            self.restart(reason)

    def _judge_missing_overlap(self, repair: Repair) -> None:
        """Judge a proof that begins too late: its overlap was lost, or has left the buffer."""
        if repair.exhausted:
            # The buffer has wrapped past the overlap, and nothing shows which publisher sent.
            self.restart("unproven_reconnect")
        else:
            self.counters["overlaps_missed"] += 1
            self.close_request(repair)
            self.ask_later(repair)

    def _accept_following(self, repair: Repair, batch: Batch) -> bool:
        if self.held.equals(batch):
            self.replay.agreed()
        if batch.seq != self.applied.next_seq:
            advanced = self.hold(batch, confirmed=True)
            self.notice_gap()
            return advanced
        self.counters["tail_repaired"] += repair.purpose is Purpose.PROBE
        self.deliver(batch, replayed=True)
        self.drain()
        self.after_advance()
        return True

    def _stop_flood(self, repair: Repair, *, advanced: bool) -> None:
        """Abandon a request whose replies go on for ever without bringing anything."""
        still_open = self.repair is repair and repair.request is not None
        if not repair.judge(advanced, self.now) and still_open:
            self.counters["replay_flood"] += 1
            self._retry_or_give_up(repair, "replay_failed")

    # What the end of a replay shows -----------------------------------------------------------

    def _judge_end(self, repair: Repair) -> None:
        """Judge a replay that has ended."""
        if repair.highest_seq is None and self.applied.seq is None:
            self._judge_empty_end(repair)
        elif repair.highest_seq is None or repair.highest_seq < repair.start_seq:
            self._judge_end_below(repair)
        elif self.held.is_any_denied() and self.replay.dispute():
            self.disown_replay()
        else:
            self.counters["unconfirmed"] += self.held.discard_refuted()
            self.drain()
            self._finish_or_retry(repair)

    def _judge_empty_end(self, repair: Repair) -> None:
        """Judge an empty replay with nothing applied: nothing was published, or nothing is kept."""
        first = self.held.first
        if first is None or (first == 0 and not self.applied.start_in_doubt):
            if self.applied.next_seq is None:
                self.start_at(0)
            self.drain()
            self._finish_or_retry(repair)
        elif not self.held.is_refuted(first):
            self.ask_later(repair)
        elif self.replay.keeps:
            self.counters["unconfirmed"] += self.held.discard_refuted()
            self.replay.keeps = None
            self._judge_empty_end(repair)
        else:
            self.counters["replay_empty"] += 1
            self.replay.keeps = False
            self.forget_start()
            self.go_live()
            self.lose_dropped()

    def _judge_end_below(self, repair: Repair) -> None:
        """Judge a replay that ended below what was applied: a restart, or nothing is kept."""
        if self.replay.keeps or self.applied.unproven:
            self._restart_or_disown("replay_ends_below")
        elif self.replay.keeps is None:
            # Its buffer never sent a batch: ask from 0 whether there is one at all.
            self.replay.keeps = False
            self.ask(repair)
        else:
            self.counters["replay_empty"] += 1
            self.go_live()

    # Trying again, and giving up --------------------------------------------------------------

    def _finish_or_retry(self, repair: Repair) -> None:
        """Go on after a replay that ended: LIVE if nothing is missing, else ask again."""
        # A batch behind a hole shows where it ends, or identity could not be proven.
        hole_known = self.held or self.applied.unproven
        # The batch behind the hole may still prove to be bogus.
        damaged = self.held.is_damaged(self.applied.next_seq)
        awaits_evidence = not damaged and self.held.is_first_unconfirmed()
        if not self.missing:
            self.held.dropped = -1
            self.go_live()
        elif repair.progress:
            self.ask(repair)
        elif not repair.exhausted or awaits_evidence or not hole_known:
            self.ask_later(repair)
        else:
            self._give_up(repair, self._name_hole(repair))

    def _retry_or_give_up(self, repair: Repair, reason: str) -> None:
        """Go on after a request that failed."""
        self.close_request(repair)
        if repair.purpose is Purpose.PROBE and not self.missing:
            self.counters["probes_failed"] += 1
            self._stay_without()
        elif not repair.exhausted:
            self.ask_later(repair)
        else:
            self._give_up(repair, reason)

    def _give_up(self, repair: Repair, reason: str) -> None:
        """Go on without the batches that replay did not bring."""
        self.counters["repairs_given_up"] += 1
        self.replay.probe_rarely()
        if self.applied.unproven:
            self.restart("unproven_reconnect", resync=reason == "undecodable")
            return
        self.trust_live()
        if self.applied.next_seq is None:
            self.lose_join(f"join_{reason}", self.held.first)
            self.drain()
        if reason in ("replay_timeout", "replay_failed"):
            # No reply comes: each further hole would cost as much time for nothing.
            self.replay.wanted = False
            self.lose_all_gaps(reason)
            self.lose_dropped()
        else:
            # All tries asked from the same seq on, so they were tries for each hole known before.
            first_try = self.replay.requests + 1 - repair.tries
            self.lose(reason)
            while self.held.is_hole_older_than(first_try):
                self.lose(self._name_hole(repair))
        if self.missing:
            repair.tries = 0
            self.ask(repair)
        else:
            self.go_live()

    def _name_hole(self, repair: Repair) -> str:
        """Return why replay could not fill the hole at the next expected seq."""
        next_seq = self.applied.next_seq
        if self.held.is_damaged(next_seq):
            return "undecodable"
        begins_behind = next_seq is not None and (repair.first_seq or 0) > next_seq
        return "evicted" if begins_behind else "unreplayable"
