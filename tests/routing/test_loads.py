"""The board of loads: rows that move, what was given lately, gauges that end."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import Rank
from kvindex.routing import Load, LocalLoadBoard
from kvindex.routing.funnel import PrefillRate
from tests.routing.fleet import NOTHING, A, B, C

pytestmark = pytest.mark.unit


def board(*ranks: Rank) -> LocalLoadBoard:
    made = LocalLoadBoard()
    made.arrange(ranks)
    return made


def test_loads_keep_to_their_ranks_when_rows_move() -> None:
    loads = board(A, B)
    loads.add(A, 10, 1, 1, now=0.0)
    loads.add(B, 20, 2, 2, now=0.0)
    loads.give(B, 100, now=0.0)
    loads.arrange([C, B])
    assert loads.columns(0.0).queued.tolist() == [0.0, 20.0]
    assert loads.columns(0.0).given.tolist() == [0.0, 100.0]
    assert loads.load(A, 0.0) == Load(10, 1, 1)
    loads.add(A, -10, -1, -1, now=0.0)
    loads.arrange([A, B, C])
    assert loads.columns(0.0).open.tolist() == [0.0, 2.0, 0.0]


def test_a_rank_without_a_row_can_be_booked_and_released() -> None:
    loads = board()
    loads.add(A, 5, 1, 1, now=0.0)
    assert loads.load(A, 0.0) == Load(5, 1, 1)
    loads.add(A, -5, -1, -1, now=0.0)
    assert loads.load(A, 0.0) == NOTHING
    loads.give(A, 100, now=0.0)
    loads.report(A, 5, 5, until=1.0)
    assert loads.load(A, 0.0) == NOTHING


def test_tokens_given_a_minute_ago_count_half() -> None:
    loads = board(A, B)
    loads.give(A, 100, now=0.0)
    loads.give(B, 50, now=60.0)
    given = loads.columns(60.0).given
    assert given[0] == given[1]
    loads.give(B, 1, now=60.0)
    assert given[0] < loads.columns(60.0).given[1]


def test_the_sums_of_given_tokens_stay_finite_for_years() -> None:
    loads = board(A, B)
    loads.give(A, 100, now=0.0)
    loads.give(B, 100, now=3e9)
    given = loads.columns(3e9).given
    assert given.tolist() == [0.0, 100.0]


def test_a_clock_that_goes_back_starves_no_rank() -> None:
    loads = board(A, B)
    loads.give(A, 10, now=1_000.0)
    loads.give(A, 10, now=20_000.0)
    loads.give(B, 10, now=2_000.0)
    given = loads.columns(now=2_000.0).given
    assert given[1] > given[0]  # else B is chosen as long as the tokens given to A weigh more


def test_a_gauge_of_one_rank_leaves_the_others_alone() -> None:
    loads = board(A, B)
    loads.report(A, queued_tokens=7, open_requests=None, until=1.0)
    loads.add(B, 3, 1, 1, now=0.0)
    assert loads.columns(0.5).queued.tolist() == [7.0, 3.0]
    loads.arrange([B, A])
    assert loads.columns(0.5).queued.tolist() == [3.0, 7.0]
    assert loads.columns(1.0).queued.tolist() == [3.0, 0.0]
    loads.report(A, 7, 7, until=2.0)
    loads.arrange([B])
    assert loads.columns(1.5).queued.tolist() == [3.0]


def test_gauges_are_read_only_when_one_of_them_ends() -> None:
    class Corrections(dict[Rank, Any]):
        reads = 0

        def items(self) -> Any:
            self.reads += 1
            return super().items()

    loads = board(A, B)
    loads.report(A, 7, 1, until=2.0)
    loads.report(B, 8, 1, until=1.0)
    corrections = loads._corrections = Corrections(loads._corrections)
    for now, queued, reads in (
        (0.5, [7.0, 8.0], 0),
        (1.0, [7.0, 0.0], 1),
        (1.5, [7.0, 0.0], 1),
        (2.0, [0.0, 0.0], 2),
    ):
        assert loads.columns(now).queued.tolist() == queued
        assert corrections.reads == reads


def test_short_waits_do_not_measure_the_prefill_rate() -> None:
    rate = PrefillRate()
    rate.measure(2_047, 10.0)
    rate.measure(1e6, 0.0)
    assert rate.tokens_per_second == 16_000.0
    rate.measure(1e6, 10.0)
    assert 98_000 < rate.tokens_per_second <= 100_000
