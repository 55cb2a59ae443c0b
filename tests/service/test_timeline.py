"""What happened, out of statuses: each thing once, in order, within a bound."""

from __future__ import annotations

import pytest

from kvindex import Rank, State
from kvindex.service.catalog import Partition
from kvindex.service.timeline import Timeline, parse_id
from tests.service.test_fleet_overview import status_of

pytestmark = pytest.mark.unit

A = Rank("a", 0)


def kinds(timeline: Timeline, position: int = 0) -> list[str]:
    return [happening.kind for happening in timeline.since(position).happenings]


def test_a_repaired_gap_is_told_as_gap_state_replay_and_state() -> None:
    timeline = Timeline(lambda _: Partition("m", "g"))
    timeline.observe(status_of(A))
    timeline.observe(status_of(A, State.REPAIRING, gaps=1, reason="seq 5 is missing"))
    timeline.observe(status_of(A, gaps=1, replays_filled=1))
    assert kinds(timeline) == ["added", "gap", "state", "replay", "state"]
    third = timeline.since(0).happenings[2]
    assert (third.text, third.state) == ("repairing: seq 5 is missing", "repairing")
    assert (third.worker, third.model, third.routing_group) == ("a", "m", "g")


def test_losses_and_restarts_are_told_with_how_many() -> None:
    timeline = Timeline()
    timeline.begin([status_of(A, losses=1)])
    timeline.observe(status_of(A, losses=4, restarts=1, epoch=1, complete=False))
    by_kind = {
        happening.kind: (happening.count, happening.text)
        for happening in timeline.since(1).happenings
    }
    assert by_kind["loss"] == (3, "3 losses: batches that no replay can bring back")
    assert by_kind["restart"][0] == 1


def test_a_sweep_finds_what_is_counted_while_the_state_stays_the_same() -> None:
    timeline = Timeline()
    timeline.observe(status_of(A))
    timeline.sweep([status_of(A, losses=2)])
    timeline.sweep([status_of(A, losses=2)])
    assert kinds(timeline) == ["added", "loss"]


def test_a_status_that_was_read_before_a_change_is_not_taken_for_another_change() -> None:
    timeline = Timeline()
    timeline.observe(status_of(A))
    before = status_of(A, gaps=1)
    timeline.observe(status_of(A, State.REPAIRING, gaps=2))
    timeline.sweep([before])
    assert kinds(timeline) == ["added", "gap", "state"]


def test_probes_of_a_live_rank_are_no_news_but_a_replay_endpoint_that_goes_is_told_once() -> None:
    timeline = Timeline()
    timeline.observe(status_of(A))
    timeline.sweep([status_of(A, replays_filled=1)])
    timeline.sweep([status_of(A, replays_filled=1, replays_failed=1)])
    timeline.sweep([status_of(A, replays_filled=1, replays_failed=2)])
    timeline.sweep([status_of(A, replays_filled=2, replays_failed=2)])
    assert kinds(timeline) == ["added", "replay", "replay"]


def test_a_rank_that_is_removed_and_comes_again_starts_anew() -> None:
    timeline = Timeline()
    timeline.observe(status_of(A, losses=3))
    timeline.observe(status_of(A, State.CLOSED, losses=3, reason="not subscribed to"))
    timeline.sweep([status_of(A, losses=3)])  # read just before
    timeline.observe(status_of(A))
    assert kinds(timeline) == ["added", "removed", "added"]


def test_the_history_is_bounded_and_says_how_many_were_missed() -> None:
    timeline = Timeline(most=3)
    timeline.observe(status_of(A))
    for losses in range(1, 6):
        timeline.sweep([status_of(A, losses=losses)])
    since = timeline.since(1)
    assert [happening.id for happening in since.happenings] == [
        f"{timeline.life}-{n}" for n in (4, 5, 6)
    ]
    assert (since.missed, since.position) == (2, 6)
    assert timeline.since(5) == ([since.happenings[-1]], 0, 6)


def test_of_another_run_of_the_service_it_is_not_known_what_was_missed() -> None:
    timeline = Timeline()
    timeline.observe(status_of(A))
    assert timeline.since(1, "another").missed is None
    assert timeline.since(99).missed is None
    assert kinds(timeline) == ["added"]


def test_a_listener_is_called_when_something_happened_and_not_else() -> None:
    timeline = Timeline()
    rung: list[int] = []
    stop = timeline.listen(lambda: rung.append(timeline.position))
    timeline.observe(status_of(A))
    timeline.sweep([status_of(A)])
    assert rung == [1]
    stop()
    timeline.sweep([status_of(A, gaps=1)])
    assert rung == [1]


def test_ids_are_read_with_suspicion() -> None:
    assert parse_id("ab-7") == ("ab", 7)
    for text in ("", "7", "-7", "ab-", "ab-x", "ab-" + "9" * 30, "ab-٣"):
        assert parse_id(text) is None, text
