"""What the ranks of a process group do with queues; imports no test framework."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from kvindex.shm import Handle, MessageQueue, ProcessGroup

MESSAGES = [[number, "x" * (number * 7 % 200)] for number in range(60)]
CHUNKS = (64, 4)
LONG = 20.0


class Apart:
    """A group of which some ranks seem to be on another machine: they see no memory of others."""

    def __init__(self, group: ProcessGroup, elsewhere: set[int]) -> None:
        self._group = group
        self._elsewhere = elsewhere
        self.rank = group.rank
        self.world_size = group.world_size

    def broadcast_object(self, obj: Any, source: int) -> Any:
        value = self._group.broadcast_object(obj, source)
        is_near = (source in self._elsewhere) == (self.rank in self._elsewhere)
        return value if is_near or not isinstance(value, str) else value[:-1]  # a segment's name

    def barrier(self) -> None:
        self._group.barrier()


def pass_on(queue: MessageQueue, group: ProcessGroup, writer_rank: int) -> Any:
    """Send all messages, or receive them; return the local readers, and the number of all."""
    with queue:
        if group.rank == writer_rank:
            for message in MESSAGES:
                queue.enqueue(message, LONG)
        else:
            assert [queue.dequeue(LONG) for _ in MESSAGES] == MESSAGES
        assert queue.broadcast_object(["from", writer_rank]) == ["from", writer_rank]
        group.barrier()
        handle = queue.export_handle()
        return handle.local_reader_ranks, handle.n_reader


def from_each_rank_in_turn(group: ProcessGroup, pipe: Connection) -> Any:
    results = []
    for writer_rank in range(group.world_size):
        queue = MessageQueue.create_from_process_group(group, *CHUNKS, writer_rank)
        results.append(pass_on(queue, group, writer_rank))
    return results


def without_waiting(group: ProcessGroup, pipe: Connection) -> Any:
    queue = MessageQueue.create_from_process_group(group, *CHUNKS, 0, blocking=False)
    return pass_on(queue, group, 0)


def with_pickle(group: ProcessGroup, pipe: Connection) -> Any:
    with MessageQueue.create_from_process_group(group, *CHUNKS, codec="pickle") as queue:
        return sorted(queue.broadcast_object({1, 2} if group.rank == 0 else None))


def across_machines(group: ProcessGroup, pipe: Connection) -> Any:
    """Rank 2 reads by TCP, the other by memory."""
    apart = Apart(group, {2})
    queue = MessageQueue.create_from_process_group(apart, *CHUNKS, 0, connect_ip="127.0.0.1")
    return pass_on(queue, apart, 0)


def across_machines_without_an_address(group: ProcessGroup, pipe: Connection) -> Any:
    return MessageQueue.create_from_process_group(Apart(group, {2}), *CHUNKS)


def from_outside(handle: bytes, group: ProcessGroup, pipe: Connection) -> Any:
    """Every rank reads what somebody outside of the group writes."""
    with MessageQueue.create_from_process_group(
        group, external_writer_handle=Handle.from_bytes(handle)
    ) as queue:
        return [queue.dequeue(LONG) for _ in MESSAGES] == MESSAGES


def to_a_single_reader(
    reader_rank: int, blocking: bool, elsewhere: set[int], group: ProcessGroup, pipe: Connection
) -> Any:
    """Every rank, the reader too, sends to one; what came from each."""
    apart = Apart(group, elsewhere)
    queue, handles = MessageQueue.create_from_process_group_single_reader(
        apart, *CHUNKS, reader_rank, blocking, connect_ip="127.0.0.1"
    )
    readers = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
    count = 20 if group.rank != reader_rank else 3  # its own are all sent before any is read
    for number in range(count):
        queue.enqueue([group.rank, number], LONG)
    got = []
    for rank, reader in enumerate(readers):
        count = 20 if rank != reader_rank else 3
        got.append([reader.dequeue(LONG) for _ in range(count)])
        assert got[-1] == [[rank, number] for number in range(count)]
        reader.close()
    group.barrier()
    queue.close()
    return len(got)
