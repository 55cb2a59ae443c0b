"""Joining, reconnecting, life and time of a sequencer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvindex.subscribe.sequencer import AskReplay, CloseReplay, State
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


def test_replay_from_zero_is_asked_first_and_streams() -> None:
    script = Script()
    assert script.connect() == [AskReplay(1, 0)]
    assert script.is_in(State.SYNCING)
    assert delivered(script.reply(0, 1)) == [0, 1]
    assert script.end() == [CloseReplay(1)]
    assert script.is_in(State.LIVE)
    assert script.sequencer.applied.complete
    assert (script.sequencer.applied.seq, script.sequencer.applied.next_seq) == (1, 2)


def test_live_batches_are_held_during_the_join_and_follow_it() -> None:
    script = Script()
    script.connect()
    assert delivered(script.live(2, 3)) == []
    assert script.sequencer.lag == 2
    assert delivered(script.reply(0, 1, 2, end=True)) == [0, 1, 2, 3]
    assert script.is_in(State.LIVE)


def test_buffer_that_no_longer_reaches_back_gives_a_partial_join_without_loss() -> None:
    script = Script().joined(7, 8)
    assert delivered(script.actions) == [7, 8]
    assert not script.sequencer.applied.complete
    assert script.count["join_truncated"] == 1
    assert lost(script.actions) == []


def test_held_batches_reach_further_back_than_a_small_buffer() -> None:
    script = Script()
    script.connect()
    script.live(0, 1, 2, 3)
    assert delivered(script.reply(3, end=True)) == [0, 1, 2, 3]
    assert script.sequencer.applied.complete


def test_empty_replay_means_nothing_was_published_yet() -> None:
    script = Script().joined()
    assert script.is_in(State.LIVE)
    assert script.sequencer.applied.next_seq == 0
    assert delivered(script.live(0)) == [0]
    assert script.sequencer.applied.complete


def test_publisher_that_keeps_nothing_is_followed_without_replay() -> None:
    script = Script()
    script.connect()
    script.live(5)
    script.end()
    script.pass_time(0.01)
    for _ in range(5):
        if script.is_in(State.LIVE):
            break
        script.pass_time(1.0)
        script.end()
    assert delivered(script.actions) == [5]
    assert not script.sequencer.applied.complete
    assert script.count["replay_empty"] == 1


def test_a_copy_of_a_batch_that_waited_for_an_empty_replay_is_delivered_once() -> None:
    script = Script(max_held=1)
    script.connect()
    script.live(0, 2)  # no room for 2: replay is asked again after this one
    assert delivered(script.end()) == [0]
    script.live(1)  # waits for the replay's word
    assert asked(script.end()) == [0]  # which was empty: is it so from 0 on, too?
    assert delivered(script.live(1)) == [1]
    script.end()
    assert script.is_in(State.LIVE)
    assert delivered(script.live(2)) == [2]
    assert delivered(script.pass_time(2 * TIMEOUT)) == []
    assert lost(script.actions) == []
    assert script.count["duplicates"] == 1
    assert script.sequencer.applied.next_seq == 3


def test_publisher_whose_empty_buffer_fills_is_joined_again() -> None:
    script = Script()
    script.connect()
    script.live(5)
    # The first replay was asked before the batch came, and does not count.
    for _ in range(1 + 3):
        script.end()
        script.pass_time(1.0)
    assert script.is_in(State.LIVE)
    script.pass_time(5.0)
    assert restarts(script.reply(batch(5))) == ["replay_awoke"]
    assert delivered(script.reply(*range(6), end=True)) == [0, 1, 2, 3, 4, 5]
    assert script.sequencer.applied.complete


def test_dead_replay_at_join_delays_live_batches_but_never_stops_them() -> None:
    script = Script()
    script.connect()
    script.live(4, 5)
    assert delivered(script.pass_time(3 * TIMEOUT + 1.0)) == [4, 5]
    assert lost(script.actions) == [("join_replay_timeout", 0, 3)]
    assert script.is_in(State.LIVE)
    assert not script.sequencer.applied.complete
    assert delivered(script.live(6)) == [6]


def test_dead_replay_at_join_with_nothing_held_declares_no_loss() -> None:
    script = Script()
    script.connect()
    script.pass_time(3 * TIMEOUT + 1.0)
    assert lost(script.actions) == []
    assert script.is_in(State.LIVE)
    assert delivered(script.live(9)) == [9]
    assert not script.sequencer.applied.complete


def test_without_replay_the_first_live_batch_begins() -> None:
    for first, complete in ((0, True), (3, False)):
        script = Script(has_replay=False)
        assert script.connect() == []
        assert script.is_in(State.LIVE)
        assert delivered(script.live(first)) == [first]
        assert script.sequencer.applied.complete is complete


def test_same_publisher_after_a_reconnect_goes_on() -> None:
    script = Script().joined(0, 1)
    script.disconnect()
    assert script.is_in(State.CONNECTING)
    assert asked(script.connect()) == [1]
    assert delivered(script.live(3)) == []
    assert delivered(script.reply(1, 2, end=True)) == [2, 3]
    assert restarts(script.actions) == []
    assert script.sequencer.applied.complete


def test_restart_while_cut_off_that_has_passed_our_number_is_found_by_the_overlap() -> None:
    script = Script().joined(0, 1)
    script.disconnect()
    script.connect()
    script.live(batch(2, 1))
    out = script.reply(batch(1, 1))
    assert restarts(out) == ["overlap_differs"]
    assert asked(out) == [0]
    assert delivered(script.reply(*(batch(n, 1) for n in range(3)), end=True)) == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert script.sequencer.applied.epoch == 1
    assert script.sequencer.applied.complete


def test_overlap_out_of_the_buffer_after_a_reconnect_is_a_restart() -> None:
    script = Script().joined(0, 1)
    script.disconnect()
    script.connect()
    for _ in range(2):  # one reply can be lost on the way: it is asked for again
        assert restarts(script.reply(2)) == []
        script.pass_time(0.5)
    assert restarts(script.reply(2)) == ["unproven_reconnect"]


def test_overlap_lost_on_the_way_after_a_reconnect_is_asked_for_again() -> None:
    script = Script().joined(0, 1)
    script.disconnect()
    script.connect()
    script.reply(2)
    script.pass_time(0.5)
    assert delivered(script.reply(1, 2, end=True)) == [2]
    assert restarts(script.actions) == []
    assert script.is_in(State.LIVE)


def test_overlap_out_of_the_buffer_without_a_disconnect_is_accepted() -> None:
    script = Script().joined(0, 1)
    script.live(3)
    assert delivered(script.reply(2, 3, end=True)) == [2, 3]
    assert restarts(script.actions) == []


def test_publisher_that_has_less_than_we_applied_was_restarted() -> None:
    script = Script().joined(0, 1, 2)
    script.disconnect()
    script.connect()
    assert restarts(script.end()) == ["replay_ends_below"]


def test_dead_replay_after_a_reconnect_restarts_and_goes_on() -> None:
    script = Script().joined(0, 1)
    script.disconnect()
    script.connect()
    out = script.pass_time(3 * TIMEOUT + 1.0)
    assert restarts(out) == ["unproven_reconnect"]
    assert script.is_in(State.LIVE)
    assert delivered(script.live(5)) == [5]


def test_reconnect_without_replay_is_a_restart_at_once() -> None:
    script = Script(has_replay=False)
    script.connect()
    script.live(0, 1)
    script.disconnect()
    script.live(2)  # of the old connection, or of the new one: nobody knows
    assert restarts(script.connect()) == ["unproven_reconnect"]
    assert delivered(script.live(3)) == [3]
    assert delivered(script.actions) == [0, 1, 3]
    assert not script.sequencer.applied.complete


def test_straggler_before_the_first_batch_of_a_reconnected_publisher_is_not_taken() -> None:
    script = Script().joined()
    script.disconnect()
    script.live(0)
    script.connect()
    script.end()
    assert delivered(script.actions) == []
    script.pass_time(0.3)
    assert delivered(script.reply(batch(0, 1), batch(1, 1), end=True)) == [(1, 0), (1, 1)]


def test_lost_tail_is_found_by_a_probe_without_leaving_live() -> None:
    script = Script().joined(0, 1)
    assert asked(script.pass_time(5.0)) == [1]
    assert script.is_in(State.LIVE)
    assert delivered(script.reply(1, 2, 3, end=True)) == [2, 3]
    assert script.count["tail_repaired"] == 2


def test_live_batches_are_delivered_during_a_probe() -> None:
    script = Script().joined(0, 1)
    script.pass_time(5.0)
    assert delivered(script.live(2)) == [2]


def test_probe_that_times_out_declares_nothing_and_is_repeated_more_rarely() -> None:
    script = Script(stale_after=1000.0).joined(0)
    times = []
    for _ in range(200):
        if asked(script.pass_time(1.0)):
            times.append(script.now)
    gaps = [after - before for before, after in pairwise(times)]
    assert lost(script.actions) == []
    assert script.is_in(State.LIVE)
    assert gaps[0] < gaps[1] < gaps[2]
    assert max(gaps) <= 8 * 5.0 + TIMEOUT + 1.0


def test_rank_without_a_proof_of_life_is_stale_until_the_next() -> None:
    script = Script(has_replay=False, stale_after=3.0)
    script.connect()
    script.live(0)
    script.pass_time(3.0)
    assert script.is_in(State.STALE)
    assert "3.0 s" in script.sequencer.reason
    assert delivered(script.live(1)) == [1]
    assert script.is_in(State.LIVE)


def test_end_of_a_probe_is_a_proof_of_life() -> None:
    script = Script(stale_after=6.0).joined(0)
    script.pass_time(5.0)
    script.reply(0, end=True)
    script.pass_time(2.0)
    assert script.is_in(State.LIVE)


def test_closed_sequencer_drops_its_request_and_stays_silent() -> None:
    script = Script()
    script.connect()
    assert script.sequencer.close(1.0) == [CloseReplay(1)]
    assert script.sequencer.close(1.0) == []
    assert script.live(0) == script.connect() == script.disconnect() == []
    assert script.sequencer.tick(99.0) == []
    assert script.sequencer.deadline is None
    assert script.is_in(State.CLOSED)
