"""Opening a queue's ends: what each is made of, and which codecs may reach whom."""

from __future__ import annotations

import logging

import zmq

from kvindex.errors import ConfigurationError
from kvindex.shm.codec import Codec, PickleCodec
from kvindex.shm.ends import ReadingEnd, WritingEnd
from kvindex.shm.handle import Handle
from kvindex.shm.reading import LocalReadingEnd, RemoteReadingEnd
from kvindex.shm.receiver import RingReceiver
from kvindex.shm.remote.keys import CurveReader, CurveServer
from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.ring import ShmRingBuffer
from kvindex.shm.sender import DeadReaderPolicy, RingSender
from kvindex.shm.waiting import Waiting
from kvindex.shm.writing import LocalWritingEnd, RemoteWritingEnd, SplitWritingEnd

__all__ = ["open_reading_end", "open_writing_end"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


def open_writing_end(
    n_reader: int,
    ranks: list[int],
    *,
    max_chunk_bytes: int,
    max_chunks: int,
    connect_ip: str | None,
    codec: Codec,
    waiting: Waiting,
    on_dead_reader: DeadReaderPolicy,
    max_message_bytes: int,
    curve: CurveServer | None,
    remote_window: int,
) -> tuple[WritingEnd, Handle]:
    """Return the end of a new queue's writer, and the handle for its readers.

    Args and Raises: as for `MessageQueue`, checked by `arguments`; `ranks` are the local readers'.
    """
    n_remote = n_reader - len(ranks)
    curve = curve if n_remote else None
    if n_remote:
        _check_remote_codec(codec, encrypted=curve is not None)
        if curve is None and zmq.has("curve"):
            # The handle has the key: strangers at the port are refused before their first message.
            curve = CurveServer.generate()
    local: LocalWritingEnd | None = None
    remote: RemoteWritingEnd | None = None
    if ranks:
        ring = ShmRingBuffer(len(ranks), max_chunk_bytes, max_chunks)
        local = LocalWritingEnd(_ring_sender(ring, ranks, waiting, on_dead_reader), ranks, waiting)
    try:
        if n_remote:
            sender = _remote_sender(n_remote, connect_ip, remote_window, max_message_bytes, curve)
            remote = RemoteWritingEnd(sender, waiting, on_dead_reader)
    except BaseException:
        if local is not None:
            local.close()
        raise
    handle = Handle(
        n_reader=n_reader,
        local_reader_ranks=ranks,
        buffer_handle=local.sender.ring.handle() if local else None,
        remote_address=remote.address if remote else None,
        remote_token=remote.token if remote else None,
        remote_curve_key=curve.public_key if curve else None,
        codec=codec.name,
        max_message_bytes=max_message_bytes,
    )
    if local and remote:
        return SplitWritingEnd(local, remote, waiting), handle
    end = local or remote
    assert end is not None  # as there is at least one reader
    return end, handle


def open_reading_end(
    handle: Handle, rank: int, codec: Codec, waiting: Waiting, curve: CurveReader | None
) -> ReadingEnd:
    """Return the end of the reader of this rank; raises as `MessageQueue.create_from_handle`."""
    if codec.name != handle.codec:
        raise ConfigurationError(
            f"the queue's codec is {handle.codec!r}: pass codec={handle.codec!r} if you trust "
            f"its writer, instead of {codec.name!r}"
        )
    if rank in handle.local_reader_ranks:
        return LocalReadingEnd(_ring_receiver(handle, rank, waiting), waiting)
    return RemoteReadingEnd(_remote_reader(handle, rank, codec, curve), waiting)


def _ring_sender(
    ring: ShmRingBuffer, ranks: list[int], waiting: Waiting, on_dead_reader: DeadReaderPolicy
) -> RingSender:
    try:
        return RingSender(
            ring,
            reserved=range(len(ranks)),
            waiting=waiting,
            on_dead_reader=on_dead_reader,
            ranks=ranks,
        )
    except BaseException:
        ring.close()
        raise


def _remote_sender(
    n_remote: int,
    connect_ip: str | None,
    window: int,
    max_message_bytes: int,
    curve: CurveServer | None,
) -> RemoteSender:
    if connect_ip is None:
        logger.warning(
            "remote readers are expected and connect_ip is not given: %s is listened on, which "
            "only this machine can reach",
            _LOOPBACK,
        )
    return RemoteSender(
        n_remote,
        _LOOPBACK if connect_ip is None else connect_ip,
        window=window,
        max_message_bytes=max_message_bytes + 1,  # the kind
        curve=curve,
    )


def _ring_receiver(handle: Handle, rank: int, waiting: Waiting) -> RingReceiver:
    if handle.buffer_handle is None:
        raise ConfigurationError(f"the handle has no ring for local rank {rank}")
    ring = ShmRingBuffer(*handle.buffer_handle)
    try:
        return RingReceiver(
            ring,
            handle.local_reader_ranks.index(rank),
            waiting=waiting,
            max_message_bytes=handle.max_message_bytes,
        )
    except BaseException:
        ring.close()
        raise


def _remote_reader(
    handle: Handle, rank: int, codec: Codec, curve: CurveReader | None
) -> RemoteReader:
    if handle.remote_address is None or handle.remote_token is None:
        raise ConfigurationError(
            f"rank {rank} is none of the queue's local ranks {handle.local_reader_ranks}, and it "
            "has no remote readers"
        )
    if handle.remote_curve_key is not None and curve is None:
        curve = CurveReader.generate(handle.remote_curve_key)
    _check_remote_codec(codec, encrypted=curve is not None)
    return RemoteReader(
        handle.remote_address,
        handle.remote_token,
        rank,
        max_message_bytes=handle.max_message_bytes + 1,  # the kind
        curve=curve,
    )


def _check_remote_codec(codec: Codec, *, encrypted: bool) -> None:
    # By class too, as a subclass may have a name of its own. What another codec does with its
    # bytes nobody here can know.
    if (codec.name == "pickle" or isinstance(codec, PickleCodec)) and not encrypted:
        raise ConfigurationError(
            "pickle runs whatever its bytes say, and anyone on the way can change them: use "
            "msgpack for remote readers, or encrypt with curve"
        )
