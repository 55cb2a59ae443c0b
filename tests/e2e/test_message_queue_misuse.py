"""What users do by mistake with a queue's end costs them an error, and never a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvindex.errors import ConfigurationError, QueueTimeoutError, ReaderEvictedError
from kvindex.shm import MessageQueue


def pair(**options: int) -> tuple[MessageQueue, MessageQueue]:
    writer = MessageQueue(1, 1, **options)  # type: ignore[arg-type]
    return writer, MessageQueue.create_from_handle(writer.export_handle(), 0)


def test_a_message_begun_in_place_is_not_overtaken_by_another_call() -> None:
    writer, reader = pair()
    with writer, reader:
        with writer.acquire_write(length=5) as view:
            view[:] = b"hello"
            with pytest.raises(RuntimeError, match="one at a time"):
                writer.enqueue(b"other")
        writer.enqueue(b"after")
        assert [reader.dequeue(1.0), reader.dequeue(1.0)] == [b"hello", b"after"]


def test_a_message_read_in_place_is_not_given_out_twice() -> None:
    writer, reader = pair()
    with writer, reader:
        for body in (b"m1", b"m2"):
            writer.enqueue(body)
        with reader.acquire_read(1.0) as view:
            with pytest.raises(RuntimeError, match="one at a time"):
                reader.dequeue(1.0)
            assert bytes(view) == b"m1"
        assert reader.dequeue(1.0) == b"m2"


def test_closing_gives_the_memory_back_at_once() -> None:
    writer, reader = pair()
    name = writer.export_handle().buffer_handle
    assert name is not None
    writer.enqueue(b"unread")
    reader.close()
    writer.close()
    assert name[3] not in Path("/proc/self/maps").read_text()
    assert writer.statistics()["messages"] == 1  # can still be asked


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


def test_a_reader_that_was_removed_is_told() -> None:
    writer, reader = pair()
    with writer, reader:
        writer.enqueue(1)
        assert writer.remove_reader(0)
        with pytest.raises(ReaderEvictedError):
            reader.dequeue(1.0)


def test_vllms_word_for_close_closes() -> None:
    writer, reader = pair()
    writer.shutdown()
    reader.shutdown()
    assert repr(writer) == "<MessageQueue: writer of a queue for 1 readers>"


def test_nonsense_is_refused_at_the_call() -> None:
    writer, reader = pair()
    with writer, reader:
        with pytest.raises(ConfigurationError, match="NaN"):
            reader.dequeue(float("nan"))
        with pytest.raises(ConfigurationError, match="reads"):
            reader.remove_reader(0)
    with pytest.raises(ConfigurationError, match="on_dead_reader"):
        MessageQueue(1, 0, on_dead_reader="perhaps")  # type: ignore[arg-type]
