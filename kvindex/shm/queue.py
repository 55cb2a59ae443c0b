"""The message queue: one writer's objects to every reader, here and on other machines."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvindex.errors import (
    ConfigurationError,
    DecodeError,
    EncodeError,
    KVIndexError,
    QueueTimeoutError,
    ReaderDiedError,
)
from kvindex.shm.codec import Codec, choose_codec
from kvindex.shm.groups.settling import (
    as_process_group,
    check_reachable,
    collect_handles,
    confirm,
    reader_options,
    spread_handle,
)
from kvindex.shm.handle import Handle
from kvindex.shm.messages import BUFFERS, RAW, body_of, decode
from kvindex.shm.opening import (
    check_remote_codec,
    local_ranks,
    open_remote_reader,
    open_remote_sender,
)
from kvindex.shm.receiver import RingReceiver
from kvindex.shm.remote.keys import CurveReader, CurveServer
from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.ring import ShmRingBuffer
from kvindex.shm.sender import DeadReaderPolicy, RingSender, check_policy
from kvindex.shm.turn import Turn
from kvindex.shm.waiting import Patience, Waiting

__all__ = ["MessageQueue"]

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 1 << 30
_GROUP_TIMEOUT = 300.0  # seconds


class MessageQueue:
    """One writer, many readers; every reader gets every message, in order.

    Making one makes the writer; `create_from_handle` makes a reader of what `export_handle` gave.
    Readers on this machine read from shared memory, others by TCP. A writer that is `max_chunks`
    messages ahead of its slowest reader waits: nothing is dropped. A message longer than a chunk
    goes in fragments. Objects are encoded with msgpack unless pickle is asked for; `bytes` travel
    as they are.

    Args:
        n_reader: readers in all.
        n_local_reader: readers on this machine; the others connect by TCP.
        local_reader_ranks: the local readers' ranks; 0, 1, … by default.
        max_chunk_bytes: bytes of a chunk.
        max_chunks: chunks in the ring. The ring takes `max_chunks * max_chunk_bytes` of /dev/shm.
        connect_ip: this machine's address, IPv4 or IPv6, that remote readers connect to; only this
            address is listened on. By default the loopback's, which this machine alone can reach.
        codec: "msgpack", "pickle" (for readers who trust the writer: never to remote readers
            without `curve`), or a `Codec`.
        waiting: how to wait.
        on_dead_reader: what to do when a reader is gone with messages unread: "remove" it and go
            on, or "raise" ReaderDiedError once and then go on without it.
        max_message_bytes: longest message, in bytes.
        curve: keys that encrypt the connections to remote readers.
        remote_window: messages that a remote reader may be behind before the writer waits.

    Raises:
        ConfigurationError: a value cannot work.
        SegmentError: the shared memory cannot be had.

    Thread safety: one thread at a time uses an end (a second is refused with RuntimeError);
        `close` and `statistics` may be called by any.

    Examples:
        >>> from kvindex.shm import MessageQueue
        >>> with MessageQueue(n_reader=1, n_local_reader=1) as writer:
        ...     with MessageQueue.create_from_handle(writer.export_handle(), rank=0) as reader:
        ...         writer.wait_until_ready()
        ...         writer.enqueue({"rank": 0, "seq": 7})
        ...         print(reader.dequeue(timeout=1.0))
        {'rank': 0, 'seq': 7}
    """

    _sender: RingSender | None
    _remote: RemoteSender | None
    _receiver: RingReceiver | None
    _remote_reader: RemoteReader | None

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 1 << 20,
        max_chunks: int = 16,
        connect_ip: str | None = None,
        *,
        codec: str | Codec = "msgpack",
        waiting: Waiting | None = None,
        on_dead_reader: DeadReaderPolicy = "remove",
        max_message_bytes: int = _MAX_MESSAGE_BYTES,
        curve: CurveServer | None = None,
        remote_window: int = 256,
    ) -> None:
        ranks = local_ranks(n_reader, n_local_reader, local_reader_ranks)
        check_policy(on_dead_reader)
        if max_message_bytes < 1:
            raise ConfigurationError(f"max_message_bytes must be positive, not {max_message_bytes}")
        n_remote = n_reader - n_local_reader
        self._set_up(choose_codec(codec), waiting or Waiting(), max_message_bytes)
        self._on_dead_reader: DeadReaderPolicy = on_dead_reader
        if n_remote:
            check_remote_codec(self._codec, encrypted=curve is not None)
        if ranks:
            ring = ShmRingBuffer(n_local_reader, max_chunk_bytes, max_chunks)
            self._sender = RingSender(
                ring,
                reserved=range(n_local_reader),
                waiting=self._waiting,
                on_dead_reader=on_dead_reader,
                ranks=ranks,
            )
        try:
            if n_remote:
                self._remote = open_remote_sender(
                    n_remote,
                    connect_ip,
                    window=remote_window,
                    max_message_bytes=max_message_bytes,
                    curve=curve,
                )
        except BaseException:
            if self._sender is not None:
                self._sender.close()
            raise
        self._handle = Handle(
            n_reader=n_reader,
            local_reader_ranks=ranks,
            buffer_handle=self._sender.ring.handle() if self._sender else None,
            remote_address=self._remote.address if self._remote else None,
            remote_token=self._remote.token if self._remote else None,
            remote_curve_key=curve.public_key if curve and n_remote else None,
            codec=self._codec.name,
            max_message_bytes=max_message_bytes,
        )
        self._finalizer = weakref.finalize(self, _close, self._turn, self._sender, self._remote)

    @staticmethod
    def create_from_handle(
        handle: Handle,
        rank: int,
        *,
        codec: str | Codec = "msgpack",
        waiting: Waiting | None = None,
        curve: CurveReader | None = None,
    ) -> MessageQueue:
        """Return the reader of this rank.

        It reads from the first message on if its place had been kept for it until now. In place of
        a reader that is gone, it reads from the message on that the writer sends next.

        Args:
            handle: what the writer's `export_handle` gave.
            rank: which reader this is; one of the handle's local ranks, or a remote one.
            codec: what the writer uses; pickle must be asked for here too.
            waiting: how to wait.
            curve: keys of this reader, when the writer has some; new ones by default.

        Raises:
            ConfigurationError: the codec is not the writer's.
            SegmentError: the queue is not on this machine, was closed, or has a living reader of
                this rank.
        """
        reader = MessageQueue.__new__(MessageQueue)
        reader._open_reader(handle, rank, choose_codec(codec), waiting or Waiting(), curve)
        return reader

    def _open_reader(
        self,
        handle: Handle,
        rank: int,
        codec: Codec,
        waiting: Waiting,
        curve: CurveReader | None,
    ) -> None:
        if codec.name != handle.codec:
            raise ConfigurationError(
                f"the queue's codec is {handle.codec!r}: pass codec={handle.codec!r} if you trust "
                f"its writer, instead of {codec.name!r}"
            )
        self._handle = handle
        self._set_up(codec, waiting, handle.max_message_bytes)
        if rank in handle.local_reader_ranks:
            if handle.buffer_handle is None:
                raise ConfigurationError(f"the handle has no ring for local rank {rank}")
            ring = ShmRingBuffer(*handle.buffer_handle)
            try:
                self._receiver = RingReceiver(
                    ring,
                    handle.local_reader_ranks.index(rank),
                    waiting=waiting,
                    max_message_bytes=handle.max_message_bytes,
                )
            except BaseException:
                ring.close()
                raise
        else:
            self._remote_reader = open_remote_reader(handle, rank, codec, curve)
        self._finalizer = weakref.finalize(
            self, _close, self._turn, self._receiver, self._remote_reader
        )

    def _set_up(self, codec: Codec, waiting: Waiting, max_message_bytes: int) -> None:
        """Begin as an end that neither writes nor reads yet."""
        self._codec = codec
        self._waiting = waiting
        self._max_message_bytes = max_message_bytes
        self._messages = 0
        # A signal's handler that raises just after the lock was taken leaves it so, with nobody in
        # a call: whoever comes next then has it. For the same reason `enqueue` and `dequeue` take
        # it in their own lines: a handler may raise at the first one of an `__exit__`, too.
        self._user = threading.Lock()
        self._in_call = False
        self._turn = Turn()  # at the remote end
        self._sender = self._remote = self._receiver = self._remote_reader = None

    # The writer -------------------------------------------------------------------------------

    def export_handle(self) -> Handle:
        """Return what readers attach by; it is small, and goes to them by any safe way."""
        return self._handle

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader.

        Args:
            obj: the object. `bytes` are copied once; buffers in `pickle.PickleBuffer` as well.
            timeout: longest wait for readers to make room, in seconds; None waits for ever.

        Raises:
            QueueTimeoutError: there was no room in time; no local reader will see the message.
            EncodeError: the codec cannot carry the object, or it is too long.
            ReaderDiedError: as `on_dead_reader` says. For a local reader the message is not sent;
                for a remote one it was, to all others.
            ConfigurationError: this end reads.
            ClosedError: the queue was closed.
        """
        if not self._user.acquire(False) and self._in_call:
            raise _in_use()
        try:
            self._in_call = True
            kind, body, size = body_of(obj, self._codec)
            if size > self._max_message_bytes:
                raise EncodeError(
                    f"a message of {size} bytes: at most {self._max_message_bytes} "
                    "(max_message_bytes)"
                )
            if self._remote is None and self._sender is not None:
                self._sender.send(kind, body, size, timeout)
            else:
                self._send_everywhere(kind, body, size, timeout)
            self._messages += 1
        finally:
            self._in_call = False
            self._user.release()

    @contextmanager
    def acquire_write(
        self, timeout: float | None = None, *, length: int | None = None
    ) -> Iterator[memoryview]:
        """Give memory to write a message of raw bytes into, where readers will read it.

        The message is sent when the `with` ends; not if that ends by an exception.

        Args:
            timeout: longest wait for room, in seconds.
            length: bytes of the message, at most a chunk; a whole chunk by default.

        Raises:
            ConfigurationError: the length is no chunk's.
            Others: as `enqueue`.
        """
        self._check_writer()
        most = self._sender.ring.layout.max_chunk_bytes if self._sender else self._max_message_bytes
        length = most if length is None and self._sender else length
        if length is None or not 0 <= length <= most:
            raise ConfigurationError(f"length must be 0 to {most} bytes, not {length!r}")
        with self._one_user():
            if self._sender is None:
                memory = bytearray(length)
                yield memoryview(memory)
                self._send_everywhere(RAW, memory, length, timeout)
            elif self._remote is None:
                with self._sender.chunk(length, timeout) as view:
                    yield view
            else:
                patience = Patience(self._waiting, timeout)
                with self._sender.chunk(length, timeout) as view:
                    yield view
                    dead = self._send_remote(RAW, view, patience.remaining())
                self._note_dead(dead)
            self._messages += 1

    # The readers ------------------------------------------------------------------------------

    def dequeue(
        self,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Any:
        """Return the next message's object.

        Args:
            timeout: longest wait in seconds; None waits for ever.
            cancel: ends the wait when set, within `Waiting.look` seconds.
            indefinite: long waits are expected: never warn of them.

        Raises:
            QueueTimeoutError: no message came in time.
            QueueClosedError: the writer closed the queue, and all of it was read.
            WriterDiedError: the writer is gone, and all that it sent whole was read.
            ReaderEvictedError: the writer took this reader off.
            WaitCancelledError: `cancel` was set.
            DecodeError: the message is none of this codec; it counts as read.
            ConfigurationError: this end writes.
            ClosedError: this end was closed.
        """
        if not self._user.acquire(False) and self._in_call:
            raise _in_use()
        try:
            self._in_call = True
            if self._receiver is not None:
                return self._receiver.receive(self._codec, timeout, cancel, quiet=indefinite)
            kind, frames = self._receive_remote(timeout, cancel, indefinite)
            self._messages += 1
            if kind == BUFFERS:
                return self._codec.decode(frames[0], [bytearray(frame) for frame in frames[1:]])
            return decode(kind, frames[0] if len(frames) == 1 else b"".join(frames), self._codec)
        finally:
            self._in_call = False
            self._user.release()

    @contextmanager
    def acquire_read(
        self,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> Iterator[memoryview]:
        """Give the next message's bytes, read-only, without a copy; gone when the `with` ends.

        They are what `acquire_write` wrote, or what the codec made of an object. The writer cannot
        use the chunk before the `with` ends; the message then counts as read, by an exception too.

        Raises: as `dequeue`.
        """
        with self._one_user():
            if self._receiver is not None:
                with self._receiver.message(timeout, cancel, quiet=indefinite) as view:
                    yield view
                return
            _, frames = self._receive_remote(timeout, cancel, indefinite)
            self._messages += 1
            body = frames[0] if len(frames) == 1 else memoryview(b"".join(frames))
            yield body.toreadonly()

    # Both -------------------------------------------------------------------------------------

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Return once the writer has seen every reader; at all ends.

        Messages may be sent before: they wait for the readers.

        Raises:
            QueueTimeoutError: some did not come in time, and which.
            WriterDiedError, QueueClosedError: the writer is gone.
        """
        patience = Patience(self._waiting, timeout)
        with self._one_user():
            if self._receiver is not None:
                self._receiver.wait_ready(patience, timeout)
            elif self._remote_reader is not None:
                with self._turn.taken() as closing:
                    self._remote_reader.wait_ready(timeout, closing)
            else:
                self._wait_for_readers(patience, timeout)

    def _wait_for_readers(self, patience: Patience, timeout: float | None) -> None:
        if self._sender is not None:
            self._sender.wait_attached(patience, timeout)
        if self._remote is not None:
            with self._turn.taken() as closing:
                dead = self._remote.wait_connected(patience.remaining(), closing)
                self._remote.send_ready()
            self._note_dead(dead)
        if self._sender is not None:
            self._sender.mark_ready()

    def remove_reader(self, rank: int) -> bool:
        """Wait for this reader no more, whether it is slow, dead, or never came; at the writer.

        It is told by ReaderEvictedError. One that comes later reads from the next message on.

        Returns:
            Whether there was such a reader, or a place kept for it.

        Raises:
            ConfigurationError: this end reads.
        """
        self._check_writer()
        if self._sender is not None and rank in self._handle.local_reader_ranks:
            return self._sender.evict(self._handle.local_reader_ranks.index(rank))
        if self._remote is None:
            return False
        with self._one_user(), self._turn.taken():
            return self._remote.evict(rank)

    def broadcast_object(self, obj: Any = None) -> Any:
        """Return the writer's object at every end: the writer sends it, a reader receives it.

        Raises: as `enqueue` and `dequeue`.
        """
        if self._is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    def statistics(self) -> dict[str, Any]:
        """Return this end's counters: `messages`, and of shared memory and TCP what each counts.

        `local`: chunks and fragments, waits that were spun or slept, wake-ups of others, readers
        removed, messages whose end never came. `remote`: as `RemoteSender.statistics`.
        """
        statistics: dict[str, Any] = {"messages": self._messages, "local": None, "remote": None}
        local = self._sender or self._receiver
        if local is not None:
            statistics["local"] = local.statistics()
        if self._receiver is not None:
            statistics["messages"] = statistics["local"]["messages"]
        if self._remote is not None:
            statistics["remote"] = self._remote.statistics()
        return statistics

    def close(self) -> None:
        """Close this end. Idempotent.

        Readers that are attached still read what was sent, and are then told that it was all.
        """
        self._finalizer()

    def shutdown(self) -> None:
        """Close this end: vLLM's word for `close`."""
        self.close()

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        end = "writer" if self._is_writer else "reader"
        return f"<MessageQueue: {end} of a queue for {self._handle.n_reader} readers>"

    # Process groups ---------------------------------------------------------------------------

    @staticmethod
    def create_from_process_group(
        pg: Any,
        max_chunk_bytes: int = 1 << 20,
        max_chunks: int = 16,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
        *,
        connect_ip: str | None = None,
        timeout: float | None = _GROUP_TIMEOUT,
        **options: Any,
    ) -> MessageQueue:
        """Return this rank's end of one queue from rank `writer_rank` to all others. Collective.

        Ranks that share memory with the writer read through it, the others by TCP.

        Args:
            pg: a `ProcessGroup`, or a group of torch.distributed.
            max_chunk_bytes: as for `MessageQueue`.
            max_chunks: likewise.
            writer_rank: which rank writes.
            external_writer_handle: at rank `writer_rank`, the handle of a queue whose writer is
                outside the group; then every rank reads, under its own rank.
            blocking: return when all are attached.
            connect_ip: the writer's address; needed there when a rank is on another machine.
            timeout: longest wait for all to be attached, in seconds.
            options: as for `MessageQueue`; readers look at `codec` and `waiting` only.

        Raises:
            ConfigurationError: a value cannot work, here or at another rank.
            QueueTimeoutError, PeerDiedError: a rank did not come, or is gone.
        """
        group = as_process_group(pg)
        local = group.same_node(writer_rank)
        queue: MessageQueue | None = None
        made: Handle | KVIndexError | None = external_writer_handle
        if group.rank == writer_rank and made is None:
            ranks = [rank for rank, here in enumerate(local) if here and rank != writer_rank]
            n_reader = group.world_size - 1
            try:
                check_reachable(n_reader, ranks, connect_ip)
                queue = MessageQueue(
                    n_reader, len(ranks), ranks, max_chunk_bytes, max_chunks, connect_ip, **options
                )
                made = queue.export_handle()
            except KVIndexError as error:  # the others wait to be told
                made = error
        handle = spread_handle(group, writer_rank, made)
        failure: KVIndexError | None = None
        if queue is None:
            try:
                queue = MessageQueue.create_from_handle(
                    handle, group.rank, **reader_options(options)
                )
            except KVIndexError as error:  # nobody is to wait for this rank
                failure = error
        try:
            confirm(group, failure)
            assert queue is not None
            if blocking:
                queue.wait_until_ready(timeout)
        except BaseException:
            if queue is not None:
                queue.close()
            raise
        return queue

    @staticmethod
    def create_from_process_group_single_reader(
        pg: Any,
        max_chunk_bytes: int = 1 << 20,
        max_chunks: int = 16,
        reader_rank: int = 0,
        blocking: bool = False,
        *,
        connect_ip: str | None = None,
        timeout: float | None = _GROUP_TIMEOUT,
        **options: Any,
    ) -> tuple[MessageQueue, list[Handle]]:
        """Return this rank's own queue to rank `reader_rank`, and there everyone's handles.

        Collective. The reader attaches to each with `create_from_handle(handle, 0)`, in the order
        of ranks; elsewhere the list is empty.

        Args: as `create_from_process_group`; with `blocking`, return when the reader is attached,
            which the reader cannot do at its own queue: it returns at once.
        """
        group = as_process_group(pg)
        local = [0] if group.same_node(reader_rank)[group.rank] else []
        queue: MessageQueue | None = None
        made: Handle | KVIndexError
        try:
            check_reachable(1, local, connect_ip)
            queue = MessageQueue(
                1, len(local), local, max_chunk_bytes, max_chunks, connect_ip, **options
            )
            made = queue.export_handle()
        except KVIndexError as error:  # the others wait to be told
            made = error
        try:
            handles = collect_handles(group, reader_rank, made)
            assert queue is not None
            if blocking and group.rank != reader_rank:
                queue.wait_until_ready(timeout)
        except BaseException:
            if queue is not None:
                queue.close()
            raise
        return queue, handles

    # Inside -----------------------------------------------------------------------------------

    @contextmanager
    def _one_user(self) -> Iterator[None]:
        """Refuse a second call while one is under way, of another thread or a signal's handler."""
        if not self._user.acquire(False) and self._in_call:
            raise _in_use()
        try:
            self._in_call = True
            yield
        finally:
            self._in_call = False
            self._user.release()

    @property
    def _is_writer(self) -> bool:
        return self._receiver is None and self._remote_reader is None

    def _check_writer(self) -> None:
        if not self._is_writer:
            raise ConfigurationError("this end reads; only the queue's maker writes")

    def _send_everywhere(self, kind: int, body: Any, size: int, timeout: float | None) -> None:
        """Send to local and remote readers; once both have room, so that all of them get it."""
        self._check_writer()
        patience = Patience(self._waiting, timeout)
        if self._sender is not None:
            self._sender.wait_room(timeout)
        dead = self._send_remote(kind, body, patience.remaining() if self._sender else timeout)
        if self._sender is not None:
            self._sender.send(kind, body, size, timeout)
        self._note_dead(dead)

    def _send_remote(self, kind: int, body: Any, timeout: float | None) -> Collection[int]:
        assert self._remote is not None
        # A body with buffers begins with their lengths, which frames have by themselves.
        parts = list(body[1:]) if kind == BUFFERS else [body]
        with self._turn.taken() as closing:
            return self._remote.send([bytes([kind]), *parts], timeout, closing)

    def _note_dead(self, dead: Collection[int]) -> None:
        if not dead:
            return
        if self._on_dead_reader == "raise":
            raise ReaderDiedError(
                f"the remote readers {sorted(dead)} are gone; they were removed", ranks=dead
            )
        logger.warning("the remote readers %s are gone; they were removed", sorted(dead))

    def _receive_remote(
        self, timeout: float | None, cancel: threading.Event | None, quiet: bool
    ) -> tuple[int, list[memoryview]]:
        if self._remote_reader is None:
            raise ConfigurationError("this end writes; readers are made by create_from_handle")
        patience = Patience(self._waiting, timeout, quiet=quiet)
        while True:
            remaining = patience.remaining()
            most = self._waiting.warn_after
            step = most if remaining is None else min(most, remaining)
            try:
                with self._turn.taken(cancel) as ending:
                    head, *frames = self._remote_reader.receive(step, ending)
                if len(head) != 1 or not frames:
                    raise DecodeError("a message that does not say its kind", size=len(head))
                return head[0], frames
            except QueueTimeoutError:
                if patience.exhausted:
                    raise QueueTimeoutError(
                        f"no message came in {timeout:g} s", timeout=timeout or 0.0
                    ) from None
                patience.warn("a message")


def _in_use() -> RuntimeError:
    return RuntimeError(
        "this end of the queue is in use, by another thread or by a call that this one interrupts: "
        "one at a time"
    )


def _close(
    turn: Turn, local: RingSender | RingReceiver | None, remote: RemoteSender | RemoteReader | None
) -> None:
    if local is not None:
        local.close()
    if remote is not None:
        turn.end(remote.close)
