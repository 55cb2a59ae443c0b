"""The two ends of a ring in one thread: damaged memory, deaths and evictions."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import pytest

from kvindex.shm import MsgpackCodec, ShmRingBuffer, Waiting
from kvindex.shm.codec import decoder_of
from kvindex.shm.ring.receiver import RingReceiver
from kvindex.shm.ring.ring import RAW
from kvindex.shm.ring.sender import RingSender
from kvindex.shm.writing import WritingEnd
from kvindex.wire.errors import (
    ConfigurationError,
    DecodeError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderDiedError,
    ReaderEvictedError,
    SegmentError,
    WriterDiedError,
)
from tests.native_ring import KIND, LENGTH, SEQ, needs_ring

pytestmark = [pytest.mark.unit, needs_ring]

WAITING = Waiting(spin=0.0, look=0.001)
DECODE = decoder_of(MsgpackCodec())

Ends = tuple[RingSender, list[RingReceiver]]


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    """Make a sender and its receivers, attached."""
    with ExitStack() as stack:

        def make(n_reader: int = 1, chunk: int = 64, chunks: int = 4, **knobs: Any) -> Ends:
            ring = ShmRingBuffer(n_reader, chunk, chunks)
            sender = RingSender(ring, reserved=range(n_reader), waiting=WAITING, **knobs)
            stack.callback(sender.close)
            receivers = [receiver_of(sender, place) for place in range(n_reader)]
            for receiver in receivers:
                stack.callback(receiver.close)
            return sender, receivers

        yield make


def receiver_of(sender: RingSender, place: int) -> RingReceiver:
    ring = ShmRingBuffer(*sender.ring.handle())
    return RingReceiver(ring, place, waiting=WAITING, max_message_bytes=1 << 20)


def received(receiver: RingReceiver, count: int = 1) -> list[Any]:
    return [receiver.receive(DECODE, 0.0) for _ in range(count)]


Make = Callable[..., Ends]


def send(sender: RingSender, *bodies: bytes) -> None:
    for body in bodies:
        sender.send(RAW, body, len(body), 0.0)


def poke(sender: RingSender, chunk: int, at: int, form: str, value: int) -> None:
    layout, memory = sender.ring.layout, sender.ring.segment.memory
    struct.pack_into(form, memory, layout.record(chunk) + at, value)


DAMAGE = [(LENGTH, 65), (LENGTH, 2**64 - 1), (SEQ, 7), (SEQ, 2**64 - 1)]


@pytest.mark.parametrize(("at", "value"), DAMAGE)
@pytest.mark.parametrize("timeout", [0.0, None])
def test_a_damaged_record_is_an_error_each_time_and_no_message(
    ends: Make, at: int, value: int, timeout: float | None
) -> None:
    sender, (receiver,) = ends()
    send(sender, b"first")
    poke(sender, 0, at, "=Q", value)
    for _ in range(2):
        with pytest.raises(SegmentError, match="damaged"):
            receiver.receive(DECODE, timeout)
        with pytest.raises(SegmentError, match="damaged"):
            with receiver.message(timeout, None, quiet=True):
                pass


def lie_about_length(sender: RingSender) -> None:
    send(sender, b"x" * 100)
    with sender.ring.get_data(0) as chunk:
        chunk[:8] = b"\xff" * 8


def send_unknown_kind(kind: int, sender: RingSender) -> None:
    send(sender, b"0123456789")
    poke(sender, 0, KIND, "=I", kind)


def send_no_msgpack(size: int, sender: RingSender) -> None:
    sender.send(1, b"\xc1" * size, size, 0.0)


@pytest.mark.parametrize(
    "damage",
    [
        lie_about_length,
        *(partial(send_unknown_kind, kind) for kind in (3, 0x0F, 0x40, 0x80)),
        *(partial(send_no_msgpack, size) for size in (40_000, 100_000)),
    ],
    ids=["length", "kind3", "kind15", "kind64", "kind128", "large", "larger"],
)
def test_a_message_that_cannot_be_decoded_counts_as_read(
    ends: Make, damage: Callable[[RingSender], None]
) -> None:
    sender, (receiver,) = ends(chunk=64 if damage is lie_about_length else 50_000)
    damage(sender)
    send(sender, b"next")
    with pytest.raises(DecodeError):
        receiver.receive(DECODE, 0.0)
    assert received(receiver) == [b"next"]


def test_the_rest_of_a_message_that_began_before_is_passed_over(ends: Make) -> None:
    sender, (receiver,) = ends()
    send_unknown_kind(2**32 - 1, sender)
    send(sender, b"next")
    assert received(receiver) == [b"next"]


def test_an_evicted_reader_gets_an_error_each_time_and_may_join_again(ends: Make) -> None:
    sender, (slow, quick) = ends(2)
    send(sender, b"0")
    assert sender.evict(0)
    for _ in range(2):
        with pytest.raises(ReaderEvictedError, match="took this reader off"):
            slow.receive(DECODE, 0.0)
    slow.close()
    with closing(receiver_of(sender, 0)) as again:
        assert not again.admitted
        send(sender, b"1")
        assert again.admitted
        assert received(again) == [b"1"]
    assert received(quick, 2) == [b"0", b"1"]
    assert sender.statistics()["readers_evicted"] == 1


def test_a_reader_that_is_evicted_while_it_reads_in_place_gets_an_error(
    ends: Make,
) -> None:
    sender, (receiver,) = ends(chunks=1)
    send(sender, b"old")

    def read() -> None:
        with receiver.message(0.0, None, quiet=True) as view:
            sender.evict(0)
            send(sender, b"new")
            assert bytes(view) == b"new"  # which is why

    with pytest.raises(ReaderEvictedError, match="while reading"):
        read()


def test_only_the_readers_that_are_missing_are_waited_for(ends: Make) -> None:
    ring = ShmRingBuffer(3, 64, 4)
    sender = RingSender(ring, reserved=[0, 2], waiting=WAITING)
    first = receiver_of(sender, 0)
    with pytest.raises(QueueTimeoutError, match=r"readers \[2\] to attach"):
        sender.wait_attached(0.01)
    assert sender.readers() == [0, 2]
    third = receiver_of(sender, 2)
    sender.wait_attached(0.01)
    for end in (third, first, sender):
        end.close()


def test_a_queue_that_closes_before_it_is_ready_never_will_be(ends: Make) -> None:
    sender, (receiver,) = ends()
    sender.close()
    with pytest.raises(QueueClosedError):
        receiver.wait_ready(1.0)


@pytest.mark.parametrize("end", [QueueClosedError, WriterDiedError])
def test_messages_from_before_the_end_are_read_first(
    ends: Make, monkeypatch: pytest.MonkeyPatch, end: type[Exception]
) -> None:
    sender, (receiver,) = ends()
    steps: list[Callable[[], object]] = [lambda: send(sender, b"last")]
    if end is QueueClosedError:
        steps.append(sender.close)

    class Meanwhile(threading.Event):
        """Acts between a reader's look for messages and its look at the writer."""

        def is_set(self) -> bool:
            while steps:
                steps.pop(0)()
            return False

    if end is WriterDiedError:
        monkeypatch.setattr(receiver.ring, "writer_lives", lambda: False)
    meanwhile = Meanwhile()
    assert receiver.receive(DECODE, 10.0, meanwhile) == b"last"
    with pytest.raises(end):
        receiver.receive(DECODE, 10.0, meanwhile)


class Interrupted:
    """A party whose first `release` of each chunk an interrupt comes before."""

    def __init__(self, party: Any) -> None:
        self._party = party
        self._interrupted: set[int] = set()

    def release(self) -> None:
        if self._party.seq not in self._interrupted:
            self._interrupted.add(self._party.seq)
            raise KeyboardInterrupt
        self._party.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._party, name)


def test_a_fragment_that_is_read_again_after_an_interrupt_is_added_once(
    ends: Make,
) -> None:
    sender, (receiver,) = ends(chunk=40_000)  # long enough to be read in place
    receiver._party = Interrupted(receiver._party)  # type: ignore[assignment]
    body = bytes(range(50)) * 2_000  # three chunks
    send(sender, body)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            receiver.receive(DECODE, 0.0)
    with suppress(KeyboardInterrupt):  # the last chunk's, if that is long enough too
        assert receiver.receive(DECODE, 0.0) == body
    assert receiver.statistics()["messages_given_up"] == 0


@pytest.mark.parametrize("size", [1, 64, 150])
def test_dead_readers_are_raised_after_the_others_were_sent_the_message(
    ends: Make, size: int
) -> None:
    sender, (dead, living) = ends(2, on_dead_reader="raise", ranks=[5, 7])
    for _ in range(4):
        send(sender, b"x")
    dead.ring.close()  # as if killed
    assert received(living, 4) == [b"x"] * 4
    with pytest.raises(ReaderDiedError, match=r"\[5\] are gone .* do not send again"):
        send(sender, b"y" * size)
    send(sender, b"z")
    assert received(living, 2) == [b"y" * size, b"z"]


def test_readers_that_died_before_a_time_out_are_raised_with_the_next_message(
    ends: Make,
) -> None:
    sender, (dead, slow) = ends(2, on_dead_reader="raise")
    for _ in range(4):
        send(sender, b"x")
    dead.ring.close()
    for _ in range(2):
        with pytest.raises(QueueTimeoutError):
            send(sender, b"not sent")
    assert sender.statistics()["readers_removed"] == 1
    assert received(slow, 4) == [b"x"] * 4
    with pytest.raises(ReaderDiedError) as raised:
        send(sender, b"sent")
    assert raised.value.ranks == (0,)
    send(sender, b"after")
    assert received(slow, 2) == [b"sent", b"after"]


def test_local_readers_are_ready_even_if_remote_ones_died_meanwhile(
    ends: Make,
) -> None:
    class Elsewhere:
        """As much of a `RemoteSender` as is asked here."""

        def wait_ready(self, timeout: float | None) -> set[int]:
            return {4}

    sender, (receiver,) = ends()
    both = WritingEnd(sender, [0], Elsewhere(), WAITING, "raise")  # type: ignore[arg-type]
    with pytest.raises(ReaderDiedError, match=r"\[4\]"):
        both.wait_ready(0.0)
    receiver.wait_ready(0.0)


@pytest.mark.parametrize(
    "knobs", [{"spin": -1}, {"spin": 11}, {"look": 0}, {"look": 11}, {"warn_after": 0}]
)
def test_waits_that_make_no_sense_are_refused(knobs: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Waiting(**knobs)
