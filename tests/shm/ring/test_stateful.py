"""A ring's writer and readers, single steps interleaved, against a plain list of messages."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvindex.shm import MsgpackCodec, ShmRingBuffer, Waiting
from kvindex.shm.codec import decoder_of
from kvindex.shm.ring.receiver import RingReceiver
from kvindex.shm.ring.ring import RAW
from kvindex.shm.ring.sender import RingSender
from kvindex.wire.errors import QueueClosedError, QueueTimeoutError, ReaderEvictedError
from tests.examples import examples
from tests.native_ring import needs_ring

pytestmark = [pytest.mark.property, needs_ring]

PLACES = 3
WAITING = Waiting(spin=0.0, look=0.001)

places = st.integers(0, PLACES - 1)


class Reader:
    """A receiver, and what it must receive: the messages from `position` on.

    Attributes:
        position: in the list of messages; None until the writer has let the reader in.
        evicted: whether the writer took it off.
    """

    def __init__(self, receiver: RingReceiver, position: int | None) -> None:
        self.receiver = receiver
        self.position = position
        self.evicted = False


Held = tuple[AbstractContextManager[memoryview], memoryview, bytes]


class QueueMachine(RuleBasedStateMachine):
    @initialize(
        chunk_bytes=st.integers(16, 64),
        chunks=st.integers(1, 4),
        reserved=st.sets(places),
    )
    def start(self, chunk_bytes: int, chunks: int, reserved: set[int]) -> None:
        self.chunk_bytes, self.chunks = chunk_bytes, chunks
        self.ring = ShmRingBuffer(PLACES, chunk_bytes, chunks)
        self.sender = RingSender(self.ring, reserved=reserved, waiting=WAITING)
        self.reserved = set(reserved)
        self.decode = decoder_of(MsgpackCodec())
        self.messages: list[bytes] = []
        self.made = 0
        self.readers: dict[int, Reader] = {}
        self.held: dict[int, Held] = {}
        self.dead: set[int] = set()

    # The writer

    @rule(size=st.integers(0, 64 * 6))
    def send(self, size: int) -> None:
        body = self.next_body(min(size, self.chunk_bytes * 6))
        self.let_in()
        try:
            self.sender.send(RAW, body, len(body), 0.0)
        except QueueTimeoutError:
            self.check_timed_out()
        else:
            self.messages.append(body)

    @rule(size=st.integers(0, 64), fails=st.booleans())
    def write_in_place(self, size: int, fails: bool) -> None:
        body = self.next_body(min(size, self.chunk_bytes))
        self.let_in()
        try:
            with self.sender.chunk(len(body), 0.0) as view:
                view[:] = body
                if fails:
                    raise ZeroDivisionError
        except QueueTimeoutError:
            self.check_timed_out()
        except ZeroDivisionError:
            pass
        else:
            self.messages.append(body)

    @rule()
    def admit(self) -> None:
        joining = sum(r.position is None for r in self.readers.values())
        self.let_in()
        assert self.sender.admit() >= joining

    @rule(place=places)
    def evict(self, place: int) -> None:
        reader = self.readers.get(place)
        counted = reader is not None and reader.position is not None and not reader.evicted
        evicted = self.sender.evict(place)
        if reader is not None:
            assert evicted == counted
            reader.evicted = reader.evicted or evicted
        if place in self.reserved:
            assert evicted
            self.reserved.discard(place)
        if evicted:
            self.dead.discard(place)

    @rule()
    def remove_dead(self) -> None:
        gone = [place for place in self.sender.readers() if place in self.dead]
        assert self.sender.remove_dead() == gone
        self.dead -= set(gone)

    # The readers

    @precondition(lambda self: len(self.readers) < PLACES)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([p for p in range(PLACES) if p not in self.readers]))
        receiver = RingReceiver(
            ShmRingBuffer(*self.ring.handle()), place, waiting=WAITING, max_message_bytes=1000
        )
        self.readers[place] = Reader(receiver, 0 if place in self.reserved else None)
        self.reserved.discard(place)
        self.dead.discard(place)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), count=st.integers(1, 5))
    def receive(self, data: st.DataObject, count: int) -> None:
        place = self.draw_reader(data)
        if place in self.held:
            return
        reader = self.readers[place]
        for _ in range(count):
            expected = self.expected(reader)
            try:
                got = reader.receiver.receive(self.decode, 0.0)
            except QueueTimeoutError:
                assert expected is None
                assert not reader.evicted
                return
            except ReaderEvictedError:
                assert reader.evicted
                return
            assert got == expected
            assert not reader.evicted
            self.advance(reader)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def begin_to_read_in_place(self, data: st.DataObject) -> None:
        place = self.draw_reader(data)
        reader = self.readers[place]
        if place in self.held or reader.evicted:
            return
        expected = self.expected(reader)
        block = reader.receiver.message(0.0, None, quiet=True)
        try:
            view = block.__enter__()
        except QueueTimeoutError:
            assert expected is None
            return
        assert expected is not None
        assert bytes(view) == expected
        self.advance(reader)
        self.held[place] = block, view, expected

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fails=st.booleans())
    def end_to_read_in_place(self, data: st.DataObject, fails: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.held)))
        block, view, expected = self.held.pop(place)
        if not self.readers[place].evicted:
            assert bytes(view) == expected
        try:
            if fails:
                error = ZeroDivisionError()
                assert not block.__exit__(type(error), error, None)
            else:
                block.__exit__(None, None, None)
        except ReaderEvictedError:
            assert self.readers[place].evicted
        except ZeroDivisionError:
            assert fails

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), dies=st.booleans())
    def go(self, data: st.DataObject, dies: bool) -> None:
        """A reader leaves, or is gone without a word."""
        place = self.draw_reader(data)
        if place in self.held:
            return
        reader = self.readers.pop(place)
        if dies:
            reader.receiver.ring.close()
            if not reader.evicted:
                self.dead.add(place)
        reader.receiver.close()

    # The model

    def next_body(self, size: int) -> bytes:
        self.made += 1
        return (self.made.to_bytes(4, "big") * (size // 4 + 1))[:size]

    def let_in(self) -> None:
        for reader in self.readers.values():
            if reader.position is None:
                reader.position = len(self.messages)

    def expected(self, reader: Reader) -> bytes | None:
        if reader.position is None or reader.position == len(self.messages):
            return None
        return self.messages[reader.position]

    def advance(self, reader: Reader) -> None:
        assert reader.position is not None
        reader.position += 1

    def draw_reader(self, data: st.DataObject) -> int:
        return int(data.draw(st.sampled_from(sorted(self.readers))))

    def check_timed_out(self) -> None:
        """There was no room: each who can still read and did not is a whole ring behind."""
        laggards = self.sender.laggards()
        assert laggards
        self.dead -= self.dead - set(self.sender.readers())
        assert not set(laggards) & self.dead
        for place in laggards:
            reader = self.readers.get(place)
            if reader is None:
                assert place in self.reserved
                continue
            assert not reader.evicted
            assert reader.receiver.behind >= self.chunks

    def teardown(self) -> None:
        if not hasattr(self, "sender"):
            return
        for place, (block, _, _) in self.held.items():
            try:
                block.__exit__(None, None, None)
            except ReaderEvictedError:
                assert self.readers[place].evicted
        self.sender.close()
        for reader in self.readers.values():
            if not reader.evicted:
                self.check_drained(reader)
            reader.receiver.close()

    def check_drained(self, reader: Reader) -> None:
        rest = self.messages[reader.position :] if reader.position is not None else []
        for expected in rest:
            assert reader.receiver.receive(self.decode, 0.0) == expected
        with pytest.raises(QueueClosedError):
            reader.receiver.receive(self.decode, 0.0)


def test_each_reader_sees_exactly_the_messages_from_its_start_on_each_once() -> None:
    run_state_machine_as_test(QueueMachine, settings=settings(examples(50), stateful_step_count=60))
