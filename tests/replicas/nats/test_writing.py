"""The queue before the log loses nothing unnoticed and delays nobody; a driver empties it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.replicas.nats import log_writer
from kvindex.replicas.nats.log import (
    AppendRefusedError,
    BodyReader,
    NoStreamError,
    StreamSettings,
)
from kvindex.replicas.nats.log_writer import LogWriter, WriterState
from kvindex.replicas.nats.relay import LogDriver, LogQueue
from kvindex.wire.errors import BusyError, NatsError
from tests.live import PATIENCE
from tests.replicas.nats.hand_relay import MemoryLog

pytestmark = pytest.mark.unit


class Clock:
    """Monotonic seconds that a test sets; it notes that another thread has asked."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = threading.Event()
        self._own = threading.current_thread()

    def __call__(self) -> float:
        if threading.current_thread() is not self._own:
            self.asked.set()
        return self.now


def queue_of(most: int = 100, clock: Clock | None = None) -> tuple[LogQueue, list[str]]:
    """An attached queue, and a bell that it rings."""
    rung: list[str] = []
    queue = LogQueue(lambda: rung.append("rung"), most=most, clock=clock or Clock())
    queue.attach()
    return queue, rung


def taken(queue: LogQueue, limit: int = 1000) -> list[bytes]:
    """What waits in a queue."""
    reader, messages = BodyReader(), []
    while body := queue.take(limit):
        assert len(body) <= limit
        messages += [bytes(message) for message in reader.split(body)]
    return messages


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=20), st.integers(5, 70))
def test_messages_are_taken_in_order_whatever_fits_a_body(
    messages: list[bytes], limit: int
) -> None:
    queue, _ = queue_of(most=2000)
    for message in messages:
        queue.send(message)
    assert queue.waiting_bytes == sum(map(len, messages))
    assert taken(queue, limit) == messages
    assert queue.waiting_bytes == 0


def test_while_another_relay_writes_nothing_is_kept() -> None:
    queue, _ = queue_of()
    queue.send(b"a")
    queue.detach()
    assert (queue.count_readers(), queue.is_attached) == (0, False)
    queue.send(b"b")
    assert taken(queue) == []
    queue.attach()
    assert queue.count_readers() == 1
    queue.send(b"c")
    assert taken(queue) == [b"c"]
    assert queue.statistics()["messages"] == 2


def test_the_bell_rings_only_for_those_who_found_nothing() -> None:
    queue, rung = queue_of()
    queue.send(b"a")
    assert rung == []
    assert taken(queue) == [b"a"]
    queue.send(b"b")
    queue.send(b"c")
    assert rung == ["rung"]


def test_a_full_queue_overflows_at_once_if_nothing_was_taken_for_a_second() -> None:
    clock = Clock()
    queue, rung = queue_of(clock=clock)
    queue.send(bytes(90))
    clock.now += 1.0
    queue.send(bytes(20))
    assert (queue.is_attached, queue.waiting_bytes, rung) == (False, 0, ["rung"])
    assert "NATS accepts them too slowly" in queue.trouble
    assert queue.statistics()["overflows"] == 1
    queue.send(b"dropped")
    queue.attach()
    assert queue.trouble == ""
    queue.send(b"a")
    assert taken(queue) == [b"a"]


def test_a_full_queue_waits_until_messages_are_taken() -> None:
    queue, _ = queue_of()
    queue.send(bytes(90))
    with ThreadPoolExecutor(1) as subscriber:
        sending = subscriber.submit(queue.send, bytes(20))
        assert len(queue.take(1000)) == 94
        sending.result(PATIENCE)
    assert queue.waiting_bytes == 20
    assert queue.statistics()["overflows"] == 0


def test_it_waits_a_second_in_all_while_little_is_taken() -> None:
    clock = Clock()
    queue, _ = queue_of(clock=clock)
    for _ in range(9):
        queue.send(bytes(10))
    with ThreadPoolExecutor(1) as subscriber:
        sending = subscriber.submit(queue.send, bytes(80))
        assert clock.asked.wait(PATIENCE)  # it waits for room
        for _ in range(3):
            clock.now += 0.4
            queue.take(14)
        sending.result(PATIENCE)
    assert not queue.is_attached
    assert queue.statistics()["blocked_seconds"] >= 1.0


def test_a_message_that_never_fits_overflows_without_a_wait() -> None:
    queue, _ = queue_of()
    queue.send(bytes(101))
    assert "101 bytes is too long" in queue.trouble


def test_closing_frees_a_thread_that_waits() -> None:
    clock = Clock()
    queue, _ = queue_of(clock=clock)
    queue.send(bytes(90))
    with ThreadPoolExecutor(1) as subscriber:
        sending = subscriber.submit(queue.send, bytes(20))
        assert clock.asked.wait(PATIENCE)
        queue.close()
        sending.result(PATIENCE)
    assert not queue.is_attached


# The driver -------------------------------------------------------------------------------------


class WritersLog(MemoryLog):
    """A log in memory that takes appends; its stream is to be made first."""

    pool = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.max_body_bytes = 1000
        self.failure = NoStreamError("no stream")

    async def make(self, settings: StreamSettings) -> None:
        self.failure = None

    async def append(self, epoch: str, expected: int, body: bytes) -> int:
        if (await self.head()).seq != expected:
            raise AppendRefusedError("another number")
        self.add(epoch, body)
        return self.last

    def of(self, epoch: str) -> list[bytes]:
        """The messages of an epoch."""
        reader = BodyReader()
        bodies = [body for its_epoch, body in self.messages.values() if its_epoch == epoch]
        return [bytes(part) for body in bodies for part in reader.split(body)]


class Scene:
    """A writer with its queue, which is attached and detached as a relay does it."""

    def __init__(self) -> None:
        self.log = WritersLog()
        self.writer = LogWriter("w")
        self.events: list[str] = []
        self.troubles: list[Exception] = []  # that the next epochs meet as they begin
        self.queue = LogQueue(self.wake, most=300)
        self.writing = LogDriver(
            self.log,  # type: ignore[arg-type]
            StreamSettings(),
            self.writer,
            self.queue,
            on_begin=self.begin,
            on_end=self.end,
            on_append=lambda size: None,
        )

    async def reach(self, wanted: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not wanted():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)

    def wake(self) -> None:
        self.writing.wake()

    async def begin(self) -> None:
        self.events.append(f"begin {self.writer.epoch}")
        if self.troubles:
            raise self.troubles.pop()
        self.queue.attach()

    async def end(self) -> None:
        self.events.append("end")
        self.queue.detach()


@asynccontextmanager
async def running(*troubles: Exception) -> AsyncIterator[Scene]:
    """A scene whose first epoch has begun, or one after these troubles; its end is the writer's."""
    scene = Scene()
    scene.troubles += troubles
    writing = asyncio.ensure_future(scene.writing.run())
    try:
        await scene.reach(lambda: scene.queue.is_attached)
        yield scene
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    monkeypatch.setattr(log_writer, "_SHORTEST_PAUSE", 0.0)


async def test_what_waits_is_appended_in_order_and_ends_with_the_epoch() -> None:
    async with running() as scene:
        for number in range(5):
            scene.queue.send(b"%d" % number)
            await asyncio.sleep(0)
        await scene.reach(lambda: len(scene.log.of("w-1")) == 5)
        assert scene.log.of("w-1") == [b"0", b"1", b"2", b"3", b"4"]
    assert scene.events == ["begin w-1", "end"]
    assert not scene.queue.is_attached


async def test_a_queue_that_overflows_begins_a_new_epoch_once_nats_answers() -> None:
    async with running() as scene:
        scene.log.failure = NatsError("no answer")
        scene.queue.send(bytes(301))
        assert scene.queue.trouble
        await scene.reach(lambda: scene.writer.counters["failures"])
        assert scene.events == ["begin w-1", "end"]
        scene.log.failure = None
        await scene.reach(lambda: scene.queue.is_attached)
        scene.queue.send(b"again")
        await scene.reach(lambda: scene.log.of("w-2") == [b"again"])
        assert scene.events == ["begin w-1", "end", "begin w-2"]


async def test_what_waits_while_nats_is_away_follows_in_the_same_epoch() -> None:
    async with running() as scene:
        scene.log.failure = NatsError("no answer")
        for number in range(5):
            scene.queue.send(b"%d" % number)
        await scene.reach(lambda: scene.writer.counters["failures"] > 2)
        scene.log.failure = None
        await scene.reach(lambda: len(scene.log.of("w-1")) == 5)
        assert scene.events == ["begin w-1"]


async def test_another_writer_detaches_the_queue() -> None:
    async with running() as scene:
        scene.log.add("other-1", b"")
        scene.queue.send(b"late")
        await scene.reach(lambda: scene.writer.state is WriterState.STANDING_BY)
        await scene.reach(lambda: not scene.queue.is_attached)
        assert scene.log.of("w-1") == []


async def test_a_subscriber_that_is_busy_as_an_epoch_begins_gets_another_one() -> None:
    async with running(BusyError(5.0)) as scene:
        assert scene.events == ["begin w-1", "end", "begin w-2"]


async def test_a_body_that_a_server_no_longer_accepts_begins_a_new_epoch() -> None:
    async with running() as scene:
        scene.log.failure = NatsError("no answer")
        scene.queue.send(bytes(200))
        await scene.reach(lambda: scene.writer.counters["failures"] > 1)
        scene.log.max_body_bytes = 100
        scene.log.failure = None
        await scene.reach(lambda: scene.writer.epoch == "w-2" and scene.queue.is_attached)
        scene.queue.send(bytes(200))
        await scene.reach(lambda: scene.log.of("w-2") == [bytes(200)])
        assert all(len(body) <= 100 for _, body in scene.log.messages.values())
