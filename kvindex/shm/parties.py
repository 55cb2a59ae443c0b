"""Which implementation of the ring's two parties runs: the native one, or the one in Python."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from kvindex.backend import BACKEND
from kvindex.errors import ClosedError, SegmentError
from kvindex.shm.layout import Layout, Rule
from kvindex.shm.mutex import Mutex
from kvindex.shm.segment import Segment

__all__ = [
    "OWN_RULE",
    "ClosedParty",
    "ParentsParty",
    "ReadingParty",
    "WritingParty",
    "mutex_of",
    "open_reader",
    "open_writer",
    "within",
]

OWN_RULE = Rule.ATOMICS if BACKEND == "native" else Rule.LOCK
"""The rule by which a ring that is made here is kept in order."""


class WritingParty(Protocol):
    """The one that writes; for one thread at a time, but for what says otherwise.

    `spin` and `sleep` are seconds. A wait is over at a wake-up, too: it is called again.
    """

    state: int

    @property
    def index(self) -> int:
        """The chunk that is next."""

    @property
    def seq(self) -> int:
        """The number of that chunk, counted from 0 without end."""

    def write(self, kind: int, data: Any, spin: float, sleep: float) -> bool:
        """Copy a buffer, or a list of them, into the next chunk and publish it; False: no room."""

    def wait(self, spin: float, sleep: float) -> bool:
        """Return whether the next chunk, that of `index`, may be written."""

    def wait_attached(self, sleep: float) -> bool:
        """Return whether every reserved place has its reader."""

    def publish(self, kind: int, length: int) -> None:
        """Publish the next chunk, written by the caller after `wait`."""

    def admit(self) -> int:
        """Let joiners in, from the next message on; return how many."""

    def awaited(self) -> list[int]:
        """Return the places of the readers that keep the next chunk from being written."""

    def remove(self, reader: int, evict: bool) -> bool:
        """Count a reader no more; False if it was not active. Any thread."""

    def reserve(self, reader: int) -> None:
        """Keep a place for a reader that will come; before any other party is there."""

    def slot_state(self, reader: int) -> int:
        """Return a `SlotState`. Any thread."""

    def interrupt(self) -> None:
        """Let a wait of another thread return. Any thread."""

    def statistics(self) -> dict[str, int]:
        """Return how often it spun, slept and woke others."""


class ReadingParty(Protocol):
    """One that reads; as `WritingParty`."""

    @property
    def index(self) -> int:
        """The chunk that is next."""

    @property
    def seq(self) -> int:
        """The number of that chunk, counted from 0 without end."""

    @property
    def active(self) -> bool:
        """Whether the writer counts this reader."""

    @property
    def evicted(self) -> bool:
        """Whether the writer took this reader off."""

    @property
    def behind(self) -> int:
        """Chunks published and not read yet."""

    @property
    def state(self) -> int:
        """The ring's state bits."""

    def attach(self) -> bool:
        """Take the place whose lock is held; whether it had been reserved."""

    def leave(self) -> None:
        """Give the place up."""

    def read(self, limit: int, spin: float, sleep: float) -> tuple[int, Any] | None:
        """Return the next chunk's kind, and its bytes if they are at most `limit`.

        If they are more: their number, and the chunk stays taken until `release`. None: nothing
        came, or this reader was evicted meanwhile.
        """

    def release(self) -> None:
        """Give back the chunk that `read` left taken."""

    def ready(self) -> bool:
        """Return whether `read` has something to return."""

    def wait_state(self, bits: int, sleep: float) -> bool:
        """Return whether the ring's state has one of these bits."""

    def interrupt(self) -> None:
        """Let a wait of another thread return. Any thread."""

    def statistics(self) -> dict[str, int]:
        """Return how often it spun, slept and woke others."""


class ClosedParty:
    """What a closed end has in place of its party, whose memory it must not keep."""

    def __init__(self, party: WritingParty | ReadingParty) -> None:
        self.seq = party.seq
        self._statistics = party.statistics()

    def statistics(self) -> dict[str, int]:
        """Return what the party counted."""
        return self._statistics

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("this end of the queue is closed")


class ParentsParty:
    """What a forked child has in place of a party of its parent's: every use is refused."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(
            "this end of the queue belongs to the parent process; attach one by the queue's handle"
        )


def open_writer(segment: Segment, layout: Layout, rule: Rule) -> WritingParty:
    """Return the writing party of a ring.

    Raises:
        SegmentError: the ring's rule is not to be had in this process.
    """
    arguments = (segment.memory, layout.n_reader, layout.max_chunks, layout.max_chunk_bytes)
    if rule is Rule.LOCK:
        from kvindex.shm.ring_python import RingWriter

        return RingWriter(*arguments, segment.mutex())
    _check_native(segment)
    from kvindex._native import RingWriter as NativeWriter

    return NativeWriter(*arguments)


def open_reader(segment: Segment, layout: Layout, rule: Rule, slot: int) -> ReadingParty:
    """Return a reading party of a ring; raises as `open_writer`."""
    arguments = (segment.memory, layout.n_reader, layout.max_chunks, layout.max_chunk_bytes, slot)
    if rule is Rule.LOCK:
        from kvindex.shm.ring_python import RingReader

        return RingReader(*arguments, segment.mutex())
    _check_native(segment)
    from kvindex._native import RingReader as NativeReader

    return NativeReader(*arguments)


def mutex_of(party: WritingParty | ReadingParty) -> Mutex | None:
    """Return the lock that a party takes for every access; None of a native one."""
    return getattr(party, "mutex", None)


_UNLIMITED = nullcontext()


def within(mutex: Mutex | None, timeout: float | None) -> AbstractContextManager[None]:
    """Let a call's accesses in the `with` wait for that lock no longer than the call may last."""
    return _UNLIMITED if mutex is None or timeout is None else mutex.within(timeout)


def _check_native(segment: Segment) -> None:
    if BACKEND != "native":
        raise SegmentError(
            f"ring {segment.name} was made by the native core, which does not run in this process: "
            "build it here, or set KVINDEX_BACKEND=python where the queue is made"
        )
