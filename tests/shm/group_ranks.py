"""What the processes of a test's group do, and what starts them; imports no test framework."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from kvindex.shm import Handle, MessageQueue, ProcessGroup, TorchProcessGroup
from kvindex.wire.errors import KVIndexError, PeerDiedError

PATIENCE = 120.0  # seconds: only a failure takes so long, however slow the machine is
Task = Callable[[ProcessGroup, Connection], Any]


class Ranks:
    """Processes, one for each rank, and a pipe to each.

    Args:
        main: what a process runs, given its rank, the number of ranks, its pipe and `arguments`.
    """

    def __init__(self, world_size: int, main: Callable[..., None], *arguments: Any) -> None:
        fresh = multiprocessing.get_context("forkserver")  # imports once what all processes need
        fresh.set_forkserver_preload([__name__, *(["torch"] if find_spec("torch") else [])])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = fresh.Pipe()
            process = fresh.Process(target=main, args=(rank, world_size, theirs, *arguments))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(PATIENCE), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def receive_all(self) -> list[Any]:
        return [self.receive(rank) for rank in range(len(self.pipes))]

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join(PATIENCE)

    def close(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.kill()
            process.join(PATIENCE)
            process.close()


class PipeGroup:
    """A group whose ranks 1, 2, … have a pipe to rank 0 each: all that a queue needs of a group."""

    def __init__(self, rank: int, world_size: int, pipes: list[Connection]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._pipes = pipes  # at rank 0 one to each other rank; elsewhere the one to rank 0

    def broadcast_object(self, obj: Any, source: int) -> Any:
        if self.rank == source and source != 0:
            self._send(self._pipes[0], obj)
        if self.rank == 0:
            value = obj if source == 0 else self._receive(self._pipes[source - 1])
            for pipe in self._pipes:
                self._send(pipe, value)
            return value
        return self._receive(self._pipes[0])

    def barrier(self) -> None:
        for rank in range(self.world_size):
            self.broadcast_object(None, rank)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()

    def _send(self, pipe: Connection, value: Any) -> None:
        try:
            pipe.send(value)
        except OSError as error:
            raise PeerDiedError(f"a rank is gone: {error}") from error

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise PeerDiedError(f"a rank is gone: {error!r}") from error


def pipe_groups(world_size: int) -> list[PipeGroup]:
    """Every rank of a group; processes may be given theirs."""
    pairs = [multiprocessing.Pipe() for _ in range(world_size - 1)]
    first = PipeGroup(0, world_size, [ours for ours, _ in pairs])
    return [first] + [
        PipeGroup(rank, world_size, [theirs]) for rank, (_, theirs) in enumerate(pairs, 1)
    ]


def pipe_ranks(world_size: int, task: Task) -> AbstractContextManager[Ranks]:
    """Processes that run a task in one group of pipes."""
    groups = pipe_groups(world_size)
    ranks = Ranks(world_size, _pipe_main, task, groups)
    for group in groups:
        group.close()  # the processes have them
    return closing(ranks)


def _pipe_main(
    rank: int, world_size: int, pipe: Connection, task: Task, groups: list[PipeGroup]
) -> None:
    for other in groups:
        if other.rank != rank:
            other.close()  # so that the end of its process is seen
    pipe.send(outcome(lambda: task(groups[rank], pipe)))


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the name and text of the error that it raises."""
    try:
        return call()
    except KVIndexError as error:
        return type(error).__name__, str(error)


def every_collective(group: ProcessGroup, pipe: Connection) -> Any:
    """What each rank broadcasts, small and large, several times over."""
    results = []
    for _ in range(3):
        for source in range(group.world_size):
            results.append(group.broadcast_object({"from": group.rank, "data": b"x"}, source))
        group.barrier()
    own = bytes([group.rank]) * (8 << 20)
    large = [group.broadcast_object(own, source) for source in range(group.world_size)]
    return results, [(len(value), value[-1]) for value in large]


def expected_collectives(world_size: int) -> Any:
    """What `every_collective` returns at each rank."""
    small = [{"from": source, "data": b"x"} for source in range(world_size)]
    return small * 3, [(8 << 20, source) for source in range(world_size)]


def too_large(group: ProcessGroup, pipe: Connection) -> Any:
    """Broadcast what only the source's limit allows."""
    assert isinstance(group, TorchProcessGroup)
    group._max_object_bytes = 1000 if group.rank == 0 else 100
    return group.broadcast_object(b"x" * 500, 0)


def barrier_without_rank_0(group: ProcessGroup, pipe: Connection) -> Any:
    """Meet, but for rank 0, which waits until it is told."""
    if group.rank == 0:
        return pipe.recv()
    return group.barrier()


def barrier_when_told(group: ProcessGroup, pipe: Connection) -> Any:
    """Meet, say so, and meet again and again once told to, till that fails."""
    group.barrier()
    pipe.send(os.getpid())
    pipe.recv()
    while True:
        group.barrier()


def torch_ranks(
    world_size: int, task: Task, store: str, backend: str, members: list[int]
) -> AbstractContextManager[Ranks]:
    """Processes with a torch.distributed group, which run a task in a group of some of them."""
    return closing(Ranks(world_size, _torch_main, task, store, backend, members))


def _torch_main(
    rank: int,
    world_size: int,
    pipe: Connection,
    task: Task,
    store: str,
    backend: str,
    members: list[int],
) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENCE),
    )
    subgroup = dist.new_group(members, timeout=timedelta(seconds=2))
    everyone = list(range(world_size))
    chosen = None if members == everyone else subgroup
    pipe.send(outcome(lambda: task(TorchProcessGroup(chosen), pipe)))
    pipe.close()
    os._exit(0)  # gloo ends badly, or late, once a rank was lost


# Queues ------------------------------------------------------------------------------------------

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


def pass_round(
    writer_ranks: list[int],
    elsewhere: set[int],
    options: dict[str, Any],
    group: ProcessGroup,
    pipe: Connection,
) -> Any:
    """Have ranks write to all others in turn; the local readers of each, and the number of all."""
    apart = Apart(group, elsewhere)
    results = []
    for writer_rank in writer_ranks:
        with MessageQueue.create_from_process_group(
            apart, *CHUNKS, writer_rank, **options
        ) as queue:
            if group.rank == writer_rank:
                for message in MESSAGES:
                    queue.enqueue(message, LONG)
            else:
                assert [queue.dequeue(LONG) for _ in MESSAGES] == MESSAGES
            last = {1, 2} if options.get("codec") == "pickle" else ["from", writer_rank]
            assert queue.broadcast_object(last) == last
            group.barrier()
            handle = queue.export_handle()
            results.append((handle.local_reader_ranks, handle.n_reader))
    return results


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
    received = []
    for rank, reader in enumerate(readers):
        count = 20 if rank != reader_rank else 3
        received.append([reader.dequeue(LONG) for _ in range(count)])
        assert received[-1] == [[rank, number] for number in range(count)]
        reader.close()
    group.barrier()
    queue.close()
    return len(received)
