"""What the processes of a test's group do, and what starts them; imports no test framework."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvindex.shm.groups.objects import check_rank, pack_object, unpack_object
from kvindex.shm.groups.process_group import ProcessGroup
from kvindex.shm.groups.same_node import MAGIC, ranks_that_share_memory
from kvindex.shm.groups.torch_group import TorchProcessGroup
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
        check_rank("source", source, self.world_size)
        if self.rank == 0:
            value = pack_object(obj) if source == 0 else self._receive(self._pipes[source - 1])
            for pipe in self._pipes:
                self._send(pipe, value)
        else:
            if self.rank == source:
                self._send(self._pipes[0], pack_object(obj))
            value = self._receive(self._pipes[0])
        return unpack_object(value)

    def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
        check_rank("destination", destination, self.world_size)
        gathered: Any = None
        if self.rank == 0:
            gathered = [obj, *(unpack_object(self._receive(pipe)) for pipe in self._pipes)]
        else:
            self._send(self._pipes[0], pack_object(obj))
        everyone = self.broadcast_object(gathered, 0)
        return everyone if self.rank == destination else None

    def same_node(self, source: int) -> list[bool]:
        return ranks_that_share_memory(self, source)

    def barrier(self) -> None:
        self.gather_object(None, 0)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()

    def _send(self, pipe: Connection, data: bytes) -> None:
        try:
            pipe.send_bytes(data)
        except OSError as error:
            raise PeerDiedError(f"a rank is gone: {error}") from error

    def _receive(self, pipe: Connection) -> bytes:
        try:
            return pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise PeerDiedError(f"a rank is gone: {error!r}") from error


def pipe_groups(world_size: int) -> list[PipeGroup]:
    """Every rank of a group; processes may be given theirs."""
    pairs = [multiprocessing.Pipe() for _ in range(world_size - 1)]
    first = PipeGroup(0, world_size, [ours for ours, _ in pairs])
    return [first] + [
        PipeGroup(rank, world_size, [theirs]) for rank, (_, theirs) in enumerate(pairs, 1)
    ]


@contextmanager
def pipe_ranks(world_size: int, task: Task) -> Iterator[Ranks]:
    """Processes that run a task in one group of pipes."""
    groups = pipe_groups(world_size)
    ranks = Ranks(world_size, _pipe_main, task, groups)
    for group in groups:
        group.close()  # the processes have them
    try:
        yield ranks
    finally:
        ranks.close()


def _pipe_main(
    rank: int, world_size: int, pipe: Connection, task: Task, groups: list[PipeGroup]
) -> None:
    for other in groups:
        if other.rank != rank:
            other.close()  # so that the end of its process is seen
    pipe.send(outcome(task, groups[rank], pipe))


def outcome(task: Task, group: ProcessGroup, pipe: Connection) -> Any:
    """What a task returns, or the name and text of the error that it raises."""
    try:
        return task(group, pipe)
    except KVIndexError as error:
        return type(error).__name__, str(error)


def every_collective(group: ProcessGroup, pipe: Connection) -> Any:
    """The results of each collective with each root, several times over."""
    results = []
    for _ in range(3):
        for root in range(group.world_size):
            results.append(group.broadcast_object({"from": group.rank, "data": b"x" * 5000}, root))
            results.append(group.gather_object((group.rank, "y" * group.rank), root))
        group.barrier()
    return results


def large_values(group: ProcessGroup, pipe: Connection) -> Any:
    """The lengths of what arrives of 8 MiB from each rank, and which rank each is from."""
    own = bytes([group.rank]) * (8 << 20)
    gathered = group.gather_object(own, 1) or []
    sent = [group.broadcast_object(own, root) for root in range(group.world_size)]
    return [(len(value), value[-1]) for value in (*sent, *gathered)]


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


def all_same_node(group: ProcessGroup, pipe: Connection) -> Any:
    """What each rank shares memory with."""
    return [group.same_node(source) for source in range(group.world_size)]


def everything(group: ProcessGroup, pipe: Connection) -> Any:
    """All three of the above, in one group's life."""
    return [task(group, pipe) for task in (every_collective, large_values, all_same_node)]


def barrier_when_told(group: ProcessGroup, pipe: Connection) -> Any:
    """Meet, say so, and meet again and again once told to, till that fails."""
    group.barrier()
    pipe.send(os.getpid())
    pipe.recv()
    while True:
        group.barrier()


def leaves_nothing(within: float = PATIENCE) -> bool:
    """Whether all memory by which ranks tell who shares it is gone, or goes soon."""
    until, pause = time.monotonic() + within, threading.Event()
    seen = [path for path in Path("/dev/shm").glob("kvindex-*") if _is_probe(path)]
    while any(path.exists() for path in seen) and time.monotonic() < until:
        pause.wait(0.01)  # others' runs have some for moments
    return not any(path.exists() for path in seen)


def _is_probe(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def expected_collectives(world_size: int, rank: int) -> list[Any]:
    """What `every_collective` returns at a rank."""
    once: list[Any] = []
    for root in range(world_size):
        once.append({"from": root, "data": b"x" * 5000})
        gathered = [[other, "y" * other] for other in range(world_size)]
        once.append(gathered if rank == root else None)
    return once * 3


def check_everything(ranks: Ranks) -> None:
    """Hold what `everything` returned at each rank against what it should."""
    world_size = len(ranks.pipes)
    for rank, (collectives, sizes, shared) in enumerate(ranks.receive_all()):
        assert collectives == expected_collectives(world_size, rank)
        large = [(8 << 20, origin) for origin in range(world_size)]
        assert sizes == (large * 2 if rank == 1 else large)
        assert shared == [[True] * world_size] * world_size


@contextmanager
def torch_ranks(
    world_size: int, task: Task, store: str, backend: str, members: list[int]
) -> Iterator[Ranks]:
    """Processes with a torch.distributed group, which run a task in a group of some of them."""
    ranks = Ranks(world_size, _torch_main, task, store, backend, members)
    try:
        yield ranks
    finally:
        ranks.close()


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
    some = dist.new_group(members, timeout=timedelta(seconds=2))
    everyone = list(range(world_size))
    try:
        pipe.send(outcome(task, TorchProcessGroup(None if members == everyone else some), pipe))
    except KVIndexError as error:
        pipe.send((type(error).__name__, str(error)))
    pipe.close()
    os._exit(0)  # gloo ends badly, or late, once a rank was lost
