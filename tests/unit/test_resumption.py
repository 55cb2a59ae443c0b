"""Which publisher goes on from which cursor."""

from __future__ import annotations

from kvindex.subscribe.cursor import Cursor, SavedCursor
from kvindex.subscribe.resumption import plan_resumption

MINE = "nh64:1"


def cursor(dp_rank: int, *, named: int | None = None, fingerprints: str = MINE) -> bytes:
    """A cursor of the publisher at this port."""
    stands = Cursor(
        epoch=0,
        seq=dp_rank,
        ts=1.0,
        next_seq=dp_rank + 1,
        complete=True,
        oldest_ts=0.0,
        kept_losses=False,
        recent={dp_rank: 5},
    )
    saved = SavedCursor(cursor=stands, dp_rank=dp_rank, named=named, fingerprints=fingerprints)
    return saved.encode()


def plan(dp_ranks: list[int], cursors: dict[int, bytes]) -> list[tuple[int, int | None, str, bool]]:
    """For each port: name, the seq of its cursor, why refused, whether something was restored."""
    return [
        (r.dp_rank, r.saved.cursor.seq if r.saved else None, r.refused, r.restored)
        for r in plan_resumption(dp_ranks, cursors, MINE)
    ]


def test_a_first_start_has_no_cursors() -> None:
    assert plan([0, 1], {}) == [(0, None, "no_cursor", False), (1, None, "no_cursor", False)]


def test_each_port_takes_its_own_cursor() -> None:
    cursors = {0: cursor(0), 1: cursor(1)}
    assert plan([0, 1], cursors) == [(0, 0, "", True), (1, 1, "", True)]


def test_a_rank_keeps_the_name_that_its_batches_gave_it() -> None:
    cursors = {0: cursor(1, named=0), 1: cursor(0, named=1)}
    assert plan([0, 1], cursors) == [(1, 0, "", True), (0, 1, "", True)]
    assert plan([0], {5: cursor(0, named=5)}) == [(5, 0, "", True)]


def test_a_port_without_a_cursor_gets_a_name_that_is_left_and_nothing_that_was_restored() -> None:
    assert plan([0, 1], {1: cursor(0, named=1)}) == [
        (1, 0, "", True),
        (0, None, "no_cursor", False),
    ]


def test_two_cursors_of_one_port_are_one_too_many_and_its_namesake_begins_anew() -> None:
    # Saved while two ranks changed names: the same publisher twice.
    cursors = {0: cursor(0), 1: cursor(0)}
    assert plan([0, 1], cursors) == [(0, 0, "", True), (1, None, "no_cursor", True)]


def test_a_cursor_of_a_port_that_is_gone_is_left() -> None:
    assert plan([0], {0: cursor(0), 1: cursor(1)}) == [(0, 0, "", True)]


def test_fingerprints_of_another_function_cannot_be_compared() -> None:
    cursors = {0: cursor(0, fingerprints="blake2b:1")}
    assert plan([0], cursors) == [(0, 0, "other_fingerprints", True)]


def test_an_unreadable_cursor_gives_way_to_one_that_says_whose_it_is() -> None:
    assert plan([0], {0: b"?"}) == [(0, None, "unreadable_cursor", True)]
    assert plan([0, 1], {0: b"?", 1: cursor(0, named=1)}) == [
        (1, 0, "", True),
        (0, None, "no_cursor", True),
    ]
