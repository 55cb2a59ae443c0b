"""What the processes need of a queue, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Ring:
    """The sizes of a queue.

    Attributes:
        readers: how many.
        chunk_bytes: of each chunk of shared memory.
        chunks: how many.
        message_bytes: the largest message's, for what has no chunks.
    """

    readers: int
    chunk_bytes: int
    chunks: int
    message_bytes: int


@dataclass(frozen=True)
class Writer:
    """The sending end.

    Attributes:
        handle: what a reader is made from; it can be pickled.
        wait_until_ready: returns when every reader has joined.
        send: sends one object, and waits while the queue is full.
        close: gives back what is not given back when the object is collected.
    """

    handle: Any
    wait_until_ready: Callable[[], object]
    send: Callable[[Any], object]
    close: Callable[[], object]


@dataclass(frozen=True)
class Reader:
    """A receiving end.

    Attributes:
        wait_until_ready: returns when nothing that is sent from now on can be missed.
        receive: returns the next object, and waits for it.
        close: gives back what is not given back when the object is collected.
    """

    wait_until_ready: Callable[[], object]
    receive: Callable[[], Any]
    close: Callable[[], object]


class Queues(Protocol):
    """One kind of queue."""

    def writer(self, ring: Ring) -> Writer:
        """Return the sending end of a new queue."""

    def reader(self, handle: Any, rank: int, ring: Ring) -> Reader:
        """Return the receiving end of this number, in any process of this machine."""


def create(name: str) -> Queues:
    """Return the kind of this name; only what it needs is imported."""
    if name == "kvindex":
        from benchmarks.queues.kvindex_queue import KVIndexQueues

        return KVIndexQueues()
    if name == "vllm":
        from benchmarks.queues.vllm_queue import VLLMQueues

        return VLLMQueues()
    if name == "zmq":
        from benchmarks.queues.pub_sub import PubSub

        return PubSub()
    raise ValueError(f"no queue is called {name!r}")
