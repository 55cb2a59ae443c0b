"""What one end of a queue promises to the process that holds it, and what mistakes with it cost."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import force_setattr

from kvindex.shm import Handle, MessageQueue, Waiting
from kvindex.shm.ring.receiver import RingReceiver
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    InUseError,
    KVIndexError,
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


# Mistakes cost an error, and never a message -----------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """A writer and its one reader."""
    with MessageQueue(1, 1, max_chunk_bytes=1 << 16, max_chunks=2) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            yield writer, reader


Ends = tuple[MessageQueue, MessageQueue]


def test_a_message_in_place_is_not_overtaken_by_another_call(ends: Ends) -> None:
    writer, reader = ends
    with writer.acquire_write(length=5) as view:
        view[:] = b"hello"
        with pytest.raises(InUseError, match="one at a time"):
            writer.enqueue(b"other")
    writer.enqueue(b"after")
    with reader.acquire_read(1.0) as view:
        with pytest.raises(InUseError, match="one at a time"):
            reader.dequeue(1.0)
        assert bytes(view) == b"hello"
    assert reader.dequeue(1.0) == b"after"


def test_closing_gives_the_memory_back_at_once(ends: Ends) -> None:
    writer, reader = ends
    name = writer.export_handle().buffer_handle
    assert name is not None
    writer.enqueue(b"unread")
    reader.shutdown()  # vLLM's name for `close`
    writer.shutdown()
    assert name[3] not in Path("/proc/self/maps").read_text()
    assert writer.statistics()["local"]["chunks"] == 1  # can still be asked
    assert (writer.statistics()["messages"], reader.statistics()["messages"]) == (1, 0)
    assert repr(writer) == "<MessageQueue: writer of a queue for 1 readers>"


def test_a_reader_that_never_came_can_be_given_up() -> None:
    with MessageQueue(2, 2, max_chunks=1) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue(1.0) == 1
            with pytest.raises(QueueTimeoutError, match=r"\[1\]"):
                writer.enqueue(2, timeout=0.01)
            assert writer.remove_reader(1)
            assert not writer.remove_reader(1)
            writer.enqueue(2, timeout=1.0)
            assert reader.dequeue(1.0) == 2
            with MessageQueue.create_from_handle(handle, 1) as late:
                writer.enqueue(3, timeout=1.0)
                assert (reader.dequeue(1.0), late.dequeue(1.0)) == (3, 3)


@pytest.mark.parametrize("message", [b"bytes", object()])
def test_an_end_that_is_used_as_the_other_one_gives_the_reason(ends: Ends, message: object) -> None:
    writer, reader = ends
    with pytest.raises(ConfigurationError, match="this end reads"):
        reader.enqueue(message)
    with pytest.raises(ConfigurationError, match="this end reads"):
        reader.remove_reader(0)
    with pytest.raises(ConfigurationError, match="this end writes"):
        writer.dequeue(0.0)
    with pytest.raises(ConfigurationError, match="this end writes"):
        with writer.acquire_read(0.0):
            pass


def test_a_wait_that_is_no_number_is_refused(ends: Ends) -> None:
    with pytest.raises(ConfigurationError, match="NaN"):
        ends[1].dequeue(float("nan"))


# Nobody reads --------------------------------------------------------------------------------


def test_a_queue_without_readers_takes_messages_and_counts_them() -> None:
    with MessageQueue(0, 0, None, 64, 2) as writer:
        writer.wait_until_ready(0.0)
        for message in (b"short", b"x" * 1000, *range(10)):
            writer.enqueue(message, timeout=0.0)
        assert writer.broadcast_object({"a": 1}) == {"a": 1}
        with writer.acquire_write(0.0) as view:
            assert len(view) == 64
            view[:] = b"w" * 64
            with pytest.raises(InUseError):
                writer.enqueue(1)
        with pytest.raises(KVIndexError, match="msgpack cannot carry"):
            writer.enqueue(object())
        with pytest.raises(ConfigurationError, match="this end writes"):
            writer.dequeue(0.0)
        assert not writer.remove_reader(0)
        assert writer.statistics() == {"messages": 14, "local": None, "remote": None}
        handle = writer.export_handle()
        assert Handle.from_bytes(handle.to_bytes()) == handle
        with pytest.raises(ConfigurationError, match="none of the queue's local ranks"):
            MessageQueue.create_from_handle(handle, 0)
    with pytest.raises(ClosedError, match="closed"):
        writer.enqueue(1)
    with pytest.raises(ClosedError, match="closed"):
        writer.wait_until_ready(0.0)
    with pytest.raises(ClosedError, match="closed"):
        with writer.acquire_write():
            pass


class Watched:
    """A lock that does something just when it has been taken, once."""

    def __init__(self, lock: Any, then: Callable[[], object]) -> None:
        self._lock = lock
        self._then: Callable[[], object] | None = then

    def acquire(self, blocking: bool) -> bool:
        taken = bool(self._lock.acquire(blocking))
        then, self._then = self._then, None
        if then is not None:
            then()
        return taken

    def release(self) -> None:
        self._lock.release()


def test_another_thread_is_refused_from_the_first_moment_of_a_call_on(ends: Ends) -> None:
    writer, reader = ends
    refused: list[BaseException | None] = []

    def send_elsewhere() -> None:
        refused.append(Running(lambda: writer.enqueue(b"other")).finish())

    writer._user = Watched(writer._user, send_elsewhere)  # type: ignore[assignment]
    writer.enqueue(b"mine")
    assert [type(error) for error in refused] == [InUseError]
    assert reader.dequeue(1.0) == b"mine"
    with pytest.raises(QueueTimeoutError):
        reader.dequeue(0.0)


def test_a_message_in_place_gives_one_up_that_has_no_end(ends: Ends) -> None:
    writer, reader = ends
    with pytest.raises(QueueTimeoutError):
        writer.enqueue(bytes(1 << 18), timeout=0.01)
    with pytest.raises(QueueTimeoutError):
        reader.dequeue(0.01)
    writer.enqueue(bytes(1 << 16))
    with reader.acquire_read(1.0) as view:
        assert len(view) == 1 << 16
    local = reader.statistics()["local"]
    assert (local["messages"], local["messages_given_up"]) == (1, 1)


def test_a_message_that_an_interrupt_left_unread_is_read_again_and_counted_once(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = ends
    writer.enqueue(bytes(1 << 16))
    with monkeypatch.context() as patch:
        patch.setattr(RingReceiver, "_give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.dequeue()
    assert reader.statistics()["messages"] == 0
    assert len(reader.dequeue(1.0)) == 1 << 16
    assert reader.statistics()["messages"] == 1


def interrupted(receiver: RingReceiver, whole: bool) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "make",
    [MessageQueue.create_from_process_group, MessageQueue.create_from_process_group_single_reader],
)
def test_a_misspelt_option_is_refused_at_every_rank_before_any_waits(make: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_chunkbytes'"):
        make(object(), max_chunkbytes=1 << 16)
