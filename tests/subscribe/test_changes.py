"""Statuses that change reach asyncio tasks and callbacks: the latest ones, and no more."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from kvindex.subscribe import RankStatus, State
from kvindex.subscribe.following import LoopBell
from kvindex.wire.errors import ClosedError, NotLiveError, UnknownRankError
from kvindex.wire.rank import Rank
from tests.children import in_child
from tests.live import PATIENCE, until
from tests.subscribe.test_status_board import LATEST, Followed, status

pytestmark = pytest.mark.unit

A, B, C = Rank("a", 0), Rank("b", 0), Rank("c", 0)


@pytest.fixture
def followed() -> Followed:
    return Followed()


def in_thread(call: Callable[[], object]) -> None:
    """Do something in another thread, as the one that writes statuses."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


async def ticks(number: int) -> None:
    """Let the event loop turn; it cannot while something blocks it."""
    for _ in range(number):
        await asyncio.sleep(0)


# watch


async def test_every_rank_is_told_first_and_then_what_changes(followed: Followed) -> None:
    changes = followed.watch()
    assert [(await anext(changes)).rank for _ in range(2)] == [A, B]
    in_thread(lambda: followed.board.show([status(A, seq=6), status(B)]))
    reported = await anext(changes)
    assert (reported.rank, reported.state) == (B, State.LIVE), "progress alone is no change"
    for complete, epoch in ((False, 0), (False, 1), (True, 0)):
        in_thread(partial(followed.board.show, [status(A, complete=complete, epoch=epoch)]))
        reported = await anext(changes)
        assert (reported.rank, reported.complete, reported.epoch) == (A, complete, epoch)


async def test_a_slow_consumer_gets_the_latest_of_each_rank_and_no_more_than_that_waits(
    followed: Followed,
) -> None:
    changes = followed.watch()
    await anext(changes)
    for epoch in range(1000):
        # The loop is blocked here, as by a consumer that does not yield.
        followed.board.show([status(A, epoch=epoch), status(B, epoch=epoch)])
    reported = [await anext(changes) for _ in range(2)]
    assert {status.rank: status.epoch for status in reported} == {A: 999, B: 999}
    waiting = asyncio.ensure_future(anext(changes))
    await ticks(100)
    assert not waiting.done()
    waiting.cancel()


async def test_a_rank_that_is_removed_or_renamed_is_told_as_closed(followed: Followed) -> None:
    changes = followed.watch()
    for _ in range(2):
        await anext(changes)
    followed.board.remove([A])
    reported = await anext(changes)
    assert (reported.rank, reported.state, reported.connected) == (A, State.CLOSED, False)
    assert reported.reason == "it is not subscribed to any more"
    followed.board.rename([B], {B: C})
    followed.board.show([status(C)])
    reported = await anext(changes)
    assert (reported.rank, reported.state) == (B, State.CLOSED)
    assert (await anext(changes)).rank == C


def test_closing_ends_every_iteration_on_every_loop(followed: Followed) -> None:
    begun = threading.Barrier(4)
    ends: list[list[State]] = []

    async def consume() -> None:
        states = []
        async for reported in followed.watch():
            states.append(reported.state)
            if len(states) == 2:
                await asyncio.to_thread(begun.wait, PATIENCE)
        ends.append(states[2:])

    async def consume_twice() -> None:
        await asyncio.gather(consume(), consume())

    mains = (consume_twice(), consume())
    loops = [threading.Thread(target=asyncio.run, args=(main,)) for main in mains]
    for loop in loops:
        loop.start()
    begun.wait(PATIENCE)
    followed.close()
    for loop in loops:
        loop.join(PATIENCE)
    assert ends == [[State.CLOSED, State.CLOSED]] * 3
    assert followed.listeners == 0

    async def late() -> None:
        assert [reported.state async for reported in followed.watch()] == [State.CLOSED] * 2

    asyncio.run(late())


async def test_what_is_cancelled_or_broken_off_leaves_nothing_behind(followed: Followed) -> None:
    before = asyncio.all_tasks()

    async def consume() -> None:
        async for _ in followed.watch():
            pass

    tasks = [asyncio.ensure_future(consume()) for _ in range(5)]
    tasks += [asyncio.ensure_future(followed.wait_live_async(PATIENCE)) for _ in range(5)]
    await ticks(10)
    assert followed.listeners == 10
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in done)
    assert followed.listeners == 0
    async for _ in followed.watch():
        break
    gc.collect()
    await ticks(5)
    assert followed.listeners == 0
    assert asyncio.all_tasks() == before


async def test_the_loop_turns_while_many_statuses_are_taken(followed: Followed) -> None:
    followed.board.show([status(Rank("a", i)) for i in range(500)])
    counted = 0

    async def count() -> None:
        nonlocal counted
        while True:
            await asyncio.sleep(0)
            counted += 1

    counting = asyncio.ensure_future(count())
    taken = 0
    async for _ in followed.watch():
        taken += 1
        if taken == 500:
            break
    counting.cancel()
    assert counted >= 490


def test_a_loop_that_is_gone_harms_nobody() -> None:
    async def make() -> LoopBell:
        return LoopBell()

    bell = asyncio.run(make())
    for _ in range(2):
        bell.ring()


# wait_live_async


async def test_waiting_ends_when_the_last_rank_is_live_and_the_loop_turns_meanwhile(
    followed: Followed,
) -> None:
    waiting = asyncio.ensure_future(followed.wait_live_async(PATIENCE))
    await ticks(1000)
    assert not waiting.done()
    in_thread(lambda: followed.board.show([status(A, state=State.REPAIRING)]))
    in_thread(lambda: followed.board.show([status(B)]))
    await ticks(100)
    assert not waiting.done(), "a is not live any more"
    in_thread(lambda: followed.board.show([status(A)]))
    await waiting
    await followed.wait_live_async(0.0)
    assert followed.listeners == 0


@pytest.mark.parametrize("timeout", [PATIENCE, None])
def test_a_thread_waits_until_the_last_rank_is_live(
    followed: Followed, timeout: float | None
) -> None:
    waiting = threading.Thread(target=followed.wait_live, args=(timeout,), daemon=True)
    waiting.start()
    until(lambda: followed.listeners == 1)
    followed.board.show([status(A, state=State.REPAIRING)])
    followed.board.show([status(B)])
    followed.board.ring()  # whatever else has changed, a is not live
    assert waiting.is_alive()
    followed.board.show([status(A)])
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert followed.listeners == 0


async def test_waiting_for_some_and_for_whole_histories(followed: Followed) -> None:
    await followed.wait_live_async(0.0, ranks=[A], complete=True)
    await followed.wait_live_async(0.0, ranks="a")
    followed.board.show([status(B, complete=False)])
    await followed.wait_live_async(0.0)
    waiting = asyncio.ensure_future(followed.wait_live_async(PATIENCE, complete=True))
    await ticks(100)
    assert not waiting.done()
    followed.board.show([status(B)])
    await waiting
    with pytest.raises(UnknownRankError):
        await followed.wait_live_async(PATIENCE, ranks=["d"])


async def test_who_waits_too_long_is_told_which_ranks_and_why(followed: Followed) -> None:
    with pytest.raises(NotLiveError, match=r"1 rank is not live after 0.01 s:\n  b/0: ") as raised:
        await followed.wait_live_async(0.01)
    assert list(raised.value.reasons) == [B]
    assert followed.listeners == 0


async def test_a_rank_that_is_removed_is_waited_for_no_longer_and_one_asked_for_is_missed(
    followed: Followed,
) -> None:
    waiting = asyncio.ensure_future(followed.wait_live_async(PATIENCE))
    asked = asyncio.ensure_future(followed.wait_live_async(0.05, ranks=[B]))
    await ticks(10)
    followed.board.remove([B])
    await waiting
    with pytest.raises(NotLiveError, match="not subscribed to any more"):
        await asked


async def test_closing_ends_the_waiting(followed: Followed) -> None:
    waiting = asyncio.ensure_future(followed.wait_live_async(PATIENCE))
    await ticks(10)
    in_thread(followed.close)
    with pytest.raises(ClosedError, match="closed by the test"):
        await waiting


async def test_ranks_of_a_stuck_thread_are_live_when_it_comes_round(followed: Followed) -> None:
    followed.board.show([status(B)])
    followed.board.now += LATEST + 1
    waiting = asyncio.ensure_future(followed.wait_live_async(PATIENCE))
    await ticks(100)
    assert not waiting.done()
    in_thread(lambda: followed.board.sign(followed.board.now))
    await waiting


# on_change


def test_a_callback_is_told_what_changes_until_it_is_stopped(followed: Followed) -> None:
    reported: list[RankStatus] = []
    stop = followed.on_change(reported.append)
    followed.board.show([status(A, seq=6, last_event_age=0.0), status(B, last_event_age=-2.0)])
    assert [(s.rank, s.state, s.last_event_age) for s in reported] == [(B, State.LIVE, 2.0)]
    stop()
    stop()
    followed.board.show([status(A, epoch=1)])
    assert len(reported) == 1


def test_a_callback_may_ask_and_what_it_raises_is_logged(
    followed: Followed,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported = []

    def fail(_: RankStatus) -> None:
        raise ZeroDivisionError

    followed.on_change(fail)
    followed.on_change(lambda new: reported.append(followed.status(new.rank) == new))
    in_thread(lambda: followed.board.show([status(B)]))
    assert reported == [True]
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_keeps_nothing_alive() -> None:
    followed = Followed()
    board, alive = followed.board, weakref.ref(followed)
    reported: list[RankStatus] = []
    followed.on_change(reported.append)
    del followed
    gc.collect()
    assert alive() is None
    board.show([status(B)])
    assert reported == []


def test_a_forked_child_calls_nobody(followed: Followed) -> None:
    reported: list[RankStatus] = []
    followed.on_change(reported.append)

    def child() -> bool:
        followed.board.disown("forked")
        return reported == [] and followed.status(A).state is State.CLOSED

    assert in_child(child) == 0
