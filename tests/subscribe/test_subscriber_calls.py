"""Functions called between two items, and cursors taken and resumed by a subscriber's own user."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvindex import (
    BusyError,
    ClosedError,
    ConfigurationError,
    Rank,
    UnknownRankError,
    Worker,
)
from kvindex.subscribe import (
    RankAdded,
    RankBatch,
    RankRestarted,
    RanksRenamed,
    StreamItem,
    Subscriber,
)
from kvindex.subscribe.subscriber_thread import Commands
from kvindex.testing import FakeEngine, Workload
from tests.live import PATIENCE, REPLAYS, caught_up, until, worker_of
from tests.subscribe.peers import RANK, BlockingSink, batch_seqs

pytestmark = pytest.mark.e2e


def subscriber_to(
    *engines: FakeEngine, sink: Callable[[StreamItem], None], **options: Any
) -> Subscriber:
    workers = [worker_of(engine) for engine in engines]
    return Subscriber(workers, sink=sink, replay_policy=REPLAYS, probe_interval=0.3, **options)


def ignore(item: StreamItem) -> None:
    """A sink that wants nothing."""


def test_a_function_is_called_on_the_thread_until_the_subscriber_is_closed() -> None:
    def fail() -> None:
        raise TimeoutError("the function's")

    with Subscriber(sink=ignore) as subscriber:
        assert subscriber.call(threading.current_thread).name == "kvindex-subscriber"
        assert subscriber.call(lambda: subscriber.call(lambda: 7)) == 7
        with pytest.raises(ZeroDivisionError):
            subscriber.call(lambda: 1 // 0)
        with pytest.raises(TimeoutError, match="the function's"):
            subscriber.call(fail)
        assert subscriber.call(lambda: "still there") == "still there"
    for ask in (lambda: subscriber.call(lambda: 1), lambda: subscriber.cursor(RANK)):
        with pytest.raises(ClosedError):
            ask()


def test_a_sink_cannot_call_since_it_stands_within_an_item(engine: FakeEngine) -> None:
    caught: list[Exception] = []

    def sink(item: StreamItem) -> None:
        if isinstance(item, RankBatch):
            try:
                subscriber.cursor(RANK)
            except BusyError as error:
                caught.append(error)

    with subscriber_to(engine, sink=sink) as subscriber:
        subscriber.wait_live(PATIENCE)
        engine.serve(range(100))
        caught_up(subscriber, engine)
    assert len(caught) == 1


def test_a_slow_sink_is_waited_for_as_long_as_the_caller_says(engine: FakeEngine) -> None:
    sink = BlockingSink()
    with subscriber_to(engine, sink=sink) as subscriber:
        subscriber.wait_live(PATIENCE)
        engine.serve(range(100))
        sink.wait_blocked()
        called = []
        with pytest.raises(BusyError):
            subscriber.call(lambda: called.append(1), timeout=0.01)
        sink.go_on.set()
        assert subscriber.call(lambda: len(called)) == 0, "what was given up is not made up for"


def test_a_rank_without_batches_has_no_cursor_and_an_unknown_one_is_unknown(
    engine: FakeEngine,
) -> None:
    with subscriber_to(engine, sink=ignore) as subscriber:
        subscriber.wait_live(PATIENCE)
        assert subscriber.cursor(RANK) is None
        with pytest.raises(UnknownRankError):
            subscriber.cursor(Rank("engine", 1))


def first_cursor(engine: FakeEngine) -> bytes:
    with subscriber_to(engine, sink=ignore) as subscriber:
        caught_up(subscriber, engine)
        cursor = subscriber.cursor(RANK)
    assert cursor is not None
    return cursor


def test_a_sink_is_given_what_follows_the_cursor_and_nothing_else(engine: FakeEngine) -> None:
    items: list[StreamItem] = []
    engine.run(Workload(10, seed=1))
    cursor, saved = first_cursor(engine), engine.published
    engine.run(Workload(10, seed=2))
    with subscriber_to(engine, sink=items.append, resume={RANK: cursor}) as subscriber:
        caught_up(subscriber, engine)
    assert isinstance(items[0], RankAdded)
    batches = [item for item in items[1:] if isinstance(item, RankBatch)]
    assert batches == items[1:]
    assert batch_seqs(batches) == list(range(saved, engine.published))
    assert {batch.epoch for batch in batches} == {0}


def test_a_cursor_of_other_fingerprints_is_a_restart_before_anything_else(
    engine: FakeEngine,
) -> None:
    class Mine:
        identity = "mine"

        def of(self, payload: bytes) -> int:
            return len(payload)

    items: list[StreamItem] = []
    engine.serve(range(100))
    options = {"resume": {RANK: first_cursor(engine)}, "fingerprints": Mine()}
    with subscriber_to(engine, sink=items.append, **options) as subscriber:
        caught_up(subscriber, engine)
        counters = subscriber.status(RANK).counters
    assert items[:2] == [RankAdded(RANK), RankRestarted(RANK, 1, "other_fingerprints")]
    assert [type(item) for item in items[2:]] == [RankBatch]
    assert counters["refused_other_fingerprints"] == 1


def test_cursors_of_nobody_are_counted_and_those_of_later_workers_wait_to_be_given(
    engine: FakeEngine,
) -> None:
    engine.serve(range(100))
    resume = {RANK: first_cursor(engine), Rank("engine", 3): b"?", Rank("gone"): b"?"}
    with subscriber_to(sink=ignore, resume=resume) as subscriber:
        assert subscriber.statistics()["thread"]["cursors_unused"] == 3
        subscriber.add(worker_of(engine), resume=resume)
        caught_up(subscriber, engine)
        status = subscriber.status(RANK)
        assert status.counters["resumed"] == 1
        assert status.restarts == 0
        assert subscriber.statistics()["thread"]["cursors_unused"] == 4


def test_a_rank_is_found_and_not_live_until_the_sink_has_renamed_it() -> None:
    """A busy index holds up the sink: meanwhile nothing was there, so nothing seemed to be late."""
    seen: list[tuple[tuple[Rank, ...], Rank, bool]] = []

    def sink(item: StreamItem) -> None:
        if isinstance(item, RanksRenamed):
            rank = subscriber.status("named").rank
            seen.append((subscriber.ranks, rank, subscriber.board.late(None, False) is None))

    with FakeEngine("named", dp_rank=3) as engine, Subscriber(sink=sink) as subscriber:
        subscriber.add(Worker("named", engine.endpoint, replay=engine.replay_endpoint))
        subscriber.wait_live(PATIENCE)
        engine.serve(range(100))
        until(subscriber.statuses, lambda statuses: engine.rank in statuses)
        assert subscriber.status("named/0").rank == engine.rank
    assert seen == [((Rank("named", 0),), Rank("named", 0), False)]


@pytest.mark.parametrize("timeout", [None, math.inf, 1e300])
def test_a_wait_may_have_no_end(engine: FakeEngine, timeout: float | None) -> None:
    with subscriber_to(engine, sink=ignore) as subscriber:
        subscriber.wait_live(timeout)
        asyncio.run(subscriber.wait_live_async(timeout))


@pytest.mark.parametrize("timeout", ["5", math.nan])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    with Subscriber(sink=ignore) as subscriber:
        with pytest.raises(ConfigurationError, match="pass seconds, or None for ever"):
            subscriber.wait_live(timeout)


# Each call gets an answer, whatever becomes of it


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_ends_the_thread_reaches_the_caller_too(kind: type[BaseException]) -> None:
    def end() -> None:
        raise kind("planted")

    with Subscriber(sink=ignore) as subscriber:
        with pytest.raises(kind, match="planted"):
            subscriber.call(end)
        until(lambda: subscriber.board.ended)
        with pytest.raises(ClosedError, match=f"thread failed: {kind.__name__}"):
            subscriber.call(end)


def test_a_call_that_does_not_end_is_given_up_after_its_time() -> None:
    go = threading.Event()

    def give_up() -> BusyError:
        with pytest.raises(BusyError) as raised:
            subscriber.call(lambda: go.wait(PATIENCE), timeout=0.05)
        return raised.value

    with Subscriber(sink=ignore) as subscriber:
        assert "ends when that does" in str(until(give_up, lambda error: error.begun))
        with pytest.raises(BusyError, match="nothing was done") as raised:
            subscriber.call(lambda: go.wait(PATIENCE), timeout=0.05)
        assert not raised.value.begun
        go.set()
        assert subscriber.call(lambda: 7) == 7


def test_calls_that_wait_when_the_thread_ends_and_those_that_come_then_are_refused() -> None:
    commands = Commands(lambda: None)
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(commands.call, int, PATIENCE)
        until(lambda: commands.waiting)
        commands.close()
        with pytest.raises(ClosedError):
            waiting.result(PATIENCE)
        with pytest.raises(ClosedError):
            commands.call(int, PATIENCE)
