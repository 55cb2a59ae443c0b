"""What one end of a queue promises to the process that holds it."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import FrameType

import pytest
from msgspec.structs import force_setattr

from kvindex.shm import MessageQueue, Waiting
from kvindex.wire.errors import (
    ClosedError,
    InUseError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
    WaitCancelledError,
)
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.shm.queue_peers import Running

pytestmark = [pytest.mark.e2e, needs_ring]

ASLEEP = Waiting(look=10.0)
"""Who sleeps is woken, or is late for every test: it would look an hour later."""
force_setattr(ASLEEP, "look", 3600.0)


class Pair:
    """A writer and its one reader, which is ready; used by threads of this process."""

    def __init__(self, in_memory: bool, stack: ExitStack, waiting: Waiting) -> None:
        self.in_memory = in_memory
        writer = MessageQueue(
            1, int(in_memory), None, 256, 4, "127.0.0.1", waiting=waiting, remote_window=4
        )
        stack.callback(writer.close)
        handle = writer.export_handle()
        reader = MessageQueue.create_from_handle(handle, 0, waiting=waiting)
        stack.callback(reader.close)
        joining = Running(lambda: reader.wait_until_ready(PATIENCE))
        writer.wait_until_ready(PATIENCE)
        assert joining.finish() is None
        self.writer, self.reader = writer, reader

    def fill(self) -> None:
        for number in range(4):
            self.writer.enqueue(number, timeout=PATIENCE)
        with pytest.raises(QueueTimeoutError):
            self.writer.enqueue("no room", timeout=0.0)

    def waiting(self, end: MessageQueue, call: Callable[[], object]) -> Running:
        """A call that waits by now: it sleeps, or was counted as waiting."""
        before = self._waits(end)
        running = Running(call)
        if self.in_memory or end is self.writer:
            until(lambda: self._waits(end) > before)
        return running

    def _waits(self, end: MessageQueue) -> int:
        counted = end.statistics()
        if self.in_memory:
            return int(counted["local"]["sleeps"])
        return int(counted["remote"]["waits"]) if end is self.writer else 0


@pytest.fixture(params=["memory", "remote"])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def make(waiting: Waiting | None = None) -> Pair:
            return Pair(request.param == "memory", stack, waiting or Waiting())

        yield make


Make = Callable[..., Pair]


class Noticed(threading.Event):
    """An event that tells when a waiting thread has looked at it, and how often it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()
        self.times_found_set = 0

    def is_set(self) -> bool:
        is_set = super().is_set()
        self.times_found_set += is_set
        self.looked.set()
        return is_set


# Ending a wait -------------------------------------------------------------------------------


def test_a_wait_ends_at_its_first_look_after_its_cancel_is_set_and_consumes_nothing(
    pair: Make,
) -> None:
    ends = pair(Waiting(look=0.05))
    cancel = Noticed()
    waiting = Running(lambda: ends.reader.dequeue(cancel=cancel))
    assert cancel.looked.wait(PATIENCE)
    cancel.set()
    assert isinstance(waiting.finish(), WaitCancelledError)
    assert cancel.times_found_set == 1
    ends.writer.enqueue("kept")
    assert ends.reader.dequeue(PATIENCE) == "kept"


def test_a_cancel_that_is_set_does_not_hide_a_message_that_is_there(pair: Make) -> None:
    ends = pair()
    cancel = threading.Event()
    cancel.set()
    ends.writer.enqueue("there")
    # TCP takes its time.
    assert ends.reader.dequeue(PATIENCE, cancel if ends.in_memory else None) == "there"
    with pytest.raises(WaitCancelledError):
        ends.reader.dequeue(PATIENCE, cancel)
    with pytest.raises(WaitCancelledError):
        with ends.reader.acquire_read(PATIENCE, cancel):
            pass


@pytest.mark.parametrize("timeout", [None, 3600.0])
def test_a_known_end_of_a_wait_is_raised_before_any_sleep(
    pair: Make, timeout: float | None
) -> None:
    ends = pair(ASLEEP)
    cancel = threading.Event()
    cancel.set()
    ends.writer.enqueue("last")
    assert ends.reader.dequeue(PATIENCE) == "last"
    dequeue = partial(ends.reader.dequeue, timeout)
    assert isinstance(Running(partial(dequeue, cancel)).finish(), WaitCancelledError)
    ends.writer.close()
    assert isinstance(Running(dequeue).finish(), QueueClosedError)
    read = ends.reader.acquire_read(timeout)
    assert isinstance(Running(read.__enter__).finish(), QueueClosedError)


@pytest.mark.parametrize("timeout", [None, 3600.0])
def test_a_removed_reader_gets_its_error_before_any_sleep(
    pair: Make, timeout: float | None
) -> None:
    ends = pair(ASLEEP)
    assert ends.writer.remove_reader(0)
    waiting = Running(lambda: ends.reader.dequeue(timeout))
    assert isinstance(waiting.finish(), ReaderEvictedError)


def test_a_reader_that_waits_gets_an_error_when_another_thread_closes_its_end(pair: Make) -> None:
    ends = pair(Waiting(look=0.05))
    cancel = Noticed()
    waiting = Running(lambda: ends.reader.dequeue(cancel=cancel))
    assert cancel.looked.wait(PATIENCE)
    ends.reader.close()
    assert isinstance(waiting.finish(), ClosedError)


def test_a_writer_that_waits_gets_an_error_when_another_thread_closes_its_end(pair: Make) -> None:
    ends = pair(Waiting(look=0.05))
    ends.fill()
    waiting = ends.waiting(ends.writer, lambda: ends.writer.enqueue("never"))
    closing = Running(ends.writer.close)
    assert isinstance(waiting.finish(), ClosedError)
    assert [ends.reader.dequeue(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(QueueClosedError):
        ends.reader.dequeue(PATIENCE)
    assert closing.finish() is None


def test_a_sleeping_end_is_woken_and_does_not_wait_for_its_next_look(pair: Make) -> None:
    ends = pair(ASLEEP)
    writer, reader = ends.writer, ends.reader
    for number in range(3):
        waiting = ends.waiting(reader, reader.dequeue)
        writer.enqueue(number)
        assert waiting.finish() is None
        assert waiting.returned == number
    ends.fill()
    waiting = ends.waiting(writer, lambda: writer.enqueue("more"))
    assert reader.dequeue(PATIENCE) == 0
    assert waiting.finish() is None
    assert [reader.dequeue(PATIENCE) for _ in range(4)] == [1, 2, 3, "more"]
    waiting = ends.waiting(reader, reader.dequeue)
    writer.close()
    assert isinstance(waiting.finish(), QueueClosedError)


def test_a_second_thread_is_refused_while_the_first_reads(pair: Make) -> None:
    ends = pair(Waiting(look=5.0))
    cancel = Noticed()
    waiting = ends.waiting(ends.reader, lambda: ends.reader.dequeue(cancel=cancel))
    assert cancel.looked.wait(PATIENCE)
    with pytest.raises(InUseError, match="another thread"):
        ends.reader.dequeue(timeout=0.0)
    with pytest.raises(InUseError, match="another thread"):
        with ends.reader.acquire_read(timeout=0.0):
            pass
    ends.writer.enqueue("for the first")
    assert waiting.finish() is None
    assert waiting.returned == "for the first"


def test_a_second_thread_is_refused_while_the_first_waits_for_room(pair: Make) -> None:
    ends = pair(Waiting(look=5.0))
    ends.fill()
    waiting = ends.waiting(ends.writer, lambda: ends.writer.enqueue("more"))
    with pytest.raises(InUseError, match="another thread"):
        ends.writer.enqueue("second", timeout=0.0)
    if not ends.in_memory:  # a local reader can be removed at any time
        with pytest.raises(InUseError, match="another thread"):
            ends.writer.remove_reader(0)
    assert [ends.reader.dequeue(PATIENCE) for _ in range(5)] == [0, 1, 2, 3, "more"]
    assert waiting.finish() is None


def test_long_waits_are_warned_of_unless_they_are_expected(
    pair: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ends = pair(Waiting(look=0.005, warn_after=0.02))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvindex"):
        with pytest.raises(QueueTimeoutError):
            ends.reader.dequeue(timeout=0.06, indefinite=True)
        assert not caplog.messages
        cancel = threading.Event()
        waiting = Running(lambda: ends.reader.dequeue(cancel=cancel))
        until(lambda: "waiting for a message" in caplog.text)
        cancel.set()
        assert isinstance(waiting.finish(), WaitCancelledError)
        ends.fill()
        waiting = Running(lambda: ends.writer.enqueue("no room"))
        until(lambda: ("the readers [0]" if ends.in_memory else "remote reader 0") in caplog.text)
        assert ends.reader.dequeue(PATIENCE) == 0
        assert waiting.finish() is None


# Reading in place ----------------------------------------------------------------------------


def test_a_message_that_is_read_in_place_cannot_be_written_and_goes_when_the_block_ends(
    pair: Make,
) -> None:
    ends = pair()
    ends.writer.enqueue(b"body")
    with ends.reader.acquire_read(PATIENCE) as body:
        assert bytes(body) == b"body"
        assert body.readonly
    if ends.in_memory:
        with pytest.raises(ValueError, match="released"):
            body[0]


def test_a_message_whose_reading_fails_counts_as_read(pair: Make) -> None:
    ends = pair()
    for body in (b"first", b"x" * 500, b"third"):  # the second in fragments
        ends.writer.enqueue(body)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            with ends.reader.acquire_read(PATIENCE):
                raise ZeroDivisionError
    assert ends.reader.dequeue(PATIENCE) == b"third"


def test_a_chunk_is_not_written_while_it_is_read_in_place() -> None:
    with MessageQueue(1, 1, None, 256, 1) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(b"a" * 200)
            with reader.acquire_read(PATIENCE) as body:
                with pytest.raises(QueueTimeoutError):
                    writer.enqueue(b"b" * 200, timeout=0.01)
                assert bytes(body) == b"a" * 200
            writer.enqueue(b"b" * 200, PATIENCE)
            assert reader.dequeue(PATIENCE) == b"b" * 200


# Signals -------------------------------------------------------------------------------------


class InterruptError(Exception):
    """What a signal's handler raises here."""


GUARDED: dict[str, Callable[[MessageQueue, MessageQueue], object]] = {
    "enqueue": lambda writer, _: writer.enqueue("second", PATIENCE),
    "dequeue": lambda _, reader: reader.dequeue(PATIENCE),
    "_one_user": lambda writer, _: writer.wait_until_ready(PATIENCE),
}


def interrupt(call: Callable[[], object], name: str, step: int) -> bool:
    """Raise inside a function where handlers run: as it starts, and after each of its C calls."""
    left = step

    def raise_it(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal left
        if frame.f_code.co_name == name and event in ("call", "c_return", "c_exception"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise InterruptError

    sys.setprofile(raise_it)
    try:
        call()
    except InterruptError:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("name", GUARDED)
def test_an_exception_of_a_signal_handler_leaves_no_end_in_use(pair: Make, name: str) -> None:
    ends = pair()
    writer, reader = ends.writer, ends.reader
    for step in itertools.count():
        writer.enqueue("first", PATIENCE)
        interrupted = interrupt(lambda: GUARDED[name](writer, reader), name, step)
        writer.enqueue("last", PATIENCE)
        while reader.dequeue(PATIENCE) != "last":
            pass
        writer.wait_until_ready(PATIENCE)
        if not interrupted:
            break
    assert step >= 3  # as it starts, when it took the lock, and when it gave it back
