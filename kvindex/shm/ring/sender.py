"""The writing end of a ring: waits for room, checks that readers live, splits long messages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from kvindex.shm.ring.ring import (
    CLOSED,
    CONTINUED,
    LENGTH_BYTES,
    MORE,
    RAW,
    READY,
    TOTAL,
    Buffer,
    RingEnd,
    ShmRingBuffer,
    SlotState,
)
from kvindex.shm.ring.waiting import Patience, Waiting
from kvindex.wire.errors import ConfigurationError, ReaderDiedError

if TYPE_CHECKING:
    from kvindex.wire._native import RingWriter

logger = logging.getLogger(__name__)

DeadReaderPolicy = Literal["remove", "raise"]
"""A writer's action on a dead reader: remove it and go on, or also raise ReaderDiedError."""


def check_policy(policy: str) -> None:
    """Raise ConfigurationError if it is no policy."""
    if policy not in ("remove", "raise"):
        raise ConfigurationError(f'on_dead_reader must be "remove" or "raise", not {policy!r}')


def check_dead(ranks: Collection[int]) -> None:
    """Raise ReaderDiedError if there are any."""
    if ranks:
        raise ReaderDiedError(
            f"the readers {sorted(ranks)} are gone with messages unread; they were removed, and "
            "all others miss nothing: do not send again",
            ranks=ranks,
        )


class RingSender(RingEnd["RingWriter"]):
    """Writes messages into a ring that it made.

    Args:
        ring: the ring; the sender closes it.
        reserved: places kept for readers to come: every message waits for them.
        waiting: how to wait.
        on_dead_reader: as for `MessageQueue`.
        ranks: the readers' names in errors and warnings, by place; by default the places.

    Thread safety: one thread at a time, but `evict`, `statistics` and `close` from any.
    """

    def __init__(
        self,
        ring: ShmRingBuffer,
        *,
        reserved: Iterable[int] = (),
        waiting: Waiting,
        on_dead_reader: DeadReaderPolicy = "remove",
        ranks: Sequence[int] | None = None,
    ) -> None:
        check_policy(on_dead_reader)
        if ring.layout.max_chunk_bytes < LENGTH_BYTES:
            raise ConfigurationError(
                f"max_chunk_bytes must be at least {LENGTH_BYTES} for messages in fragments, not "
                f"{ring.layout.max_chunk_bytes}"
            )
        super().__init__(ring, ring.writer())
        self._chunk_bytes = ring.layout.max_chunk_bytes
        self._waiting = waiting
        self._on_dead_reader = on_dead_reader
        self._ranks = ranks or range(ring.layout.n_reader)
        self._dead: list[int] = []  # ranks that were removed, and are to be reported
        self._counters: Counter[str] = Counter()
        for slot in reserved:
            self._party.reserve(slot)

    def send(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> None:
        """Publish a message of a kind from 0 to 15 to every reader.

        Its body, in one buffer or several, has `size` bytes in all, and is free again when this
        returns. Raises as `MessageQueue.enqueue`, but for errors of the encoding.
        """
        # Joiners come in here, between two messages: inside one they would begin with its middle.
        self._party.admit()
        if size > self._chunk_bytes:
            patience = Patience(self._waiting, timeout)
            self._put(*self._put_beginning(kind, body, size, patience), patience)
            self._counters["fragments"] += 1
        elif not self._party.write(kind, body, 0.0, 0.0):  # there mostly is room: no clock is read
            self._put(kind, body, Patience(self._waiting, timeout))
        if self._dead:
            check_dead(self.take_dead())

    @contextmanager
    def begun(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> Iterator[None]:
        """Publish a message without its end when the `with` begins, and the end when it ends well.

        If the `with` ends by an exception, no reader will see the message. Raises as `send`, but
        leaves the dead to `take_dead`.
        """
        patience = Patience(self._waiting, timeout)
        self._party.admit()
        if size > self._chunk_bytes:
            kind, body = self._put_beginning(kind, body, size, patience)
        # There is room for the end when the `with` begins: what happens in it, such as sending to
        # others, cannot be undone.
        self._wait_room(patience)
        yield
        self._put(kind, body, patience)
        self._counters["fragments"] += size > self._chunk_bytes

    @contextmanager
    def chunk(self, length: int, timeout: float | None) -> Iterator[memoryview]:
        """Give the next chunk's first `length` bytes to write; published when the `with` ends well.

        Raises as `send`, but leaves the dead to `take_dead`.
        """
        self._party.admit()
        self._wait_room(Patience(self._waiting, timeout))
        with self.ring.get_data(self._party.index) as data, data[:length] as view:
            yield view
            self._party.publish(RAW, length)

    def wait_attached(self, timeout: float | None) -> None:
        """Return once every reserved place has its reader; QueueTimeoutError has the others."""
        patience = Patience(self._waiting, timeout)
        while not self._party.wait_attached(patience.slice()):
            missing = self._named(self._slots(SlotState.RESERVED))
            if missing:  # else the last one has come, or was removed, just now
                patience.check(f"the readers {missing} to attach")
        self._party.admit()

    def admit(self) -> int:
        """Admit joiners, from the next message on; return how many."""
        return self._party.admit()

    def mark_ready(self) -> None:
        """Let the readers' `wait_ready` return."""
        self._party.state |= READY

    def readers(self) -> list[int]:
        """Return the places whose readers every message waits for."""
        return self._slots(SlotState.ACTIVE, SlotState.RESERVED)

    def laggards(self) -> list[int]:
        """Return the places of the readers that keep the next chunk from being written."""
        return self._party.awaited()

    def evict(self, slot: int) -> bool:
        """Remove a reader, alive, dead or not there yet; False if the place is free.

        It gets ReaderEvictedError; a later reader starts where it is admitted.
        """
        evicted = self._party.remove(slot, True)
        self._counters["readers_evicted"] += evicted
        return evicted

    def remove_dead(self) -> list[int]:
        """Remove every reader that is gone; return their places. A system call for each."""
        return self._remove(self._slots(SlotState.ACTIVE))

    def take_dead(self) -> Collection[int]:
        """Return the ranks of the dead readers to report, each once."""
        dead, self._dead = self._dead, []
        return dead

    def statistics(self) -> dict[str, int]:
        """Return how many chunks were published, waits were slept, and readers removed."""
        names = ("fragments", "readers_removed", "readers_evicted")
        return {
            "chunks": self._party.seq,
            **{name: self._counters[name] for name in names},
            **self._party.statistics(),
        }

    def _leave(self, party: RingWriter) -> None:
        """No message follows."""
        party.state |= CLOSED

    def _put_beginning(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, patience: Patience
    ) -> tuple[int, Sequence[Buffer]]:
        """Publish a long message's fragments but for the last, which is returned."""
        # The last one makes the message whole, for all readers at once: the caller decides when.
        parts = [body] if isinstance(body, bytes | bytearray | memoryview) else body
        pieces = fragments(kind, parts, size, self._chunk_bytes)
        piece = next(pieces)
        for following in pieces:
            self._put(*piece, patience)
            self._counters["fragments"] += 1
            piece = following
        return piece

    def _wait_room(self, patience: Patience) -> None:
        """Return once the next chunk can be written; it stays so."""
        while not self._party.wait(patience.spin, patience.slice()):
            self._look_around(patience)

    def _put(self, kind: int, body: Buffer | Sequence[Buffer], patience: Patience) -> None:
        while not self._party.write(kind, body, patience.spin, patience.slice()):
            self._look_around(patience)

    def _look_around(self, patience: Patience) -> None:
        """Between two waits for room: check whether it can still come."""
        awaited = self._party.awaited()
        # A time-out is for the living: without the dead there may be room at once.
        dead = self._remove(awaited)
        late = self._named(slot for slot in awaited if slot not in dead)
        if self._on_dead_reader == "raise":
            self._dead += self._named(dead)
        if late:
            behind = self.ring.layout.max_chunks
            patience.check(f"the readers {late}, which are {behind} chunks behind, to read")

    def _remove(self, slots: Sequence[int]) -> list[int]:
        # A place that is kept for a reader to come has no lock yet, and looks as if it were dead.
        dead = [
            slot
            for slot in slots
            if self._party.slot_state(slot) == SlotState.ACTIVE
            and not self.ring.reader_lives(slot)
            and self._party.remove(slot, False)
        ]
        if dead:
            self._counters["readers_removed"] += len(dead)
            logger.warning("the readers %s are gone; they were removed", self._named(dead))
        return dead

    def _named(self, slots: Iterable[int]) -> list[int]:
        return [self._ranks[slot] for slot in slots]

    def _slots(self, *states: SlotState) -> list[int]:
        places = range(self.ring.layout.n_reader)
        return [slot for slot in places if self._party.slot_state(slot) in states]


def fragments(
    kind: int, parts: Sequence[Buffer], size: int, chunk_bytes: int
) -> Iterator[tuple[int, list[Buffer]]]:
    """Return a long body in pieces of at most `chunk_bytes`, each with its kind."""
    piece: list[Buffer] = [TOTAL.pack(size)]
    room = chunk_bytes - LENGTH_BYTES
    left = size
    flags = MORE
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            taken, view = view[:room], view[room:]
            piece.append(taken)
            room -= len(taken)
            left -= len(taken)
            if room == 0 and left:
                yield kind | flags, piece
                flags = MORE | CONTINUED
                piece, room = [], chunk_bytes
    yield kind | CONTINUED, piece
