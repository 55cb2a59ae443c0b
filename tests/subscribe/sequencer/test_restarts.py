"""Reconnects, duplicates and restarts: is it still the same publisher?"""

from __future__ import annotations

import pytest

from kvindex.subscribe.sequencer import State
from tests.subscribe.sequencer.sequencer_script import TIMEOUT, Script, batch, without_replay

pytestmark = pytest.mark.unit


def test_same_publisher_after_a_reconnect_goes_on() -> None:
    script = Script().joined(0, 1)
    script.disconnect()
    assert script.is_in(State.CONNECTING)
    assert script.connect().asked == [1]
    assert script.live(3).delivered == []
    assert script.reply(1, 2, end=True).delivered == [2, 3]
    assert script.actions.restarts == []
    assert script.applied.complete


def test_restart_while_cut_off_that_has_passed_our_number_is_found_by_the_overlap() -> None:
    script = Script().joined(0, 1)
    script.reconnect()
    script.live(batch(2, 1))
    out = script.reply(batch(1, 1))
    assert out.restarts == ["overlap_differs"]
    assert out.asked == [0]
    assert script.reply(*(batch(n, 1) for n in range(3)), end=True).delivered == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert script.applied.epoch == 1
    assert script.applied.complete


def test_overlap_out_of_the_buffer_after_a_reconnect_is_a_restart() -> None:
    script = Script().joined(0, 1)
    script.reconnect()
    for _ in range(2):  # one reply can be lost on the way: it is asked for again
        assert script.reply(2).restarts == []
        script.pass_time(0.5)
    assert script.reply(2).restarts == ["unproven_reconnect"]


def test_overlap_lost_on_the_way_after_a_reconnect_is_asked_for_again() -> None:
    script = Script().joined(0, 1)
    script.reconnect()
    script.reply(2)
    script.pass_time(0.5)
    assert script.reply(1, 2, end=True).delivered == [2]
    assert script.actions.restarts == []
    assert script.is_in(State.LIVE)


def test_overlap_out_of_the_buffer_without_a_disconnect_is_accepted() -> None:
    script = Script().joined(0, 1, live=[3])
    assert script.reply(2, 3, end=True).delivered == [2, 3]
    assert script.actions.restarts == []


def test_publisher_that_has_less_than_we_applied_was_restarted() -> None:
    script = Script().joined(0, 1, 2)
    script.reconnect()
    assert script.end().restarts == ["replay_ends_below"]


def test_dead_replay_after_a_reconnect_restarts_and_goes_on() -> None:
    script = Script().joined(0, 1)
    script.reconnect()
    out = script.pass_time(3 * TIMEOUT + 1.0)
    assert out.restarts == ["unproven_reconnect"]
    assert script.is_in(State.LIVE)
    assert script.live(5).delivered == [5]


def test_reconnect_without_replay_is_a_restart_at_once() -> None:
    script = without_replay(0, 1)
    script.disconnect()
    script.live(2)  # of the old connection, or of the new one: nobody knows
    assert script.connect().restarts == ["unproven_reconnect"]
    assert script.live(3).delivered == [3]
    assert script.actions.delivered == [0, 1, 3]
    assert not script.applied.complete


def test_straggler_before_the_first_batch_of_a_reconnected_publisher_is_not_taken() -> None:
    script = Script().joined()
    script.disconnect()
    script.live(0)
    script.connect()
    script.end()
    assert script.actions.delivered == []
    script.pass_time(0.3)
    assert script.reply(batch(0, 1), batch(1, 1), end=True).delivered == [(1, 0), (1, 1)]


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
    assert out.restarts == ["seq_fell_back"]
    assert out.asked == [0]
    assert script.reply(batch(0, 1), end=True).delivered == [(1, 0)]
    assert script.applied.epoch == 1


def test_restart_without_replay_goes_on_with_the_batch_that_told() -> None:
    script = without_replay(0, 1, 2)
    out = script.live(batch(0, 1))
    assert out.restarts == ["seq_fell_back"]
    assert out.delivered == [(1, 0)]
    assert script.applied.complete


def test_straggler_of_an_old_epoch_is_refused_and_checked() -> None:
    script = Script().joined(0, 1, 2)
    script.live(batch(0, 1))
    script.reply(batch(0, 1), end=True)
    out = script.live(batch(3, 0))
    assert out.delivered == []
    assert script.count["old_epoch"] == 1
    assert script.is_in(State.LIVE)


def test_clock_that_was_set_back_is_believed_when_replay_agrees() -> None:
    script = Script().joined(0)
    assert script.live(batch(1, ts=1.0)).delivered == []
    assert script.reply(batch(0), batch(1, ts=1.0), end=True).delivered == [1]
    assert script.live(batch(2, ts=2.0)).delivered == [2]


def test_other_content_under_an_applied_seq_with_an_old_time_is_checked_by_a_probe() -> None:
    script = Script().joined(0, 1)
    out = script.live(batch(1, 1, ts=1.0))
    assert out.restarts == []
    assert out.asked == [1]
    assert script.reply(batch(1, 1, ts=1.0)).restarts == ["overlap_differs"]


def test_restart_is_found_by_the_probe() -> None:
    script = Script().joined(0, 1)
    script.pass_time(5.0)
    assert script.reply(batch(1, 1)).restarts == ["overlap_differs"]


def test_clock_set_back_without_replay_heals_after_many_refusals() -> None:
    script = without_replay(100, recent=1)
    out = script.live(*(batch(seq, 1, ts=float(seq)) for seq in range(20)))
    assert out.restarts == ["clock_fell_back"]
    assert out.delivered[-1] == (1, 19)


def test_a_reply_below_what_was_asked_for_does_not_make_the_replay_end_there() -> None:
    script = Script().joined(0, 1, 2)
    script.reconnect()
    assert script.reply(2, 1, end=True).restarts == []
    assert script.is_in(State.LIVE)
