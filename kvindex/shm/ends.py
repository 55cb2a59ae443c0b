"""A queue's two ends: each with a ring, if it shares memory with other ends, and with sockets.

The methods raise as those of `MessageQueue` do, and are for one thread at a time unless stated
otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import zmq

from kvindex.shm.arguments import WriterSettings
from kvindex.shm.codec import BUFFERS, Codec, PickleCodec
from kvindex.shm.handle import Handle
from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.ring import (
    RAW,
    Buffer,
    DeadReaderPolicy,
    Patience,
    RingReceiver,
    RingSender,
    ShmRingBuffer,
    Waiting,
    check_dead,
)
from kvindex.shm.turn import Turn
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError, DecodeError

__all__ = ["ReadingEnd", "WritingEnd", "open_reading_end", "open_writing_end"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class WritingEnd:
    """The end that sends every message, to readers here, elsewhere, both, or none.

    With both kinds of readers, each message goes to all of them or to none. The writer waits until
    both sides have room. It sends the whole message to the remote readers, and then publishes its
    end to the local readers, which makes it visible to them. Readers that died are reported last,
    so that every other reader has the message by then.

    Args:
        ring: to readers here, or None; the end closes it.
        ranks: theirs, in the order of their places.
        remote: to readers elsewhere, or None; the end closes it.
        waiting: how to wait.
        on_dead_reader: as for `MessageQueue`.
    """

    def __init__(
        self,
        ring: RingSender | None,
        ranks: Sequence[int],
        remote: RemoteSender | None,
        waiting: Waiting,
        on_dead_reader: DeadReaderPolicy,
    ) -> None:
        self._ring = ring
        self._ranks = ranks
        self._remote = remote
        self._waiting = waiting
        self._on_dead_reader = on_dead_reader
        self._dead: set[int] = set()  # remote ranks that were removed, and are to be reported
        self._turn = Turn()

    @property
    def sender(self) -> RingSender | WritingEnd:
        """The sending object: the ring itself if that is all, so that a message takes no detour."""
        return self._ring if self._ring is not None and self._remote is None else self

    def send(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> None:
        """Send a message to every reader; its memory is free again when this returns."""
        if self._ring is None:
            self._send_elsewhere(kind, body, timeout)
        else:
            patience = Patience(self._waiting, timeout)
            with self._ring.begun(kind, body, size, timeout):
                self._send_elsewhere(kind, body, patience.remaining())
        self._check_dead()

    @contextmanager
    def chunk(self, length: int, timeout: float | None) -> Iterator[memoryview]:
        """Give memory for a raw message of at most a chunk; sent if the `with` ends well."""
        patience = Patience(self._waiting, timeout)
        if self._ring is None:
            with self._turn.taken():
                memory = memoryview(bytearray(length))
            yield memory
            self._send_elsewhere(RAW, memory, timeout)
        else:
            with self._ring.chunk(length, timeout) as view:
                yield view
                if self._remote is not None:
                    self._send_elsewhere(RAW, view, patience.remaining())
        self._check_dead()

    def wait_ready(self, timeout: float | None) -> None:
        """Return once every reader has come and been notified of that."""
        patience = Patience(self._waiting, timeout)
        if self._ring is not None:
            self._ring.wait_attached(timeout)
        if self._ring is None or self._remote is not None:
            with self._turn.taken() as closing:
                if self._remote is not None:
                    self._note(self._remote.wait_connected(patience.remaining(), closing))
                    self._remote.send_ready()
        if self._ring is not None:
            self._ring.mark_ready()
        self._check_dead()

    def evict(self, rank: int) -> bool:
        """Remove a reader; return whether there was one. A local reader's rank: any thread."""
        if self._ring is not None and rank in self._ranks:
            return self._ring.evict(self._ranks.index(rank))
        if self._remote is None:
            return False
        with self._turn.taken():
            return self._remote.evict(rank)

    def statistics(self) -> dict[str, Any]:
        """Return the counters, under `local` and `remote`. Any thread."""
        sides = {"local": self._ring, "remote": self._remote}
        return {name: side.statistics() for name, side in sides.items() if side is not None}

    def close(self) -> None:
        """Notify readers that no message follows. Idempotent, any thread."""
        try:
            if self._ring is not None:
                self._ring.close()
        finally:
            self._turn.end(lambda: None if self._remote is None else self._remote.close())

    def _send_elsewhere(
        self, kind: int, body: Buffer | Sequence[Buffer], timeout: float | None
    ) -> None:
        """Send a message to the remote readers, and leave the dead to `_check_dead`."""
        with self._turn.taken() as closing:
            if self._remote is not None:
                # A body with buffers begins with their lengths, which frames have by themselves.
                parts = body[1:] if kind == BUFFERS else [body]
                self._note(self._remote.send([bytes([kind]), *parts], timeout, closing))

    def _note(self, dead: Collection[int]) -> None:
        if dead:
            logger.warning("the remote readers %s are gone; they were removed", sorted(dead))
            if self._on_dead_reader == "raise":
                self._dead.update(dead)

    def _check_dead(self) -> None:
        dead, self._dead = self._dead, set()
        check_dead([*(() if self._ring is None else self._ring.take_dead()), *dead])


class ReadingEnd:
    """An end that receives every message: from the writer's ring, or from a writer elsewhere.

    Args:
        ring, remote: where messages come from, one of them; the end closes it.
        codec: decodes them.
    """

    def __init__(
        self, ring: RingReceiver | None, remote: RemoteReader | None, codec: Codec
    ) -> None:
        self._ring = ring
        self._remote = remote
        self._codec = codec
        self._turn = Turn()
        self._messages = 0

    @property
    def receiver(self) -> RingReceiver | ReadingEnd:
        """The receiving object; as the `sender` of a `WritingEnd`."""
        return self if self._ring is None else self._ring

    def receive(
        self,
        decode: Callable[[int, Buffer], Any],
        timeout: float | None,
        cancel: threading.Event | None = None,
        *,
        quiet: bool = False,
    ) -> Any:
        """Return the object of the next message from elsewhere; `quiet`: warn of no long wait."""
        kind, frames = self._next(timeout, cancel, quiet)
        if kind == BUFFERS:
            return self._codec.decode(frames[0], [bytearray(frame) for frame in frames[1:]])
        return decode(kind, _joined(frames))

    @contextmanager
    def message(
        self, timeout: float | None, cancel: threading.Event | None, *, quiet: bool
    ) -> Iterator[memoryview]:
        """Give the bytes of the next message from elsewhere, read-only, until the `with` ends."""
        _, frames = self._next(timeout, cancel, quiet)
        yield memoryview(_joined(frames)).toreadonly()

    def wait_ready(self, timeout: float | None) -> None:
        """Return once the writer reports that every reader has come."""
        if self._remote is None:
            assert self._ring is not None
            self._ring.wait_ready(timeout)
        else:
            with self._turn.taken() as closing:
                self._remote.wait_ready(timeout, closing)

    def statistics(self) -> dict[str, Any]:
        """Return the count of `messages`, and more under `local`. Any thread."""
        if self._ring is None:
            return {"messages": self._messages}
        counted = self._ring.statistics()
        return {"messages": counted["messages"], "local": counted}

    def close(self) -> None:
        """Notify the writer that this reader leaves. Idempotent, any thread."""
        if self._ring is not None:
            self._ring.close()
        if self._remote is not None:
            self._turn.end(self._remote.close)

    def _next(
        self, timeout: float | None, cancel: threading.Event | None, quiet: bool
    ) -> tuple[int, list[memoryview]]:
        """Return the next message's kind and its frames, of which there is at least one."""
        assert self._remote is not None
        with self._turn.taken(cancel) as ending:
            head, *frames = self._remote.receive(timeout, ending, quiet=quiet)
        if len(head) != 1 or not frames:
            raise DecodeError("a message that does not say its kind", size=len(head))
        self._messages += 1
        return head[0], frames


def open_writing_end(
    n_reader: int, ranks: list[int], settings: WriterSettings
) -> tuple[WritingEnd, Handle]:
    """Return the end of a new queue's writer, and the handle for its readers.

    `ranks` are the local readers'. Raises: as `MessageQueue`.
    """
    codec, waiting = settings.codec, settings.waiting
    n_remote = n_reader - len(ranks)
    curve = settings.curve if n_remote else None
    if n_remote:
        _check_remote_codec(codec, encrypted=curve is not None)
        if curve is None and zmq.has("curve"):
            # The handle has the key: strangers at the port are refused before their first message.
            curve = Curve.generate()
    ring: RingSender | None = None
    remote: RemoteSender | None = None
    with ExitStack() as opened:  # closed again if something goes wrong
        if ranks:
            memory = ShmRingBuffer(len(ranks), settings.max_chunk_bytes, settings.max_chunks)
            opened.callback(memory.close)
            ring = RingSender(
                memory,
                reserved=range(len(ranks)),
                waiting=waiting,
                on_dead_reader=settings.on_dead_reader,
                ranks=ranks,
            )
            opened.callback(ring.close)
        if n_remote:
            if settings.connect_ip is None:
                logger.warning(
                    "remote readers are expected and connect_ip is not given: %s is listened on, "
                    "which only this machine can reach",
                    _LOOPBACK,
                )
            remote = RemoteSender(
                n_remote,
                _LOOPBACK if settings.connect_ip is None else settings.connect_ip,
                window=settings.remote_window,
                curve=curve,
                waiting=waiting,
            )
        opened.pop_all()
    handle = Handle(
        n_reader=n_reader,
        local_reader_ranks=ranks,
        buffer_handle=ring.ring.handle() if ring else None,
        remote_address=remote.address if remote else None,
        remote_token=remote.token if remote else None,
        remote_curve_key=curve.public_key if curve else None,
        codec=codec.name,
        max_message_bytes=settings.max_message_bytes,
    )
    return WritingEnd(ring, ranks, remote, waiting, settings.on_dead_reader), handle


def open_reading_end(
    handle: Handle, rank: int, codec: Codec, waiting: Waiting, curve: Curve | None
) -> ReadingEnd:
    """Return the end of the reader of this rank; raises as `MessageQueue.create_from_handle`."""
    if codec.name != handle.codec:
        raise ConfigurationError(
            f"the queue's codec is {handle.codec!r}: pass codec={handle.codec!r} if you trust "
            f"its writer, instead of {codec.name!r}"
        )
    if rank in handle.local_reader_ranks:
        return ReadingEnd(_ring_receiver(handle, rank, waiting), None, codec)
    return ReadingEnd(None, _remote_reader(handle, rank, codec, waiting, curve), codec)


def _ring_receiver(handle: Handle, rank: int, waiting: Waiting) -> RingReceiver:
    if handle.buffer_handle is None:
        raise ConfigurationError(f"the handle has no ring for local rank {rank}")
    place = handle.local_reader_ranks.index(rank)
    with ExitStack() as opened:
        ring = ShmRingBuffer(*handle.buffer_handle)
        opened.callback(ring.close)
        receiver = RingReceiver(
            ring, place, waiting=waiting, max_message_bytes=handle.max_message_bytes
        )
        opened.pop_all()
    return receiver


def _remote_reader(
    handle: Handle, rank: int, codec: Codec, waiting: Waiting, curve: Curve | None
) -> RemoteReader:
    if handle.remote_address is None or handle.remote_token is None:
        raise ConfigurationError(
            f"rank {rank} is none of the queue's local ranks {handle.local_reader_ranks}, and it "
            "has no remote readers"
        )
    if handle.remote_curve_key is not None and curve is None:
        curve = Curve.generate(handle.remote_curve_key)
    _check_remote_codec(codec, encrypted=curve is not None)
    return RemoteReader(
        handle.remote_address,
        handle.remote_token,
        rank,
        max_message_bytes=handle.max_message_bytes + 1,  # the kind
        curve=curve,
        waiting=waiting,
    )


def _check_remote_codec(codec: Codec, *, encrypted: bool) -> None:
    # By class too, as a subclass may have a name of its own. Whether another codec is safe
    # cannot be known here.
    if (codec.name == "pickle" or isinstance(codec, PickleCodec)) and not encrypted:
        raise ConfigurationError(
            "pickle runs whatever its bytes say, and anyone on the way can change them: use "
            "msgpack for remote readers, or encrypt with curve"
        )


def _joined(frames: list[memoryview]) -> Buffer:
    return frames[0] if len(frames) == 1 else b"".join(frames)
