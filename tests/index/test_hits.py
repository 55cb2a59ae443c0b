"""An answer as columns, one row for each rank of a list, by both indexes."""

from __future__ import annotations

from array import array

import pytest

from kvindex import ConfigurationError, EventBatch, Hits, Index, Match, Rank, RankRows
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from tests.index.index_events import SIZE, A, B, prompt, stored

pytestmark = pytest.mark.unit

C, NOBODY = Rank("c", 3), Rank("nobody")
ROWS = RankRows([C, NOBODY, B, A])
both = pytest.mark.parametrize("kind", [Index, reference.Index], ids=["chosen", "python"])


def filled(index: BaseIndex) -> BaseIndex:
    """A holds a block, B two and two more on the host, C stores another prompt."""
    on_host = [stored(2, 3, medium="CPU"), stored(4, medium="DISK")]
    index.apply(A, EventBatch(ts=0.0, events=[stored(0)]))
    index.apply(B, EventBatch(ts=0.0, events=[stored(0, 1), *on_host]))
    index.apply(C, EventBatch(ts=0.0, events=[stored(7, parent=None)]))
    return index


def column(*values: int) -> array[int]:
    return array("q", [value * SIZE for value in values])


@both
def test_each_row_tells_what_its_rank_holds_up_to_each_tier(kind: type[BaseIndex]) -> None:
    match = filled(kind()).match(prompt(9))
    assert match.hits(ROWS) == Hits(
        column(0, 0, 2, 1), column(0, 0, 4, 1), column(0, 0, 5, 1), column(1, 0, 1, 1)
    )


@both
def test_rows_that_are_not_live_or_not_asked_for_hold_nothing(kind: type[BaseIndex]) -> None:
    index, held = filled(kind()), column(0, 0, 0, 1)
    expected = Hits(held, held, held, column(1, 0, 1, 1))
    for live in (bytes([1, 1, 0, 1]), bytearray([1, 1, 0, 9])):
        assert index.match(prompt(9)).hits(ROWS, live) == expected
    assert index.match(prompt(9), ranks=[A]).hits(ROWS) == expected


@both
@pytest.mark.parametrize("live", [b"", bytes(3), bytes(5)], ids=["none", "short", "long"])
def test_a_mask_of_another_length_is_refused(kind: type[BaseIndex], live: bytes) -> None:
    match = filled(kind()).match(prompt(9))
    with pytest.raises(ValueError, match="a byte for each of 4 rows"):
        match.hits(ROWS, live)


@both
def test_rows_follow_the_index_when_its_ranks_change(kind: type[BaseIndex]) -> None:
    index, other = filled(kind()), kind()
    other.apply(A, EventBatch(ts=0.0, events=[stored(0, 1, 2)]))

    def tokens(index: BaseIndex = index) -> array[int]:
        return index.match(prompt(9)).hits(ROWS).tokens

    before = index.match(prompt(9))
    for _ in range(2):
        assert tokens() == column(0, 0, 5, 1)
        assert tokens(other) == column(0, 0, 0, 3), "one list of rows serves several indexes"
    index.rename({A: B, B: A})
    assert tokens() == column(0, 0, 1, 5)
    index.remove(A)
    assert tokens() == column(0, 0, 1, 0)
    index.apply(NOBODY, EventBatch(ts=0.0, events=[stored(0, 1, 2)]))
    assert tokens() == column(0, 3, 1, 0)
    assert before.hits(ROWS).tokens == column(0, 0, 5, 1), "an answer does not change"


@both
def test_any_number_of_rows_may_be_asked_for(kind: type[BaseIndex]) -> None:
    index = kind()
    ranks = [Rank("w", dp_rank) for dp_rank in range(200)]
    for rank in ranks:
        index.apply(rank, EventBatch(ts=0.0, events=[stored(*range(rank.dp_rank % 7 + 1))]))
    for rank in ranks[::3]:
        index.remove(rank)
    match: Match = index.match(prompt(9))
    for chosen in (ranks, ranks[50:60], ranks[::-1], []):
        expected = [match[rank].tokens if rank in match else 0 for rank in chosen]
        assert match.hits(RankRows(chosen)).tokens.tolist() == expected


def test_columns_are_ones_own() -> None:
    match = filled(Index()).match(prompt(9))
    match.hits(ROWS).tokens[0] = 5
    assert match.hits(ROWS).tokens[0] == 0


def test_a_rank_has_one_row() -> None:
    with pytest.raises(ConfigurationError, match="b/0 has two rows"):
        RankRows([A, B, B])


def test_rows_are_a_sequence_of_ranks() -> None:
    assert (list(ROWS), len(ROWS), ROWS[2], ROWS[:2]) == ([C, NOBODY, B, A], 4, B, (C, NOBODY))
    assert A in ROWS
    assert repr(RankRows([A])) == "RankRows([Rank(worker='a', dp_rank=0)])"
