"""The guarded way to the sink."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from kvindex.rank import Rank
from kvindex.subscribe import RankBatch, RankRemoved, StreamItem
from kvindex.subscribe.delivery import Outlet

RANK = Rank("engine", 0)


def test_the_sink_gets_each_batch_in_an_envelope_with_its_own_seq() -> None:
    items: list[StreamItem] = []
    outlet = Outlet(items.append, None, Counter())
    outlet.put_run(RANK, 2, 40, ["a", "b"])
    outlet.put(RankRemoved(RANK))
    assert items == [
        RankBatch(RANK, 2, 40, "a", False),
        RankBatch(RANK, 2, 41, "b", False),
        RankRemoved(RANK),
    ]


def test_on_batch_gets_the_batches_and_the_sink_everything_else() -> None:
    items: list[StreamItem] = []
    batches: list[tuple[Rank, Any]] = []
    outlet = Outlet(items.append, lambda rank, batch: batches.append((rank, batch)), Counter())
    outlet.put_run(RANK, 2, 40, ["a", "b"])
    outlet.put(RankRemoved(RANK))
    assert batches == [(RANK, "a"), (RANK, "b")]
    assert items == [RankRemoved(RANK)]


@pytest.mark.parametrize("by_batch", [False, True])
def test_batches_are_handed_over_one_at_least_as_long_as_there_is_time(by_batch: bool) -> None:
    taken: list[Any] = []
    outlet = Outlet(
        taken.append, (lambda rank, b: taken.append(b)) if by_batch else None, Counter()
    )
    times = iter([True, False, False])
    put = partial(outlet.put_run, RANK, 0, 0, time_left=lambda: next(times))
    assert [put(["a", "b", "c"]), put(["c"])] == [2, 1]
    assert len(taken) == 3
    outlet.shut = True
    assert put(["d", "e"]) == 2, "they are done with"


def fail_on_b(batch: object) -> None:
    if batch == "b":
        raise RuntimeError("a planted bug")


@pytest.mark.parametrize("direct", [True, False])
def test_a_failure_is_counted_and_the_batches_after_it_still_come(
    direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[Any] = []

    def on_batch(_: Rank, batch: Any) -> None:
        fail_on_b(batch)
        taken.append(batch)

    def sink(item: StreamItem) -> None:
        assert isinstance(item, RankBatch)
        on_batch(item.rank, item.batch)

    counters: Counter[str] = Counter()
    outlet = Outlet(sink, on_batch if direct else None, counters)
    outlet.put_run(RANK, 0, 0, ["a", "b", "c"])
    assert taken == ["a", "c"]
    assert counters == {"sink_failures": 1}
    assert "the sink failed on RankBatch" in caplog.text
    assert "a planted bug" in caplog.text


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_comes_once_it_is_shut_not_even_the_rest_of_a_run(direct: bool) -> None:
    taken: list[Any] = []

    def on_batch(_: Rank, batch: Any) -> None:
        taken.append(batch)
        outlet.shut = True

    def sink(item: StreamItem) -> None:
        assert isinstance(item, RankBatch)
        on_batch(item.rank, item.batch)

    outlet = Outlet(sink, on_batch if direct else None, Counter())
    outlet.put_run(RANK, 0, 0, ["a", "b", "c"])
    outlet.put(RankRemoved(RANK))
    assert taken == ["a"]
