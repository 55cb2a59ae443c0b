"""How the processes of a group share queues: one to all others, or one from each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from kvindex.shm.handle import Handle
from kvindex.shm.ring import Segment
from kvindex.shm.torch_group import TorchProcessGroup, check_rank
from kvindex.shm.writing import QueueOptions
from kvindex.wire.errors import ConfigurationError, SegmentError
from kvindex.wire.options import check_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvindex.shm.queue import MessageQueue

logger = logging.getLogger(__name__)

_TIMEOUT = 300.0  # seconds
_End = TypeVar("_End", bound="MessageQueue | Handle | None")


@runtime_checkable
class ProcessGroup(Protocol):
    """A fixed number of processes that exchange small values; `TorchProcessGroup` adapts torch's.

    A group of your own needs these four members and nothing else. Both methods are collective: each
    rank calls them in the same order, or the others wait for it.

    Values are those that msgpack carries: None, bool, int of 64 bits, float, str, bytes, lists and
    maps of these.

    Raises:
        ConfigurationError: by each method: the value cannot be carried, or `source` is no rank of
            the group.
        QueueTimeoutError: by each method: ranks did not make the call in time.
        PeerDiedError: by each method: a rank is gone.

    Thread safety: one thread at a time, as the order of calls must be the same everywhere.
    """

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        ...

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """Return at every rank the `obj` of rank `source`; those of other ranks are ignored."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...


def create_from_process_group(
    pg: Any,
    max_chunk_bytes: int = 1 << 20,
    max_chunks: int = 16,
    writer_rank: int = 0,
    external_writer_handle: Handle | None = None,
    blocking: bool = True,
    *,
    connect_ip: str | None = None,
    timeout: float | None = _TIMEOUT,
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
    from kvindex.shm.queue import MessageQueue

    group = _checked_group(pg, options, "writer_rank", writer_rank)
    near = _gather(group, _shares_memory(group, writer_rank))
    ranks = [rank for rank, shares in enumerate(near) if shares is True and rank != writer_rank]
    with ExitStack() as opened:  # closed again if something goes wrong

        def make() -> MessageQueue | Handle | None:
            if group.rank != writer_rank:
                return None
            if external_writer_handle is not None:
                return external_writer_handle
            size = max_chunk_bytes, max_chunks
            return opened.enter_context(
                _made(group.world_size - 1, ranks, size, connect_ip, options)
            )

        made, offers = _settle(group, "make the queue", make)  # first, since the others wait for it

        def attach() -> MessageQueue:
            if isinstance(made, MessageQueue):
                return made
            return opened.enter_context(
                MessageQueue.create_from_handle(
                    Handle.from_bytes(offers[writer_rank]),
                    group.rank,
                    codec=options.get("codec", "msgpack"),
                    waiting=options.get("waiting"),
                )
            )

        queue, _ = _settle(group, "open its end of the queue", attach)
        if blocking:
            queue.wait_until_ready(timeout)
        opened.pop_all()
    return queue


def create_from_process_group_single_reader(
    pg: Any,
    max_chunk_bytes: int = 1 << 20,
    max_chunks: int = 16,
    reader_rank: int = 0,
    blocking: bool = False,
    *,
    connect_ip: str | None = None,
    timeout: float | None = _TIMEOUT,
    **options: Unpack[QueueOptions],
) -> tuple[MessageQueue, list[Handle]]:
    """Return this rank's own queue to rank `reader_rank`, and there everyone's handles.

    Collective. The reader attaches to each with `create_from_handle(handle, 0)`, in the order
    of ranks; elsewhere the list is empty.

    Args: as `create_from_process_group`; with `blocking`, return when the reader is attached,
        which the reader cannot do at its own queue: it returns at once.
    """
    group = _checked_group(pg, options, "reader_rank", reader_rank)
    ranks = [0] if _shares_memory(group, reader_rank) else []
    with ExitStack() as opened:

        def make() -> MessageQueue:
            size = max_chunk_bytes, max_chunks
            return opened.enter_context(_made(1, ranks, size, connect_ip, options))

        queue, offers = _settle(group, "open its end of the queue", make)
        handles = []
        if group.rank == reader_rank:
            handles = [Handle.from_bytes(offer) for offer in offers]
        elif blocking:
            queue.wait_until_ready(timeout)
        opened.pop_all()
    return queue, handles


def _checked_group(pg: Any, options: QueueOptions, name: str, rank: int) -> ProcessGroup:
    check_options("MessageQueue", options, QueueOptions)
    group = pg if isinstance(pg, ProcessGroup) else TorchProcessGroup(pg)
    check_rank(name, rank, group.world_size)
    return group


def _gather(group: ProcessGroup, obj: Any) -> list[Any]:
    """Return at every rank each rank's `obj`. Collective."""
    ranks = range(group.world_size)
    return [group.broadcast_object(obj if rank == group.rank else None, rank) for rank in ranks]


def _shares_memory(group: ProcessGroup, source: int) -> bool:
    """Return whether this rank shares memory with rank `source`. Collective.

    Containers on one machine may have a /dev/shm each, and two machines may have one name. So rank
    `source` makes a segment, whose name cannot be guessed, and the others try to attach it. A rank
    of another user cannot, since segments are private to their user.
    """
    made: Segment | None = None
    try:
        if group.rank == source:
            made = Segment.make(1, b"\0")
    except SegmentError as error:
        logger.warning("no rank can share memory with this one: %s", error)
    try:
        name = group.broadcast_object(None if made is None else made.name, source)
        shared = isinstance(name, str) and _can_attach(name)
        group.barrier()  # before the name is gone, every rank has tried it
    finally:
        if made is not None:
            made.close()
    return shared


def _can_attach(name: str) -> bool:
    try:
        Segment.attach(name).close()
    except SegmentError:
        return False
    return True


def _made(
    n_reader: int,
    ranks: list[int],
    size: tuple[int, int],
    connect_ip: str | None,
    options: QueueOptions,
) -> MessageQueue:
    """Return the writing end for so many readers, of which these ranks are local."""
    from kvindex.shm.queue import MessageQueue

    if len(ranks) < n_reader and connect_ip is None:
        raise ConfigurationError(
            f"{n_reader - len(ranks)} ranks share no memory with the writer: give it "
            "connect_ip, its address that they can reach"
        )
    return MessageQueue(n_reader, len(ranks), ranks, *size, connect_ip, **options)


def _settle(group: ProcessGroup, task: str, act: Callable[[], _End]) -> tuple[_End, list[bytes]]:
    """Act at every rank; return the result, and the handle of each rank's as bytes. Collective.

    If a rank fails, it raises its own error, and the others a ConfigurationError that names it.
    """
    offer = failure = None
    try:
        result = act()
        if result is not None:
            handle = result if isinstance(result, Handle) else result.export_handle()
            offer = handle.to_bytes()
    except Exception as error:  # of whatever kind: the other ranks wait for this one's report
        failure = error
    reports = _gather(group, [offer, failure and str(failure)])
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(reports):
        if reason is not None:
            raise ConfigurationError(f"rank {rank} could not {task}: {reason}")
    return result, [offer for offer, _ in reports]
