"""Replays and the queue of batches, without sockets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from kvindex.publish.replay import (
    MAX_REPLAYS,
    SLICE_REPLIES,
    ReplayBuffer,
    ReplayService,
    SendResult,
)
from kvindex.publish.zmq_publisher import BatchQueue
from kvindex.wire import EventBatch, parse_replay
from kvindex.wire.errors import ClosedError
from tests.live import PATIENCE

pytestmark = pytest.mark.unit

# Replays -----------------------------------------------------------------------------------------


class Askers:
    """Receives the replies; each asker has room for `room` of them."""

    def __init__(self) -> None:
        self.received: dict[bytes, list[int | str]] = {}
        self.order: list[bytes] = []
        self.room: dict[bytes, int] = {}

    def send(self, frames: list[bytes]) -> SendResult:
        identity = frames[0]
        if self.room.get(identity, 1) <= 0:
            return SendResult.NO_ROOM
        if identity in self.room:
            self.room[identity] -= 1
        reply = parse_replay(frames[1:])
        self.received.setdefault(identity, []).append("end" if reply.end else reply.seq)
        self.order.append(identity)
        return SendResult.SENT


class Bench:
    """A service over a buffer of numbered batches, with a clock of its own."""

    def __init__(self, seqs: range, *, steps: int = 10_000, size: int = 8) -> None:
        self.buffer = ReplayBuffer(steps)
        for seq in seqs:
            self.buffer.append(seq, bytes(size))
        self.askers = Askers()
        self.counters: Counter[str] = Counter()
        self.now = 0.0
        self.service = ReplayService(
            self.buffer,
            self.askers.send,
            topic=b"kv",
            with_topic=False,
            counters=self.counters,
            stall_timeout=10.0,
        )

    def ask(self, identity: bytes, start_seq: int = 0, *, room: int | None = None) -> None:
        """Ask for a replay; with `room`, the asker can receive so many replies."""
        if room is not None:
            self.askers.room[identity] = room
        self.service.ask(identity, start_seq, self.now)

    def serve_slice(self) -> None:
        self.service.serve_slice(self.now)

    def publish(self, seqs: range) -> None:
        for seq in seqs:
            self.buffer.append(seq, b"...")

    @property
    def received(self) -> dict[bytes, list[int | str]]:
        return self.askers.received

    def run(self, limit: int = 10_000) -> None:
        """Serve until no replay is on, at the times that the service asks for."""
        for _ in range(limit):
            wait = self.service.wait_time(self.now)
            if wait is None:
                return
            self.now += wait
            self.service.serve_slice(self.now)
        raise AssertionError(f"replays did not end within {limit} slices")


def upto(first: int, end: int) -> list[int | str]:
    return [*range(first, end), "end"]


@pytest.mark.parametrize(
    ("published", "steps", "start", "expected"),
    [
        (12, 7, 0, upto(5, 12)),
        (12, 7, 5, upto(5, 12)),
        (12, 7, 9, upto(9, 12)),
        (12, 7, 12, ["end"]),
        (12, 7, 2**64 - 1, ["end"]),
        (0, 7, 0, ["end"]),
        (5, 0, 0, ["end"]),
    ],
)
def test_a_replay_is_what_is_held_from_the_start_then_the_end(
    published: int, steps: int, start: int, expected: list[int | str]
) -> None:
    bench = Bench(range(published), steps=steps)
    bench.ask(b"a", start)
    bench.run()
    assert bench.received[b"a"] == expected
    assert bench.counters["replays_served"] == 1
    assert bench.counters["replayed_batches"] == len(expected) - 1


@pytest.mark.parametrize(("size", "sent"), [(8, SLICE_REPLIES), (600_000, 2)])
def test_one_slice_sends_a_bounded_number_of_replies_and_of_bytes(size: int, sent: int) -> None:
    bench = Bench(range(1000 if size == 8 else 10), size=size)
    bench.ask(b"a")
    bench.serve_slice()
    assert len(bench.askers.order) == sent


def test_askers_take_turns() -> None:
    bench = Bench(range(SLICE_REPLIES * 3))
    for identity in (b"a", b"b", b"c"):
        bench.ask(identity)
    for _ in range(6):
        bench.serve_slice()
    turns = [bench.askers.order[i * SLICE_REPLIES] for i in range(6)]
    assert turns == [b"a", b"b", b"c", b"a", b"b", b"c"]
    bench.run()
    assert set(map(len, bench.received.values())) == {SLICE_REPLIES * 3 + 1}


def test_batches_published_meanwhile_are_replayed_too() -> None:
    bench = Bench(range(100))
    bench.ask(b"a")
    bench.serve_slice()
    bench.publish(range(100, 150))
    bench.run()
    assert bench.received[b"a"] == upto(0, 150)


def test_replays_of_one_asker_come_one_after_the_other() -> None:
    bench = Bench(range(200))
    for start in (0, 190, 2**64 - 1):
        bench.ask(b"a", start)
    bench.run()
    assert bench.received[b"a"] == [*upto(0, 200), *upto(190, 200), "end"]


def test_the_end_too_waits_for_room() -> None:
    bench = Bench(range(3))
    bench.ask(b"a", room=3)
    bench.serve_slice()
    assert bench.received[b"a"] == [0, 1, 2]
    bench.askers.room[b"a"] = 1
    bench.run()
    assert bench.received[b"a"] == upto(0, 3)
    assert bench.counters["replayed_batches"] == 3


def test_an_asker_that_stands_still_for_too_long_is_given_up() -> None:
    bench = Bench(range(100))
    bench.ask(b"a", room=5)
    bench.ask(b"a", 50)
    bench.run(limit=1000)  # the retries slow down: 10 s are no 1000 tries
    assert bench.now >= 10.0
    assert bench.counters["replays_stalled"] == 2
    assert len(bench.service) == 0


def test_too_many_replays_are_refused_until_one_ends() -> None:
    bench = Bench(range(10))
    for number in range(MAX_REPLAYS + 3):
        bench.ask(b"%d" % number)
    assert (len(bench.service), bench.counters["replays_refused"]) == (MAX_REPLAYS, 3)
    bench.run()
    assert len(bench.received) == MAX_REPLAYS
    bench.ask(b"late")
    bench.run()
    assert bench.received[b"late"] == upto(0, 10)


def test_batches_that_leave_the_buffer_under_a_slow_replay_are_counted() -> None:
    bench = Bench(range(100), steps=100)
    bench.ask(b"a", room=10)
    bench.serve_slice()
    bench.publish(range(100, 150))
    bench.askers.room[b"a"] = 1000
    bench.run()
    assert bench.received[b"a"] == [*range(10), *upto(50, 150)]
    assert bench.counters["replay_batches_overtaken"] == 40


def test_a_buffer_with_holes_is_replayed_as_it_is() -> None:
    bench = Bench(range(0, 20, 3))
    bench.ask(b"a", 4)
    bench.run()
    assert bench.received[b"a"] == [6, 9, 12, 15, 18, "end"]
    assert bench.counters["replay_batches_overtaken"] == 0


# The queue ---------------------------------------------------------------------------------------


class Queue(BatchQueue):
    """A queue that counts how often it wakes."""

    def __init__(self, size: int) -> None:
        self.woken = 0
        super().__init__(size, drop_when_full=False, wake=self._count)

    def _count(self) -> None:
        self.woken += 1


def batch(number: int = 0) -> EventBatch:
    return EventBatch(ts=float(number), events=[])


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_the_first_batch_of_an_empty_queue_and_closing_wake_and_nothing_after_stop_waking() -> None:
    queue = Queue(10)
    queue.put(batch())
    queue.put(batch())
    assert queue.woken == 1
    queue.take(2)
    queue.put(batch())
    assert queue.woken == 2
    queue.close("first reason")
    assert queue.woken == 3
    queue.stop_waking()
    queue.close("second reason")
    assert queue.woken == 3


def test_concurrent_callers_get_numbers_without_gap_or_duplicate() -> None:
    queue = Queue(10_000)
    threads = [in_thread(lambda: [queue.put(batch()) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.join(PATIENCE)
    assert [seq for seq, _ in queue.take(10_000)] == list(range(2000))


def test_closing_releases_a_caller_that_waits_for_room() -> None:
    queue = Queue(1)
    queue.put(batch())
    errors: list[str] = []
    is_about_to_wait = threading.Event()

    def put() -> None:
        is_about_to_wait.set()
        try:
            queue.put(batch())
        except ClosedError as error:
            errors.append(str(error))

    thread = in_thread(put)
    assert is_about_to_wait.wait(PATIENCE)
    queue.close("closed for a test")
    thread.join(PATIENCE)
    assert errors == ["closed for a test"]
    assert queue.next_seq == 1
