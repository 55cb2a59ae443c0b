"""The queue before the log: nothing is lost unnoticed, and the subscriber never waits for long."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.replicas.nats.log import BodyReader
from kvindex.replicas.nats.relay import LogQueue
from tests.live import PATIENCE

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


def test_a_body_has_as_many_messages_as_fit() -> None:
    queue, _ = queue_of()
    for _ in range(5):
        queue.send(b"0123456789")
    assert [len(queue.take(30)) for _ in range(4)] == [28, 28, 14, 0]


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
