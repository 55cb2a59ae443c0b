"""kvindex.shm.MessageQueue with its defaults: msgpack, its own way to wait."""

from __future__ import annotations

from functools import partial

from benchmarks.queues.adapter import Reader, Ring, Writer
from kvindex.shm import Handle, MessageQueue


class KVIndexQueues:
    """Our queues."""

    def writer(self, ring: Ring) -> Writer:
        """Return the sending end of a new queue."""
        queue = MessageQueue(
            ring.readers,
            ring.readers,
            max_chunk_bytes=ring.chunk_bytes,
            max_chunks=ring.chunks,
        )
        return Writer(queue.export_handle(), queue.wait_until_ready, queue.enqueue, queue.close)

    def reader(self, handle: Handle, rank: int, ring: Ring) -> Reader:
        """Return the receiving end of this number."""
        queue = MessageQueue.create_from_handle(handle, rank)
        return Reader(queue.wait_until_ready, partial(queue.dequeue, indefinite=True), queue.close)
