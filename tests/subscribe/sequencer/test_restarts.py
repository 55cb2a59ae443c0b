"""Reconnects, resumptions, duplicates and restarts: is it still the same publisher?"""

from __future__ import annotations

import pytest

from kvindex.subscribe.sequencer import (
    MANY_RESTARTS,
    RESTARTS_WITHIN,
    AskReplay,
    CloseReplay,
    RankRestarted,
    State,
)
from tests.subscribe.sequencer.sequencer_script import RANK, TIMEOUT, Script, batch, without_replay

pytestmark = pytest.mark.unit


@pytest.fixture(params=["after a reconnect", "from a cursor"])
def reconnected(request: pytest.FixtureRequest) -> Script:
    """A script that has applied 0 and 1, and awaits proof that the publisher is the same."""
    script = Script().joined(0, 1)
    script.disconnect()
    if request.param == "from a cursor":
        cursor = script.sequencer.cursor()
        script = Script()
        assert script.resume(cursor) == []
    assert script.is_in(State.CONNECTING)
    assert script.connect().asked == [1]
    assert script.is_in(State.SYNCING)
    assert "seq 1 is still the same" in script.sequencer.reason
    return script


def test_same_publisher_after_a_reconnect_goes_on(reconnected: Script) -> None:
    assert reconnected.live(3).delivered == []
    assert reconnected.reply(1, 2, end=True).delivered == [2, 3]
    assert reconnected.actions.restarts == []
    assert reconnected.applied.complete


def test_restart_while_cut_off_that_has_passed_our_number_is_found_by_the_overlap(
    reconnected: Script,
) -> None:
    reconnected.live(batch(2, 1))
    request = reconnected.request
    assert reconnected.reply(batch(1, 1)) == [
        CloseReplay(request),
        RankRestarted(RANK, 1, "overlap_differs"),
        AskReplay(request + 1, 0),
    ]
    new = [batch(seq, 1) for seq in range(3)]
    assert reconnected.reply(*new, end=True).delivered == [(1, 0), (1, 1), (1, 2)]
    assert reconnected.applied.epoch == 1
    assert reconnected.applied.complete


@pytest.mark.parametrize("lost_on_the_way", [True, False])
def test_a_missing_overlap_is_asked_for_again_and_then_shows_a_restart(
    reconnected: Script, lost_on_the_way: bool
) -> None:
    for _ in range(2):
        assert reconnected.reply(2).restarts == []
        reconnected.pass_time(0.5)
    if lost_on_the_way:
        assert reconnected.reply(1, 2, end=True).delivered == [2]
        assert reconnected.actions.restarts == []
        assert reconnected.is_in(State.LIVE)
    else:  # it has left the buffer
        assert reconnected.reply(2).restarts == ["unproven_reconnect"]


def test_overlap_out_of_the_buffer_without_a_disconnect_is_accepted() -> None:
    script = Script().joined(0, 1, live=[3])
    assert script.reply(2, 3, end=True).delivered == [2, 3]
    assert script.actions.restarts == []


def test_publisher_that_has_less_than_we_applied_was_restarted(reconnected: Script) -> None:
    assert reconnected.end().restarts == ["replay_ends_below"]


def test_a_reply_below_what_was_asked_for_does_not_make_the_replay_end_there(
    reconnected: Script,
) -> None:
    assert reconnected.reply(1, 0, end=True).restarts == []
    assert reconnected.is_in(State.LIVE)


def test_dead_replay_after_a_reconnect_restarts_and_goes_on(reconnected: Script) -> None:
    out = reconnected.pass_time(3 * TIMEOUT + 1.0)
    assert out.restarts == ["unproven_reconnect"]
    assert reconnected.is_in(State.LIVE)
    assert reconnected.live(5).delivered == [5]


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


@pytest.mark.parametrize(("recent", "counter"), [(256, "duplicates"), (1, "delayed")])
def test_an_old_batch_is_dropped_whether_it_is_remembered_or_not(recent: int, counter: str) -> None:
    script = Script(recent=recent).joined(0, 1, 2)
    assert script.live(1, 0) == []
    assert script.count[counter] == 2


def test_seq_that_falls_back_with_a_newer_time_is_a_restart_and_its_stragglers_are_refused() -> (
    None
):
    script = Script().joined(0, 1, 2)
    out = script.live(batch(0, 1))
    assert out.restarts == ["seq_fell_back"]
    assert out.asked == [0]
    assert script.reply(batch(0, 1), end=True).delivered == [(1, 0)]
    assert script.applied.epoch == 1
    assert script.live(3).delivered == []
    assert script.count["old_epoch"] == 1
    assert script.is_in(State.LIVE)


def test_restart_without_replay_goes_on_with_the_batch_that_showed_it() -> None:
    script = without_replay(0, 1, 2)
    out = script.live(batch(0, 1))
    assert out.restarts == ["seq_fell_back"]
    assert out.delivered == [(1, 0)]
    assert script.applied.complete


def test_clock_that_was_set_back_is_believed_when_replay_agrees() -> None:
    script = Script().joined(0)
    assert script.live(batch(1, ts=1.0)).delivered == []
    assert script.reply(batch(0), batch(1, ts=1.0), end=True).delivered == [1]
    assert script.live(batch(2, ts=2.0)).delivered == [2]


def test_a_probe_compares_the_last_batch_when_due_and_when_another_has_its_seq() -> None:
    silent, disputed = Script().joined(0, 1), Script().joined(0, 1)
    probes = [silent.pass_time(5.0), disputed.live(batch(1, 1, ts=1.0))]
    for script, probe in zip([silent, disputed], probes, strict=True):
        assert (probe.asked, probe.restarts) == ([1], [])
        assert script.reply(batch(1, 1)).restarts == ["overlap_differs"]


def test_clock_set_back_without_replay_heals_after_many_refusals() -> None:
    script = without_replay(100, recent=1)
    out = script.live(*(batch(seq, 1, ts=float(seq)) for seq in range(20)))
    assert out.restarts == ["clock_fell_back"]
    assert out.delivered[-1] == (1, 19)


def test_two_publishers_at_one_address_are_recognised_by_numbers_that_fall_back_and_back() -> None:
    script = without_replay(0)
    for turn in range(6):
        assert not script.sequencer.several_publishers(script.now)
        script.live(batch(100 + turn, ts=2_000.0 + turn))
        script.pass_time(TIMEOUT)  # what lies between is lost
        script.live(batch(turn, ts=2_000.5 + turn))
        if script.count["restarts"] == MANY_RESTARTS:
            break
    assert script.sequencer.several_publishers(script.now)
    assert not script.sequencer.several_publishers(script.now + RESTARTS_WITHIN)


def test_a_publisher_that_is_restarted_often_is_not_taken_for_several() -> None:
    script = Script().joined(0, 1)
    for life in range(1, 3 * MANY_RESTARTS):
        script.disconnect()
        script.connect()
        assert script.live(batch(0, life)).restarts == ["seq_fell_back"]
        script.reply(batch(0, life), batch(1, life), end=True)
        assert script.is_in(State.LIVE)
    assert not script.sequencer.several_publishers(script.now)


def test_a_publisher_behind_a_relay_that_is_restarted_each_minute_is_not_taken_for_several() -> (
    None
):
    script = without_replay(0, 1)
    for life in range(1, 3 * MANY_RESTARTS):
        script.pass_time(60.0)
        script.live(batch(0, life))
        script.live(batch(1, life))
    assert script.count["restarts"] > MANY_RESTARTS
    assert not script.sequencer.several_publishers(script.now)
