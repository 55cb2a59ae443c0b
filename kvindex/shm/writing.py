"""Writing ends: to readers that share this machine's memory, to readers elsewhere, and to both."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvindex.shm.codec import Buffer
from kvindex.shm.messages import BUFFERS, RAW
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.sender import DeadReaderPolicy, RingSender, check_dead
from kvindex.shm.turn import Turn
from kvindex.shm.waiting import Patience, Waiting

__all__ = ["LocalWritingEnd", "RemoteWritingEnd", "SplitWritingEnd"]

logger = logging.getLogger(__name__)


class LocalWritingEnd:
    """The `WritingEnd` of a queue whose readers are all on this machine.

    Args:
        sender: writes into the ring; the end closes it.
        ranks: the readers', in the order of their places.
        waiting: how to wait.
    """

    def __init__(self, sender: RingSender, ranks: Sequence[int], waiting: Waiting) -> None:
        self.sender = sender
        self.ranks = ranks
        self._waiting = waiting

    @contextmanager
    def chunk(self, length: int, timeout: float | None) -> Iterator[memoryview]:
        with self.sender.chunk(length, timeout) as view:
            yield view
        check_dead(self.sender.take_dead())

    def wait_ready(self, timeout: float | None) -> None:
        self.sender.wait_attached(Patience(self._waiting, timeout), timeout)
        self.sender.mark_ready()

    def evict(self, rank: int) -> bool:
        return rank in self.ranks and self.sender.evict(self.ranks.index(rank))

    def statistics(self) -> dict[str, Any]:
        return {"local": self.sender.statistics()}

    def close(self) -> None:
        self.sender.close()


class RemoteWritingEnd:
    """The `WritingEnd` of a queue whose readers are all elsewhere.

    Args:
        sender: reaches them; the end closes it.
        waiting: how to wait.
        on_dead_reader: what to do about readers that are gone, as for `MessageQueue`.

    Attributes:
        address: where readers connect.
        token: what they show.
    """

    def __init__(
        self,
        sender: RemoteSender,
        waiting: Waiting,
        on_dead_reader: DeadReaderPolicy,
    ) -> None:
        self._remote = sender
        self._waiting = waiting
        self.address = sender.address
        self.token = sender.token
        self._on_dead_reader = on_dead_reader
        self._dead: set[int] = set()  # ranks that were removed, and are to be raised
        self._turn = Turn()

    @property
    def sender(self) -> RemoteWritingEnd:
        return self

    def send(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> None:
        self.pass_on(kind, body, timeout)
        check_dead(self.take_dead())

    def pass_on(self, kind: int, body: Buffer | Sequence[Buffer], timeout: float | None) -> None:
        """Send a message, and leave the dead to `take_dead`."""
        # A body with buffers begins with their lengths, which frames have by themselves.
        parts = body[1:] if kind == BUFFERS else [body]
        with self._turn.taken() as closing:
            self._note(self._remote.send([bytes([kind]), *parts], timeout, closing))

    @contextmanager
    def chunk(self, length: int, timeout: float | None) -> Iterator[memoryview]:
        with self._turn.taken():
            memory = bytearray(length)
        yield memoryview(memory)
        self.send(RAW, memory, length, timeout)

    def wait_ready(self, timeout: float | None) -> None:
        self.wait_joined(timeout)
        check_dead(self.take_dead())

    def wait_joined(self, timeout: float | None) -> None:
        """Wait until all are here and tell them, and leave the dead to `take_dead`."""
        patience = Patience(self._waiting, timeout)
        with self._turn.taken() as closing:
            self._note(self._remote.wait_connected(patience.remaining(), closing))
            self._remote.send_ready()

    def evict(self, rank: int) -> bool:
        with self._turn.taken():
            return self._remote.evict(rank)

    def statistics(self) -> dict[str, Any]:
        return {"remote": self._remote.statistics()}

    def close(self) -> None:
        self._turn.end(self._remote.close)

    def take_dead(self) -> Collection[int]:
        """Return the ranks of the dead that are to be raised, each of them once."""
        dead, self._dead = self._dead, set()
        return dead

    def _note(self, dead: Collection[int]) -> None:
        if not dead:
            return
        logger.warning("the remote readers %s are gone; they were removed", sorted(dead))
        if self._on_dead_reader == "raise":
            self._dead.update(dead)


class SplitWritingEnd:
    """The `WritingEnd` of a queue with readers here and elsewhere: all of them get a message.

    The local ones see a message when its end is there, which is published when the remote ones
    were sent all of it: so it is sent when both sides have room, and to nobody before. The dead of
    both are raised together, and last: that keeps the message from nobody.
    """

    def __init__(self, local: LocalWritingEnd, remote: RemoteWritingEnd, waiting: Waiting) -> None:
        self._local = local
        self._remote = remote
        self._waiting = waiting

    @property
    def sender(self) -> SplitWritingEnd:
        return self

    def send(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> None:
        patience = Patience(self._waiting, timeout)
        with self._local.sender.begun(kind, body, size, timeout):
            self._remote.pass_on(kind, body, patience.remaining())
        self._check_dead()

    @contextmanager
    def chunk(self, length: int, timeout: float | None) -> Iterator[memoryview]:
        patience = Patience(self._waiting, timeout)
        with self._local.sender.chunk(length, timeout) as view:
            yield view
            self._remote.pass_on(RAW, view, patience.remaining())
        self._check_dead()

    def wait_ready(self, timeout: float | None) -> None:
        patience = Patience(self._waiting, timeout)
        self._local.sender.wait_attached(patience, timeout)
        self._remote.wait_joined(patience.remaining())
        self._local.sender.mark_ready()
        self._check_dead()

    def evict(self, rank: int) -> bool:
        return (self._local if rank in self._local.ranks else self._remote).evict(rank)

    def statistics(self) -> dict[str, Any]:
        return self._local.statistics() | self._remote.statistics()

    def close(self) -> None:
        try:
            self._local.close()
        finally:
            self._remote.close()

    def _check_dead(self) -> None:
        check_dead([*self._local.sender.take_dead(), *self._remote.take_dead()])
