"""What users do by mistake with a queue's end costs them an error, and never a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvindex.shm import Handle, MessageQueue
from kvindex.shm.ring.receiver import RingReceiver
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    InUseError,
    KVIndexError,
    QueueTimeoutError,
)
from tests.native_ring import needs_ring
from tests.shm.queue_peers import Running

pytestmark = [pytest.mark.e2e, needs_ring]


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
    assert writer.statistics()["messages"] == 1  # can still be asked
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
