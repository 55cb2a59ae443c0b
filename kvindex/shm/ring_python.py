"""The ring's two parties in Python: what runs where no native core was built.

The rule of order here is one lock. Python has no atomics: a byte stored through a memoryview is
whole, but nothing says in which order another core sees it and the bytes around it. So every access
to the header's words, the slots and the records happens while the segment's `Mutex` is held, and a
chunk's bytes are touched only by the party whose turn the records say it is: the writer copies in
before the lock under which it sets the written flag, a reader copies out between the lock under
which it saw that flag and the lock under which it sets its own. Each lock is taken after the one
before it was given back, by the kernel, with what that orders. That is all of the argument.

A party may be stopped while it is inside, so every access may raise QueueTimeoutError: within the
time of the call that it is part of, if that has one (`Mutex.within`). Nothing has changed then.

Waiting parties sleep on the same words as in the native core (futex(2), through ctypes), and do not
spin: looking once costs two system calls here.

The names are those of `kvindex._native.RingWriter` and `RingReader`.
"""

from __future__ import annotations

import logging
import mmap
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from kvindex.errors import InUseError
from kvindex.shm.futex import Word
from kvindex.shm.layout import (
    CLOSED,
    KIND,
    LENGTH,
    NEXT_SEQ,
    PUBLISHED,
    SEQ,
    SLOT_START,
    SLOT_STATE,
    SPACE,
    STATE,
    Layout,
    SlotState,
)
from kvindex.shm.mutex import CLOSING, Mutex, is_running

__all__ = ["RingReader", "RingWriter"]

logger = logging.getLogger(__name__)

_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_COUNTS = (SlotState.ACTIVE, SlotState.RESERVED)
_MINE = (SlotState.ACTIVE,)
_MINE_YET = (SlotState.ACTIVE, SlotState.JOINING)

_INTERRUPT = 0.1  # seconds


class _Party:
    """What both parties know."""

    def __init__(
        self,
        memory: mmap.mmap,
        n_reader: int,
        max_chunks: int,
        max_chunk_bytes: int,
        mutex: Mutex,
        waits_on: int,
    ) -> None:
        self._memory = memory
        self._layout = Layout(n_reader, max_chunks, max_chunk_bytes)
        if self._layout.total_bytes > len(memory):
            raise ValueError("the memory does not hold such a ring")
        self.mutex = mutex
        self._published = Word(memory, PUBLISHED)
        self._space = Word(memory, SPACE)
        self._mine = self._space if waits_on == SPACE else self._published
        self._turn = threading.RLock()
        self._user: FrameType | None = None
        self._counters: Counter[str] = Counter(spins=0, sleeps=0, wakes=0)
        self.index = 0
        self.seq = 0

    def statistics(self) -> dict[str, int]:
        return dict(self._counters)

    def interrupt(self) -> None:
        # Without the lock whoever is about to sleep is missed, and looks up by itself later.
        if self.mutex.take(_INTERRUPT):
            try:
                self._mine.get_odd()
                self._mine.make_even()
            finally:
                self.mutex.give()
        self._mine.wake()

    def _take_turn(self) -> None:
        if not self._turn.acquire(blocking=False):
            raise InUseError("this end of the queue is in use by another thread: one at a time")
        if self._user is not None and is_running(self._user):
            self._turn.release()
            raise InUseError("this end of the queue is in use: a signal handler interrupted it")
        self._user = sys._getframe(1)

    def _give_turn(self) -> None:
        self._user = None
        try:  # with all that earlier turns left which a signal handler's exception ended
            while True:
                self._turn.release()
        except RuntimeError:
            pass

    def _wait(self, ready: Callable[[], bool], sleep: float) -> bool:
        """As `Waiter::wait` of the native core, without the spinning."""
        with self.mutex:
            if ready():
                return True
            if sleep <= 0:
                return False
            value = self._mine.get_odd()
        self._counters["sleeps"] += 1
        self._mine.wait(value, sleep)
        with self.mutex:
            return ready()

    def _wake(self, word: Word) -> None:
        self._counters["wakes"] += 1
        word.wake()

    # With the lock held:

    def _get(self, form: struct.Struct, offset: int) -> int:
        return int(form.unpack_from(self._memory, offset)[0])

    def _set(self, form: struct.Struct, offset: int, value: int) -> None:
        form.pack_into(self._memory, offset, value)

    def _slot_state(self, reader: int) -> int:
        return self._get(_U32, self._layout.slot(reader) + SLOT_STATE)

    def _set_slot_state(self, reader: int, state: SlotState) -> None:
        self._set(_U32, self._layout.slot(reader) + SLOT_STATE, state)


class RingWriter(_Party):
    """The writing party; for one thread at a time."""

    def __init__(
        self,
        memory: mmap.mmap,
        n_reader: int,
        max_chunks: int,
        max_chunk_bytes: int,
        mutex: Mutex,
    ) -> None:
        super().__init__(memory, n_reader, max_chunks, max_chunk_bytes, mutex, SPACE)
        self._state = self._get(_U32, STATE)  # which nobody else writes

    def write(self, kind: int, data: Any, spin: float, sleep: float) -> bool:
        parts = data if isinstance(data, list | tuple) else (data,)
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(map(len, views))
        if length > self._layout.max_chunk_bytes:
            raise ValueError("longer than a chunk")
        self._take_turn()
        try:
            if not self._wait(self._ready, sleep):
                return False
            at = self._layout.chunk(self.index)
            for view in views:
                self._memory[at : at + len(view)] = view
                at += len(view)
            self._publish(kind, length)
            return True
        finally:
            self._give_turn()

    def wait(self, spin: float, sleep: float) -> bool:
        self._take_turn()
        try:
            return self._wait(self._ready, sleep)
        finally:
            self._give_turn()

    def wait_attached(self, sleep: float) -> bool:
        self._take_turn()
        try:
            return self._wait(lambda: SlotState.RESERVED not in self._slot_states(), sleep)
        finally:
            self._give_turn()

    def publish(self, kind: int, length: int) -> None:
        if length > self._layout.max_chunk_bytes:
            raise ValueError("longer than a chunk")
        with self.mutex:
            if not self._ready():
                raise ValueError("the chunk is not free")
        self._publish(kind, length)

    def admit(self) -> int:
        admitted = 0
        with self.mutex:
            for reader, state in enumerate(self._slot_states()):
                if state == SlotState.JOINING:
                    self._admit(reader)
                    admitted += 1
            woken = admitted > 0 and self._published.make_even()
        if woken:
            self._wake(self._published)
        return admitted

    def awaited(self) -> list[int]:
        with self.mutex:
            return list(self._awaited())

    def remove(self, reader: int, evict: bool) -> bool:
        with self.mutex:
            if self._slot_state(self._checked(reader)) not in _COUNTS:
                return False
            self._set_slot_state(reader, SlotState.EVICTED if evict else SlotState.FREE)
            woken = self._published.make_even()
        if woken:
            self._wake(self._published)
        return True

    def reserve(self, reader: int) -> None:
        with self.mutex:
            self._set_slot_state(self._checked(reader), SlotState.RESERVED)

    def slot_state(self, reader: int) -> int:
        with self.mutex:
            return self._slot_state(self._checked(reader))

    @property
    def state(self) -> int:
        return self._state

    @state.setter
    def state(self, value: int) -> None:
        if not self.mutex.take(CLOSING):
            if not value & CLOSED:
                self.mutex.refuse(CLOSING)
            # Its readers see that the writer is gone, but not that it meant to.
            logger.warning("the queue is closed, but its lock is held: its readers are not told")
            return
        try:
            self._state = value
            self._set(_U32, STATE, value)
            woken = self._published.make_even()
        finally:
            self.mutex.give()
        if woken:
            self._wake(self._published)

    def _checked(self, reader: int) -> int:
        if not 0 <= reader < self._layout.n_reader:
            raise IndexError("no such reader")
        return reader

    def _publish(self, kind: int, length: int) -> None:
        layout, chunk = self._layout, self.index
        with self.mutex:
            record = layout.record(chunk)
            self._set(_U64, record + SEQ, self.seq)
            self._set(_U64, record + LENGTH, length)
            self._set(_U32, record + KIND, kind)
            flags = bytes([1, *(state not in _COUNTS for state in self._slot_states())])
            at = layout.flags(chunk)
            self._memory[at : at + len(flags)] = flags
            self.seq += 1
            self.index = self.seq % layout.max_chunks
            self._set(_U64, NEXT_SEQ, self.seq)
            woken = self._published.make_even()
        if woken:
            self._wake(self._published)

    # With the lock held:

    def _slot_states(self) -> list[int]:
        return [self._slot_state(reader) for reader in range(self._layout.n_reader)]

    def _ready(self) -> bool:
        return not self._awaited()

    def _awaited(self) -> Sequence[int]:
        at = self._layout.flags(self.index)
        written, *read = self._memory[at : at + 1 + self._layout.n_reader]
        if not written:
            return ()
        return [
            reader
            for reader, flag in enumerate(read)
            if not flag and self._slot_state(reader) in _COUNTS
        ]

    def _admit(self, reader: int) -> None:
        for chunk in range(self._layout.max_chunks):
            self._memory[self._layout.flags(chunk) + 1 + reader] = 1
        self._set(_U64, self._layout.slot(reader) + SLOT_START, self.seq)
        self._set_slot_state(reader, SlotState.ACTIVE)


class RingReader(_Party):
    """A reading party; for one thread at a time."""

    def __init__(
        self,
        memory: mmap.mmap,
        n_reader: int,
        max_chunks: int,
        max_chunk_bytes: int,
        slot: int,
        mutex: Mutex,
    ) -> None:
        super().__init__(memory, n_reader, max_chunks, max_chunk_bytes, mutex, PUBLISHED)
        if not 0 <= slot < n_reader:
            raise IndexError("no such reader")
        self._slot = slot
        self._started = False
        self._attached = False

    def attach(self) -> bool:
        with self.mutex:
            kept = self._slot_state(self._slot) == SlotState.RESERVED
            # Whoever had the slot is gone, for its lock is ours.
            self._set_slot_state(self._slot, SlotState.ACTIVE if kept else SlotState.JOINING)
            self._attached = True
            woken = self._space.make_even()
        if woken:
            self._wake(self._space)
        return kept

    def leave(self) -> None:
        self._attached = False
        if not self.mutex.take(CLOSING):
            # The writer sees that the reader is gone by the lock that goes with its mapping.
            logger.warning("a reader leaves, but the queue's lock is held: the writer is not told")
            return
        try:
            self._set_slot_state(self._slot, SlotState.LEFT)
            woken = self._space.make_even()
        finally:
            self.mutex.give()
        if woken:
            self._wake(self._space)

    def read(self, limit: int, spin: float, sleep: float) -> tuple[int, Any] | None:
        self._take_turn()
        try:
            if not self._wait(self._ready, sleep):
                return None
            with self.mutex:
                record = self._layout.record(self.index)
                seq = self._get(_U64, record + SEQ)
                length = self._get(_U64, record + LENGTH)
                kind = self._get(_U32, record + KIND)
            sound = seq == self.seq and length <= self._layout.max_chunk_bytes
            if sound and length > limit:
                return kind, length
            at = self._layout.chunk(self.index)
            data = self._memory[at : at + length] if sound else b""
            if self.evicted:
                return None
            if not sound:
                raise ValueError("the ring's memory is damaged: a record is not what must follow")
            self._release()
            return kind, data
        finally:
            self._give_turn()

    def release(self) -> None:
        self._take_turn()
        try:
            self._release()
        finally:
            self._give_turn()

    def ready(self) -> bool:
        with self.mutex:
            return self._ready()

    def wait_state(self, bits: int, sleep: float) -> bool:
        self._take_turn()
        try:
            return self._wait(lambda: bool(self._get(_U32, STATE) & bits), sleep)
        finally:
            self._give_turn()

    @property
    def active(self) -> bool:
        with self.mutex:
            return self._slot_state(self._slot) == SlotState.ACTIVE

    @property
    def evicted(self) -> bool:
        # Who was taken for dead has its place made free, or another's: it must learn that too.
        kept = _MINE if self._started else _MINE_YET
        with self.mutex:
            return self._attached and self._slot_state(self._slot) not in kept

    @property
    def behind(self) -> int:
        with self.mutex:
            return max(0, self._get(_U64, NEXT_SEQ) - self.seq)

    @property
    def state(self) -> int:
        with self.mutex:
            return self._get(_U32, STATE)

    def _release(self) -> None:
        with self.mutex:
            self._memory[self._layout.flags(self.index) + 1 + self._slot] = 1
            self.seq += 1
            self.index = self.seq % self._layout.max_chunks
            woken = self._space.make_even()
        if woken:
            self._wake(self._space)

    # With the lock held:

    def _ready(self) -> bool:
        if not self._started and not self._start():
            return False
        at = self._layout.flags(self.index)
        return self._memory[at] == 1 and self._memory[at + 1 + self._slot] == 0

    def _start(self) -> bool:
        if self._slot_state(self._slot) != SlotState.ACTIVE:
            return False
        self.seq = self._get(_U64, self._layout.slot(self._slot) + SLOT_START)
        self.index = self.seq % self._layout.max_chunks
        self._started = True
        return True
