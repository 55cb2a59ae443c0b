"""A replay endpoint that is another publisher's, and one that is only slow, short or restarted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvindex.subscribe.sequencer import Batch, ReplayPolicy, State
from tests.subscribe.sequencer.sequencer_script import TIMEOUT, Actions, Script, batch

pytestmark = pytest.mark.unit

PROBE = 5.0


def neighbours(*seqs: int) -> list[Batch]:
    """Return batches of the publisher whose replay endpoint was given by mistake."""
    return [batch(seq, -1) for seq in seqs]


def refute(script: Script, *replies: Batch | int) -> Actions:
    """Answer with these replies until the sequencer asks no more, or thrice."""
    begin = len(script.actions)
    for _ in range(3):
        script.reply(*replies, end=True)
        before = script.request
        for _ in range(20):
            if script.request == before:
                script.pass_time(0.05)
        if script.request == before:
            break
    return Actions(script.actions[begin:])


def disowned() -> Script:
    """Return a script whose replay endpoint has proved to be another publisher's."""
    script = Script().joined(*neighbours(0, 1, 2))
    for seq in (10, 11, 12):
        script.live(seq)
        refute(script, *neighbours(2))
    assert script.applied.seq == 12
    return script


def test_an_idle_neighbours_replay_is_given_up_when_three_live_batches_were_refuted() -> None:
    script = Script().joined(*neighbours(0, 1, 2))
    for seq in (10, 11):
        script.live(seq)
        refute(script, *neighbours(2))
        assert script.actions.restarts == []
        assert script.sequencer.lag == 0
    assert script.count["unconfirmed"] == 2
    script.live(12)
    out = refute(script, *neighbours(2))
    assert out.restarts == ["foreign_replay"], "what it brought is dropped"
    assert out.lost == [("foreign_replay", 0, 11)]
    assert out.delivered == [12]
    assert script.is_in(State.LIVE)
    assert not script.applied.complete
    assert script.count["foreign_replay"] == 1
    assert "another publisher's" in script.sequencer.unrepairable
    assert script.live(13).delivered == [13]


def test_a_busy_neighbours_replay_is_given_up_too() -> None:
    script = Script().joined(*neighbours(0, 1, 2))
    theirs = 2
    for seq in range(10, 20):
        script.live(seq)
        script.reply(*neighbours(theirs, theirs + 1), end=True)
        refute(script, *neighbours(theirs + 1))
        theirs += 1
        if script.count["foreign_replay"]:
            break
    assert script.count["foreign_replay"] == 1
    assert script.is_in(State.LIVE)
    assert script.actions.delivered[-1] == script.applied.seq
    assert script.sequencer.lag == 0


def test_the_replay_of_a_neighbour_that_is_ahead_is_given_up() -> None:
    script = Script().joined(*neighbours(*range(6)), live=[2])
    for _ in range(3):
        script.reply(*neighbours(*range(6)), end=True)
        script.pass_time(0.5)
    assert script.actions.restarts == ["seq_fell_back", "foreign_replay"]
    assert script.actions.lost == [("foreign_replay", 0, 1)]
    assert script.actions.delivered[-1] == 2
    assert script.is_in(State.LIVE)
    assert script.live(3).delivered == [3]


def test_without_a_replay_of_its_own_a_gap_is_a_loss_after_one_time_out() -> None:
    script = disowned()
    script.pass_time(PROBE)  # a probe is under way
    assert script.live(15).asked == []
    out = script.pass_time(TIMEOUT)
    assert out.lost == [("gap_without_replay", 13, 14)]
    assert out.delivered == [15]


def test_a_foreign_replay_is_asked_ever_more_rarely_and_only_compared() -> None:
    script = disowned()
    script.actions.clear()
    times = []
    for seq in range(13, 200):
        script.live(seq)  # a stream that never rests is no hindrance
        if script.pass_time(0.5).asked:
            times.append(script.now)
            script.reply(*neighbours(12))
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (2 * PROBE, 8 * PROBE)
    assert script.actions.restarts == []
    assert script.actions.delivered == list(range(13, 200))


def test_a_foreign_replay_that_does_not_answer_changes_nothing() -> None:
    script = disowned()
    script.actions.clear()
    assert script.pass_time(PROBE).asked == [12]
    script.pass_time(TIMEOUT)
    assert script.is_in(State.LIVE)
    assert script.count["probes_failed"] == 1
    assert script.pass_time(2 * PROBE).asked == [12]
    script.reply_damaged(14)
    assert script.pass_time(4 * PROBE).asked == [12]
    script.end()
    assert not (script.actions.delivered + script.actions.lost + script.actions.restarts)
    assert script.live(13).delivered == [13]


def test_a_replay_that_has_the_publishers_batches_after_all_is_joined() -> None:
    script = disowned()
    assert script.pass_time(PROBE).asked == [12]
    out = script.reply(12)
    assert out.restarts == ["replay_agrees"]
    assert out.asked == [0]
    assert script.reply(*range(13), end=True).delivered == list(range(13))
    assert script.is_in(State.LIVE)
    assert script.applied.complete
    assert script.sequencer.unrepairable == ""


def test_after_a_reconnect_a_foreign_replay_proves_nothing_and_brings_nothing() -> None:
    script = disowned()
    script.disconnect()
    script.actions.clear()
    assert script.connect().asked == []
    assert script.actions.restarts == ["unproven_reconnect"]
    assert script.live(batch(0, 1)).delivered == [(1, 0)]
    assert script.applied.complete
    assert script.sequencer.cursor() is None


def test_numbers_damaged_now_and_then_do_not_make_a_replay_another_publishers() -> None:
    script = Script().joined(0)
    for seq in range(1, 9):
        script.live(seq)
        script.live(10**15 + seq)
        refute(script, seq)
    assert script.count["unconfirmed"] == 8
    assert not (script.actions.restarts + script.actions.lost)
    assert script.is_in(State.LIVE)


def test_live_batches_that_have_left_the_replay_buffer_do_not_make_it_another_publishers() -> None:
    script = Script().joined(0)
    for seq in range(5, 80, 10):
        script.live(seq)
        refute(script, seq + 4)  # the buffer holds one batch
    assert script.count["foreign_replay"] == 0


def test_a_reconnect_forgets_what_spoke_against_the_replay() -> None:
    script = Script().joined(0, 1)
    for life in range(6):
        script.live(batch(10 + life))
        refute(script, 1)
        script.reconnect()
        script.reply(1, end=True)
    assert script.count["unconfirmed"] == 6
    assert script.count["foreign_replay"] == 0


def test_the_replay_of_a_neighbour_that_counts_in_step_is_given_up() -> None:
    script = Script().joined(*neighbours(0, 1))
    for seq in range(2, 60):
        script.live(seq)  # follows by chance, and the stream never rests
        if script.pass_time(1.0).asked:
            script.reply(*neighbours(*range(seq)), end=True)
            if script.actions.restarts[-1:] == ["replay_ends_below"]:
                script.reply(*neighbours(*range(seq + 1)), end=True)
            if script.count["foreign_replay"]:
                break
    assert script.actions.restarts[-1] == "foreign_replay"
    assert script.actions.lost == [("foreign_replay", 0, seq)]
    assert script.live(seq + 1).delivered == [seq + 1]
    assert not script.applied.complete


def test_a_replay_is_compared_with_a_busy_stream_once_and_not_again() -> None:
    script = Script().joined(0)
    for seq in range(1, 60):
        script.live(seq)
        if script.pass_time(1.0).asked:
            script.reply(seq, end=True)
    assert script.count["probes"] == 1


def test_what_was_held_over_a_broken_connection_is_not_joined_to_what_comes_live_after_it() -> None:
    """The engine may have restarted meanwhile, and its numbers may fit."""
    script = Script().joined(*neighbours(0), live=[2])
    script.pass_time(0.01)
    script.disconnect()
    script.pass_time(0.01)
    script.connect()
    script.pass_time(0.01)
    script.live(batch(3, 1))
    refute(script, *neighbours(0, 1, 2))
    assert script.count["foreign_replay"] == 1
    assert 2 not in script.actions.delivered
    assert script.actions.delivered[-1] == (1, 3)
    assert script.count["held_dropped"] == 1


def test_a_gap_that_replay_leaves_open_but_for_a_live_batch_ends_a_row_of_disputes() -> None:
    script = Script().joined(0)
    for number in range(2):
        script.live(10**15 + number)
        refute(script, 0)
    script.live(2)
    refute(script, 0, 2)
    assert script.actions.holes == [(1, 1)]
    script.live(10**16)
    refute(script, 2)
    assert script.count["unconfirmed"] == 3
    assert script.count["foreign_replay"] == 0


def test_what_came_live_after_replay_was_asked_is_not_denied_by_it() -> None:
    script = Script(replay_policy=ReplayPolicy(timeout=TIMEOUT, attempts=9)).joined(0, live=[9])
    for seq in (4, 5, 6):
        script.live(batch(seq, 1))
        assert script.reply(batch(seq)).restarts == []
        script.pass_time(TIMEOUT)
    assert script.count["conflicting"] == 3
    assert script.count["foreign_replay"] == 0
