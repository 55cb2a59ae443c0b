from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvindex.publish.loop import BatchQueue
from kvindex.wire import EventBatch
from kvindex.wire.errors import ClosedError
from tests.live import PATIENCE

pytestmark = pytest.mark.unit


class Queue(BatchQueue):
    """A queue that counts how often it wakes."""

    def __init__(self, size: int, *, drop_when_full: bool = False) -> None:
        self.woken = 0
        super().__init__(size, drop_when_full=drop_when_full, wake=self._wake)

    def _wake(self) -> None:
        self.woken += 1


def batch(number: int = 0) -> EventBatch:
    return EventBatch(ts=float(number), events=[])


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_batches_leave_in_the_order_of_their_numbers() -> None:
    queue = Queue(10)
    for number in range(5):
        assert queue.put(batch(number))
    assert [(seq, taken.ts) for seq, taken in queue.take(3)] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [seq for seq, _ in queue.take(9)] == [3, 4]
    assert queue.take(9) == []


def test_only_the_first_batch_of_an_empty_queue_wakes_and_none_after_stop_waking() -> None:
    queue = Queue(10)
    queue.put(batch())
    queue.put(batch())
    assert queue.woken == 1
    queue.take(2)
    queue.put(batch())
    assert queue.woken == 2
    queue.take(1)
    queue.stop_waking()
    queue.put(batch())
    queue.close("closed")
    assert queue.woken == 2


def test_a_full_queue_that_drops_spends_the_number() -> None:
    queue = Queue(2, drop_when_full=True)
    assert [queue.put(batch()) for _ in range(4)] == [True, True, False, False]
    queue.take(1)
    assert queue.put(batch())
    assert [seq for seq, _ in queue.take(9)] == [1, 4]
    assert (queue.accepted, queue.dropped, queue.next_seq) == (3, 2, 5)


def test_a_full_queue_that_blocks_waits_for_room_and_loses_nothing() -> None:
    woken = threading.Event()
    queue = BatchQueue(2, drop_when_full=False, wake=woken.set)
    thread = in_thread(lambda: [queue.put(batch(number)) for number in range(100)])
    received: list[int] = []
    while len(received) < 100:
        assert woken.wait(PATIENCE)
        woken.clear()
        assert len(queue) <= 2
        received += [seq for seq, _ in queue.take(9)]
    thread.join(PATIENCE)
    assert received == list(range(100))
    assert queue.dropped == 0


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


def test_a_closed_queue_refuses_and_can_still_be_emptied() -> None:
    queue = Queue(5, drop_when_full=True)
    queue.put(batch())
    queue.close("first reason")
    queue.close("second reason")
    assert queue.woken == 3
    with pytest.raises(ClosedError, match="first reason"):
        queue.put(batch())
    assert [seq for seq, _ in queue.take(5)] == [0]
