"""Clients, replicas and event streams in asyncio: the event loop goes on, nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvindex import (
    BACKEND,
    Client,
    ClosedError,
    EventStream,
    NotLiveError,
    Rank,
    RankBatch,
    RankStatus,
    State,
    StreamItem,
)
from kvindex.replicas import Replica, join
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, REPLAYS, client_of, link_to, worker_of
from tests.replicas.fanout_peers import fan_out

pytestmark = pytest.mark.e2e

RANK = Rank("engine", 0)
PROMPT = list(range(64))


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a main task; no other task and no thread is left."""
    before = threading.active_count()

    async def alone() -> None:
        others = asyncio.all_tasks()
        await asyncio.wait_for(main, PATIENCE)
        assert asyncio.all_tasks() == others

    asyncio.run(alone())
    assert threading.active_count() == before


async def until(asked: Client | Replica, **fields: Any) -> RankStatus:
    """Wait until the rank has these values."""
    async with aclosing(asked.watch()) as changes:
        async for status in changes:
            if all(getattr(status, name) == value for name, value in fields.items()):
                return status
    raise AssertionError(f"closed before {fields}")


async def turning(waiting: asyncio.Future[Any], turns: int = 1000) -> None:
    """Let the event loop turn so often; what is waited for does not come meanwhile."""
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not waiting.done()


async def batches(stream: EventStream, count: int) -> list[int]:
    """Take items until so many batches came; return their numbers."""
    numbers: list[int] = []
    async with aclosing(stream.__aiter__()) as items:
        async for item in items:
            if isinstance(item, RankBatch):
                numbers.append(item.seq)
                if len(numbers) == count:
                    break
    return numbers


def test_a_client_is_waited_for_watched_asked_and_closed_in_tasks() -> None:
    async def main(engine: FakeEngine) -> None:
        with link_to(engine) as link:
            link.cut()
            async with client_of(worker_of(engine, link)) as client:
                live = asyncio.ensure_future(client.wait_live_async(PATIENCE))
                await turning(live)
                with pytest.raises(NotLiveError, match="engine/0"):
                    await client.wait_live_async(0.01)
                link.heal()
                await live
                best = client.match(PROMPT).best
                assert best is not None
                assert (best.tokens, best.state) == (64, State.LIVE)
                lost = asyncio.ensure_future(until(client, state=State.CONNECTING))
                await turning(lost)
                link.cut()
                assert (await lost).rank == RANK
                engine.restart()
                link.retarget(engine.endpoint, engine.replay_endpoint)
                link.heal()
                assert (await until(client, epoch=1, state=State.LIVE)).restarts == 1
                closing = [asyncio.ensure_future(until(client, epoch=7)) for _ in range(3)]
                await turning(closing[0])
            for task in closing:
                with pytest.raises(AssertionError, match="closed before"):
                    await task
            with pytest.raises(ClosedError):
                await client.wait_live_async(PATIENCE)

    with FakeEngine("engine") as engine:
        engine.serve(PROMPT)
        run(main(engine))


@pytest.mark.skipif(BACKEND == "python", reason="a fan-out needs the native module")
def test_a_replica_is_waited_for_and_watched_too(tmp_path: Path) -> None:
    path = str(tmp_path / "kvindex.sock")

    async def main() -> None:
        async with await asyncio.to_thread(join, path, PATIENCE) as replica:
            await replica.wait_live_async(PATIENCE)
            stale = asyncio.ensure_future(until(replica, state=State.STALE))
            await turning(stale)
            await asyncio.to_thread(fanout.close)
            assert (await stale).rank == RANK
            closed = asyncio.ensure_future(until(replica, epoch=7))
            await turning(closed)
        with pytest.raises(AssertionError, match="closed before"):
            await closed

    with FakeEngine("engine") as engine, fan_out(path, worker_of(engine)) as fanout:
        asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_stream_is_iterated_in_a_task_and_gives_every_item_in_order() -> None:
    async def main(engine: FakeEngine) -> None:
        async with EventStream(worker_of(engine), replay_policy=REPLAYS) as stream:
            await stream.wait_live_async(PATIENCE)
            for _ in range(5):
                engine.serve(PROMPT)
                engine.clear(flush=True)
            last = engine.published - 1
            numbers = await batches(stream, last + 1)
            assert numbers == list(range(last + 1))
            following = asyncio.ensure_future(batches(stream, 1))
            await turning(following)
            engine.serve(PROMPT)
            assert await following == [last + 1]

    with FakeEngine("engine") as engine:
        run(main(engine))


def test_an_iteration_that_is_cancelled_takes_nothing_and_another_one_goes_on() -> None:
    async def main(engine: FakeEngine) -> None:
        async with EventStream(worker_of(engine), replay_policy=REPLAYS) as stream:
            seen: list[StreamItem] = []

            async def consume() -> None:
                async for item in stream:
                    seen.append(item)

            published = 0
            for _ in range(20):
                consuming = asyncio.ensure_future(consume())
                engine.serve(list(range(published, published + 16)))
                published = engine.published
                await asyncio.sleep(0.001)
                consuming.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await consuming
            engine.serve(list(range(published, published + 16)))
            published = engine.published
            numbers = [item.seq for item in seen if isinstance(item, RankBatch)]
            numbers += await batches(stream, published - len(numbers))
            assert numbers == list(range(published))

    with FakeEngine("engine") as engine:
        run(main(engine))


def test_closing_ends_the_iteration_and_other_tasks_have_their_turns() -> None:
    async def main(engine: FakeEngine) -> None:
        async with EventStream(worker_of(engine), replay_policy=REPLAYS) as stream:
            await stream.wait_live_async(PATIENCE)
            turns = 0

            async def turn() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            turning = asyncio.ensure_future(turn())
            taken: list[int] = []
            async for _ in stream:
                taken.append(turns)
                begun = asyncio.get_running_loop().time()
                while asyncio.get_running_loop().time() < begun + 0.002:
                    pass  # as one that works for long on each item
                if len(taken) == 20:
                    stream.close()
            assert len(taken) == 20
            assert all(later > before for before, later in pairwise(taken))
            turning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turning

    with FakeEngine("engine") as engine:
        for start in range(0, 40 * 16, 16):
            engine.serve(range(start, start + 16))
        run(main(engine))
