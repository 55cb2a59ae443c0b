"""Gaps: how they are filled, and when they are lost."""

from __future__ import annotations

import pytest

from kvindex.subscribe.sequencer import RankLost, ReplayPolicy, State
from tests.subscribe.sequencer.sequencer_script import TIMEOUT, Script, without_replay

pytestmark = pytest.mark.unit

LONG = 3 * TIMEOUT + 2.0


def test_gap_is_filled_from_the_last_applied_batch_and_order_is_kept() -> None:
    script = Script().joined(0, 1)
    out = script.live(4)
    assert out.asked == [1]
    assert out.delivered == []
    assert script.is_in(State.REPAIRING)
    assert "2..3 (2 batches)" in script.sequencer.reason
    assert "asked 1 time" in script.sequencer.reason
    assert script.sequencer.lag == 3
    assert script.reply(1, 2, 3).delivered == [2, 3, 4]
    assert script.is_in(State.LIVE)
    script.end()
    assert script.applied.complete
    assert script.sequencer.reason == ""


def test_reordered_batches_close_a_gap_by_themselves() -> None:
    script = Script().joined(0, live=[2])
    assert script.live(1).delivered == [1, 2]
    assert script.is_in(State.LIVE)


def test_replay_with_an_interior_hole_is_asked_again_from_the_hole() -> None:
    script = Script().joined(0, live=[5])
    out = script.reply(0, 1, 2, 4, 5, end=True)
    assert out.delivered == [1, 2]
    assert out.asked == [2]
    assert script.reply(2, 3, 4, 5, end=True).delivered == [3, 4, 5]
    assert script.is_in(State.LIVE)
    assert script.actions.lost == []


@pytest.mark.parametrize(("replies", "reason"), [([2], "evicted"), ([0, 2], "unreplayable")])
def test_a_batch_that_replay_does_not_have_is_lost_after_the_tries(
    replies: list[int], reason: str
) -> None:
    script = Script().joined(0, live=[2])
    script.reply(*replies, end=True)
    script.answer_next(*replies)
    assert script.actions.lost == []
    script.answer_next(*replies)
    assert script.actions.lost == [(reason, 1, 1)]
    assert script.actions.delivered == [0, 2]
    assert script.is_in(State.LIVE)
    assert not script.applied.complete


@pytest.mark.parametrize(("on_loss", "reset"), [("reset", True), ("keep", False)])
def test_silent_replay_loses_the_gap_by_policy_and_live_goes_on(on_loss: str, reset: bool) -> None:
    script = Script(on_loss=on_loss).joined(0, live=[2, 4])
    out = script.pass_time(LONG)
    assert out.lost == [("replay_timeout", 1, 1), ("replay_timeout", 3, 3)]
    assert {action.reset for action in out if isinstance(action, RankLost)} == {reset}
    assert out.delivered == [2, 4]
    assert script.is_in(State.LIVE)
    assert script.count["replay_timeouts"] == 3
    assert script.count["lost_batches"] == 2
    assert script.live(5).delivered == [5]


def test_failing_replay_socket_loses_the_gap_after_the_tries() -> None:
    script = Script().joined(0, live=[2])
    for _ in range(3):
        script.fail()
        script.pass_time(0.5)
    assert script.actions.lost == [("replay_failed", 1, 1)]


def test_each_reply_restarts_the_time_out() -> None:
    script = Script().joined(0, live=[9])
    for seq in range(8):
        script.pass_time(0.9 * TIMEOUT)
        script.reply(seq)
    assert script.count["replay_timeouts"] == 0
    assert script.applied.seq == 7


def test_back_off_grows_and_is_capped() -> None:
    settings = ReplayPolicy(timeout=1.0, attempts=8, backoff=0.1, max_backoff=0.4)
    script = Script(replay_policy=settings).joined(0, live=[2])
    waits = []
    for _ in range(7):
        script.fail()
        deadline = script.sequencer.deadline
        assert deadline is not None
        waits.append(deadline - script.now)
        script.pass_time(waits[-1])
    for wait, most in zip(waits, (0.1, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4), strict=True):
        assert most / 2 <= wait <= most


def test_gap_without_replay_waits_for_reordered_batches_and_is_then_lost() -> None:
    script = without_replay(0, 3, 2)
    assert "given up in 2.0 s" in script.sequencer.reason
    assert script.pass_time(TIMEOUT - 0.1).lost == []
    assert script.pass_time(0.2).lost == [("gap_without_replay", 1, 1)]
    assert script.actions.delivered == [0, 2, 3]


def test_without_replay_a_hole_whose_follower_has_waited_long_is_lost_with_the_one_before() -> None:
    script = without_replay(0, 2, 4)
    script.pass_time(TIMEOUT / 2)
    script.live(6)
    # 3 was awaited since 4 came, not since 1 was given up.
    assert script.pass_time(TIMEOUT / 2).holes == [(1, 1), (3, 3)]
    assert script.pass_time(TIMEOUT / 2 - 0.1).lost == []
    assert script.pass_time(0.1).holes == [(5, 5)]
    assert script.is_in(State.LIVE)


def test_without_replay_a_late_batch_between_two_holes_does_not_delay_those_behind_it() -> None:
    script = without_replay(0, 3, 7)
    script.pass_time(TIMEOUT - 0.1)
    script.live(5)
    assert script.pass_time(0.1).holes == [(1, 2), (4, 4), (6, 6)]


def test_without_replay_a_hole_behind_a_closed_one_is_waited_for_in_full() -> None:
    script = without_replay(0, 2)
    script.pass_time(TIMEOUT - 0.1)
    script.live(4, 1)
    assert script.pass_time(TIMEOUT - 0.1).lost == []
    assert script.live(3).delivered == [3, 4]
    assert script.is_in(State.LIVE)


def test_without_replay_damage_behind_a_hole_does_not_put_off_its_end() -> None:
    script = without_replay(0, 2)
    for _ in range(4):
        script.pass_time(TIMEOUT / 4)
        script.damaged(4)
    assert script.actions.holes == [(1, 1)]


def test_with_replay_holes_that_the_same_tries_did_not_fill_are_lost_together() -> None:
    script = Script().joined(0, live=[2])
    script.reply(0, 2, end=True)
    script.live(4, 6, 8)
    for _ in range(4):
        script.answer_next(0, 2, 4, 6, 8)
    # 3, 5 and 7 were missing before the second row of tries began.
    assert script.actions.holes == [(1, 1), (3, 3), (5, 5), (7, 7)]
    assert script.is_in(State.LIVE)


def test_with_replay_a_hole_that_opened_during_the_tries_gets_its_own() -> None:
    script = Script().joined(0, live=[2])
    script.reply(0, 2, end=True)
    script.live(4)
    script.answer_next(0, 2, 4)
    script.answer_next(0, 2, 4)
    assert script.actions.holes == [(1, 1)]
    assert script.reply(2, 3, 4, end=True).delivered == [3, 4]
