"""The message queue: one writer's objects to every reader, here and on other machines."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from kvindex.shm.codec import Codec, body_of, choose_codec, decoder_of
from kvindex.shm.groups import (
    ProcessGroup,
    TorchProcessGroup,
    check_rank,
    gather,
    settle,
    shares_memory,
)
from kvindex.shm.remote import IN_USE, RemoteReader
from kvindex.shm.ring import DeadReaderPolicy, RingReceiver, ShmRingBuffer, Waiting
from kvindex.shm.writing import Handle, QueueOptions, WritingEnd, open_writing_end
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ConfigurationError,
    EncodeError,
    InUseError,
    ReaderDiedError,
    check_options,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_GROUP_TIMEOUT = 300.0  # seconds
_READS = "this end reads; only the maker writes"
_WRITES = "this end writes; create_from_handle makes readers"


class MessageQueue:
    """One writer, many readers; every reader gets every message, in order.

    The constructor makes the writer; `create_from_handle` makes a reader from `export_handle()`.
    Readers on this machine read from shared memory, others by TCP. A writer that is `max_chunks`
    messages ahead of its slowest reader waits: nothing is dropped. A message longer than a chunk
    goes in fragments. Objects are encoded with msgpack unless pickle is asked for; `bytes` travel
    as they are.

    Args:
        n_reader: readers in all. With 0, messages go to no reader.
        n_local_reader: readers on this machine; the others connect by TCP.
        local_reader_ranks: the local readers' ranks; 0, 1, … by default.
        max_chunk_bytes: bytes of a chunk.
        max_chunks: chunks in the ring. The ring takes `max_chunks * max_chunk_bytes` of /dev/shm.
        connect_ip: this machine's address, IPv4 or IPv6, that remote readers connect to; only this
            address is listened on. By default the loopback's, which this machine alone can reach.
        codec: "msgpack", "pickle" (for readers who trust the writer), or a `Codec`, whose author is
            responsible for its `decode`.
        waiting: how to wait.
        on_dead_reader: what to do when a reader is gone with messages unread: "remove" it and go
            on, or "raise" ReaderDiedError once as well, when all others were sent the message.
        max_message_bytes: longest message, in bytes.
        curve: `kvindex.Curve.generate()`, which encrypts the connections to remote readers; by
            default new keys. The handle holds the public one, which every reader must know.
        remote_window: messages that a remote reader may be behind before the writer waits.

    Raises:
        ConfigurationError: a value cannot work.
        SegmentError: the shared memory cannot be had.

    Thread safety: one thread at a time uses an end (a second is refused with InUseError);
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
        max_message_bytes: int = 1 << 30,
        curve: Curve | None = None,
        remote_window: int = 256,
    ) -> None:
        chosen = choose_codec(codec)
        ranks = _local_ranks(n_reader, n_local_reader, local_reader_ranks)
        writing, handle = open_writing_end(
            n_reader,
            ranks,
            max_chunk_bytes=max_chunk_bytes,
            max_chunks=max_chunks,
            connect_ip=connect_ip,
            codec=chosen,
            waiting=Waiting() if waiting is None else waiting,
            on_dead_reader=on_dead_reader,
            max_message_bytes=max_message_bytes,
            curve=curve,
            remote_window=remote_window,
        )
        self._view_bytes = min(max_chunk_bytes, max_message_bytes)
        self._set_up(writing, handle, chosen)

    @staticmethod
    def create_from_handle(
        handle: Handle,
        rank: int,
        *,
        codec: str | Codec = "msgpack",
        waiting: Waiting | None = None,
        curve: Curve | None = None,
    ) -> MessageQueue:
        """Return the reader of this rank.

        If its place was kept for it until now, it reads from the first message on. If it replaces a
        reader that is gone, it reads from the writer's next message on.

        Args:
            handle: from the writer's `export_handle`.
            rank: which reader this is; one of the handle's local ranks, or a remote one.
            codec: the writer's; pickle must be chosen here too.
            waiting: how to wait.
            curve: a remote reader's keys, `Curve.generate(server_key)`; new ones by default.

        Raises:
            ConfigurationError: a value cannot work, or the codec is not the writer's.
            SegmentError: the queue is not on this machine, was closed, or has a living reader of
                this rank. A remote reader gets this error from its first call.
        """
        if curve is not None and curve.server_key is None:
            raise ConfigurationError(
                "curve must name the writer's public key, as Curve.generate(server_key) does, or "
                f"be None, not {curve!r}"
            )
        chosen = choose_codec(codec)
        if chosen.name != handle.codec:  # never pickle just because a handle names it
            raise ConfigurationError(
                f"the queue's codec is {handle.codec!r}: pass codec={handle.codec!r} if you trust "
                f"its writer, instead of {chosen.name!r}"
            )
        waiting = waiting or Waiting()
        longest = handle.max_message_bytes
        reading: RingReceiver | RemoteReader
        if rank in handle.local_reader_ranks:
            if handle.buffer_handle is None:
                raise ConfigurationError(f"the handle has no ring for local rank {rank}")
            with ExitStack() as opened:  # closed again if something goes wrong
                ring = opened.enter_context(ShmRingBuffer(*handle.buffer_handle))
                place = handle.local_reader_ranks.index(rank)
                reading = RingReceiver(ring, place, waiting=waiting, max_message_bytes=longest)
                opened.pop_all()
        elif handle.remote_address is None or handle.remote_curve_key is None:
            raise ConfigurationError(
                f"rank {rank} is none of the queue's local ranks {handle.local_reader_ranks}, and "
                "it has no remote readers"
            )
        else:
            reading = RemoteReader(
                handle.remote_address,
                rank,
                max_message_bytes=longest,
                curve=curve or Curve.generate(handle.remote_curve_key),
                waiting=waiting,
            )
        queue = MessageQueue.__new__(MessageQueue)
        queue._set_up(reading, handle, chosen)
        return queue

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
        **options: Unpack[QueueOptions],
    ) -> MessageQueue:
        """Return this rank's end of one queue from rank `writer_rank` to all others. Collective.

        Ranks that share memory with the writer read through it, the others by TCP. A group of one
        rank has no readers.

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
        group = _checked_group(pg, options, "writer_rank", writer_rank)
        near = gather(group, shares_memory(group, writer_rank))
        ranks = [rank for rank, shares in enumerate(near) if shares is True and rank != writer_rank]
        with ExitStack() as opened:  # closed again if something goes wrong

            def make() -> tuple[MessageQueue | None, Handle | None]:
                if group.rank != writer_rank or external_writer_handle is not None:
                    return None, external_writer_handle if group.rank == writer_rank else None
                size = max_chunk_bytes, max_chunks
                made = _made(group.world_size - 1, ranks, size, connect_ip, options)
                return opened.enter_context(made), made.export_handle()

            # First, since the others wait for its handle.
            writer, offers = settle(group, "make the queue", make)

            def attach() -> tuple[MessageQueue, None]:
                if writer is not None:
                    return writer, None
                reader = MessageQueue.create_from_handle(
                    Handle.from_bytes(offers[writer_rank]),
                    group.rank,
                    codec=options.get("codec", "msgpack"),
                    waiting=options.get("waiting"),
                )
                return opened.enter_context(reader), None

            queue, _ = settle(group, "open its end of the queue", attach)
            if blocking:
                queue.wait_until_ready(timeout)
            opened.pop_all()
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
        **options: Unpack[QueueOptions],
    ) -> tuple[MessageQueue, list[Handle]]:
        """Return this rank's own queue to rank `reader_rank`, and there everyone's handles.

        Collective. The reader attaches to each with `create_from_handle(handle, 0)`, in the order
        of ranks; elsewhere the list is empty.

        Args: as `create_from_process_group`; with `blocking`, return when the reader is attached,
            which the reader cannot do at its own queue: it returns at once.
        """
        group = _checked_group(pg, options, "reader_rank", reader_rank)
        ranks = [0] if shares_memory(group, reader_rank) else []
        with ExitStack() as opened:

            def make() -> tuple[MessageQueue, Handle]:
                made = _made(1, ranks, (max_chunk_bytes, max_chunks), connect_ip, options)
                return opened.enter_context(made), made.export_handle()

            queue, offers = settle(group, "open its end of the queue", make)
            handles = []
            if group.rank == reader_rank:
                handles = [Handle.from_bytes(offer) for offer in offers]
            elif blocking:
                # Not at the reader, which attaches to its own queue only after this returns.
                queue.wait_until_ready(timeout)
            opened.pop_all()
        return queue, handles

    def _set_up(
        self, end: WritingEnd | RingReceiver | RemoteReader, handle: Handle, codec: Codec
    ) -> None:
        self._end = end
        self._writing = end if isinstance(end, WritingEnd) else None
        self._sender = None if self._writing is None else self._writing.sender
        self._receiver = None if isinstance(end, WritingEnd) else end
        self._handle = handle
        self._codec = codec
        self._decode = decoder_of(codec)
        self._max_message_bytes = handle.max_message_bytes
        self._messages = 0  # sent
        # The lock keeps other threads out, and the flag a signal handler, which runs in the thread
        # that it interrupts. No plain lock does both: Ctrl-C just after it was taken would leave it
        # taken for ever, while a reentrant one lets its own thread go on. `enqueue` and `dequeue`
        # take it in their own lines, since Ctrl-C may also come at the first line of an `__exit__`.
        self._user = threading.RLock()
        self._in_call = False
        # Also where nobody closes it: a queue that is collected, or whose process ends, must not
        # leave its peers waiting.
        self._finalizer = weakref.finalize(self, end.close)

    @contextmanager
    def _one_user(self) -> Iterator[None]:
        """Refuse a second call while one is under way, from another thread or a signal handler."""
        if not self._user.acquire(False) or self._in_call:
            self._refuse()
        try:
            self._in_call = True
            yield
        finally:
            self._in_call = False
            self._user.release()

    def _refuse(self) -> NoReturn:
        with suppress(RuntimeError):  # it is another thread's
            self._user.release()
        raise InUseError(IN_USE)

    # The writer -------------------------------------------------------------------------------

    def export_handle(self) -> Handle:
        """Return the readers' handle; it is small, and may go to them by any safe way."""
        return self._handle

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader.

        Args:
            obj: the object. `bytes` are copied once; buffers in `pickle.PickleBuffer` as well.
            timeout: longest wait for readers to make room, in seconds; None waits for ever.

        Raises:
            QueueTimeoutError: there was no room in time; no reader will see the message.
            EncodeError: the codec cannot carry the object, or it is too long.
            ReaderDiedError: readers are gone, with `on_dead_reader="raise"`. The message was sent
                to all others: sent again, it would reach them twice.
            ConfigurationError: this end reads.
            ClosedError: this end was closed.
        """
        if not self._user.acquire(False) or self._in_call:
            self._refuse()
        try:
            self._in_call = True
            # Before the codec: at a reading end it is the end that is wrong, not the object.
            if self._sender is None:
                raise ConfigurationError(_READS)
            kind, body, size = body_of(obj, self._codec)
            if size > self._max_message_bytes:
                raise EncodeError(
                    f"a message of {size} bytes: at most {self._max_message_bytes} "
                    "(max_message_bytes)"
                )
            self._sender.send(kind, body, size, timeout)
            self._messages += 1
        except ReaderDiedError:
            self._messages += 1  # the other readers have it
            raise
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
            length: bytes of the message, at most a chunk and `max_message_bytes`; by default as
                many as these allow.

        Raises: as `enqueue` (ReaderDiedError when the `with` ends); ConfigurationError, if the
            length is more.
        """
        with self._one_user():
            if self._writing is None:
                raise ConfigurationError(_READS)
            most = self._view_bytes
            length = most if length is None else length
            if not 0 <= length <= most:
                raise ConfigurationError(
                    f"length must be 0 to {most} bytes (max_chunk_bytes, max_message_bytes), not "
                    f"{length}"
                )
            try:
                with self._writing.chunk(length, timeout) as view:
                    yield view
                self._messages += 1
            except ReaderDiedError:
                self._messages += 1  # as `enqueue`
                raise

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
            WriterDiedError: the writer is gone, and every whole message was read.
            ReaderEvictedError: the writer removed this reader.
            WaitCancelledError: `cancel` was set.
            DecodeError: the message is not of this codec; it counts as read.
            ConfigurationError: this end writes, or the writer refused this remote reader (its rank
                or version).
            ClosedError: this end was closed.
        """
        if not self._user.acquire(False) or self._in_call:
            self._refuse()
        try:
            self._in_call = True
            if self._receiver is None:
                raise ConfigurationError(_WRITES)
            return self._receiver.receive(self._decode, timeout, cancel, quiet=indefinite)
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

        They were written by `acquire_write`, or encoded by the codec. The writer cannot use the
        chunk before the `with` ends; the message then counts as read, after an exception too.

        Raises: as `dequeue`.
        """
        with self._one_user():
            # For the whole `with`: another call would release the chunk that the caller reads.
            if self._receiver is None:
                raise ConfigurationError(_WRITES)
            with self._receiver.message(timeout, cancel, quiet=indefinite) as view:
                yield view

    # Both -------------------------------------------------------------------------------------

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Return once the writer has seen every reader; at all ends.

        Messages may be sent before: they wait for the readers.

        Raises:
            QueueTimeoutError: some readers did not come in time; the message names them.
            WriterDiedError, QueueClosedError: the writer is gone.
            ReaderDiedError: readers died meanwhile, with `on_dead_reader="raise"`; all others are
                ready.
        """
        with self._one_user():
            self._end.wait_ready(timeout)

    def remove_reader(self, rank: int) -> bool:
        """Remove a reader, whether it is slow, dead, or never came; at the writer.

        It gets ReaderEvictedError. A reader that comes later reads from the next message on.

        Returns:
            Whether there was such a reader, or a place kept for it.

        Raises:
            ConfigurationError: this end reads.
        """
        if self._writing is None:
            raise ConfigurationError(_READS)
        return self._writing.evict(rank)

    def broadcast_object(self, obj: Any = None) -> Any:
        """Return the writer's object at every end: the writer sends it, a reader receives it.

        Raises: as `enqueue` and `dequeue`.
        """
        if self._writing is not None:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    def statistics(self) -> dict[str, Any]:
        """Return this end's counters: `messages`, and those of shared memory and TCP.

        `local`: chunks and fragments, waits that were spun or slept, wake-ups of others, readers
        removed, messages whose end never came. `remote`: as `RemoteSender.statistics`.
        """
        counted = self._end.statistics()
        if self._writing is not None:
            return {"messages": self._messages, **counted}
        local = counted if isinstance(self._end, RingReceiver) else None
        return {"messages": counted["messages"], "local": local, "remote": None}

    def close(self) -> None:
        """Close this end. Idempotent.

        Attached readers still read the sent messages, and then get QueueClosedError. The writer
        waits 5 seconds at most for remote readers that have messages unread; call `remove_reader`
        first to wait for none.
        """
        self._finalizer()

    def shutdown(self) -> None:
        """Close this end: vLLM's name for `close`."""
        self.close()

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        end = "writer" if self._writing is not None else "reader"
        return f"<MessageQueue: {end} of a queue for {self._handle.n_reader} readers>"


def _local_ranks(n_reader: int, n_local: int, ranks: Sequence[int] | None) -> list[int]:
    """Return the local readers' ranks, 0, 1, … by default."""
    if not 0 <= n_local <= n_reader:
        raise ConfigurationError(
            "n_reader must be at least 0 and n_local_reader 0 to n_reader, not "
            f"{n_reader} and {n_local}"
        )
    chosen = list(range(n_local) if ranks is None else ranks)
    if not len(set(chosen)) == len(chosen) == n_local:
        raise ConfigurationError(
            f"local_reader_ranks must be {n_local} different ranks, not {ranks!r}"
        )
    return chosen


def _checked_group(pg: Any, options: QueueOptions, name: str, rank: int) -> ProcessGroup:
    check_options("MessageQueue", options, QueueOptions)
    group = pg if isinstance(pg, ProcessGroup) else TorchProcessGroup(pg)
    check_rank(name, rank, group.world_size)
    return group


def _made(
    n_reader: int,
    ranks: list[int],
    size: tuple[int, int],
    connect_ip: str | None,
    options: QueueOptions,
) -> MessageQueue:
    """Return the writing end for so many readers, of which these ranks are local."""
    if len(ranks) < n_reader and connect_ip is None:
        raise ConfigurationError(
            f"{n_reader - len(ranks)} ranks share no memory with the writer: give it "
            "connect_ip, its address that they can reach"
        )
    return MessageQueue(n_reader, len(ranks), ranks, *size, connect_ip, **options)
