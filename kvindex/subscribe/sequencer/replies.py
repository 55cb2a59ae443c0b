"""Decides what each reply, end and failure of a replay request means for the stream."""

from __future__ import annotations

from kvindex.subscribe.sequencer.machine import Machine
from kvindex.subscribe.sequencer.repair import Purpose, Repair
from kvindex.subscribe.sequencer.values import Batch

__all__ = ["Replies"]


class Replies:
    """Accepts the replies of replay, tries again, and gives up. Owner: one sequencer."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._applied = machine.applied
        self._held = machine.held
        self._replay = machine.replay
        self._counters = machine.counters

    def take(self, repair: Repair, batch: Batch) -> None:
        """Accept a reply to the open request."""
        self._replay.unanswered = 0
        repair.saw(batch.seq, self._machine.now)
        if self._replay.foreign:
            self._compare(batch)
            return
        self._stop_flood(repair, advanced=self._take(repair, batch))

    def take_damaged(self, repair: Repair, seq: int | None) -> None:
        """Record a reply that cannot be read, with its seq where legible."""
        self._counters["damaged"] += 1
        if self._replay.foreign:
            self._stay_without()
            return
        if seq is not None:
            repair.saw(seq, self._machine.now)
            self._machine.note_damaged(seq)
        self._stop_flood(repair, advanced=False)

    def end(self, repair: Repair, request: int) -> None:
        """Record the end of the open request."""
        self._counters["replays_ended"] += 1
        self._replay.ended(self._machine.now)
        self._machine.close_request(repair)
        if self._replay.foreign:
            self._stay_without()
            return
        overlaps = repair.highest_seq == repair.start_seq and not repair.progress
        self._held.testify(request, ends_at=repair.start_seq if overlaps else None)
        self._take_end(repair)

    def fail(self, repair: Repair) -> None:
        """Record that the socket of the open request failed."""
        self._counters["replays_failed"] += 1
        self._replay.unanswered += not repair.replies
        self._machine.close_request(repair)
        self._retry_or_give_up(repair, "replay_failed")

    def time_out(self, repair: Repair) -> None:
        """Make the next try, or end a try that nothing has answered for too long."""
        if repair.request is None:
            self._machine.ask(repair)
            return
        self._counters["replay_timeouts"] += 1
        self._replay.unanswered += not repair.replies
        self._machine.close_request(repair)
        self._retry_or_give_up(repair, "replay_timeout")

    # A replay that is another publisher's -------------------------------------------------------

    def _compare(self, batch: Batch) -> None:
        """Use replay again if it sends the batch that came live under this number."""
        if self._applied.recognise(batch):
            self._replay.disown(foreign=False)
            self._machine.restart("replay_agrees")
        else:
            self._stay_without()

    def _stay_without(self) -> None:
        """Ask again later, and later each time."""
        self._replay.probe_rarely()
        self._replay.quiet_since = self._machine.now
        self._machine.abandon_repair()

    # What a reply shows -----------------------------------------------------------------------

    def _take(self, repair: Repair, batch: Batch) -> bool:
        """Accept a reply; return whether it brought something new."""
        applied = self._applied
        if batch.seq < repair.start_seq:
            self._counters["below_start"] += 1
            return False
        if self._replay.keeps is False and applied.seq is not None:
            # Batches accepted unproven while replay was empty may be another publisher's.
            self._replay.keeps = True
            self._machine.restart("replay_awoke")
            return True
        self._replay.keeps = True
        if applied.next_seq is None:
            self._start_at(batch)
        if applied.next_seq is not None and batch.seq < applied.next_seq:
            return self._check_overlap(batch)
        if applied.unproven:
            self._take_reply_without_overlap(repair)
            return True
        if self._held.contradicts(batch):  # the replay is a dead publisher's, or another's
            self._counters["conflicting"] += 1
            self._counters["replays_failed"] += 1
            if self._held.precedes(batch.seq, self._replay.requests) and self._replay.dispute():
                self._machine.disown_replay()
                return True
            self._machine.close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")
            return True
        return self._take_following_reply(repair, batch)

    def _start_at(self, batch: Batch) -> None:
        """Begin the epoch with the first batch in replay, or with a held run before it."""
        seq = batch.seq
        if self._applied.epoch == 0 and not self._counters["disconnects"]:
            seq = self._held.start_of_run(seq)
        self._applied.start(seq)
        if seq > 0:
            self._counters["join_truncated"] += 1
        self._held.discard_below(seq)
        if seq < batch.seq:
            self._machine.drain()

    def _check_overlap(self, batch: Batch) -> bool:
        """Compare a reply with the batch that was applied under its seq: the proof of identity."""
        recognised = self._applied.recognise(batch)
        if recognised is False:
            self._restart("overlap_differs")
            return True
        if recognised and batch.seq > self._applied.replayed_to:
            self._replay.agreed()
        if recognised and self._applied.unproven:
            self._applied.unproven = False
            self._machine.drain()
            return True
        return False

    def _restart(self, reason: str) -> None:
        """Begin a new epoch, unless replay has denied live batches once too often."""
        applied = self._applied
        came_live = applied.seq is not None and applied.seq > applied.replayed_to
        if came_live and not applied.unproven and self._replay.dispute():
            self._machine.disown_replay()
        else:
            self._machine.restart(reason)

    def _take_reply_without_overlap(self, repair: Repair) -> None:
        """Judge a proof that begins too late: its overlap was lost, or has left the buffer."""
        if repair.exhausted:
            # The buffer has wrapped past the overlap, and nothing shows which publisher sent.
            self._machine.restart("unproven_reconnect")
        else:
            self._counters["overlaps_missed"] += 1
            self._machine.close_request(repair)
            self._machine.ask_later(repair)

    def _take_following_reply(self, repair: Repair, batch: Batch) -> bool:
        if self._held.equals(batch):
            self._replay.agreed()
        if batch.seq != self._applied.next_seq:
            advanced = self._machine.hold(batch, confirmed=True)
            self._machine.notice_gap()
            return advanced
        if repair.purpose is Purpose.PROBE:
            self._counters["tail_repaired"] += 1
        self._machine.deliver(batch, replayed=True)
        self._machine.drain()
        self._machine.after_advance()
        return True

    def _stop_flood(self, repair: Repair, *, advanced: bool) -> None:
        """Abandon a request whose replies go on for ever without bringing anything."""
        still_open = self._machine.repair is repair and repair.request is not None
        if not repair.judge(advanced, self._machine.now) and still_open:
            self._counters["replay_flood"] += 1
            self._machine.close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")

    # What the end of a replay shows -----------------------------------------------------------

    def _take_end(self, repair: Repair) -> None:
        """Judge a replay that has ended."""
        if repair.highest_seq is None and self._applied.seq is None:
            self._take_empty_end(repair)
        elif repair.highest_seq is None or repair.highest_seq < repair.start_seq:
            self._take_end_below(repair)
        else:
            if self._held.is_any_denied() and self._replay.dispute():
                self._machine.disown_replay()
                return
            self._counters["unconfirmed"] += self._held.discard_refuted()
            self._machine.drain()
            self._finish_or_retry(repair)

    def _take_empty_end(self, repair: Repair) -> None:
        """Judge an empty replay with nothing applied: nothing was published, or nothing is kept."""
        first = self._held.first
        if first is None or (first == 0 and not self._applied.start_in_doubt):
            if self._applied.next_seq is None:
                self._applied.start(0)
            self._machine.drain()
            self._finish_or_retry(repair)
        elif not self._held.is_refuted(first):
            self._machine.ask_later(repair)
        elif self._replay.keeps:
            self._counters["unconfirmed"] += self._held.discard_refuted()
            self._replay.keeps = None
            self._take_empty_end(repair)
        else:
            self._counters["replay_empty"] += 1
            self._replay.keeps = False
            if self._applied.next_seq == 0:
                self._applied.forget_start()
            self._machine.go_live()
            self._machine.lose_dropped()

    def _take_end_below(self, repair: Repair) -> None:
        """Judge a replay that ended below what was applied: a restart, or nothing is kept."""
        if self._replay.keeps or self._applied.unproven:
            self._restart("replay_ends_below")
        elif self._replay.keeps is None:
            # Its buffer never sent a batch: ask from 0 whether there is one at all.
            self._replay.keeps = False
            self._machine.ask(repair)
        else:
            self._counters["replay_empty"] += 1
            self._machine.go_live()

    # Trying again, and giving up --------------------------------------------------------------

    def _finish_or_retry(self, repair: Repair) -> None:
        """Go on after a replay that ended: LIVE if nothing is missing, else ask again."""
        # A batch behind a hole shows where it ends, or identity could not be proven.
        hole_known = self._held or self._applied.unproven
        # The batch behind the hole may still prove to be bogus.
        damaged = self._held.is_damaged(self._applied.next_seq)
        awaits_evidence = not damaged and self._held.is_first_unconfirmed()
        if not self._machine.missing:
            self._held.dropped = -1
            self._machine.go_live()
        elif repair.progress:
            self._machine.ask(repair)
        elif not repair.exhausted or awaits_evidence or not hole_known:
            self._machine.ask_later(repair)
        else:
            self._give_up(repair, self._name_hole(repair))

    def _retry_or_give_up(self, repair: Repair, reason: str) -> None:
        """Go on after a request that failed."""
        if repair.purpose is Purpose.PROBE and not self._machine.missing:
            self._counters["probes_failed"] += 1
            self._stay_without()
        elif not repair.exhausted:
            self._machine.ask_later(repair)
        else:
            self._give_up(repair, reason)

    def _give_up(self, repair: Repair, reason: str) -> None:
        """Go on without the batches that replay did not bring."""
        self._counters["repairs_given_up"] += 1
        self._replay.probe_rarely()
        if self._applied.unproven:
            self._machine.restart("unproven_reconnect", resync=reason == "undecodable")
            return
        self._applied.start_in_doubt = False
        self._machine.drain()
        if self._applied.next_seq is None:
            self._machine.lose_join(f"join_{reason}", self._held.first)
            self._machine.drain()
        if reason in ("replay_timeout", "replay_failed"):
            # No reply comes: each further hole would cost as much time for nothing.
            self._replay.wanted = False
            self._machine.lose_all_gaps(reason)
            self._machine.lose_dropped()
        else:
            self._lose_holes_tried_for(repair, reason)
        if self._machine.missing:
            repair.tries = 0
            self._machine.ask(repair)
        else:
            self._machine.go_live()

    def _lose_holes_tried_for(self, repair: Repair, reason: str) -> None:
        """Lose the hole in front, and those after it that every try could have filled, too.

        All tries asked from the same seq on, so they were tries for each hole known before them.
        """
        first_try = self._replay.requests + 1 - repair.tries
        self._machine.lose(reason)
        self._machine.drain()
        while self._held.is_hole_older_than(first_try):
            self._machine.lose(self._name_hole(repair))
            self._machine.drain()

    def _name_hole(self, repair: Repair) -> str:
        """Return why replay could not fill the hole at the next expected seq."""
        next_seq = self._applied.next_seq
        if self._held.is_damaged(next_seq):
            return "undecodable"
        begins_behind = next_seq is not None and (repair.first_seq or 0) > next_seq
        return "evicted" if begins_behind else "unreplayable"
