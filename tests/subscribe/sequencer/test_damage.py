"""Damage, bounds, and batches that no replay confirms."""

from __future__ import annotations

import sys

import pytest

from kvindex.subscribe.sequencer import MAX_SEQ, CloseReplay, State, stream_state
from tests.subscribe.sequencer.sequencer_script import TIMEOUT, Script, batch, without_replay

pytestmark = pytest.mark.unit

START = 1_001.5
LONG = 3 * TIMEOUT + 2.0


def test_damaged_live_batch_is_fetched_by_replay_at_once() -> None:
    script = Script().joined(0)
    out = script.damaged(1)
    assert out.asked == [0]
    assert script.is_in(State.REPAIRING)
    assert script.reply(0, 1, end=True).delivered == [1]
    assert script.is_in(State.LIVE)


def test_damage_of_unknown_number_is_repaired_until_the_end_of_replay() -> None:
    script = Script().joined(0)
    script.damaged(None)
    script.live(1)
    assert script.is_in(State.REPAIRING)
    assert script.reply(0, 1, 2, end=True).delivered == [2]
    assert script.is_in(State.LIVE)


def test_batch_that_stays_undecodable_is_lost_alone() -> None:
    script = Script().joined(0, live=[2])
    for _ in range(3):
        script.reply(0)
        script.reply_damaged(1)
        script.reply(2, end=True)
        script.pass_time(1.0)
    assert script.actions.lost == [("undecodable", 1, 1)]
    assert script.actions.delivered == [0, 2]


def test_damage_without_replay_is_a_loss_at_once() -> None:
    script = without_replay(0)
    assert script.damaged(1).lost == [("undecodable", 1, 1)]
    assert script.live(2).delivered == [2]


@pytest.mark.parametrize("far", [3, 10**9, MAX_SEQ])
@pytest.mark.parametrize("comes_next", ["at once", "after the loss"])
def test_an_unreadable_number_far_ahead_does_not_make_a_rank_deaf(
    far: int, comes_next: str
) -> None:
    script = without_replay(0, 1)
    script.damaged(far)
    if comes_next == "after the loss":
        script.pass_time(TIMEOUT)
    assert script.live(2).delivered == [2]
    script.pass_time(TIMEOUT)
    assert script.live(3, 4, 5).delivered == [3, 4, 5]
    assert script.is_in(State.LIVE)
    assert set(script.actions.restarts) == {"unreadable_seq"}
    assert not script.sequencer.several_publishers(script.now)


@pytest.mark.parametrize("far", [9, 10**9, MAX_SEQ])
def test_an_unreadable_replys_number_far_ahead_does_not_make_a_rank_deaf(far: int) -> None:
    script = Script().joined(0, 1)
    script.live(3)
    script.reply_damaged(far)
    script.reply(1, 2, 3, end=True)
    script.pass_time(60)
    assert script.live(4, 5).delivered == [4, 5]
    assert script.actions.delivered == [0, 1, 2, 3, 4, 5]
    assert (script.actions.lost, script.actions.restarts) == ([], [])


def test_old_batches_behind_an_unreadable_number_are_dropped_until_there_are_many() -> None:
    script = without_replay()
    script.live(batch(0, ts=100.0))
    script.damaged(5)
    script.pass_time(TIMEOUT)
    for seq in range(1, 4):
        assert script.live(batch(seq, ts=50.0)).delivered == []
    assert script.count["delayed"] == 3
    assert script.live(batch(4, ts=101.0)).delivered == [4]


def test_the_count_of_lost_batches_stops_where_64_bits_can_still_hold_it() -> None:
    script = without_replay()
    for life in range(4):
        script.live(batch(0, life, ts=life), batch(MAX_SEQ, life, ts=life))
        script.pass_time(TIMEOUT)
    assert script.count["losses"] == 4
    assert script.count["lost_batches"] == 2**63 - 1


def cost_of_losing(holes: int) -> int:
    """Return how many calls it takes to declare holes lost, half of them by damage."""
    script = without_replay(0)
    for number in range(0, holes, 2):
        script.damaged(2 + 2 * number)
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
    assert len(actions.lost) > holes
    return calls


def test_the_cost_of_declaring_holes_lost_grows_with_their_number_and_no_faster() -> None:
    assert cost_of_losing(4_000) < 9 * cost_of_losing(500)


@pytest.mark.parametrize("seq", [-1, 2**64 - 1, 2**70])
def test_impossible_seq_counts_as_damage(seq: int) -> None:
    script = without_replay()
    assert script.live(batch(seq)) == []
    assert script.count["damaged"] == 1


def test_overflow_of_held_batches_is_followed_by_a_further_replay() -> None:
    script = Script(max_held=2).joined(0, live=[2, 3, 4, 5])
    assert script.count["held_dropped"] == 2
    # The buffer had only this much when the request was served.
    out = script.reply(0, 1, end=True)
    assert out.delivered == [1, 2, 3]
    assert out.asked == [3]
    assert script.reply(3, 4, 5, end=True).delivered == [4, 5]
    assert script.is_in(State.LIVE)
    assert script.applied.complete


def test_held_batches_are_bounded_in_bytes() -> None:
    script = Script(max_held_bytes=25).joined(0, live=[2, 3, 4])
    assert script.count["held_dropped"] == 1


def test_one_batch_is_held_however_large_so_that_the_stream_can_go_on_past_it() -> None:
    script = Script(max_held_bytes=1).joined(0, live=[2, 3])
    assert script.count["held_dropped"] == 1
    assert script.reply(0, 1, end=True).delivered == [1, 2]


def test_overflow_without_replay_is_a_loss_at_once() -> None:
    script = without_replay(max_held=2)
    out = script.live(0, 2, 3, 4)
    assert out.lost == [("held_overflow", 1, 1)]
    assert out.delivered == [0, 2, 3, 4]


def test_corrupted_number_that_no_replay_confirms_is_discarded_without_loss() -> None:
    script = Script().joined(0, live=[10**15])
    script.reply(0, end=True)
    script.answer_next(0)
    script.answer_next(0)
    assert script.actions.lost == []
    assert script.count["unconfirmed"] == 1
    assert script.is_in(State.LIVE)
    assert script.live(1).delivered == [1]
    assert script.applied.complete


def test_same_number_with_other_content_keeps_the_newer() -> None:
    script = Script().joined(0)
    script.live(batch(2, ts=START), batch(2, 1))
    assert script.count["conflicting"] == 1
    assert script.live(1).delivered == [1, (1, 2)]


def test_endless_replies_without_progress_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_state, "MAX_IDLE_REPLIES", 50)
    script = Script().joined(0, live=[2])
    out = script.reply(*[0] * 60)
    assert [action for action in out if isinstance(action, CloseReplay)] != []
    assert script.count["replay_flood"] == 1


def test_slow_drip_of_useless_replies_does_not_hold_a_gap_open_for_ever() -> None:
    script = Script().joined(0, live=[2])
    for _ in range(100):
        script.pass_time(0.9 * TIMEOUT)
        script.reply(0)
        if script.actions.lost:
            break
    assert script.actions.lost == [("replay_failed", 1, 1)]


def test_replies_of_a_dead_publisher_do_not_mix_with_newer_live_batches() -> None:
    script = Script()
    script.connect()
    script.live(batch(1, 1))
    out = script.reply(0, 1)
    assert out.delivered == [0]
    assert script.count["conflicting"] == 1
    script.pass_time(0.2)
    assert script.reply(batch(0, 1), batch(1, 1), end=True).restarts == ["overlap_differs"]
    assert script.reply(batch(0, 1), batch(1, 1), end=True).delivered == [(1, 0), (1, 1)]


def test_batches_dropped_for_want_of_room_are_declared_when_replay_is_dead() -> None:
    script = Script(max_held=1).joined(0, live=[2, 3, 4])
    out = script.pass_time(LONG)
    assert out.lost == [("replay_timeout", 1, 1), ("held_overflow", 3, 4)]
    assert out.delivered == [2]
    assert script.live(5).delivered == [5]


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
