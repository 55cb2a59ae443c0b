"""A reading end of a ring: waits for messages, looks after the writer, joins what was split."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvindex.errors import (
    ClosedError,
    DecodeError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderEvictedError,
    SegmentError,
    WaitCancelledError,
    WriterDiedError,
)
from kvindex.shm.codec import Buffer, Codec
from kvindex.shm.layout import CLOSED, READY
from kvindex.shm.messages import CONTINUED, MORE, Assembly, decode
from kvindex.shm.parties import ClosedParty, ParentsParty
from kvindex.shm.ring import ShmRingBuffer
from kvindex.shm.waiting import Patience, Waiting

__all__ = ["RingReceiver"]

# Bytes that are copied out at once; more are decoded where they are. A copy of this many takes
# about as long as asking twice.
_COPIED = 32 << 10


class RingReceiver:
    """Reads every message of a ring, in order.

    Args:
        ring: the ring, attached for this reader alone; the receiver closes it.
        slot: the reader's place.
        waiting: how to wait.
        max_message_bytes: longest message that is accepted, in bytes.

    Raises:
        SegmentError: a living reader has the place.

    Thread safety: one thread at a time, but `statistics` and `close` from any.
    """

    def __init__(
        self, ring: ShmRingBuffer, slot: int, *, waiting: Waiting, max_message_bytes: int
    ) -> None:
        self.ring = ring
        self._slot = slot
        self._waiting = waiting
        self._spin = waiting.spin
        self._look = waiting.look
        self._assembly = Assembly(max_message_bytes)
        self._messages = 0
        self._closed = False
        self._party = ring.reader(slot)
        ring.segment.on_fork = self._disown

    def receive(
        self,
        codec: Codec,
        timeout: float | None,
        cancel: threading.Event | None = None,
        *,
        quiet: bool = False,
    ) -> Any:
        """Return the next message's object.

        Args:
            codec: what decodes it.
            timeout: longest wait in seconds; None waits for ever.
            cancel: ends the wait when set, within the `look` of the settings.
            quiet: never warn of a long wait.

        Raises:
            QueueTimeoutError: none came in time.
            QueueClosedError: the writer has closed the queue, and all of it was read.
            WriterDiedError: the writer is gone, and all that it published whole was read.
            ReaderEvictedError: the writer took this reader off.
            WaitCancelledError: `cancel` was set.
            ClosedError: this end was closed.
            DecodeError: the message is not one of this codec; it counts as read.
            SegmentError: the ring's memory is damaged.
        """
        if self._closed:
            self._check_open()
        patience: Patience | None = None
        got = None
        if timeout is None and cancel is None:  # the usual call, without more ado
            got = self._read(_COPIED, self._spin, self._look)
            if got is None:
                patience = Patience(self._waiting, None, quiet=quiet)
                self._look_around(patience, None, None)
            elif type(got[1]) is bytes and got[0] < MORE and not self._assembly.begun:
                self._messages += 1
                return decode(got[0], got[1], codec)
        chunks = self._chunks(_COPIED, timeout, cancel, patience, quiet=quiet)
        while True:
            with self._body(got or next(chunks)) as message:
                if message is not None:
                    self._messages += 1
                    return self._decoded(message, codec)
            got = None

    @contextmanager
    def message(
        self, timeout: float | None, cancel: threading.Event | None, *, quiet: bool
    ) -> Iterator[memoryview]:
        """Give the next message's bytes, read-only, where they are if they are in one chunk.

        Raises: as `receive`; ReaderEvictedError at the end of the `with`, if the bytes may have
            been overwritten meanwhile.
        """
        self._check_open()
        for got in self._chunks(0, timeout, cancel, None, quiet=quiet):
            with self._body(got) as message:
                if message is not None:
                    self._messages += 1
                    with memoryview(message[1]) as view, view.toreadonly() as body:
                        yield body
                    return

    def wait_ready(self, patience: Patience, timeout: float | None) -> None:
        """Return once the writer says that all readers are there.

        Raises:
            QueueTimeoutError: it did not in time.
            WriterDiedError, QueueClosedError, ClosedError: it never will.
        """
        self._check_open()
        while not self._party.wait_state(READY | CLOSED, patience.slice()):
            self._check_open()
            if not self.ring.writer_lives():
                self._bury_writer()
            if patience.exhausted:
                raise QueueTimeoutError(
                    f"the queue was not ready in {timeout:g} s: the writer waits for other readers",
                    timeout=timeout or 0.0,
                )
            patience.warn("the queue to be ready")
        if not self._party.state & READY and not self._party.ready():
            raise QueueClosedError("the writer closed the queue before it was ready")

    @property
    def seq(self) -> int:
        """The number of the next chunk to read."""
        return self._party.seq

    @property
    def admitted(self) -> bool:
        """Whether the writer counts this reader."""
        return self._party.active

    @property
    def behind(self) -> int:
        """Chunks published and not read yet."""
        return 0 if self._closed else self._party.behind

    def statistics(self) -> dict[str, int]:
        """Return how many messages were read or given up, and how the waits went."""
        return {
            "messages": self._messages,
            "messages_given_up": self._assembly.given_up,
            "behind": self.behind,
            **self._party.statistics(),
        }

    def close(self) -> None:
        """Give the place up; the writer waits for this reader no more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.ring.segment.on_fork = None
        if not self.ring.segment.closed:
            if not self.ring.writer_lives():
                self.ring.segment.unlink()  # which the writer can do no more
            party, self._party = self._party, ClosedParty(self._party)
            party.leave()
            party.interrupt()
            del party  # and with it the memory, unless a thread is still inside
        self.ring.close()

    def _chunks(
        self,
        limit: int,
        timeout: float | None,
        cancel: threading.Event | None,
        patience: Patience | None,
        *,
        quiet: bool,
    ) -> Iterator[tuple[int, Any]]:
        """Give what `read` of the party does, chunk by chunk, with one patience for all."""
        spin = self._spin if timeout is None else min(self._spin, timeout)
        while True:
            got = self._read(limit, 0.0, 0.0)
            if got is None:
                patience = patience or Patience(self._waiting, timeout, quiet=quiet)
                while (got := self._read(limit, spin, patience.slice())) is None:
                    self._look_around(patience, timeout, cancel)
            yield got

    def _read(self, limit: int, spin: float, sleep: float) -> tuple[int, Any] | None:
        try:
            return self._party.read(limit, spin, sleep)
        except ValueError as error:
            raise self._damaged(error) from None

    def _damaged(self, error: ValueError) -> SegmentError:
        return SegmentError(f"ring {self.ring.name}: {error}; attach anew")

    def _look_around(
        self, patience: Patience, timeout: float | None, cancel: threading.Event | None
    ) -> None:
        """Between two waits for a message: see what could keep it from ever coming."""
        self._check_open()
        if cancel is not None and cancel.is_set():
            raise WaitCancelledError("the wait for a message was cancelled")
        if self._party.evicted:
            raise ReaderEvictedError(
                f"the writer took the reader at place {self._slot} off: it was too far behind, or "
                "was taken for dead; attach again"
            )
        # What the writer published before it closed or died is read first.
        if self._party.state & CLOSED:
            if not self._party.ready():
                raise QueueClosedError("the writer closed the queue, and all of it was read")
        elif not self.ring.writer_lives() and not self._party.ready():
            self._bury_writer()
        if patience.exhausted:
            raise QueueTimeoutError(f"no message came in {timeout:g} s", timeout=timeout or 0.0)
        patience.warn("a message")

    def _bury_writer(self) -> None:
        if self._party.state & CLOSED:  # it closed between two looks
            raise QueueClosedError("the writer closed the queue, and all of it was read")
        self.ring.segment.unlink()  # which the writer can do no more
        raise WriterDiedError("the writer is gone without having closed the queue")

    @contextmanager
    def _body(self, got: tuple[int, Any]) -> Iterator[tuple[int, Buffer] | None]:
        """Give the message that a chunk completes, if it does; the bytes go when it ends."""
        kind, data = got
        if type(data) is bytes:
            yield self._assembly.add(kind, data)
            return
        taken = True
        try:
            with self.ring.get_data(self._party.index) as chunk, chunk[:data] as piece:
                if not kind & (MORE | CONTINUED):
                    yield kind, piece
                    return
                whole = self._assembly.add(kind, piece)
            evicted = self._give_back()
            taken = False
            self._check_whole(evicted)
            yield whole
        finally:
            if taken:
                self._check_whole(self._give_back())

    def _give_back(self) -> bool:
        """Let the writer have the chunk; return whether it may have had it before."""
        self._check_open()  # closed meanwhile by another thread: the writer waits no more
        evicted = self._party.evicted
        self._party.release()
        return evicted

    def _check_whole(self, evicted: bool) -> None:
        if evicted:
            raise ReaderEvictedError("taken off while reading: the message may be damaged")

    def _decoded(self, message: tuple[int, Buffer], codec: Codec) -> Any:
        try:
            return decode(*message, codec)
        except DecodeError:
            if self._party.evicted:
                raise ReaderEvictedError(
                    "taken off while reading: the message is damaged"
                ) from None
            raise

    def _disown(self) -> None:
        """In a forked child: this end is the parent's."""
        self._party = ParentsParty()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this end of the queue is closed")
