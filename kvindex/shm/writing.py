"""A queue's writing end: a ring to the readers here, sockets to those elsewhere, both, or none."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypedDict

import msgspec
import zmq

from kvindex.shm.codec import BUFFERS, Codec
from kvindex.shm.remote import RemoteSender
from kvindex.shm.ring import (
    RAW,
    Buffer,
    DeadReaderPolicy,
    Layout,
    Patience,
    RingHandle,
    RingSender,
    ShmRingBuffer,
    Waiting,
    check_dead,
    check_policy,
)
from kvindex.wire.curve import Curve
from kvindex.wire.errors import UNREADABLE, ClosedError, ConfigurationError, DecodeError

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_MAX_HANDLE_BYTES = 1 << 20


class QueueOptions(TypedDict, total=False):
    """The keyword options of a `MessageQueue`, which says what each one means.

    Functions that pass options on can take `**options: Unpack[QueueOptions]`.
    """

    codec: str | Codec
    waiting: Waiting | None
    on_dead_reader: DeadReaderPolicy
    max_message_bytes: int
    curve: Curve | None
    remote_window: int


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's address, for its readers; any process that has it can read the queue.

    It pickles, and can be a dict's key; `to_bytes` and `from_bytes` carry it without pickle.

    Attributes:
        n_reader: readers in all.
        local_reader_ranks: the ranks that read through shared memory; the others by TCP.
        buffer_handle: of the ring, or None without local readers.
        remote_address: `tcp://…` for remote readers, or None without any.
        remote_curve_key: the writer's public CURVE key: only readers that know it are admitted.
        codec: name of the messages' codec.
        max_message_bytes: longest message that readers accept, in bytes.
    """

    n_reader: int
    local_reader_ranks: list[int]
    buffer_handle: RingHandle | None
    remote_address: str | None
    remote_curve_key: bytes | None
    codec: str
    max_message_bytes: int

    def to_bytes(self) -> bytes:
        """Return the handle in msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Handle:
        """Return the handle that `to_bytes` encoded.

        Raises:
            DecodeError: these bytes are no handle.
        """
        if len(data) > _MAX_HANDLE_BYTES:
            raise DecodeError("no handle is as long as this", size=len(data))
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNREADABLE as error:
            raise DecodeError(f"not a queue's handle: {error}", size=len(data)) from error

    def __hash__(self) -> int:
        return hash(self.to_bytes())  # the list of ranks has no hash

    def __repr__(self) -> str:
        remote = self.n_reader - len(self.local_reader_ranks)
        return f"<Handle of a queue for {len(self.local_reader_ranks)} local, {remote} remote>"


class WritingEnd:
    """The end that sends every message; its methods raise as those of `MessageQueue` do.

    With both kinds of readers, each message goes to all of them or to none. The writer waits until
    both sides have room. It sends the whole message to the remote readers, and then publishes its
    end to the local readers, which makes it visible to them. Readers that died are reported last,
    so that every other reader has the message by then.

    It closes its ring and its sockets. One thread at a time uses it; `statistics`, `close`, and
    `evict` of a local reader may be called by any. `ranks` are the local readers', by place.
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
        self._closed = False

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
            # The ring holds the message's end back until TCP has taken the whole: a time-out there
            # leaves local readers a message without an end, which they drop.
            with self._ring.begun(kind, body, size, timeout):
                self._send_elsewhere(kind, body, patience.remaining())
        self._check_dead()

    @contextmanager
    def chunk(self, length: int, timeout: float | None) -> Iterator[memoryview]:
        """Give memory for a raw message of at most a chunk; sent if the `with` ends well."""
        patience = Patience(self._waiting, timeout)
        if self._ring is None:
            self._check_open()
            memory = memoryview(bytearray(length))
            yield memory
            # The caller's writing took its own time: waiting for credit begins only here.
            self._send_elsewhere(RAW, memory, timeout)
        else:
            with self._ring.chunk(length, timeout) as view:
                yield view
                if self._remote is not None:
                    self._send_elsewhere(RAW, view, patience.remaining())
        self._check_dead()

    def wait_ready(self, timeout: float | None) -> None:
        """Return once every reader has come and been notified of that."""
        self._check_open()
        patience = Patience(self._waiting, timeout)
        if self._ring is not None:
            self._ring.wait_attached(timeout)
        if self._remote is not None:
            self._note(self._remote.wait_ready(patience.remaining()))
        if self._ring is not None:
            self._ring.mark_ready()  # last: local readers, too, wait for the remote ones
        self._check_dead()

    def evict(self, rank: int) -> bool:
        """Remove a reader; return whether there was one."""
        if self._ring is not None and rank in self._ranks:
            return self._ring.evict(self._ranks.index(rank))
        return self._remote is not None and self._remote.evict(rank)

    def statistics(self) -> dict[str, Any]:
        """Return the counters, under `local` and `remote`."""
        sides = {"local": self._ring, "remote": self._remote}
        return {name: side and side.statistics() for name, side in sides.items()}

    def close(self) -> None:
        """Notify readers that no message follows. Idempotent."""
        self._closed = True
        try:
            if self._ring is not None:
                self._ring.close()  # first: remote readers may hold the closing up for seconds
        finally:
            if self._remote is not None:
                self._remote.close()

    def _send_elsewhere(
        self, kind: int, body: Buffer | Sequence[Buffer], timeout: float | None
    ) -> None:
        """Send a message to the remote readers, and leave the dead to `_check_dead`."""
        self._check_open()
        if self._remote is not None:
            # A body with buffers begins with their lengths, which frames have by themselves.
            parts: Any = body[1:] if kind == BUFFERS else [body]
            self._note(self._remote.send(kind, parts, timeout))

    def _note(self, dead: Collection[int]) -> None:
        if dead:
            logger.warning("the remote readers %s are gone; they were removed", sorted(dead))
            # Kept until the message is with all others: raised now, it would not be.
            if self._on_dead_reader == "raise":
                self._dead.update(dead)

    def _check_dead(self) -> None:
        dead, self._dead = self._dead, set()
        check_dead([*(() if self._ring is None else self._ring.take_dead()), *dead])

    def _check_open(self) -> None:
        # With readers, their ring or sockets raise it.
        if self._closed and self._ring is None and self._remote is None:
            raise ClosedError("this end of the queue is closed")


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
    curve: Curve | None,
    remote_window: int,
) -> tuple[WritingEnd, Handle]:
    """Return the end of a new queue's writer, and the handle for its readers.

    `ranks` are the local readers'; the other arguments and the errors are `MessageQueue`'s.
    """
    # Checked whichever readers there are: a queue must not fail once its first remote one comes.
    Layout(1, max_chunks, max_chunk_bytes)
    check_policy(on_dead_reader)
    if max_message_bytes < 1:
        raise ConfigurationError(f"max_message_bytes must be at least 1, not {max_message_bytes}")
    if curve is not None and curve.server_key is not None:
        raise ConfigurationError(
            f"curve must be the writer's own key pair, Curve.generate(), not {curve!r}"
        )
    n_remote = n_reader - len(ranks)
    ring: RingSender | None = None
    remote: RemoteSender | None = None
    with ExitStack() as opened:  # closed again if something goes wrong
        if ranks:
            memory = ShmRingBuffer(len(ranks), max_chunk_bytes, max_chunks)
            opened.callback(memory.close)
            ring = RingSender(
                memory,
                reserved=range(len(ranks)),
                waiting=waiting,
                on_dead_reader=on_dead_reader,
                ranks=ranks,
            )
            opened.callback(ring.close)
        if n_remote:
            if curve is None and not zmq.has("curve"):
                raise ConfigurationError(
                    "this pyzmq's ZeroMQ has no CURVE, without which remote readers are not "
                    "served: install pyzmq from its wheels"
                )
            if connect_ip is None:
                logger.warning(
                    "remote readers are expected and connect_ip is not given: %s is listened on, "
                    "which only this machine can reach",
                    _LOOPBACK,
                )
            curve = curve or Curve.generate()
            remote = RemoteSender(
                n_remote,
                _LOOPBACK if connect_ip is None else connect_ip,
                window=remote_window,
                curve=curve,
                waiting=waiting,
            )
        opened.pop_all()
    handle = Handle(
        n_reader=n_reader,
        local_reader_ranks=ranks,
        buffer_handle=ring.ring.handle() if ring else None,
        remote_address=remote.address if remote else None,
        remote_curve_key=curve.public_key if curve and remote else None,
        codec=codec.name,
        max_message_bytes=max_message_bytes,
    )
    return WritingEnd(ring, ranks, remote, waiting, on_dead_reader), handle
