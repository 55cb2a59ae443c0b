"""Writing ends: to readers that share this machine's memory, to readers elsewhere, and to both."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvindex.errors import ConfigurationError, ReaderDiedError
from kvindex.shm.codec import Buffer
from kvindex.shm.messages import BUFFERS, RAW
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.sender import DeadReaderPolicy, RingSender
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

    def chunk(
        self, length: int | None, timeout: float | None
    ) -> AbstractContextManager[memoryview]:
        most = self.sender.ring.layout.max_chunk_bytes
        return self.sender.chunk(_checked(most if length is None else length, most), timeout)

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
        max_message_bytes: longest message, in bytes.

    Attributes:
        address: where readers connect.
        token: what they show.
    """

    def __init__(
        self,
        sender: RemoteSender,
        waiting: Waiting,
        on_dead_reader: DeadReaderPolicy,
        max_message_bytes: int,
    ) -> None:
        self._remote = sender
        self._waiting = waiting
        self.address = sender.address
        self.token = sender.token
        self._on_dead_reader = on_dead_reader
        self._max_message_bytes = max_message_bytes
        self._turn = Turn()

    @property
    def sender(self) -> RemoteWritingEnd:
        return self

    def send(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> None:
        self.note_dead(self.pass_on(kind, body, timeout))

    def pass_on(
        self, kind: int, body: Buffer | Sequence[Buffer], timeout: float | None
    ) -> Collection[int]:
        """Send a message; return the ranks that were found dead, for `note_dead`."""
        # A body with buffers begins with their lengths, which frames have by themselves.
        parts = body[1:] if kind == BUFFERS else [body]
        with self._turn.taken() as closing:
            return self._remote.send([bytes([kind]), *parts], timeout, closing)

    @contextmanager
    def chunk(self, length: int | None, timeout: float | None) -> Iterator[memoryview]:
        memory = bytearray(_checked(length, self._max_message_bytes))
        yield memoryview(memory)
        self.send(RAW, memory, len(memory), timeout)

    def wait_ready(self, timeout: float | None) -> None:
        patience = Patience(self._waiting, timeout)
        with self._turn.taken() as closing:
            dead = self._remote.wait_connected(patience.remaining(), closing)
            self._remote.send_ready()
        self.note_dead(dead)

    def evict(self, rank: int) -> bool:
        with self._turn.taken():
            return self._remote.evict(rank)

    def statistics(self) -> dict[str, Any]:
        return {"remote": self._remote.statistics()}

    def close(self) -> None:
        self._turn.end(self._remote.close)

    def note_dead(self, dead: Collection[int]) -> None:
        """Log or raise that these ranks were removed, as `on_dead_reader` says."""
        if not dead:
            return
        if self._on_dead_reader == "raise":
            raise ReaderDiedError(
                f"the remote readers {sorted(dead)} are gone; they were removed", ranks=dead
            )
        logger.warning("the remote readers %s are gone; they were removed", sorted(dead))


class SplitWritingEnd:
    """The `WritingEnd` of a queue with readers here and elsewhere: all of them get a message.

    It is sent when both sides have room. What the remote side tells of its dead comes last, so
    that an error about them keeps the message from nobody.
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
        self._local.sender.wait_room(timeout)
        dead = self._remote.pass_on(kind, body, patience.remaining())
        self._local.sender.send(kind, body, size, timeout)
        self._remote.note_dead(dead)

    @contextmanager
    def chunk(self, length: int | None, timeout: float | None) -> Iterator[memoryview]:
        patience = Patience(self._waiting, timeout)
        with self._local.chunk(length, timeout) as view:
            yield view
            dead = self._remote.pass_on(RAW, view, patience.remaining())
        self._remote.note_dead(dead)

    def wait_ready(self, timeout: float | None) -> None:
        patience = Patience(self._waiting, timeout)
        self._local.sender.wait_attached(patience, timeout)
        self._remote.wait_ready(patience.remaining())
        self._local.sender.mark_ready()

    def evict(self, rank: int) -> bool:
        return (self._local if rank in self._local.ranks else self._remote).evict(rank)

    def statistics(self) -> dict[str, Any]:
        return self._local.statistics() | self._remote.statistics()

    def close(self) -> None:
        self._local.close()
        self._remote.close()


def _checked(length: int | None, most: int) -> int:
    if length is None or not 0 <= length <= most:
        raise ConfigurationError(f"length must be 0 to {most} bytes, not {length!r}")
    return length
