"""How the ranks of a group share queues: from one rank to all others, or from each rank to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from kvindex.shm.groups.process_group import ProcessGroup
from kvindex.shm.groups.torch_group import TorchProcessGroup
from kvindex.shm.handle import Handle
from kvindex.wire.errors import ConfigurationError, KVIndexError

__all__ = ["share_one_queue", "share_queues_to_one"]


class _Queue(Protocol):
    """An end of a queue: the methods used here."""

    def export_handle(self) -> Handle: ...

    def wait_until_ready(self, timeout: float | None) -> None: ...

    def close(self) -> None: ...


Queue = TypeVar("Queue", bound=_Queue)
# Makes the writing end, of: how many readers, how many of them are local, and those ranks.
Make = Callable[[int, int, list[int]], Queue]
# Makes the reading end of a rank.
Attach = Callable[[Handle, int], Queue]


def share_one_queue(
    pg: Any,
    writer_rank: int,
    *,
    make: Make[Queue],
    attach: Attach[Queue],
    external_writer_handle: Handle | None,
    connect_ip: str | None,
    blocking: bool,
    timeout: float | None,
) -> Queue:
    """Return this rank's end of one queue; see `MessageQueue.create_from_process_group`."""
    group = _process_group(pg)
    local = group.same_node(writer_rank)
    queue: Queue | None = None
    made: Handle | KVIndexError | None = None
    if group.rank == writer_rank:
        if external_writer_handle is None:
            ranks = [rank for rank, here in enumerate(local) if here and rank != writer_rank]
            queue, made = _made(make, group.world_size - 1, ranks, connect_ip)
        else:
            made = _checked(external_writer_handle)
    try:
        offers = _settle(group, made, writer_rank, "make the queue")
        offered = group.broadcast_object(offers and offers[writer_rank], writer_rank)
        failure: KVIndexError | None = None
        if queue is None:
            try:
                queue = attach(Handle.from_bytes(offered), group.rank)
            except KVIndexError as error:  # no other rank may wait for this one
                failure = error
        _settle(group, failure, 0, "open its end of the queue")
        assert queue is not None
        if blocking:
            queue.wait_until_ready(timeout)
    except BaseException:
        if queue is not None:
            queue.close()
        raise
    return queue


def share_queues_to_one(
    pg: Any,
    reader_rank: int,
    *,
    make: Make[Queue],
    connect_ip: str | None,
    blocking: bool,
    timeout: float | None,
) -> tuple[Queue, list[Handle]]:
    """Return this rank's queue to `reader_rank`, and there all handles.

    See `MessageQueue.create_from_process_group_single_reader`.
    """
    group = _process_group(pg)
    ranks = [0] if group.same_node(reader_rank)[group.rank] else []
    queue, made = _made(make, 1, ranks, connect_ip)
    try:
        offers = _settle(group, made, reader_rank, "open its end of the queue")
        handles = [Handle.from_bytes(offer) for offer in offers if offer is not None]
        assert queue is not None
        if blocking and group.rank != reader_rank:
            queue.wait_until_ready(timeout)
    except BaseException:
        if queue is not None:
            queue.close()
        raise
    return queue, handles


def _process_group(group: Any) -> ProcessGroup:
    return group if isinstance(group, ProcessGroup) else TorchProcessGroup(group)


def _checked(handle: Handle) -> Handle | KVIndexError:
    """Return the handle; or the error, as `_made`."""
    if isinstance(handle, Handle):
        return handle
    return ConfigurationError(
        f"external_writer_handle must be a Handle or None, not a {type(handle).__name__}"
    )


def _made(
    make: Make[Queue], n_reader: int, ranks: Sequence[int], connect_ip: str | None
) -> tuple[Queue | None, Handle | KVIndexError]:
    """Return a new queue with its handle; or the error, since the others wait for a report."""
    try:
        if len(ranks) < n_reader and connect_ip is None:
            raise ConfigurationError(
                f"{n_reader - len(ranks)} ranks share no memory with the writer: give it "
                "connect_ip, its address that they can reach"
            )
        queue = make(n_reader, len(ranks), list(ranks))
    except KVIndexError as error:
        return None, error
    return queue, queue.export_handle()


def _settle(
    group: ProcessGroup, made: Handle | KVIndexError | None, root: int, task: str
) -> list[bytes | None]:
    """Return at rank `root` each rank's result, if no rank failed, and elsewhere nothing.

    Collective.

    Raises:
        ConfigurationError: a rank failed; at that rank, its own error.
    """
    failure = made if isinstance(made, KVIndexError) else None
    offer = made.to_bytes() if isinstance(made, Handle) else None
    gathered = group.gather_object([offer, failure and str(failure)], root) or []
    failed = [[rank, why] for rank, (_, why) in enumerate(gathered) if why is not None]
    failed = group.broadcast_object(failed, root)
    if failure is not None:
        raise failure
    if failed:
        raise ConfigurationError(f"rank {failed[0][0]} could not {task}: {failed[0][1]}")
    return [offer for offer, _ in gathered]
