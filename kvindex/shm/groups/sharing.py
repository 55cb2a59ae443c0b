"""How the ranks of a group come to share queues: one's to all others, or everyone's to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvindex.errors import ConfigurationError, KVIndexError
from kvindex.shm.groups.settling import (
    as_process_group,
    check_reachable,
    collect_handles,
    confirm,
    spread_handle,
)
from kvindex.shm.handle import Handle

__all__ = ["share_one_queue", "share_queues_to_one"]


class _Queue(Protocol):
    """An end of a queue: the little that is asked of it here."""

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
    group = as_process_group(pg)
    local = group.same_node(writer_rank)
    queue: Queue | None = None
    made: Handle | KVIndexError | None = None
    if group.rank == writer_rank:
        if external_writer_handle is None:
            ranks = [rank for rank, here in enumerate(local) if here and rank != writer_rank]
            queue, made = _made(make, group.world_size - 1, ranks, connect_ip)
        else:
            made = _checked(external_writer_handle)
    failure: KVIndexError | None = None
    try:
        handle = spread_handle(group, writer_rank, made)
        if queue is None:
            try:
                queue = attach(handle, group.rank)
            except KVIndexError as error:  # nobody is to wait for this rank
                failure = error
        confirm(group, failure)
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
    group = as_process_group(pg)
    ranks = [0] if group.same_node(reader_rank)[group.rank] else []
    queue, made = _made(make, 1, ranks, connect_ip)
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


def _checked(handle: Handle) -> Handle | KVIndexError:
    """Return the handle; or the error, as `_made`."""
    if isinstance(handle, Handle):
        return handle
    return ConfigurationError(
        f"external_writer_handle must be a Handle or None, not a {type(handle).__name__}"
    )


def _made(
    make: Make[Queue], n_reader: int, ranks: list[int], connect_ip: str | None
) -> tuple[Queue | None, Handle | KVIndexError]:
    """Return a new queue with its handle; or the error, as the others wait to be told."""
    try:
        check_reachable(n_reader, ranks, connect_ip)
        queue = make(n_reader, len(ranks), ranks)
    except KVIndexError as error:
        return None, error
    return queue, queue.export_handle()
