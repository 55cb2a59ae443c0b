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
from typing import Any

import pytest
from msgspec.structs import force_setattr

from kvindex.shm import (
    MessageQueue,
    Waiting,
)
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

Pair = Callable[..., tuple[MessageQueue, MessageQueue]]

WAYS = ["memory", "remote"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(request.param)


@pytest.fixture
def pair(way: str) -> Iterator[Pair]:
    """Make a writer and its one reader, which is ready."""
    with ExitStack() as stack:

        def make(**knobs: Any) -> tuple[MessageQueue, MessageQueue]:
            waiting = knobs.pop("waiting", Waiting())
            if way == "remote":
                knobs.update(connect_ip="127.0.0.1", remote_window=4)
            n_local = int(way != "remote")
            writer = MessageQueue(1, n_local, None, 256, 4, waiting=waiting, **knobs)
            stack.callback(writer.close)
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0, waiting=waiting)
            stack.callback(reader.close)
            if way == "remote":
                joining = threading.Thread(target=reader.wait_until_ready, args=(PATIENCE,))
                joining.start()
                writer.wait_until_ready(PATIENCE)
                joining.join(PATIENCE)
            else:
                writer.wait_until_ready(PATIENCE)
            return writer, reader

        yield make


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


def fill(writer: MessageQueue) -> None:
    for number in range(4):
        writer.enqueue(number, timeout=PATIENCE)
    with pytest.raises(QueueTimeoutError):
        writer.enqueue("no room", timeout=0.0)


def sleeps(queue: MessageQueue) -> int:
    return int(queue.statistics()["local"]["sleeps"])


def slept_since(queue: MessageQueue, before: int) -> bool:
    return sleeps(queue) > before


# Ending a wait -------------------------------------------------------------------------------


def test_a_wait_ends_at_its_first_look_after_its_cancel_is_set_and_consumes_nothing(
    pair: Pair,
) -> None:
    writer, reader = pair(waiting=Waiting(look=0.05))
    cancel = Noticed()
    waiting = Running(lambda: reader.dequeue(cancel=cancel))
    assert cancel.looked.wait(PATIENCE)
    cancel.set()
    assert isinstance(waiting.finish(), WaitCancelledError)
    assert cancel.times_found_set == 1
    writer.enqueue("kept")
    assert reader.dequeue(PATIENCE) == "kept"


def test_a_cancel_that_is_set_does_not_hide_a_message_that_is_there(pair: Pair) -> None:
    writer, reader = pair()
    cancel = threading.Event()
    cancel.set()
    writer.enqueue("there")
    if writer.export_handle().buffer_handle is None:
        assert reader.dequeue(PATIENCE) == "there"  # TCP takes its time
    else:
        assert reader.dequeue(PATIENCE, cancel) == "there"
    with pytest.raises(WaitCancelledError):
        reader.dequeue(PATIENCE, cancel)
    with pytest.raises(WaitCancelledError):
        with reader.acquire_read(PATIENCE, cancel):
            pass


def test_a_known_end_of_a_wait_is_raised_before_any_sleep(pair: Pair) -> None:
    writer, reader = pair(waiting=ASLEEP)
    cancel = threading.Event()
    cancel.set()
    writer.enqueue("last")
    assert reader.dequeue(PATIENCE) == "last"
    for timeout in (None, 3600.0):
        call = partial(reader.dequeue, timeout, cancel)
        assert isinstance(Running(call).finish(), WaitCancelledError)
    writer.close()
    for timeout in (None, 3600.0):
        assert isinstance(Running(partial(reader.dequeue, timeout)).finish(), QueueClosedError)
        read = reader.acquire_read(timeout)
        assert isinstance(Running(read.__enter__).finish(), QueueClosedError)


def test_a_removed_reader_gets_its_error_before_any_sleep(pair: Pair) -> None:
    writer, reader = pair(waiting=ASLEEP)
    assert writer.remove_reader(0)
    for timeout in (None, 3600.0):
        assert isinstance(Running(partial(reader.dequeue, timeout)).finish(), ReaderEvictedError)


def test_a_reader_that_waits_gets_an_error_when_another_thread_closes_its_end(pair: Pair) -> None:
    _, reader = pair(waiting=Waiting(look=0.05))
    cancel = Noticed()
    waiting = Running(lambda: reader.dequeue(cancel=cancel))
    assert cancel.looked.wait(PATIENCE)
    reader.close()
    assert isinstance(waiting.finish(), ClosedError)


def test_a_writer_that_waits_gets_an_error_when_another_thread_closes_its_end(pair: Pair) -> None:
    writer, reader = pair(waiting=Waiting(look=0.05))
    fill(writer)
    waiting = Running(lambda: writer.enqueue("never"))
    if writer.export_handle().buffer_handle is not None:
        until(lambda: sleeps(writer) > 0)
    else:
        until(lambda: writer.statistics()["remote"]["waits"] > 1)
    closing = Running(writer.close)
    assert isinstance(waiting.finish(), ClosedError)
    assert [reader.dequeue(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(QueueClosedError):
        reader.dequeue(PATIENCE)
    assert closing.finish() is None


def test_a_sleeping_end_is_woken_and_does_not_wait_for_its_next_look(pair: Pair) -> None:
    writer, reader = pair(waiting=ASLEEP)
    in_memory = writer.export_handle().buffer_handle is not None
    for number in range(3):
        before = sleeps(reader) if in_memory else 0
        waiting = Running(reader.dequeue)
        if in_memory:
            until(partial(slept_since, reader, before))
        writer.enqueue(number)
        assert waiting.finish() is None
        assert waiting.returned == number
    fill(writer)
    before = sleeps(writer) if in_memory else 0
    waiting = Running(lambda: writer.enqueue("more"))
    if in_memory:
        until(partial(slept_since, writer, before))
    assert reader.dequeue(PATIENCE) == 0
    assert waiting.finish() is None
    assert [reader.dequeue(PATIENCE) for _ in range(4)] == [1, 2, 3, "more"]
    if in_memory:  # told that it closes, too
        before = sleeps(reader)
        waiting = Running(reader.dequeue)
        until(partial(slept_since, reader, before))
        writer.close()
        assert isinstance(waiting.finish(), QueueClosedError)


def test_a_second_thread_is_refused_while_the_first_uses_an_end(pair: Pair) -> None:
    writer, reader = pair(waiting=Waiting(look=5.0))
    cancel = Noticed()
    waiting = Running(lambda: reader.dequeue(cancel=cancel))
    if writer.export_handle().buffer_handle is not None:
        until(lambda: sleeps(reader) > 0)
    else:
        assert cancel.looked.wait(PATIENCE)
    with pytest.raises(InUseError, match="another thread"):
        reader.dequeue(timeout=0.0)
    with pytest.raises(InUseError, match="another thread"):
        with reader.acquire_read(timeout=0.0):
            pass
    writer.enqueue("for the first")
    assert waiting.finish() is None
    assert waiting.returned == "for the first"


def test_a_second_thread_is_refused_while_the_first_waits_for_room(pair: Pair) -> None:
    writer, reader = pair(waiting=Waiting(look=5.0))
    fill(writer)
    waiting = Running(lambda: writer.enqueue("more"))
    if writer.export_handle().buffer_handle is not None:
        until(lambda: sleeps(writer) > 0)
    else:
        until(lambda: writer.statistics()["remote"]["waits"] > 1)
        with pytest.raises(InUseError, match="another thread"):
            writer.remove_reader(0)  # a remote reader's; a local one can be removed at any time
    with pytest.raises(InUseError, match="another thread"):
        writer.enqueue("second", timeout=0.0)
    received = [reader.dequeue(PATIENCE) for _ in range(5)]
    assert received == [0, 1, 2, 3, "more"]
    assert waiting.finish() is None


def test_long_waits_are_warned_of_unless_they_are_expected(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = pair(waiting=Waiting(look=0.005, warn_after=0.02))
    writer.wait_until_ready(PATIENCE)
    reader.wait_until_ready(PATIENCE)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvindex"):
        with pytest.raises(QueueTimeoutError):
            reader.dequeue(timeout=0.06, indefinite=True)
        assert not caplog.messages
        cancel = threading.Event()
        waiting = Running(lambda: reader.dequeue(cancel=cancel))
        until(lambda: "waiting for a message" in caplog.text)
        cancel.set()
        assert isinstance(waiting.finish(), WaitCancelledError)
        caplog.clear()
        if writer.export_handle().buffer_handle is not None:
            fill(writer)
            waiting = Running(lambda: writer.enqueue("no room"))
            until(lambda: "the readers [0]" in caplog.text)
            assert reader.dequeue(PATIENCE) == 0
            assert waiting.finish() is None


# Reading in place ----------------------------------------------------------------------------


def test_a_message_that_is_read_in_place_cannot_be_written_and_goes_when_the_block_ends(
    pair: Pair,
) -> None:
    writer, reader = pair()
    writer.enqueue(b"body")
    with reader.acquire_read(PATIENCE) as body:
        assert bytes(body) == b"body"
        assert body.readonly
    if writer.export_handle().buffer_handle is not None:
        with pytest.raises(ValueError, match="released"):
            body[0]


def test_a_message_whose_reading_fails_counts_as_read(pair: Pair) -> None:
    writer, reader = pair()
    writer.enqueue(b"first")
    writer.enqueue(b"x" * 500)  # in fragments
    writer.enqueue(b"third")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            with reader.acquire_read(PATIENCE):
                raise ZeroDivisionError
    assert reader.dequeue(PATIENCE) == b"third"


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
def test_an_exception_of_a_signal_handler_leaves_no_end_in_use(pair: Pair, name: str) -> None:
    writer, reader = pair()
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
