"""The processes of one kind of queue, and the measurements that they make together."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.process import cpu_seconds
from benchmarks.queues.adapter import Queues, Ring
from benchmarks.queues.parties import Receiving, Sending
from benchmarks.queues.payloads import object_bytes


class Crew:
    """A writer and its readers, forked once and kept: importing vLLM takes seconds.

    Args:
        queues: which kind.
        readers: how many there are at most.
    """

    def __init__(self, queues: Queues, readers: int) -> None:
        gc.collect()
        gc.freeze()  # what was imported is not looked through again by every collection
        self._writer = _Member(Sending(queues), [])
        self._readers: list[_Member] = []
        for _ in range(readers):
            before = [self._writer, *self._readers]
            self._readers.append(_Member(Receiving(queues), before))

    def throughput(
        self, readers: int, size: int, seconds: float, chunk_bytes: int, chunks: int
    ) -> dict[str, Any]:
        """Send as fast as it goes for so long; every reader checks number and order.

        Returns:
            messages, and the seconds from the first one's sending to the last reader's end.
        """
        with self._queue(readers, size, chunk_bytes, chunks) as group:
            group.all("warm", (size, chunks), (size, chunks))
            (sent, started), ends = group.all("flood", (size, seconds), (size,), reads="drain")
        if any(received != sent for received, _ in ends):
            raise AssertionError(f"{sent} messages were sent, and {ends} came")
        finished = max(at for _, at in ends)
        return {"messages": sent, "seconds": (finished - started) / 1e9}

    def latency(
        self,
        readers: int,
        size: int,
        rate: float,
        seconds: float,
        chunk_bytes: int,
        chunks: int,
    ) -> dict[str, Any]:
        """Send at a pace; return every reader's samples in nanoseconds, and the CPU used."""
        messages = max(2, int(rate * seconds))
        with self._queue(readers, size, chunk_bytes, chunks) as group:
            group.all("warm", (size, chunks), (size, chunks))
            before = group.cpu()
            _, samples = group.all("pace", (size, rate, messages), (), reads="stamp")
            used = group.cpu() - before
        if any(len(own) != messages for own in samples):
            raise AssertionError(f"{messages} messages were sent, and {samples} came")
        return {"samples": [one for own in samples for one in own], **used.share()}

    def idle(
        self,
        readers: int,
        size: int,
        settle: float,
        seconds: float,
        wakes: int,
        chunk_bytes: int,
        chunks: int,
    ) -> dict[str, Any]:
        """Let the readers wait while nobody sends; then send a few messages, far apart.

        Args:
            settle: seconds before CPU is looked at, and between two of the messages.
            seconds: for which it is looked at.
            wakes: messages.

        Returns:
            the CPU used meanwhile, and the samples of the messages in nanoseconds.
        """
        with self._queue(readers, size, chunk_bytes, chunks) as group:
            group.all("warm", (size, chunks), (size, chunks))
            for reader in group.readers:
                reader.tell("stamp")
            time.sleep(settle)
            before = group.cpu()
            time.sleep(seconds)
            used = group.cpu() - before
            group.writer.tell("pace", size, 1 / settle, wakes)
            _, *samples = _hear_all([group.writer, *group.readers])
        return {"samples": [one for own in samples for one in own], **used.share()}

    @contextmanager
    def _queue(self, readers: int, size: int, chunk_bytes: int, chunks: int) -> Iterator[_Group]:
        ring = Ring(readers, chunk_bytes, chunks, size or object_bytes())
        group = _Group(self._writer, self._readers[:readers])
        group.writer.tell("open", ring)
        handle = group.writer.hear()
        for rank, reader in enumerate(group.readers):
            reader.tell("join", handle, rank, ring)
        for reader in group.readers:
            reader.hear()
        group.all("ready", (), ())
        yield group
        for member in (*group.readers, group.writer):
            member.tell("close")
            member.hear()


@dataclass(frozen=True)
class _Cpu:
    """CPU seconds of a writer and its readers, at or over some seconds."""

    at: float
    writer: float
    readers: float
    number: int

    def __sub__(self, before: _Cpu) -> _Cpu:
        return _Cpu(
            self.at - before.at,
            self.writer - before.writer,
            self.readers - before.readers,
            self.number,
        )

    def share(self) -> dict[str, float]:
        """Percent of a core: the writer's, and a reader's."""
        return {
            "writer": 100 * self.writer / self.at,
            "reader": 100 * self.readers / self.number / self.at,
        }


@dataclass(frozen=True)
class _Group:
    """Who takes part in one measurement."""

    writer: _Member
    readers: Sequence[_Member]

    def all(
        self,
        writes: str,
        writer: tuple[Any, ...],
        reader: tuple[Any, ...],
        *,
        reads: str | None = None,
    ) -> tuple[Any, list[Any]]:
        """Let the readers do one thing and the writer another; return what they say."""
        for member in self.readers:
            member.tell(reads or writes, *reader)
        self.writer.tell(writes, *writer)
        first, *others = _hear_all([self.writer, *self.readers])
        return first, others

    def cpu(self) -> _Cpu:
        """Read every process's CPU clock."""
        readers = sum(cpu_seconds(member.pid) for member in self.readers)
        writer = cpu_seconds(self.writer.pid)
        return _Cpu(time.monotonic(), writer, readers, len(self.readers))


class _Member:
    """One forked process; it ends when this one does."""

    def __init__(self, party: Any, before: Sequence[_Member]) -> None:
        fork = get_context("fork")
        self.connection, there = fork.Pipe()
        inherited = [self.connection, *(member.connection for member in before)]
        process = fork.Process(target=_obey, args=(party, there, inherited), daemon=True)
        process.start()
        there.close()
        assert process.pid is not None
        self.pid: int = process.pid

    def tell(self, method: str, *arguments: Any) -> None:
        """Let it do something."""
        self.connection.send((method, arguments))

    def hear(self) -> Any:
        """Return what came of it.

        Raises:
            RuntimeError: it failed; the message is its traceback.
        """
        failed, value = self.connection.recv()
        if failed:
            raise RuntimeError(value)
        return value


def _hear_all(members: Sequence[_Member]) -> list[Any]:
    """What each says, in the members' order; the first failure counts, whoever waits for it."""
    waiting = {member.connection: member for member in members}
    heard: dict[_Member, Any] = {}
    while waiting:
        for connection in wait(list(waiting)):
            assert isinstance(connection, Connection)
            member = waiting.pop(connection)
            heard[member] = member.hear()
    return [heard[member] for member in members]


def _obey(
    party: Any, orders: Connection[Any, Any], inherited: Sequence[Connection[Any, Any]]
) -> None:
    """Do what is told until nobody is left to tell."""
    for connection in inherited:
        connection.close()  # else a process that is gone would seem to be there
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    while True:
        try:
            method, arguments = orders.recv()
        except EOFError:
            return
        orders.send(_outcome(getattr(party, method), arguments))


def _outcome(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return False, call(*arguments)
    except Exception:
        return True, traceback.format_exc()
