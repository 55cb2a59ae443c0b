"""A sequencer that goes on where an earlier one stood, once the publisher has proven itself."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex.subscribe.sequencer import AskReplay, CloseReplay, Cursor, RankRestarted, State
from tests.subscribe.sequencer.sequencer_script import RANK, Script, batch, without_replay

pytestmark = pytest.mark.unit


def cursor_after(*seqs: int, **options: Any) -> Cursor:
    return cursor_of(Script(**options).joined(*seqs))


def cursor_of(script: Script) -> Cursor:
    cursor = script.sequencer.cursor()
    assert cursor is not None
    return cursor


def resumed(cursor: Cursor | None, **options: Any) -> Script:
    script = Script(**options)
    script.resume(cursor)
    return script


def rejoining(cursor: Cursor) -> Script:
    """Resume and connect."""
    script = resumed(cursor)
    script.connect()
    return script


def test_a_cursor_has_where_the_stream_stands_without_what_is_held() -> None:
    cursor = cursor_of(Script(recent=2).joined(0, 1, 2, live=[5]))
    assert (cursor.epoch, cursor.seq, cursor.next_seq, cursor.complete) == (0, 2, 3, True)
    assert (cursor.ts, cursor.oldest_ts) == (batch(2).ts, batch(0).ts)
    assert cursor.recent == {seq: batch(seq).fingerprint for seq in (1, 2)}
    assert not cursor.kept_losses


def test_there_is_no_cursor_where_there_is_nothing_to_go_on_from() -> None:
    restarted = Script().joined(0, 1, live=[batch(0, life=1)])
    assert restarted.actions.restarts
    closed = Script().joined(0, 1)
    closed.close()
    for script in (Script(), Script().joined(), restarted, closed, without_replay(0, 1)):
        assert script.sequencer.cursor() is None


def test_there_is_no_cursor_while_batches_are_taken_on_trust() -> None:
    script = Script()
    script.connect()
    script.live(5)
    while not script.is_in(State.LIVE):
        script.end()
        script.pass_time(1.0)
    assert script.applied.seq == 5
    assert script.count["replay_empty"] == 1
    assert script.sequencer.cursor() is None


def test_the_overlap_is_asked_for_and_only_what_is_missing_is_delivered() -> None:
    script = resumed(cursor_after(0, 1, 2))
    assert (
        script.live(3) == script.actions == []
    )  # came before the monitor's word that we are connected
    assert script.is_in(State.CONNECTING)
    assert script.connect() == [AskReplay(1, 2)]
    assert script.is_in(State.SYNCING)
    assert "seq 2 is still the same" in script.sequencer.reason
    assert script.live(4).delivered == []
    assert script.reply(2, 3, 4).delivered == [3, 4]
    assert script.is_in(State.SYNCING)
    assert script.end() == [CloseReplay(1)]
    assert script.is_in(State.LIVE)
    assert script.live(5).delivered == [5]
    assert script.applied.complete
    assert script.count["resumed"] == 1
    assert script.count["replayed"] == 2


def test_without_replay_all_is_dropped_at_once() -> None:
    script = resumed(cursor_after(0, 1), has_replay=False)
    assert script.actions == [RankRestarted(RANK, 1, "no_replay")]
    assert script.count["resumes_refused"] == script.count["refused_no_replay"] == 1
    script.connect()
    assert script.live(2).delivered == [2]
    assert not script.applied.complete


@pytest.mark.parametrize(
    ("cursor", "refused", "epoch"),
    [(None, "", 1), (None, "no_cursor", 1), (cursor_after(0, 1), "other_fingerprints", 1)],
)
def test_a_cursor_that_the_caller_cannot_use_is_a_restart_and_then_a_join(
    cursor: Cursor | None, refused: str, epoch: int
) -> None:
    script = Script()
    script.resume(cursor, refused=refused)
    assert script.actions == [RankRestarted(RANK, epoch, refused or "no_cursor")]
    assert script.connect() == [AskReplay(1, 0)]
    assert script.reply(0, 1, end=True).delivered == [0, 1]
    assert script.applied.complete


def test_what_was_kept_over_a_loss_stays_flagged_and_is_not_kept_by_a_stricter_policy() -> None:
    script = Script(on_loss="keep").joined(0, 1, live=[5])
    while not script.actions.lost:
        script.pass_time(1.0)
        script.reply(1, 5, end=True)
    cursor = cursor_of(script)
    assert (cursor.seq, cursor.complete, cursor.kept_losses) == (5, False, True)
    same = resumed(cursor, on_loss="keep").joined(5, 6)
    assert same.actions.delivered == [6]
    assert not same.sequencer.applied.complete
    assert cursor_of(same).kept_losses
    stricter = resumed(cursor, on_loss="reset")
    assert stricter.actions == [RankRestarted(RANK, 1, "kept_losses")]


def test_a_loss_that_dropped_everything_does_not_stand_in_the_way() -> None:
    script = Script(on_loss="reset").joined(0, 1, live=[5])
    while not script.actions.lost:
        script.pass_time(1.0)
        script.reply(1, 5, end=True)
    assert resumed(cursor_of(script)).joined(5, 6).actions.delivered == [6]


def test_epochs_are_counted_on() -> None:
    script = Script().joined(0, 1)
    script.live(batch(0, life=1))
    script.reply(batch(0, life=1), end=True)
    cursor = cursor_of(script)
    assert cursor.epoch == 1
    later = resumed(cursor)
    assert later.sequencer.applied.epoch == 1
    later.connect()
    assert later.reply(batch(0, life=2))[1] == RankRestarted(RANK, 2, "overlap_differs")


def test_an_unproven_cursor_can_be_saved_again() -> None:
    cursor = cursor_after(0, 1, 2)
    script = resumed(cursor)
    assert script.sequencer.cursor() == cursor
    script.connect()
    assert script.sequencer.cursor() == cursor


def test_a_gap_behind_the_cursor_is_asked_for_behind_the_cursor() -> None:
    script = rejoining(cursor_after(0, 1))
    assert script.reply(1, 3).delivered == []  # 2 was lost inside the replay
    script.end()
    assert script.pass_time(0.2).asked == [1]
    assert script.reply(1, 2, 3, end=True).delivered == [2, 3]


def test_a_delayed_copy_of_what_was_applied_before_the_cursor_is_known() -> None:
    script = resumed(cursor_after(0, 1, 2)).joined(2)
    assert script.live(1) == []
    assert script.count["duplicates"] == 1


def test_a_closed_sequencer_resumes_nothing() -> None:
    script = Script()
    script.sequencer.close(0.0)
    assert script.resume(None) == []


def test_what_was_declared_lost_stays_lost() -> None:
    script = Script(on_loss="keep").joined(0, 1)
    while not script.actions.lost:  # nothing good follows what is damaged
        script.pass_time(6.0)
        script.sequencer.replayed_damaged(script.request, 2, script.now)
        script.end()
    cursor = cursor_of(script)
    assert (cursor.seq, cursor.next_seq) == (1, 3)
    later = resumed(cursor, on_loss="keep")
    later.connect()
    assert later.reply(1, 2, 3, end=True).delivered == [3]
