"""A relay that is driven by hand, a log and a store in memory, and what copies of it hold."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from kvindex import Rank
from kvindex.replicas.messages import ReceivedMessage
from kvindex.replicas.nats.following import LogMembership, LogOrigin, PoolConnection
from kvindex.replicas.nats.log import Head, Log, LogMessage, StreamSettings, join_bodies
from kvindex.replicas.nats.snapshots import PoolSnapshots, encode_snapshot, name_of
from kvindex.subscribe import RankAdded, RankRemoved
from kvindex.wire.errors import NatsError
from kvindex.wire.nats import NatsPool, open_connection, parse_pool
from tests.index.index_events import stored
from tests.live import PATIENCE
from tests.replicas.hand_server import HandServer

POOL = parse_pool("nats://n1", "llama", {})
A, B = Rank("a"), Rank("b")
STOP = threading.Event()  # never set

_Result = TypeVar("_Result")


class HandRelay(HandServer):
    """The relay's index and its tap; what it sends waits until `body` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.tap.attend()
        self._block = 0

    def add(self, rank: Rank) -> None:
        self.tell(RankAdded(rank))

    def remove(self, rank: Rank) -> None:
        self.tell(RankRemoved(rank))

    def store(self, rank: Rank) -> None:
        """Store one more block."""
        self._block += 1
        self.apply(rank, stored(self._block, parent=None))

    def body(self) -> bytes:
        """End the turn; return all that was sent since the last call."""
        self.show()
        body, self.sent = join_bodies(self.sent), []
        return body

    def snapshot(self, epoch: str, position: int) -> tuple[str, bytes]:
        """Return an object, by its name."""
        name = name_of(position, epoch)
        return name, encode_snapshot(self.snapshots.parts(), self.index, epoch, position)


class MemoryLog:
    """A log and a store in memory, which lose and repeat what they are asked to."""

    is_closed = False
    is_connected = True

    def __init__(self) -> None:
        self.messages: dict[int, tuple[str, bytes]] = {}
        self.last = 0
        self.first = 1
        self.objects: dict[str, bytes | Exception] = {}
        self.skipped: set[int] = set()  # left out by the next delivery
        self.repeated: set[int] = set()  # delivered twice
        self.pending: int | None = None  # what deliveries say of it, if not the truth
        self.reads: list[int] = []  # from where the log was asked for
        self.failure: NatsError | None = None  # of every request
        self.on_silence: Callable[[], object] = lambda: None
        self.closed = 0
        self.readers = 0  # that are open

    def add(self, epoch: str, body: bytes) -> None:
        self.last += 1
        self.messages[self.last] = epoch, body

    def trim(self, first: int) -> None:
        """Forget the messages before this one."""
        self.first = max(self.first, min(first, self.last + 1))
        for seq in [seq for seq in self.messages if seq < self.first]:
            del self.messages[seq]

    def put(self, name: str, data: bytes | Exception) -> None:
        self.objects[name] = data

    # As connections see it

    async def connect(self, pool: NatsPool, on_change: Callable[[str], None]) -> PoolConnection:
        self._check()
        self.on_change = on_change
        return PoolConnection(self, self, self._close)  # type: ignore[arg-type]

    async def _close(self) -> None:
        self.closed += 1

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def head(self) -> Head:
        await asyncio.sleep(0)
        self._check()
        return Head(self.last, self.first, self.messages.get(self.last, (None,))[0])

    async def names(self) -> list[str]:
        return sorted(self.objects)

    async def get(self, name: str) -> bytes:
        data = self.objects[name]
        if isinstance(data, Exception):
            raise data
        return data

    async def read(self, seq: int) -> MemoryReader:
        self._check()
        self.reads.append(seq)
        self.readers += 1
        return MemoryReader(self, seq)


class MemoryReader:
    def __init__(self, log: MemoryLog, seq: int) -> None:
        self._log = log
        self._seq = seq

    async def next(self, timeout: float) -> LogMessage:
        log = self._log
        self._seq = max(self._seq, log.first)
        while self._seq in log.skipped:
            log.skipped.discard(self._seq)
            self._seq += 1
        if self._seq > log.last:
            log.on_silence()
            await asyncio.sleep(0)  # a connection that breaks ends the wait here
            raise asyncio.TimeoutError
        epoch, body = log.messages[self._seq]
        pending = log.last - self._seq if log.pending is None else log.pending
        message = LogMessage(self._seq, epoch, pending, body)
        if self._seq in log.repeated:
            log.repeated.discard(self._seq)
        else:
            self._seq += 1
        return message

    async def close(self) -> None:
        self._log.readers -= 1


def origin(
    log: MemoryLog, pool: NatsPool = POOL, clock: Callable[[], float] = time.monotonic
) -> LogOrigin:
    return LogOrigin(pool, 3.0, log.connect, clock)


def membership(log: MemoryLog, notes: list[str], **options: Any) -> LogMembership:
    """A place that has not joined."""
    return origin(log, **options).open(notes.append)


class RealLog:
    """A relay's end of a pool on a real server: each call runs the connection's event loop."""

    def __init__(self, pool: NatsPool, relay: HandRelay) -> None:
        self.pool = pool
        self.relay = relay
        self.epochs = 0
        self.last = 0
        self._loop = asyncio.new_event_loop()
        try:
            self._client = self._run(open_connection(pool, "relay", timeout=PATIENCE))
            self._log = Log(self._client, pool)
            self._store = PoolSnapshots(self._client, pool)
            self._run(self._log.make(StreamSettings(max_bytes=8 << 20)))
        except BaseException:
            self._loop.close()
            raise

    @property
    def epoch(self) -> str:
        return f"e-{self.epochs}"

    def begin(self) -> None:
        """Begin another epoch, with a snapshot."""
        self.epochs += 1
        self.last = self._run(self._log.head()).seq
        self._append(b"")
        self.snapshot()

    def turn(self) -> None:
        self._append(self.relay.body())

    def snapshot(self) -> None:
        name, data = self.relay.snapshot(self.epoch, self.last + 1)
        self.turn()
        self._run(self._store.put(name, data))

    def purge(self) -> None:
        """Empty the log but for its last message, as an operator may."""
        self._run(self._client.jetstream().purge_stream(self.pool.stream, keep=1))

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.close()

    def _append(self, body: bytes) -> None:
        self.last = self._run(self._log.append(self.epoch, self.last, body))

    def _run(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        return self._loop.run_until_complete(call)


def begun(pool: NatsPool, stack: ExitStack) -> RealLog:
    """A log whose first epoch has begun, with a snapshot; `a` holds the block 1."""
    log = RealLog(pool, HandRelay())
    stack.callback(log.close)
    log.relay.add(A)
    log.relay.store(A)
    log.relay.show(A)
    log.begin()
    return log


# Over the log in memory -------------------------------------------------------------------------


class Scene:
    """A relay, its log, and one place at it."""

    def __init__(self) -> None:
        self.relay = HandRelay()
        self.log = MemoryLog()
        self.notes: list[str] = []
        self.epoch = "e-1"
        self.log.add(self.epoch, b"")
        self.relay.add(A)
        self.relay.store(A)
        self.relay.show(A)
        self.snapshot()
        self.places: list[LogMembership] = []

    def snapshot(self) -> str:
        position = self.log.last + 1
        name, data = self.relay.snapshot(self.epoch, position)
        self.turn()
        self.log.put(name, data)
        return name

    def turn(self) -> None:
        self.log.add(self.epoch, self.relay.body())

    def store(self, rank: Rank = A) -> None:
        self.relay.store(rank)
        self.turn()

    def place(self, **options: Any) -> LogMembership:
        place = membership(self.log, self.notes, **options)
        self.places.append(place)
        return place

    def joined(self, **options: Any) -> LogMembership:
        place = self.place(**options)
        place.join()
        return place

    def assert_same(self, place: LogMembership) -> None:
        self.relay.assert_same(place.copy)

    def close(self) -> None:
        for place in self.places:
            place.close()


def receive(place: LogMembership) -> ReceivedMessage:
    """Receive the next message, and apply it."""
    message = place.receive(3.0, STOP)
    place.copy.apply(message)
    return message


def follow(scene: Scene, place: LogMembership) -> None:
    """Receive all that the log has, and compare."""
    while place._waiting or place._expected <= scene.log.last:
        receive(place)
    scene.assert_same(place)


def damaged(data: bytes) -> bytes:
    return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
