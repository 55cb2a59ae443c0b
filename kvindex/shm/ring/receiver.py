"""A reading end of a ring: waits for messages, checks that the writer lives, joins fragments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvindex.shm.ring.ring import (
    CLOSED,
    CONTINUED,
    LENGTH_BYTES,
    MORE,
    READY,
    TOTAL,
    Buffer,
    RingEnd,
    ShmRingBuffer,
)
from kvindex.shm.ring.waiting import Patience, Waiting, check_cancel
from kvindex.wire.errors import (
    DecodeError,
    QueueClosedError,
    ReaderEvictedError,
    SegmentError,
    WriterDiedError,
)

if TYPE_CHECKING:
    from kvindex.wire._native import RingReader

# Bytes that are copied out at once; more are decoded where they are. A copy of this many takes
# about as long as asking twice.
_COPIED = 32 << 10
_KIND = 0x0F

Decode = Callable[[int, Buffer], Any]


class RingReceiver(RingEnd["RingReader"]):
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
        super().__init__(ring, ring.reader(slot))
        self._waiting = waiting
        self._spin = waiting.spin
        self._look = waiting.look
        self._glance_at = 0.0  # when to check again whether the writer lives
        self._assembly = Assembly(max_message_bytes)
        self._added: tuple[int, tuple[int, Buffer] | None] | None = None
        self._messages = 0

    def receive(
        self,
        decode: Decode,
        timeout: float | None,
        cancel: threading.Event | None = None,
        *,
        quiet: bool = False,
    ) -> Any:
        """Return `decode` of the next message's kind and body; `quiet`: warn of no long wait.

        `decode` must keep nothing of the body, unless the body is bytes. Raises as
        `MessageQueue.dequeue`, and SegmentError if the ring's memory is damaged.
        """
        # A burst is read without a clock, and an idle reader looks around before its first sleep.
        patience: Patience | None = None
        got = None
        if timeout is None and cancel is None:  # the usual call, by the shortest way
            got = self._read(_COPIED, self._spin, 0.0)
            if got is None:
                self._glance(None)
                got = self._read(_COPIED, self._spin, self._look)
            if got is None:
                patience = Patience(self._waiting, None, quiet=quiet)
                self._look_around(patience, None)
            elif got[0] < MORE and not self._assembly.begun:
                if type(got[1]) is bytes:
                    self._messages += 1
                    return decode(got[0], got[1])
                return self._decode_in_place(*got, decode)
        chunks = self._chunks(_COPIED, timeout, cancel, patience, quiet=quiet)
        while True:
            with self._body(got or next(chunks)) as message:
                if message is not None:
                    return self._decoded(message, decode)
            got = None

    @contextmanager
    def message(
        self, timeout: float | None, cancel: threading.Event | None, *, quiet: bool
    ) -> Iterator[memoryview]:
        """Give the next message's bytes, read-only, where they are if they are in one chunk.

        Raises as `receive`; at the end of the `with` ReaderEvictedError, if the bytes may have been
        overwritten meanwhile.
        """
        for got in self._chunks(0, timeout, cancel, None, quiet=quiet):
            with self._body(got) as message:
                if message is not None:
                    with memoryview(message[1]) as view, view.toreadonly() as body:
                        yield body
                    return

    def wait_ready(self, timeout: float | None) -> None:
        """Return once the writer reports that all readers are there; raise if it never will."""
        patience = Patience(self._waiting, timeout)
        sleep = 0.0  # the writer's death may be known already
        while not self._party.wait_state(READY | CLOSED, sleep):
            if not self._party.state & CLOSED and not self.ring.writer_lives():
                self._bury_writer()
            patience.check("the other readers of the queue to attach")
            sleep = patience.slice()
        if not self._party.state & READY and not self._party.ready():
            raise QueueClosedError("the writer closed the queue before it was ready")

    @property
    def admitted(self) -> bool:
        """Whether the writer counts this reader."""
        return self._party.active

    @property
    def behind(self) -> int:
        """Chunks published and not read yet."""
        return self._party.behind

    def statistics(self) -> dict[str, int]:
        """Return how many messages were read or given up, and how the waits went."""
        return {
            "messages": self._messages,
            "messages_given_up": self._assembly.given_up,
            "behind": self.behind,
            **self._party.statistics(),
        }

    def _leave(self, party: RingReader) -> None:
        """The writer no longer waits for this reader."""
        # Whichever survivor goes first: a killed writer's segment would stay until a sweep.
        if not self.ring.writer_lives():
            self.ring.segment.unlink()
        party.leave()

    def _chunks(
        self,
        limit: int,
        timeout: float | None,
        cancel: threading.Event | None,
        patience: Patience | None,
        *,
        quiet: bool,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the results of the party's `read`, chunk by chunk, with one patience for all."""
        spin = self._spin if timeout is None else min(self._spin, timeout)
        while True:
            got = self._read(limit, spin, patience.slice() if patience else 0.0)
            if got is not None:
                yield got
            elif patience is None:
                patience = Patience(self._waiting, timeout, quiet=quiet)
                self._glance(cancel)
            else:
                self._look_around(patience, cancel)

    def _read(self, limit: int, spin: float, sleep: float) -> tuple[int, Any] | None:
        try:
            return self._party.read(limit, spin, sleep)
        except ValueError as error:  # a record that no writer of ours makes
            raise SegmentError(f"ring {self.ring.name}: {error}; attach anew") from None

    def _look_around(self, patience: Patience, cancel: threading.Event | None) -> None:
        """Between two waits for a message: check whether it can still come."""
        self._check_end(cancel, thoroughly=True)
        patience.check("a message")

    def _glance(self, cancel: threading.Event | None) -> None:
        """Before the first wait for a message: check whether it is known never to come."""
        # To check whether the writer lives costs a system call: not for each message of a burst.
        now = time.monotonic()
        thoroughly = now >= self._glance_at
        if thoroughly:
            self._glance_at = now + self._look
        try:
            self._check_end(cancel, thoroughly=thoroughly)
        except WriterDiedError:
            self._glance_at = 0.0  # the next call, too, hears of it before any sleep
            raise

    def _check_end(self, cancel: threading.Event | None, *, thoroughly: bool) -> None:
        # The state before `ready` below: between the two a last message may be published.
        closed = self._party.state & CLOSED
        check_cancel(cancel, "a message")
        if self._party.evicted:
            raise ReaderEvictedError(
                "the writer took this reader off: it was too far behind, or was taken for dead; "
                "attach again"
            )
        # Messages published before the writer closed or died are read first.
        if closed:
            if not self._party.ready():
                raise QueueClosedError("the writer closed the queue, and all of it was read")
        elif thoroughly and not self.ring.writer_lives() and not self._party.ready():
            self._bury_writer()

    def _bury_writer(self) -> None:
        if self._party.state & CLOSED:  # it closed between two looks
            raise QueueClosedError("the writer closed the queue, and all of it was read")
        self.ring.segment.unlink()  # which the writer can do no more
        raise WriterDiedError("the writer is gone without having closed the queue")

    @contextmanager
    def _body(self, got: tuple[int, Any]) -> Iterator[tuple[int, Buffer] | None]:
        """Give the message that a chunk completes, if it does, for the length of the `with`."""
        kind, data = got
        if type(data) is bytes:
            message = self._assembly.add(kind, data)
            self._messages += message is not None
            yield message
        elif kind & (MORE | CONTINUED):
            yield self._add_in_place(kind, data)
        else:
            self._assembly.give_up()  # a whole message: the fragments before it have no end
            try:
                with self.ring.get_data(self._party.index) as chunk, chunk[:data] as body:
                    yield kind, body
            finally:
                self._give_back(whole=True)

    def _add_in_place(self, kind: int, length: int) -> tuple[int, Buffer] | None:
        """Return the message that a fragment completes, if it does; the chunk is released."""
        seq = self._party.seq
        try:
            # If an interrupt prevented the release, the chunk is read again, and was added already.
            if self._added is None or self._added[0] != seq:
                with self.ring.get_data(self._party.index) as chunk, chunk[:length] as piece:
                    self._added = seq, self._assembly.add(kind, piece)
        except DecodeError:
            self._give_back(whole=False)
            raise
        message = self._added[1]
        self._give_back(whole=message is not None)
        self._added = None
        return message

    def _decode_in_place(self, kind: int, length: int, decode: Decode) -> Any:
        """Decode the chunk that `read` left taken, and release it."""
        # As `_body` does it for the unusual cases, in one go: after a long sleep each further line
        # of Python is cold.
        at = self.ring.layout.chunk(self._party.index)
        try:
            with memoryview(self.ring.segment.memory) as memory, memory[at : at + length] as body:
                return self._decoded((kind, body), decode)
        finally:
            self._give_back(whole=True)

    def _give_back(self, whole: bool) -> None:
        """Release the chunk; raise ReaderEvictedError if the writer may have used it before."""
        evicted = self._party.evicted  # ClosedError: another thread has closed meanwhile
        # Counted after the release: an interrupt before it has the chunk read again.
        self._party.release()
        self._messages += whole
        if evicted:
            raise ReaderEvictedError("taken off while reading: the message may be damaged")

    def _decoded(self, message: tuple[int, Buffer], decode: Decode) -> Any:
        try:
            return decode(*message)
        except DecodeError:
            # For copied bytes this was checked before they counted as read.
            if type(message[1]) is memoryview and self._party.evicted:
                raise ReaderEvictedError(
                    "taken off while reading: the message is damaged"
                ) from None
            raise


class Assembly:
    """Joins fragments to messages. Belongs to one reader; `given_up` counts unfinished ones."""

    def __init__(self, max_bytes: int) -> None:
        self.given_up = 0
        self._max_bytes = max_bytes
        self._body: bytearray | None = None
        self._kind = 0
        self._filled = 0

    def add(self, kind: int, piece: Buffer) -> tuple[int, Buffer] | None:
        """Add a chunk; return a message's kind and body if the chunk completes it.

        A fragment that cannot belong where it is raises DecodeError, and the message is dropped.
        """
        if not kind & CONTINUED:
            self.give_up()
            if not kind & MORE:
                return kind, piece
            first = memoryview(piece)[LENGTH_BYTES:]
            if len(piece) < LENGTH_BYTES:
                raise DecodeError("a first fragment without a length", size=len(piece))
            (total,) = TOTAL.unpack_from(piece)
            # Checked before memory is taken for it: the length is another process's word.
            if not len(first) < total <= self._max_bytes:
                raise DecodeError(
                    f"a message of {total} bytes that begins with {len(first)}; at most "
                    f"{self._max_bytes} are accepted (max_message_bytes)",
                    size=total,
                )
            self._body = bytearray(total)
            self._body[: len(first)] = first
            self._kind = kind & _KIND
            self._filled = len(first)
            return None
        body = self._body
        if body is None:
            return None  # the rest of a message whose beginning came before this reader
        end = self._filled + len(piece)
        if end > len(body) or kind & _KIND != self._kind or (end < len(body)) != bool(kind & MORE):
            size = len(body)
            self.give_up()
            raise DecodeError(f"a fragment to byte {end} of a message of {size}", size=size)
        body[self._filled : end] = piece
        self._filled = end
        if kind & MORE:
            return None
        self._body = None
        return self._kind, body

    @property
    def begun(self) -> bool:
        """Whether there are fragments of a message that is not whole."""
        return self._body is not None

    def give_up(self) -> None:
        """Drop a message that was begun."""
        if self._body is not None:
            self._body = None
            self.given_up += 1
