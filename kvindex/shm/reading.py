"""A queue's reading end: a ring's receiver here, a socket's reader elsewhere."""

from __future__ import annotations

from contextlib import ExitStack

from kvindex.shm.codec import Codec
from kvindex.shm.handle import Handle
from kvindex.shm.remote import RemoteReader
from kvindex.shm.ring import RingReceiver, ShmRingBuffer, Waiting
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError

__all__ = ["open_reading_end"]


def open_reading_end(
    handle: Handle, rank: int, codec: Codec, waiting: Waiting, curve: Curve | None
) -> RingReceiver | RemoteReader:
    """Return the end of the reader of this rank; raises as `MessageQueue.create_from_handle`."""
    if codec.name != handle.codec:
        raise ConfigurationError(
            f"the queue's codec is {handle.codec!r}: pass codec={handle.codec!r} if you trust "
            f"its writer, instead of {codec.name!r}"
        )
    if rank in handle.local_reader_ranks:
        return _ring_receiver(handle, rank, waiting)
    if handle.remote_address is None or handle.remote_curve_key is None:
        raise ConfigurationError(
            f"rank {rank} is none of the queue's local ranks {handle.local_reader_ranks}, and it "
            "has no remote readers"
        )
    return RemoteReader(
        handle.remote_address,
        rank,
        max_message_bytes=handle.max_message_bytes,
        curve=curve or Curve.generate(handle.remote_curve_key),
        waiting=waiting,
    )


def _ring_receiver(handle: Handle, rank: int, waiting: Waiting) -> RingReceiver:
    if handle.buffer_handle is None:
        raise ConfigurationError(f"the handle has no ring for local rank {rank}")
    with ExitStack() as opened:  # closed again if something goes wrong
        ring = opened.enter_context(ShmRingBuffer(*handle.buffer_handle))
        place = handle.local_reader_ranks.index(rank)
        receiver = RingReceiver(
            ring, place, waiting=waiting, max_message_bytes=handle.max_message_bytes
        )
        opened.pop_all()
    return receiver
