"""Local and remote readers of one queue."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvindex.shm import MessageQueue
from kvindex.wire.errors import QueueTimeoutError
from tests.live import PATIENCE
from tests.native_ring import needs_ring
from tests.shm.conftest import CHUNK, WINDOW
from tests.shm.queue_peers import End, Nursery, Peer, ThreadPeer, ended

pytestmark = [pytest.mark.e2e, needs_ring]


@pytest.fixture
def mixed(nursery: Nursery) -> Iterator[Callable[..., tuple[MessageQueue, list[Peer]]]]:
    """Make a queue with two local readers, a thread and a process, and two remote ones."""
    with ExitStack() as stack, ended([]) as peers:

        def make(**knobs: Any) -> tuple[MessageQueue, list[Peer]]:
            writer = MessageQueue(
                4, 2, [1, 3], CHUNK, WINDOW, "127.0.0.1", remote_window=WINDOW, **knobs
            )
            stack.callback(writer.close)
            for rank in range(4):
                peers.append(ThreadPeer(End()) if rank < 2 else nursery.fork())
                peers[-1].call("attach", writer.export_handle().to_bytes(), rank)
                peers[-1].start("ready")
            writer.wait_until_ready(PATIENCE)
            for peer in peers:
                peer.result()
            return writer, peers

        yield make


def test_local_and_remote_readers_get_the_same(
    mixed: Callable[..., tuple[MessageQueue, list[Peer]]],
) -> None:
    writer, readers = mixed()
    messages: list[Any] = [[number, b"x" * (number * 7 % 300)] for number in range(100)]
    for reader in readers:
        reader.start("take", len(messages) + 2)
    for message in messages:
        writer.enqueue(message, PATIENCE)
    writer.enqueue([pickle.PickleBuffer(b"b" * 100)], PATIENCE)
    with writer.acquire_write(PATIENCE, length=5) as view:
        view[:] = b"bytes"
    for reader in readers:
        assert reader.result() == [*messages, [b"b" * 100], b"bytes"]


@pytest.mark.parametrize("slow", [1, 2])
def test_a_message_for_which_one_reader_has_no_room_reaches_none(
    mixed: Callable[..., tuple[MessageQueue, list[Peer]]], slow: int
) -> None:
    writer, readers = mixed()
    quick = [reader for rank, reader in enumerate(readers) if rank != slow]
    for number in range(WINDOW):
        writer.enqueue(number, PATIENCE)
    for reader in quick:
        assert reader.call("take", WINDOW) == list(range(WINDOW))
    for late in ("lost", "lost too"):
        with pytest.raises(QueueTimeoutError):
            writer.enqueue(late, timeout=0.05)
    with pytest.raises(QueueTimeoutError):
        with writer.acquire_write(0.05, length=4) as view:
            view[:] = b"lost"
    assert readers[slow].call("take", WINDOW) == list(range(WINDOW))
    writer.enqueue("after", PATIENCE)
    for reader in readers:
        assert reader.call("take", 1) == ["after"]


@pytest.mark.parametrize("slow", [1, 2])
def test_a_long_message_for_which_one_reader_has_room_for_the_beginning_only_reaches_none(
    mixed: Callable[..., tuple[MessageQueue, list[Peer]]], slow: int
) -> None:
    writer, readers = mixed()
    filled = WINDOW - (slow == 1)  # of a remote reader's room a message takes one, however long
    for number in range(filled):
        writer.enqueue(number, PATIENCE)
    for rank, reader in enumerate(readers):
        if rank != slow:
            assert reader.call("take", filled) == list(range(filled))
    for size in (2 * CHUNK, 10 * CHUNK):
        with pytest.raises(QueueTimeoutError):
            writer.enqueue(b"x" * size, timeout=0.05)
    assert readers[slow].call("take", filled) == list(range(filled))
    for reader in readers:
        reader.start("take", 2)
    for message in (b"y" * 10 * CHUNK, "after"):
        writer.enqueue(message, PATIENCE)
    for reader in readers:
        assert reader.result() == [b"y" * 10 * CHUNK, "after"]
    assert writer.statistics()["messages"] == filled + 2
