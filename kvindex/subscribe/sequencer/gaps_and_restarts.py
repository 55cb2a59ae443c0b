"""Decides what each live batch, reply and time-out means for a stream, and makes the moves."""

from __future__ import annotations

from kvindex.subscribe.sequencer.stream_state import Purpose, Repair, StreamState
from kvindex.subscribe.sequencer.values import Batch
from kvindex.wire.rank import State

MAX_REFUSED = 16
"""Without replay: batches refused in a row for their age until the clock counts as set back."""

# Live batches ------------------------------------------------------------------------------------


def judge_live(stream: StreamState, batch: Batch) -> None:
    """Deliver, hold or drop a live batch, or begin a new epoch with it."""
    applied = stream.applied
    if applied.seq is not None and batch.seq <= applied.seq:
        _judge_fallen_back(stream, batch)
    elif applied.next_seq is not None and batch.seq < applied.next_seq:
        # Declared lost, and none was applied since. Without replay that may rest on the number of
        # one unreadable message, far ahead of all others.
        if not stream.replay.usable and batch.ts >= applied.ts:
            stream.restart("seq_fell_back" if stream.replay.foreign else "unreadable_seq", batch)
        else:
            _refuse(stream, batch, "delayed")
    elif batch.ts < applied.oldest_ts:
        _refuse(stream, batch, "old_epoch")
    elif stream.state is State.CONNECTING:
        stream.hold(batch)
    elif applied.unproven and not stream.replay.usable:
        stream.restart("unproven_reconnect", batch)
    elif _follows(stream, batch):
        if stream.held.get(batch.seq) is not None:  # it waited for a replay that proved empty
            stream.counters["duplicates"] += 1
        stream.deliver(batch, replayed=False)
        stream.drain()
        stream.after_advance()
    elif stream.hold(batch):
        stream.notice_gap()


def _follows(stream: StreamState, batch: Batch) -> bool:
    """Return whether a live batch may be delivered at once."""
    applied = stream.applied
    if applied.unproven or stream.awaits_replay:
        return False
    if applied.next_seq is None:
        return stream.state is State.LIVE
    return batch.seq == applied.next_seq


def _judge_fallen_back(stream: StreamState, batch: Batch) -> None:
    """Judge a live batch that is not above the last applied one: a duplicate or a restart."""
    recognised = stream.applied.recognise(batch)
    if recognised:
        stream.counters["duplicates"] += 1
        if batch.seq <= stream.applied.replayed_to:
            stream.replay.pair(True)
    elif batch.ts > stream.applied.ts:
        stream.restart("seq_fell_back", batch)
    elif recognised is None and stream.replay.exists:
        stream.counters["delayed"] += 1
    else:
        _refuse(stream, batch, "delayed")


def _refuse(stream: StreamState, batch: Batch, counter: str) -> None:
    """Drop a batch that seems too old; ask replay, or count, in case the clock is wrong."""
    stream.counters[counter] += 1
    if stream.replay.usable:
        if stream.state is State.LIVE and stream.repair is None:
            stream.begin(Purpose.PROBE)
        return
    stream.refused += 1
    if stream.refused >= MAX_REFUSED and stream.state is not State.CONNECTING:
        stream.restart("clock_fell_back", batch)


def judge_damaged(stream: StreamState, seq: int | None) -> None:
    """Have replay bring the batch of a damaged live message, or lose it without replay."""
    stream.counters["damaged"] += 1
    next_seq, connecting = stream.applied.next_seq, stream.state is State.CONNECTING
    if seq is not None and next_seq is not None and seq < next_seq:
        return
    if stream.replay.usable:
        stream.replay.wanted = True
        if not connecting:
            stream.notice_gap()
    elif seq is not None and next_seq is not None and not stream.applied.unproven:
        stream.note_damaged(seq)
        if not connecting:
            stream.lose_damaged()
            stream.go_live()


# Replies, ends and failures of a request ---------------------------------------------------------


def accept_reply(stream: StreamState, repair: Repair, batch: Batch) -> None:
    """Accept a reply to the open request."""
    stream.replay.unanswered = 0
    repair.saw(batch.seq, stream.now)
    if not stream.replay.foreign:
        _stop_flood(stream, repair, advanced=_judge_reply(stream, repair, batch))
    elif stream.applied.recognise(batch):  # the replay is this publisher's after all
        stream.replay.disown(foreign=False)
        stream.restart("replay_agrees")
    else:
        _probe_later(stream)


def accept_damaged_reply(stream: StreamState, repair: Repair, seq: int | None) -> None:
    """Record a reply that cannot be read, with its seq where legible."""
    stream.counters["damaged"] += 1
    if stream.replay.foreign:
        _probe_later(stream)
        return
    # Replies ascend by one from what is asked for, or from the next batch that is missing. Any
    # other number, unless below a known batch, is damaged as well.
    follows = repair.start_seq if repair.highest_seq is None else repair.highest_seq + 1
    expected = max(follows, stream.applied.next_seq or 0, stream.held.highest)
    if seq is not None and seq <= expected:
        repair.saw(seq, stream.now)
        stream.note_damaged(seq)
    _stop_flood(stream, repair, advanced=False)


def accept_end(stream: StreamState, repair: Repair, request: int) -> None:
    """Record the end of the open request."""
    stream.counters["replays_ended"] += 1
    stream.replay.ended(stream.now)
    stream.close_request(repair)
    if stream.replay.foreign:
        _probe_later(stream)
        return
    overlaps = repair.highest_seq == repair.start_seq and not repair.progress
    stream.held.testify(request, ends_at=repair.start_seq if overlaps else None)
    _judge_end(stream, repair)


def fail(stream: StreamState, repair: Repair) -> None:
    """Record that the socket of the open request failed."""
    stream.counters["replays_failed"] += 1
    stream.replay.unanswered += not repair.replies
    _retry_or_give_up(stream, repair, "replay_failed")


def time_out(stream: StreamState, repair: Repair) -> None:
    """Make the next try, or end a try that nothing has answered for too long."""
    if repair.request is None:
        stream.ask(repair)
        return
    stream.counters["replay_timeouts"] += 1
    stream.replay.unanswered += not repair.replies
    _retry_or_give_up(stream, repair, "replay_timeout")


def _probe_later(stream: StreamState) -> None:
    """Go on without replay; ask again later, and later each time."""
    stream.replay.probe_rarely()
    stream.replay.quiet_since = stream.now
    stream.abandon_repair()


# What a reply shows ------------------------------------------------------------------------------


def _judge_reply(stream: StreamState, repair: Repair, batch: Batch) -> bool:
    """Judge a reply; return whether it brought something new."""
    applied, replay = stream.applied, stream.replay
    if batch.seq < repair.start_seq:
        stream.counters["below_start"] += 1
        return False
    was_empty, replay.keeps = replay.keeps is False, True
    if was_empty and applied.seq is not None:
        # Batches accepted unproven while replay was empty may be another publisher's.
        stream.restart("replay_awoke")
        return True
    if applied.next_seq is None:
        _join_at(stream, batch)
    if applied.next_seq is not None and batch.seq < applied.next_seq:
        return _check_overlap(stream, batch)
    if applied.unproven:
        _judge_missing_overlap(stream, repair)
        return True
    entry = stream.held.get(batch.seq)
    if entry is not None and entry.batch.fingerprint == batch.fingerprint:
        if not entry.confirmed:  # it arrived live
            replay.pair(True)
    elif entry is not None and entry.batch.ts > batch.ts:
        # The replay is a dead publisher's, or another's.
        stream.counters["conflicting"] += 1
        stream.counters["replays_failed"] += 1
        if entry.asked < replay.requests and replay.dispute():
            stream.disown_replay()
        else:
            _retry_or_give_up(stream, repair, "replay_failed")
        return True
    return _accept_following(stream, repair, batch)


def _join_at(stream: StreamState, batch: Batch) -> None:
    """Begin the epoch with the first batch in replay, or with a held run before it."""
    seq = batch.seq
    if stream.applied.epoch == 0 and not stream.counters["disconnects"]:
        seq = stream.held.start_of_run(seq)
    stream.counters["join_truncated"] += seq > 0
    stream.start_at(seq)
    if seq < batch.seq:
        stream.drain()


def _check_overlap(stream: StreamState, batch: Batch) -> bool:
    """Compare a reply with the batch that was applied under its seq: the proof of identity."""
    recognised = stream.applied.recognise(batch)
    if recognised is False:
        _restart_or_disown(stream, "overlap_differs")
        return True
    if recognised and batch.seq > stream.applied.replayed_to:
        stream.replay.pair(True)
    if recognised and stream.applied.unproven:
        stream.applied.unproven = False
        stream.drain()
        return True
    return False


def _restart_or_disown(stream: StreamState, reason: str) -> None:
    """Begin a new epoch, unless replay has denied live batches once too often."""
    if stream.applied.arrived_live and not stream.applied.unproven and stream.replay.dispute():
        stream.disown_replay()
    else:
        stream.restart(reason)


def _judge_missing_overlap(stream: StreamState, repair: Repair) -> None:
    """Judge a proof that begins too late: its overlap was lost, or has left the buffer."""
    if repair.exhausted:
        # The buffer has wrapped past the overlap, and nothing shows which publisher sent.
        stream.restart("unproven_reconnect")
    else:
        stream.counters["overlaps_missed"] += 1
        stream.close_request(repair)
        repair.back_off(stream.now)


def _accept_following(stream: StreamState, repair: Repair, batch: Batch) -> bool:
    if batch.seq != stream.applied.next_seq:
        advanced = stream.hold(batch, confirmed=True)
        stream.notice_gap()
        return advanced
    stream.counters["tail_repaired"] += repair.purpose is Purpose.PROBE
    stream.deliver(batch, replayed=True)
    stream.drain()
    stream.after_advance()
    return True


def _stop_flood(stream: StreamState, repair: Repair, *, advanced: bool) -> None:
    """Abandon a request whose replies go on for ever without bringing anything."""
    still_open = stream.repair is repair and repair.request is not None
    if not repair.judge(advanced, stream.now) and still_open:
        stream.counters["replay_flood"] += 1
        _retry_or_give_up(stream, repair, "replay_failed")


# What the end of a replay shows ------------------------------------------------------------------


def _judge_end(stream: StreamState, repair: Repair) -> None:
    if repair.highest_seq is None and stream.applied.seq is None:
        _judge_empty_end(stream, repair)
    elif repair.highest_seq is None or repair.highest_seq < repair.start_seq:
        _judge_end_below(stream, repair)
    elif stream.held.is_any_denied() and stream.replay.dispute():
        stream.disown_replay()
    else:
        stream.discard_refuted()
        stream.drain()
        _finish_or_retry(stream, repair)


def _judge_empty_end(stream: StreamState, repair: Repair) -> None:
    """Judge an empty replay with nothing applied: nothing was published, or nothing is kept."""
    first = stream.held.first
    entry = stream.held.get(first)
    if entry is None or (first == 0 and not stream.applied.start_in_doubt):
        if stream.applied.next_seq is None:
            stream.start_at(0)
        stream.drain()
        _finish_or_retry(stream, repair)
    elif not stream.held.is_refuted(entry):
        repair.back_off(stream.now)
    elif stream.replay.keeps:
        stream.discard_refuted()
        stream.replay.keeps = None
        _judge_empty_end(stream, repair)
    else:
        stream.counters["replay_empty"] += 1
        stream.replay.keeps = False
        if stream.applied.next_seq == 0:  # where it was to begin
            stream.applied.forget_start()
        stream.go_live()
        stream.lose_dropped()


def _judge_end_below(stream: StreamState, repair: Repair) -> None:
    """Judge a replay that ended below what was applied: a restart, or nothing is kept."""
    if stream.replay.keeps or stream.applied.unproven:
        _restart_or_disown(stream, "replay_ends_below")
    elif stream.replay.keeps is None:
        # Its buffer never sent a batch: ask from 0 whether there is one at all.
        stream.replay.keeps = False
        stream.ask(repair)
    else:
        stream.counters["replay_empty"] += 1
        stream.go_live()


# Trying again, and giving up ---------------------------------------------------------------------


def _finish_or_retry(stream: StreamState, repair: Repair) -> None:
    """Go on after a replay that ended: LIVE if nothing is missing, else ask again."""
    # A batch behind a hole shows where it ends, or identity could not be proven.
    hole_known = stream.held or stream.applied.unproven
    # The batch behind the hole may still prove to be bogus.
    damaged = stream.held.is_damaged(stream.applied.next_seq)
    awaits_evidence = not damaged and stream.held.is_first_unconfirmed()
    if not stream.missing:
        stream.held.dropped = -1
        stream.go_live()
    elif repair.progress:
        stream.ask(repair)
    elif not repair.exhausted or awaits_evidence or not hole_known:
        repair.back_off(stream.now)
    else:
        _give_up(stream, repair, _name_hole(stream, repair))


def _retry_or_give_up(stream: StreamState, repair: Repair, reason: str) -> None:
    """Go on after a request that failed."""
    stream.close_request(repair)
    if repair.purpose is Purpose.PROBE and not stream.missing:
        stream.counters["probes_failed"] += 1
        _probe_later(stream)
    elif not repair.exhausted:
        repair.back_off(stream.now)
    else:
        _give_up(stream, repair, reason)


def _give_up(stream: StreamState, repair: Repair, reason: str) -> None:
    """Go on without the batches that replay did not bring."""
    stream.counters["repairs_given_up"] += 1
    stream.replay.probe_rarely()
    if stream.applied.unproven:
        stream.restart("unproven_reconnect", resync=reason == "undecodable")
        return
    stream.applied.start_in_doubt = False  # no replay brings the first batch of the epoch
    stream.drain()
    if stream.applied.next_seq is None:
        stream.lose_join(f"join_{reason}", stream.held.first)
        stream.drain()
    if reason in ("replay_timeout", "replay_failed"):
        # No reply arrives: each further hole would cost as much time for nothing.
        stream.replay.wanted = False
        stream.lose_all_gaps(reason)
        stream.lose_dropped()
    else:
        # All tries asked from the same seq on, so they were tries for each hole known before.
        first_try = stream.replay.requests + 1 - repair.tries
        stream.lose(reason)
        while stream.held.is_hole_older_than(first_try):
            stream.lose(_name_hole(stream, repair))
    if stream.missing:
        repair.tries = 0
        stream.ask(repair)
    else:
        stream.go_live()


def _name_hole(stream: StreamState, repair: Repair) -> str:
    """Return why replay could not fill the hole at the next expected seq."""
    next_seq = stream.applied.next_seq
    if stream.held.is_damaged(next_seq):
        return "undecodable"
    begins_behind = next_seq is not None and (repair.first_seq or 0) > next_seq
    return "evicted" if begins_behind else "unreplayable"
