"""The server's end of the ring: every reader gets every message, or is evicted for being slow.

Owned by the subscriber's thread, which no reader may block for long. Each place has an allowance:
the time that the thread waits for its reader reduces it, and it grows back slowly. So the thread
waits for a reader that is late once, not for one that is late again and again, and each reader uses
its own allowance alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from kvindex.shm.ring import RAW, Buffer, RingHandle, RingSender, ShmRingBuffer, Waiting, fragments
from kvindex.wire.errors import QueueTimeoutError

__all__ = ["Allowance", "Outflow"]

logger = logging.getLogger(__name__)

_REGAINED = 0.1  # of the time that passes without waiting


class Allowance:
    """How many seconds may still be waited: at `most` so many."""

    def __init__(self, most: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._left = most
        self._since = clock()

    def left(self) -> float:
        """Return the seconds that are left now, as a wait begins."""
        now = self._clock()
        self._left = min(self._most, self._left + _REGAINED * (now - self._since))
        self._since = now
        return self._left

    def spend(self) -> bool:
        """Take the time since `left` was called; return whether anything is left."""
        now = self._clock()
        spent, self._since = now - self._since, now
        self._left = max(0.0, self._left - spent)
        return self._left > 0.0


class Outflow:
    """Sends messages to every reader of a ring that it makes.

    Args:
        max_replicas: places for readers.
        chunk_bytes, chunks: size of the ring.
        patience: seconds for which a slow reader may hold the sending thread.
        clock: monotonic seconds.

    Thread safety: one thread, but `statistics`, `is_free` and `close` from any.
    """

    def __init__(
        self,
        max_replicas: int,
        chunk_bytes: int,
        chunks: int,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ring = ShmRingBuffer(max_replicas, chunk_bytes, chunks)
        self.chunk_bytes = chunk_bytes
        self.evicted: set[int] = set()  # places whose readers were evicted and may not have noticed
        self._blocked = 0.0  # seconds spent waiting for room
        self._ring = ring
        self._sender = RingSender(ring, waiting=Waiting(spin=0.0, look=0.05))
        self._patience = patience
        self._clock = clock
        self._allowances: dict[int, Allowance] = {}
        self._counters: Counter[str] = Counter()

    @property
    def handle(self) -> RingHandle:
        """The handle that readers attach with."""
        return self._ring.handle()

    def is_free(self, place: int) -> bool:
        """Return whether no living reader holds a place."""
        return not self._ring.reader_lives(place)

    def send(self, body: bytes) -> None:
        """Send a message to every reader; those that delay it for too long are evicted."""
        self._counters["messages"] += 1
        self._counters["bytes"] += len(body)
        if len(body) <= self.chunk_bytes:
            self._put(RAW, [body], len(body))
            return
        for kind, piece in fragments(RAW, [body], len(body), self.chunk_bytes):
            self._put(kind, list(piece), sum(map(len, piece)))

    def admit(self) -> None:
        """Admit the readers that have attached, from the next message on."""
        self._sender.admit()

    def count_readers(self) -> int:
        """Remove dead readers; return how many are left that every message waits for."""
        self._sender.remove_dead()
        return len(self._sender.readers())

    def statistics(self) -> dict[str, float]:
        """Return what was sent, how many readers were evicted, and how long the thread waited."""
        sender = self._sender.statistics()
        return {
            "messages": self._counters["messages"],
            "bytes": self._counters["bytes"],
            "chunks": sender["chunks"],
            "evicted": sender["readers_evicted"],
            "blocked_seconds": self._blocked,
        }

    def close(self) -> None:
        """Notify every reader that no message follows. Idempotent."""
        self._sender.close()

    def _put(self, kind: int, parts: list[Buffer], size: int) -> None:
        try:
            self._sender.send(kind, parts, size, 0.0)
        except QueueTimeoutError:
            began = self._clock()
            try:
                while not self._put_in_time(kind, parts, size):
                    pass
            finally:
                self._blocked += self._clock() - began

    def _put_in_time(self, kind: int, parts: list[Buffer], size: int) -> bool:
        """Wait as long as every late reader may; return whether it was sent."""
        late = self._sender.laggards()
        timeout = min((self._allowance(place).left() for place in late), default=0.0)
        try:
            self._sender.send(kind, parts, size, timeout)
        except QueueTimeoutError:
            for place in self._sender.laggards():
                if place in late and not self._allowance(place).spend():
                    self._evict(place)
            return False
        for place in late:
            self._allowance(place).spend()
        return True

    def _allowance(self, place: int) -> Allowance:
        """Return a place's allowance; a reader that joins anew does not get it refilled."""
        if place not in self._allowances:
            self._allowances[place] = Allowance(self._patience, self._clock)
        return self._allowances[place]

    def _evict(self, place: int) -> None:
        self.evicted.add(place)
        if self._sender.evict(place):
            logger.warning(
                "the replica at place %d was too slow and was taken off; it joins anew by itself "
                "once it runs",
                place,
            )
