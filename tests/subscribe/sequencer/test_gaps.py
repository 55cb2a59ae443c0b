"""Gaps, losses, duplicates, restarts and bounds of a sequencer."""

from __future__ import annotations

import sys

import pytest

from kvindex.subscribe.sequencer import MAX_SEQ, CloseReplay, RankLost, ReplayPolicy, State, repair
from tests.subscribe.sequencer.sequencer_script import (
    RANK,
    TIMEOUT,
    Script,
    asked,
    batch,
    delivered,
    lost,
    restarts,
)

pytestmark = pytest.mark.unit

START = 1_001.5
LONG = 3 * TIMEOUT + 2.0


def retry(script: Script, *seqs: int) -> None:
    """Answer the next try with these replies and an end."""
    before = script.request
    for _ in range(200):
        if script.request != before:
            break
        script.pass_time(0.05)
    script.reply(*seqs, end=True)


# -- gaps


def test_gap_is_filled_from_the_last_applied_batch_and_order_is_kept() -> None:
    script = Script().joined(0, 1)
    out = script.live(4)
    assert asked(out) == [1]
    assert delivered(out) == []
    assert script.is_in(State.REPAIRING)
    assert "2..3 (2 batches)" in script.sequencer.reason
    assert "asked 1 time" in script.sequencer.reason
    assert script.sequencer.lag == 3
    assert delivered(script.reply(1, 2, 3)) == [2, 3, 4]
    assert script.is_in(State.LIVE)
    script.end()
    assert script.sequencer.applied.complete
    assert script.sequencer.reason == ""


def test_reordered_batches_close_a_gap_by_themselves() -> None:
    script = Script().joined(0)
    script.live(2)
    assert delivered(script.live(1)) == [1, 2]
    assert script.is_in(State.LIVE)


def test_replay_with_an_interior_hole_is_asked_again_from_the_hole() -> None:
    script = Script().joined(0)
    script.live(5)
    out = script.reply(0, 1, 2, 4, 5, end=True)
    assert delivered(out) == [1, 2]
    assert asked(out) == [2]
    assert delivered(script.reply(2, 3, 4, 5, end=True)) == [3, 4, 5]
    assert script.is_in(State.LIVE)
    assert lost(script.actions) == []


def test_evicted_history_is_lost_after_the_tries() -> None:
    script = Script().joined(0)
    script.live(5)
    script.reply(4, 5, end=True)
    assert lost(script.actions) == []
    retry(script, 4, 5)
    retry(script, 4, 5)
    assert lost(script.actions) == [("evicted", 1, 3)]
    assert delivered(script.actions) == [0, 4, 5]
    assert script.is_in(State.LIVE)
    assert not script.sequencer.applied.complete


def test_batch_that_was_never_encoded_is_an_unreplayable_hole() -> None:
    script = Script().joined(0, 1)
    script.live(3)
    script.reply(1, 3, end=True)
    retry(script, 1, 3)
    retry(script, 1, 3)
    assert lost(script.actions) == [("unreplayable", 2, 2)]
    assert delivered(script.actions) == [0, 1, 3]


@pytest.mark.parametrize(("on_loss", "reset"), [("reset", True), ("keep", False)])
def test_silent_replay_loses_the_gap_by_policy_and_live_goes_on(on_loss: str, reset: bool) -> None:
    script = Script(on_loss=on_loss).joined(0)
    script.live(2, 4)
    out = script.pass_time(LONG)
    assert [a for a in out if isinstance(a, RankLost)] == [
        RankLost(RANK, 0, "replay_timeout", 1, 1, reset),
        RankLost(RANK, 0, "replay_timeout", 3, 3, reset),
    ]
    assert delivered(out) == [2, 4]
    assert script.is_in(State.LIVE)
    assert script.count["replay_timeouts"] == 3
    assert script.count["lost_batches"] == 2
    assert delivered(script.live(5)) == [5]


def test_failing_replay_socket_loses_the_gap_after_the_tries() -> None:
    script = Script().joined(0)
    script.live(2)
    for _ in range(3):
        script.actions += script.sequencer.replay_failed(script.request, script.now)
        script.pass_time(0.5)
    assert lost(script.actions) == [("replay_failed", 1, 1)]


def test_each_reply_restarts_the_time_out() -> None:
    script = Script().joined(0)
    script.live(9)
    for seq in range(8):
        script.pass_time(0.9 * TIMEOUT)
        script.reply(seq)
    assert script.count["replay_timeouts"] == 0
    assert script.sequencer.applied.seq == 7


def test_back_off_grows_and_is_capped() -> None:
    settings = ReplayPolicy(timeout=1.0, attempts=8, backoff=0.1, max_backoff=0.4)
    script = Script(replay_policy=settings).joined(0)
    script.live(2)
    waits = []
    for _ in range(7):
        script.actions += script.sequencer.replay_failed(script.request, script.now)
        deadline = script.sequencer.deadline
        assert deadline is not None
        waits.append(deadline - script.now)
        script.pass_time(waits[-1])
    for wait, most in zip(waits, (0.1, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4), strict=True):
        assert most / 2 <= wait <= most


def test_gap_without_replay_waits_for_reordered_batches_and_is_then_lost() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0, 3, 2)
    assert "given up in 2.0 s" in script.sequencer.reason
    assert lost(script.pass_time(TIMEOUT - 0.1)) == []
    assert lost(script.pass_time(0.2)) == [("gap_without_replay", 1, 1)]
    assert delivered(script.actions) == [0, 2, 3]


def test_without_replay_a_hole_whose_follower_has_waited_long_is_lost_with_the_one_before() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0, 2, 4)
    script.pass_time(TIMEOUT / 2)
    script.live(6)
    # 3 was awaited since 4 came, not since 1 was given up.
    assert [hole[1:] for hole in lost(script.pass_time(TIMEOUT / 2))] == [(1, 1), (3, 3)]
    assert lost(script.pass_time(TIMEOUT / 2 - 0.1)) == []
    assert [hole[1:] for hole in lost(script.pass_time(0.1))] == [(5, 5)]
    assert script.is_in(State.LIVE)


def test_without_replay_a_late_batch_between_two_holes_does_not_delay_those_behind_it() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0, 3, 7)
    script.pass_time(TIMEOUT - 0.1)
    script.live(5)
    assert [hole[1:] for hole in lost(script.pass_time(0.1))] == [(1, 2), (4, 4), (6, 6)]


def test_without_replay_a_hole_behind_a_closed_one_is_waited_for_in_full() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0, 2)
    script.pass_time(TIMEOUT - 0.1)
    script.live(4, 1)
    assert lost(script.pass_time(TIMEOUT - 0.1)) == []
    assert delivered(script.live(3)) == [3, 4]
    assert script.is_in(State.LIVE)


def test_without_replay_damage_behind_a_hole_does_not_put_off_its_end() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0, 2)
    for _ in range(4):
        script.pass_time(TIMEOUT / 4)
        script.actions += script.sequencer.damaged(4, script.now)
    assert [hole[1:] for hole in lost(script.actions)] == [(1, 1)]


def test_with_replay_holes_that_the_same_tries_did_not_fill_are_lost_together() -> None:
    script = Script().joined(0)
    script.live(2)
    script.reply(0, 2, end=True)
    script.live(4, 6, 8)
    for _ in range(4):
        retry(script, 0, 2, 4, 6, 8)
    # 3, 5 and 7 were missing before the second row of tries began.
    assert [hole[1:] for hole in lost(script.actions)] == [(1, 1), (3, 3), (5, 5), (7, 7)]
    assert script.is_in(State.LIVE)


def test_with_replay_a_hole_that_opened_during_the_tries_gets_its_own() -> None:
    script = Script().joined(0)
    script.live(2)
    script.reply(0, 2, end=True)
    script.live(4)
    retry(script, 0, 2, 4)
    retry(script, 0, 2, 4)
    assert [hole[1:] for hole in lost(script.actions)] == [(1, 1)]
    assert delivered(script.reply(2, 3, 4, end=True)) == [3, 4]


def test_replies_to_an_abandoned_request_are_ignored() -> None:
    script = Script().joined(0)
    assert script.sequencer.replayed(1, batch(1), 1.0) == []
    assert script.count["stale_replies"] == 1


# -- duplicates and restarts


def test_duplicate_is_dropped() -> None:
    script = Script().joined(0, 1)
    assert script.live(1, 0) == []
    assert script.count["duplicates"] == 2


def test_delayed_duplicate_that_is_no_longer_remembered_is_not_a_restart() -> None:
    script = Script(recent=1).joined(0, 1, 2)
    assert script.live(0) == []
    assert script.count["delayed"] == 1


def test_seq_that_falls_back_with_a_newer_time_is_a_restart() -> None:
    script = Script().joined(0, 1, 2)
    out = script.live(batch(0, 1))
    assert restarts(out) == ["seq_fell_back"]
    assert asked(out) == [0]
    assert delivered(script.reply(batch(0, 1), end=True)) == [(1, 0)]
    assert script.sequencer.applied.epoch == 1


def test_restart_without_replay_goes_on_with_the_batch_that_told() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0, 1, 2)
    out = script.live(batch(0, 1))
    assert restarts(out) == ["seq_fell_back"]
    assert delivered(out) == [(1, 0)]
    assert script.sequencer.applied.complete


def test_straggler_of_an_old_epoch_is_refused_and_checked() -> None:
    script = Script().joined(0, 1, 2)
    script.live(batch(0, 1))
    script.reply(batch(0, 1), end=True)
    out = script.live(batch(3, 0))
    assert delivered(out) == []
    assert script.count["old_epoch"] == 1
    assert script.is_in(State.LIVE)


def test_clock_that_was_set_back_is_believed_when_replay_agrees() -> None:
    script = Script().joined(0)
    assert delivered(script.live(batch(1, ts=1.0))) == []
    assert delivered(script.reply(batch(0), batch(1, ts=1.0), end=True)) == [1]
    assert delivered(script.live(batch(2, ts=2.0))) == [2]


def test_other_content_under_an_applied_seq_with_an_old_time_is_checked_by_a_probe() -> None:
    script = Script().joined(0, 1)
    out = script.live(batch(1, 1, ts=1.0))
    assert restarts(out) == []
    assert asked(out) == [1]
    assert restarts(script.reply(batch(1, 1, ts=1.0))) == ["overlap_differs"]


def test_restart_is_found_by_the_probe() -> None:
    script = Script().joined(0, 1)
    script.pass_time(5.0)
    assert restarts(script.reply(batch(1, 1))) == ["overlap_differs"]


def test_clock_set_back_without_replay_heals_after_many_refusals() -> None:
    script = Script(has_replay=False, recent=1)
    script.connect()
    script.live(100)
    out = script.live(*(batch(seq, 1, ts=float(seq)) for seq in range(20)))
    assert restarts(out) == ["clock_fell_back"]
    assert delivered(out)[-1] == (1, 19)


# -- damage


def test_damaged_live_batch_is_fetched_by_replay_at_once() -> None:
    script = Script().joined(0)
    out = script.sequencer.damaged(1, 0.0)
    assert asked(out) == [0]
    script.actions += out
    assert script.is_in(State.REPAIRING)
    assert delivered(script.reply(0, 1, end=True)) == [1]
    assert script.is_in(State.LIVE)


def test_damage_of_unknown_number_is_repaired_until_the_end_of_replay() -> None:
    script = Script().joined(0)
    script.actions += script.sequencer.damaged(None, 0.0)
    script.live(1)
    assert script.is_in(State.REPAIRING)
    assert delivered(script.reply(0, 1, 2, end=True)) == [2]
    assert script.is_in(State.LIVE)


def test_batch_that_stays_undecodable_is_lost_alone() -> None:
    script = Script().joined(0)
    script.live(2)
    for _ in range(3):
        script.reply(0)
        script.actions += script.sequencer.replayed_damaged(script.request, 1, script.now)
        script.reply(2, end=True)
        script.pass_time(1.0)
    assert lost(script.actions) == [("undecodable", 1, 1)]
    assert delivered(script.actions) == [0, 2]


def test_damage_without_replay_is_a_loss_at_once() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0)
    assert lost(script.sequencer.damaged(1, 0.0)) == [("undecodable", 1, 1)]
    assert delivered(script.live(2)) == [2]


def test_the_count_of_lost_batches_stops_where_64_bits_can_still_hold_it() -> None:
    script = Script(has_replay=False)
    script.connect()
    for life in range(4):
        script.live(batch(0, life, ts=life), batch(MAX_SEQ, life, ts=life))
        script.pass_time(TIMEOUT)
    assert script.count["losses"] == 4
    assert script.count["lost_batches"] == 2**63 - 1


def cost_of_losing(holes: int) -> int:
    """Return how many calls it takes to declare holes lost, half of them by damage."""
    script = Script(has_replay=False)
    script.connect()
    script.live(0)
    for number in range(0, holes, 2):
        script.actions += script.sequencer.damaged(2 + 2 * number, script.now)
        script.live(4 + 2 * number)
    calls = 0

    def count(_frame: object, event: str, _function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        actions = script.disconnect()
    finally:
        sys.setprofile(None)
    assert len(lost(actions)) > holes
    return calls


def test_the_cost_of_declaring_holes_lost_grows_with_their_number_and_no_faster() -> None:
    assert cost_of_losing(4_000) < 9 * cost_of_losing(500)


@pytest.mark.parametrize("seq", [-1, 2**64 - 1, 2**70])
def test_impossible_seq_counts_as_damage(seq: int) -> None:
    script = Script(has_replay=False)
    script.connect()
    assert script.live(batch(seq)) == []
    assert script.count["damaged"] == 1


# -- bounds and evidence


def test_overflow_of_held_batches_is_followed_by_a_further_replay() -> None:
    script = Script(max_held=2).joined(0)
    script.live(2, 3, 4, 5)
    assert script.count["held_dropped"] == 2
    # The buffer had only this much when the request was served.
    out = script.reply(0, 1, end=True)
    assert delivered(out) == [1, 2, 3]
    assert asked(out) == [3]
    assert delivered(script.reply(3, 4, 5, end=True)) == [4, 5]
    assert script.is_in(State.LIVE)
    assert script.sequencer.applied.complete


def test_held_batches_are_bounded_in_bytes() -> None:
    script = Script(max_held_bytes=25).joined(0)
    script.live(2, 3, 4)
    assert script.count["held_dropped"] == 1


def test_overflow_without_replay_is_a_loss_at_once() -> None:
    script = Script(has_replay=False, max_held=2)
    script.connect()
    out = script.live(0, 2, 3, 4)
    assert lost(out) == [("held_overflow", 1, 1)]
    assert delivered(out) == [0, 2, 3, 4]


def test_corrupted_number_that_no_replay_confirms_is_discarded_without_loss() -> None:
    script = Script().joined(0)
    script.live(10**15)
    script.reply(0, end=True)
    retry(script, 0)
    retry(script, 0)
    assert lost(script.actions) == []
    assert script.count["unconfirmed"] == 1
    assert script.is_in(State.LIVE)
    assert delivered(script.live(1)) == [1]
    assert script.sequencer.applied.complete


def test_same_number_with_other_content_keeps_the_newer() -> None:
    script = Script().joined(0)
    script.live(batch(2, ts=START), batch(2, 1))
    assert script.count["conflicting"] == 1
    assert delivered(script.live(1)) == [1, (1, 2)]


def test_endless_replies_without_progress_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "MAX_IDLE_REPLIES", 50)
    script = Script().joined(0)
    script.live(2)
    out = script.reply(*[0] * 60)
    assert [action for action in out if isinstance(action, CloseReplay)] != []
    assert script.count["replay_flood"] == 1


def test_slow_drip_of_useless_replies_does_not_hold_a_gap_open_for_ever() -> None:
    script = Script().joined(0)
    script.live(2)
    for _ in range(100):
        script.pass_time(0.9 * TIMEOUT)
        script.reply(0)
        if lost(script.actions):
            break
    assert lost(script.actions) == [("replay_failed", 1, 1)]


def test_replies_of_a_dead_publisher_do_not_mix_with_newer_live_batches() -> None:
    script = Script()
    script.connect()
    script.live(batch(1, 1))
    out = script.reply(0, 1)
    assert delivered(out) == [0]
    assert script.count["conflicting"] == 1
    script.pass_time(0.2)
    assert restarts(script.reply(batch(0, 1), batch(1, 1), end=True)) == ["overlap_differs"]
    assert delivered(script.reply(batch(0, 1), batch(1, 1), end=True)) == [(1, 0), (1, 1)]


def test_batches_dropped_for_want_of_room_are_declared_when_replay_is_dead() -> None:
    script = Script(max_held=1).joined(0)
    script.live(2, 3, 4)
    out = script.pass_time(LONG)
    assert lost(out) == [("replay_timeout", 1, 1), ("held_overflow", 3, 4)]
    assert delivered(out) == [2]
    assert delivered(script.live(5)) == [5]


def test_what_had_no_room_before_a_reconnect_is_not_awaited_of_the_next_publisher() -> None:
    script = Script(max_held=1).joined()
    script.live(28, 29)  # no room for 29
    assert script.sequencer.lag == 30
    script.disconnect()
    assert script.sequencer.lag == 0
    script.connect()
    script.reply(batch(0, life=1), end=True)
    assert script.is_in(State.LIVE)
    assert script.sequencer.lag == 0
