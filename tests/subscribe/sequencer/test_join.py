"""Joining, probes and proof of life."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvindex.subscribe.sequencer import AskReplay, CloseReplay, State
from tests.subscribe.sequencer.sequencer_script import TIMEOUT, Script, batch, without_replay

pytestmark = pytest.mark.unit


@pytest.fixture
def joining() -> Script:
    script = Script()
    assert script.connect() == [AskReplay(1, 0)]
    assert script.is_in(State.SYNCING)
    return script


def test_replay_from_zero_streams(joining: Script) -> None:
    assert joining.reply(0, 1).delivered == [0, 1]
    assert joining.end() == [CloseReplay(1)]
    assert joining.is_in(State.LIVE)
    assert joining.applied.complete
    assert (joining.applied.seq, joining.applied.next_seq) == (1, 2)


@pytest.mark.parametrize(
    ("live", "replayed", "delivered", "complete"),
    [
        ([2, 3], [0, 1, 2], [0, 1, 2, 3], True),  # live batches follow the join
        ([0, 1, 2, 3], [3], [0, 1, 2, 3], True),  # and reach further back than a small buffer
        ([], [7, 8], [7, 8], False),  # a buffer that no longer reaches back is no loss
    ],
)
def test_a_join_delivers_what_replay_and_live_batches_have_together(
    joining: Script, live: list[int], replayed: list[int], delivered: list[int], complete: bool
) -> None:
    assert joining.live(*live).delivered == []
    assert joining.sequencer.lag == len(live)
    assert joining.reply(*replayed, end=True).delivered == delivered
    assert joining.is_in(State.LIVE)
    assert joining.applied.complete is complete
    assert joining.count["join_truncated"] == (not complete)
    assert joining.actions.lost == []


def test_empty_replay_means_nothing_was_published_yet() -> None:
    script = Script().joined()
    assert script.is_in(State.LIVE)
    assert script.applied.next_seq == 0
    assert script.live(0).delivered == [0]
    assert script.applied.complete


def test_publisher_that_keeps_nothing_is_followed_without_replay(joining: Script) -> None:
    joining.live(5)
    joining.end()
    joining.pass_time(0.01)
    for _ in range(5):
        if joining.is_in(State.LIVE):
            break
        joining.pass_time(1.0)
        joining.end()
    assert joining.actions.delivered == [5]
    assert not joining.applied.complete
    assert joining.count["replay_empty"] == 1


def test_a_copy_of_a_batch_that_waited_for_an_empty_replay_is_delivered_once() -> None:
    script = Script(max_held=1)
    script.connect()
    script.live(0, 2)  # no room for 2: replay is asked again after this one
    assert script.end().delivered == [0]
    script.live(1)  # waits for the replay's word
    assert script.end().asked == [0]  # which was empty: is it so from 0 on, too?
    assert script.live(1).delivered == [1]
    script.end()
    assert script.is_in(State.LIVE)
    assert script.live(2).delivered == [2]
    assert script.pass_time(2 * TIMEOUT).delivered == []
    assert script.actions.lost == []
    assert script.count["duplicates"] == 1
    assert script.applied.next_seq == 3


def test_publisher_whose_empty_buffer_fills_is_joined_again(joining: Script) -> None:
    joining.live(5)
    # The first replay was asked before the batch came, and does not count.
    for _ in range(1 + 3):
        joining.end()
        joining.pass_time(1.0)
    assert joining.is_in(State.LIVE)
    joining.pass_time(5.0)
    assert joining.reply(batch(5)).restarts == ["replay_awoke"]
    assert joining.reply(*range(6), end=True).delivered == [0, 1, 2, 3, 4, 5]
    assert joining.applied.complete


@pytest.mark.parametrize("held", [[4, 5], []])
def test_dead_replay_at_join_delays_live_batches_but_never_stops_them(
    joining: Script, held: list[int]
) -> None:
    joining.live(*held)
    assert joining.pass_time(3 * TIMEOUT + 1.0).delivered == held
    assert joining.actions.lost == ([("join_replay_timeout", 0, 3)] if held else [])
    assert joining.is_in(State.LIVE)
    assert joining.live(6).delivered == [6]
    assert not joining.applied.complete


def test_without_replay_the_first_live_batch_begins() -> None:
    for first, complete in ((0, True), (3, False)):
        script = Script(has_replay=False)
        assert script.connect() == []
        assert script.is_in(State.LIVE)
        assert script.live(first).delivered == [first]
        assert script.applied.complete is complete


def test_lost_tail_is_found_by_a_probe_during_which_live_batches_are_delivered() -> None:
    script = Script().joined(0, 1)
    assert script.pass_time(5.0).asked == [1]
    assert script.is_in(State.LIVE)
    assert script.live(2).delivered == [2]
    assert script.reply(1, 2, 3, 4, end=True).delivered == [3, 4]
    assert script.count["tail_repaired"] == 2


def test_probe_that_times_out_declares_nothing_and_is_repeated_more_rarely() -> None:
    script = Script(stale_after=1000.0).joined(0)
    times = []
    for _ in range(200):
        if script.pass_time(1.0).asked:
            times.append(script.now)
    gaps = [after - before for before, after in pairwise(times)]
    assert script.actions.lost == []
    assert script.is_in(State.LIVE)
    assert gaps[0] < gaps[1] < gaps[2]
    assert max(gaps) <= 8 * 5.0 + TIMEOUT + 1.0


def test_rank_without_a_proof_of_life_is_stale_until_the_next() -> None:
    script = without_replay(0, stale_after=3.0)
    script.pass_time(3.0)
    assert script.is_in(State.STALE)
    assert "3.0 s" in script.sequencer.reason
    assert script.live(1).delivered == [1]
    assert script.is_in(State.LIVE)


def test_end_of_a_probe_is_a_proof_of_life() -> None:
    script = Script(stale_after=6.0).joined(0)
    script.pass_time(5.0)
    script.reply(0, end=True)
    script.pass_time(2.0)
    assert script.is_in(State.LIVE)


def test_closed_sequencer_drops_its_request_and_stays_silent(joining: Script) -> None:
    assert joining.sequencer.close(1.0) == [CloseReplay(1)]
    assert joining.sequencer.close(1.0) == []
    assert joining.live(0) == joining.connect() == joining.disconnect() == []
    assert joining.sequencer.tick(99.0) == []
    assert joining.sequencer.deadline is None
    assert joining.is_in(State.CLOSED)


def test_an_answer_to_an_abandoned_request_is_ignored_and_no_proof_of_life() -> None:
    script = Script(stale_after=3.0).joined(0)
    script.pass_time(3.0)
    assert script.is_in(State.STALE)
    sequencer, now = script.sequencer, script.now
    assert sequencer.replayed(1, batch(1), now) == sequencer.replay_ended(1, now) == []
    assert script.is_in(State.STALE)
    assert script.count["stale_replies"] == 2
