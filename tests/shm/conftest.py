"""A queue's writer in the test, and its readers in threads, in processes, or across TCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvindex.shm import Handle, MessageQueue
from tests.live import PATIENCE
from tests.shm.queue_peers import End, Nursery, Peer, ThreadPeer, ended, is_left
from tests.shm.remote_peers import RemoteQueue

WAYS = ["threads", "processes", "remote"]
CHUNK = 64
WINDOW = 4


class Party:
    """A writer here, and readers of the kind that the test is run with."""

    def __init__(self, way: str, nursery: Nursery, peers: list[Peer], stack: ExitStack) -> None:
        self.is_remote = way == "remote"
        self.handles: list[Handle] = []
        self._in_threads = way.startswith("threads")
        self._nursery = nursery
        self._peers = peers
        self._stack = stack

    def writer(self, n_reader: int = 1, **knobs: Any) -> MessageQueue:
        """A queue with a ring (or window) of 4 messages, and chunks of 64 bytes."""
        n_local = knobs.pop("n_local", 0 if self.is_remote else n_reader)
        knobs.setdefault("max_chunk_bytes", CHUNK)
        knobs.setdefault("max_chunks", WINDOW)
        if n_local < n_reader:
            knobs.setdefault("connect_ip", "127.0.0.1")
            knobs.setdefault("remote_window", WINDOW)
        queue = MessageQueue(n_reader, n_local, **knobs)
        self.handles.append(queue.export_handle())
        self._stack.callback(queue.close)
        return queue

    def peer(self) -> Peer:
        peer = ThreadPeer(End()) if self._in_threads else self._nursery.fork()
        self._peers.append(peer)
        return peer

    def reader(self, writer: MessageQueue, rank: int = 0, **knobs: Any) -> Peer:
        peer = self.peer()
        peer.call("attach", writer.export_handle().to_bytes(), rank, **knobs)
        return peer

    def ready(self, n_reader: int = 1, **knobs: Any) -> tuple[MessageQueue, list[Peer]]:
        """A writer and its readers, attached."""
        writer = self.writer(n_reader, **knobs)
        known = {name: knobs[name] for name in ("codec", "waiting") if name in knobs}
        readers = [self.reader(writer, rank, **known) for rank in range(n_reader)]
        for reader in readers:
            reader.start("ready")
        writer.wait_until_ready(PATIENCE)
        for reader in readers:
            reader.result()
        return writer, readers


@pytest.fixture
def remote() -> Iterator[RemoteQueue]:
    with ExitStack() as stack:
        yield RemoteQueue(stack)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(params=WAYS)
def party(
    request: pytest.FixtureRequest, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Party]:
    with ExitStack() as stack, ended([]) as peers:
        party = Party(request.param, nursery, peers, stack)
        yield party
    assert not any(map(is_left, party.handles))
