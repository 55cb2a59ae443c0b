"""A replay endpoint that is another publisher's, and one that is only slow, short or restarted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvindex.subscribe.sequencer import Action, Batch, State
from tests.subscribe.sequencer.sequencer_script import (
    TIMEOUT,
    Script,
    asked,
    batch,
    delivered,
    lost,
    restarts,
)

pytestmark = pytest.mark.unit

PROBE = 5.0


def neighbours(*seqs: int) -> list[Batch]:
    """Return batches of the publisher whose replay endpoint was given by mistake."""
    return [batch(seq, -1) for seq in seqs]


def refute(script: Script, *replies: Batch | int) -> list[Action]:
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
    return script.actions[begin:]


def disowned() -> Script:
    """Return a script whose replay endpoint has proved to be another publisher's."""
    script = Script().joined(*neighbours(0, 1, 2))
    for seq in (10, 11, 12):
        script.live(seq)
        refute(script, *neighbours(2))
    assert script.sequencer.applied.seq == 12
    return script


def test_an_idle_neighbours_replay_is_given_up_when_three_live_batches_were_refuted() -> None:
    script = Script().joined(*neighbours(0, 1, 2))
    for seq in (10, 11):
        script.live(seq)
        refute(script, *neighbours(2))
        assert restarts(script.actions) == []
        assert script.sequencer.lag == 0
    assert script.count["unconfirmed"] == 2
    script.live(12)
    out = refute(script, *neighbours(2))
    assert restarts(out) == ["foreign_replay"], "what it brought is dropped"
    assert lost(out) == [("foreign_replay", 0, 11)]
    assert delivered(out) == [12]
    assert script.is_in(State.LIVE)
    assert not script.sequencer.applied.complete
    assert script.count["foreign_replay"] == 1
    assert "another publisher's" in script.sequencer.unrepairable
    assert delivered(script.live(13)) == [13]


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
    assert delivered(script.actions)[-1] == script.sequencer.applied.seq
    assert script.sequencer.lag == 0


def test_the_replay_of_a_neighbour_that_is_ahead_is_given_up() -> None:
    script = Script().joined(*neighbours(*range(6)))
    script.live(2)
    for _ in range(3):
        script.reply(*neighbours(*range(6)), end=True)
        script.pass_time(0.5)
    assert restarts(script.actions) == ["seq_fell_back", "foreign_replay"]
    assert lost(script.actions) == [("foreign_replay", 0, 1)]
    assert delivered(script.actions)[-1] == 2
    assert script.is_in(State.LIVE)
    assert delivered(script.live(3)) == [3]


def test_without_a_replay_of_its_own_a_gap_is_a_loss_after_one_time_out() -> None:
    script = disowned()
    script.pass_time(PROBE)  # a probe is under way
    assert asked(script.live(15)) == []
    out = script.pass_time(TIMEOUT)
    assert lost(out) == [("gap_without_replay", 13, 14)]
    assert delivered(out) == [15]


def test_a_foreign_replay_is_asked_ever_more_rarely_and_only_compared() -> None:
    script = disowned()
    script.actions.clear()
    times = []
    for seq in range(13, 200):
        script.live(seq)  # a stream that never rests is no hindrance
        if asked(script.pass_time(0.5)):
            times.append(script.now)
            script.reply(*neighbours(12))
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (2 * PROBE, 8 * PROBE)
    assert restarts(script.actions) == []
    assert delivered(script.actions) == list(range(13, 200))


def test_a_foreign_replay_that_does_not_answer_changes_nothing() -> None:
    script = disowned()
    script.actions.clear()
    assert asked(script.pass_time(PROBE)) == [12]
    script.pass_time(TIMEOUT)
    assert script.is_in(State.LIVE)
    assert script.count["probes_failed"] == 1
    assert asked(script.pass_time(2 * PROBE)) == [12]
    script.actions += script.sequencer.replayed_damaged(script.request, 14, script.now)
    assert asked(script.pass_time(4 * PROBE)) == [12]
    script.end()
    assert not (delivered(script.actions) + lost(script.actions) + restarts(script.actions))
    assert delivered(script.live(13)) == [13]


def test_a_replay_that_has_the_publishers_batches_after_all_is_joined() -> None:
    script = disowned()
    assert asked(script.pass_time(PROBE)) == [12]
    out = script.reply(12)
    assert restarts(out) == ["replay_agrees"]
    assert asked(out) == [0]
    assert delivered(script.reply(*range(13), end=True)) == list(range(13))
    assert script.is_in(State.LIVE)
    assert script.sequencer.applied.complete
    assert script.sequencer.unrepairable == ""


def test_after_a_reconnect_a_foreign_replay_proves_nothing_and_brings_nothing() -> None:
    script = disowned()
    script.disconnect()
    script.actions.clear()
    assert asked(script.connect()) == []
    assert restarts(script.actions) == ["unproven_reconnect"]
    assert delivered(script.live(batch(0, 1))) == [(1, 0)]
    assert script.sequencer.applied.complete
    assert script.sequencer.cursor() is None


def test_numbers_damaged_now_and_then_do_not_make_a_replay_another_publishers() -> None:
    script = Script().joined(0)
    for seq in range(1, 9):
        script.live(seq)
        script.live(10**15 + seq)
        refute(script, seq)
    assert script.count["unconfirmed"] == 8
    assert not (restarts(script.actions) + lost(script.actions))
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
        script.disconnect()
        script.connect()
        script.reply(1, end=True)
    assert script.count["unconfirmed"] == 6
    assert script.count["foreign_replay"] == 0


def test_the_replay_of_a_neighbour_that_counts_in_step_is_given_up() -> None:
    script = Script().joined(*neighbours(0, 1))
    out = []
    for seq in range(2, 60):
        out += script.live(seq)  # follows by chance, and the stream never rests
        if asked(script.pass_time(1.0)):
            script.reply(*neighbours(*range(seq)), end=True)
            if restarts(script.actions)[-1:] == ["replay_ends_below"]:
                script.reply(*neighbours(*range(seq + 1)), end=True)
            if script.count["foreign_replay"]:
                break
    assert restarts(script.actions)[-1] == "foreign_replay"
    assert lost(script.actions) == [("foreign_replay", 0, seq)]
    assert delivered(script.live(seq + 1)) == [seq + 1]
    assert not script.sequencer.applied.complete


def test_a_replay_is_compared_with_a_busy_stream_once_and_not_again() -> None:
    script = Script().joined(0)
    for seq in range(1, 60):
        script.live(seq)
        if asked(script.pass_time(1.0)):
            script.reply(seq, end=True)
    assert script.count["probes"] == 1


def test_what_was_held_over_a_broken_connection_is_not_joined_to_what_comes_live_after_it() -> None:
    """The engine may have restarted meanwhile, and its numbers may fit."""
    script = Script().joined(*neighbours(0))
    script.live(2)
    script.pass_time(0.01)
    script.disconnect()
    script.pass_time(0.01)
    script.connect()
    script.pass_time(0.01)
    script.live(batch(3, 1))
    refute(script, *neighbours(0, 1, 2))
    assert script.count["foreign_replay"] == 1
    assert 2 not in delivered(script.actions)
    assert delivered(script.actions)[-1] == (1, 3)
    assert script.count["held_dropped"] == 1
