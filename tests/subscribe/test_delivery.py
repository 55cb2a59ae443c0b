"""The guarded way to the sink, and what waits on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvindex.subscribe import RankBatch, RankLost, RankRemoved, RankRestarted, StreamItem
from kvindex.subscribe.delivery import Delivery, Outlet
from kvindex.wire.rank import Rank

pytestmark = pytest.mark.unit

RANK = Rank("engine", 0)


def outlet_of(take: Callable[[Any], None], *, direct: bool) -> tuple[Outlet, Counter[str]]:
    """Make an outlet whose batches `take` gets, by `on_batch` or in an item; and its counters."""

    def sink(item: StreamItem) -> None:
        assert isinstance(item, RankBatch)
        take(item.batch)

    counters: Counter[str] = Counter()
    return Outlet(sink, (lambda _, batch: take(batch)) if direct else None, counters), counters


def test_the_sink_gets_each_batch_in_an_envelope_with_its_own_seq_unless_on_batch_does() -> None:
    items: list[StreamItem] = []
    batches: list[tuple[Rank, Any]] = []
    for on_batch in (None, lambda rank, batch: batches.append((rank, batch))):
        outlet = Outlet(items.append, on_batch, Counter())
        outlet.put_run(RANK, 2, 40, ["a", "b"])
        outlet.put(RankRemoved(RANK))
    assert items == [
        RankBatch(RANK, 2, 40, "a", False),
        RankBatch(RANK, 2, 41, "b", False),
        RankRemoved(RANK),
        RankRemoved(RANK),
    ]
    assert batches == [(RANK, "a"), (RANK, "b")]


@pytest.mark.parametrize("direct", [True, False])
def test_batches_are_handed_over_one_at_least_as_long_as_there_is_time(direct: bool) -> None:
    taken: list[Any] = []
    outlet, _ = outlet_of(taken.append, direct=direct)
    times = iter([True, False, False])
    put = partial(outlet.put_run, RANK, 0, 0, time_left=lambda: next(times))
    assert [put(["a", "b", "c"]), put(["c"])] == [2, 1]
    assert taken == ["a", "b", "c"]
    outlet.shut = True
    assert put(["d", "e"]) == 2, "they are done with"


@pytest.mark.parametrize("direct", [True, False])
def test_a_failure_is_counted_and_the_batches_after_it_still_come(
    direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[Any] = []

    def take(batch: Any) -> None:
        if batch == "b":
            raise RuntimeError("a planted bug")
        taken.append(batch)

    outlet, counters = outlet_of(take, direct=direct)
    outlet.put_run(RANK, 0, 0, ["a", "b", "c"])
    assert taken == ["a", "c"]
    assert counters == {"sink_failures": 1}
    assert "the sink failed on RankBatch" in caplog.text
    assert "a planted bug" in caplog.text


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_comes_once_it_is_shut_not_even_the_rest_of_a_run(direct: bool) -> None:
    taken: list[Any] = []

    def take(batch: Any) -> None:
        taken.append(batch)
        outlet.shut = True

    outlet, _ = outlet_of(take, direct=direct)
    outlet.put_run(RANK, 0, 0, ["a", "b", "c"])
    outlet.put(RankRemoved(RANK))
    assert taken == ["a"]


# -- what waits for want of time


def delivery_of(items: list[Any], times: list[bool]) -> Delivery:
    """Make a delivery in its turn, into `items`, whose sink has room when `times` says so."""
    left = iter(times)
    outlet = Outlet(items.append, None, Counter(), has_room=lambda: next(left))
    delivery = Delivery(RANK, outlet, lambda: 0.0)
    delivery.begin_turn()
    return delivery


def batch(seq: int, *, replayed: bool = True) -> RankBatch[Any]:
    return RankBatch(RANK, 0, seq, f"batch {seq}", replayed)


def test_what_there_was_no_time_for_comes_first_in_the_next_turn() -> None:
    items: list[Any] = []
    delivery = delivery_of(items, [True, False, False, True, True, True, True])
    delivery.add(batch(4))
    delivery.add_run(5, ["batch 5", "batch 6", "batch 7"])
    delivery.add(batch(8))
    assert delivery.lag == 5
    delivery.hand_over(1.0)
    assert (delivery.seq, delivery.lag, delivery.batch_at) == (5, 3, 1.0)
    delivery.hand_over(2.0)
    assert (delivery.seq, delivery.lag) == (8, 0)
    assert not delivery.waiting
    assert items == [batch(seq, replayed=seq in (4, 8)) for seq in range(4, 9)]


def test_everything_is_handed_over_where_the_cursor_must_stand_at_the_sink() -> None:
    items: list[Any] = []
    delivery = delivery_of(items, [False] * 6)
    delivery.add_run(0, ["batch 0", "batch 1"])
    delivery.add(RankRestarted(RANK, 1, "seq_fell_back"))
    delivery.hand_over_all(1.0)
    assert (delivery.epoch, delivery.seq, len(items)) == (1, None, 3)


def test_what_waits_goes_out_under_the_name_that_its_rank_has_by_then() -> None:
    items: list[Any] = []
    delivery = delivery_of(items, [True] * 5)
    delivery.add(batch(0))
    delivery.add_run(1, ["batch 1"])
    delivery.add(RankLost(RANK, 0, "evicted", 2, 3, False))
    delivery.rename(Rank("engine", 7))
    delivery.hand_over(1.0)
    assert [(type(item), item.rank.dp_rank) for item in items] == [
        (RankBatch, 7),
        (RankBatch, 7),
        (RankLost, 7),
    ]


def test_a_sink_that_asks_for_more_in_its_own_call_gets_nothing_out_of_order() -> None:
    seqs: list[int] = []

    def sink(item: StreamItem) -> None:
        assert isinstance(item, RankBatch)
        delivery.hand_over_all(1.0)
        seqs.append(item.seq)

    delivery = Delivery(RANK, Outlet(sink, None, Counter()), lambda: 0.0)
    delivery.begin_turn()
    delivery.add(batch(0))
    delivery.add(batch(1))
    delivery.hand_over(1.0)
    assert seqs == [0, 1]
