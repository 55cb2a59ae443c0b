"""What a MessageQueue says to its users about readers on other machines."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvindex.shm import Handle, MessageQueue, Waiting
from kvindex.shm.ring import RingSender
from kvindex.wire.errors import (
    ConfigurationError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
)
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.shm.queue_peers import Running

pytestmark = [pytest.mark.e2e, needs_ring]

UNANSWERED = r"tcp://127\.0\.0\.1:\d+: connected, and not accepted yet"


class Parties:
    """A queue's ends, closed with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def writer(self, n_reader: int = 1, **knobs: Any) -> MessageQueue:
        knobs.setdefault("connect_ip", "127.0.0.1")
        return self._stack.enter_context(MessageQueue(n_reader, 0, **knobs))

    def reader(self, handle: Handle, rank: int = 0, **knobs: Any) -> MessageQueue:
        return self._stack.enter_context(MessageQueue.create_from_handle(handle, rank, **knobs))

    def pair(self) -> tuple[MessageQueue, MessageQueue]:
        """A writer and its only reader, which has joined."""
        writer = self.writer()
        reader = self.reader(writer.export_handle())
        writer.wait_until_ready(PATIENCE)
        return writer, reader

    def serving(self, writer: MessageQueue) -> None:
        """Have the writer call `wait_until_ready` again and again, as one at work would."""
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                writer.wait_until_ready(PATIENCE)

        self._stack.callback(Running(serve).finish)
        self._stack.callback(ended.set)


@pytest.fixture
def parties() -> Iterator[Parties]:
    with ExitStack() as stack:
        yield Parties(stack)


def test_a_writer_that_is_in_no_call_is_named_when_time_is_up(
    parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    writer = parties.writer()
    reader = parties.reader(writer.export_handle(), waiting=Waiting(warn_after=0.05))

    def warned() -> bool:
        with pytest.raises(QueueTimeoutError):
            reader.dequeue(0.1)
        return "not accepted yet" in caplog.text

    until(warned)
    for call in (reader.dequeue, reader.wait_until_ready):
        with pytest.raises(QueueTimeoutError, match=f"^waited 0.1 s for .*{UNANSWERED}"):
            call(0.1)
    writer.wait_until_ready(PATIENCE)
    reader.wait_until_ready(PATIENCE)
    with pytest.raises(QueueTimeoutError, match=r"^waited 0\.01 s for a message$"):
        reader.dequeue(0.01)


def test_a_warning_has_the_length_of_a_short_wait(
    parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    _, reader = parties.pair()
    impatient = parties.reader(reader.export_handle(), 1, waiting=Waiting(warn_after=0.02))

    def waited() -> list[float]:
        with pytest.raises(QueueTimeoutError):
            impatient.dequeue(0.1)
        return [float(line.rsplit(" for ")[-1].removesuffix(" s")) for line in caplog.messages]

    assert all(seconds >= 0.02 for seconds in until(waited))


def test_a_stranger_to_the_queue_gets_the_reason_at_its_next_call(parties: Parties) -> None:
    writer, _ = parties.pair()
    handle = writer.export_handle()
    parties.serving(writer)
    for rank, why in (
        (1, "rank 1 is none of its remote readers'"),
        (0, "rank 0 has another reader"),
    ):
        stranger = parties.reader(handle, rank)
        for call in (stranger.dequeue, stranger.wait_until_ready, stranger.dequeue):
            with pytest.raises(ConfigurationError, match=f"refused: {why}"):
                call(PATIENCE)


# Closing -------------------------------------------------------------------------------------


def test_a_writer_that_is_dropped_is_closed() -> None:
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        writer.wait_until_ready(PATIENCE)
        del writer
        gc.collect()
        with pytest.raises(QueueClosedError):
            reader.dequeue(PATIENCE)


def test_a_reader_that_was_removed_is_not_waited_for_either(
    parties: Parties, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = parties.pair()
    writer.enqueue("unread", PATIENCE)
    assert writer.remove_reader(0)
    with caplog.at_level(logging.WARNING, "kvindex.shm"):
        writer.close()
    assert not caplog.messages  # else it would say that it waited in vain
    assert reader.dequeue(PATIENCE) == "unread"
    with pytest.raises(ReaderEvictedError):
        reader.dequeue(PATIENCE)


def test_a_close_that_is_interrupted_at_the_local_readers_still_notifies_the_remote_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = MessageQueue(2, 1, connect_ip="127.0.0.1")
    handle = writer.export_handle()
    close = RingSender.close

    def interrupted(end: RingSender) -> None:
        close(end)
        raise KeyboardInterrupt

    with (
        MessageQueue.create_from_handle(handle, 0),
        MessageQueue.create_from_handle(handle, 1) as remote,
    ):
        writer.wait_until_ready(PATIENCE)
        monkeypatch.setattr(RingSender, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
        with pytest.raises(QueueClosedError):
            remote.dequeue(PATIENCE)
