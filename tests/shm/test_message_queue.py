"""One suite for a queue whose readers are threads, processes, or at the other end of TCP."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvindex.shm import MessageQueue, MsgpackCodec, Waiting
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    EncodeError,
    QueueClosedError,
    QueueTimeoutError,
    SegmentError,
)
from tests.live import PATIENCE
from tests.native_ring import needs_ring
from tests.shm.conftest import CHUNK, WINDOW, Party
from tests.shm.queue_peers import End, Nursery, Peer, Running, ThreadPeer, ended

pytestmark = [pytest.mark.e2e, needs_ring]


def exchanged(writer: MessageQueue, readers: list[Peer], messages: list[Any]) -> list[Any]:
    """Send messages that every reader reads meanwhile; return what all of them received."""
    for reader in readers:
        reader.start("take", len(messages))
    for message in messages:
        writer.enqueue(message, PATIENCE)
    received, *others = [reader.result() for reader in readers]
    assert all(other == received for other in others)
    return list(received)


def sending(writer: MessageQueue, messages: list[Any]) -> Running:
    def send() -> None:
        for message in messages:
            writer.enqueue(message, PATIENCE)

    return Running(send)


def fill(writer: MessageQueue) -> int:
    """Send numbers until there is no room; return how many were sent."""
    for number in range(100):
        try:
            writer.enqueue(number, timeout=0.01)
        except QueueTimeoutError:
            return number
    raise AssertionError("there is always room")


# What readers get ----------------------------------------------------------------------------


@pytest.mark.parametrize("n_reader", [1, 2, 4])
def test_every_reader_gets_every_message_in_order(party: Party, n_reader: int) -> None:
    messages = [[number, "x" * (number % 90)] for number in range(300)]
    assert exchanged(*party.ready(n_reader), messages) == messages


def test_messages_of_every_size(party: Party) -> None:
    edges = (0, CHUNK, 2 * CHUNK - 8, WINDOW * CHUNK, 10 * CHUNK, 4000)
    sizes = sorted({max(0, edge + by) for edge in edges for by in range(-9, 10)})
    messages = [bytes(number % 251 for number in range(size)) for size in sizes]
    assert exchanged(*party.ready(), messages) == messages


VALUES: list[Any] = [
    None, True, False, 0, -1, 2**64 - 1, -(2**63), 0.5, "", "é☃", b"", b"\x00\xff", [], {},
    [1, [2, [3, None]]], {"a": {"b": [b"c"]}, "d": 1.5}, {1: "one"}, ["x" * 500, b"y" * 500],
]  # fmt: skip


def test_msgpack_brings_back_what_it_carries(party: Party) -> None:
    received = exchanged(*party.ready(), VALUES)
    assert received == VALUES
    assert [type(value) for value in received] == [type(value) for value in VALUES]


@pytest.mark.parametrize("size", [0, 1, CHUNK, 5000])
def test_buffers_go_beside_the_object(party: Party, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    buffers: list[Any] = [bytearray(content), memoryview(content), memoryview(bytearray(content))]
    message = {"blocks": [pickle.PickleBuffer(buffer) for buffer in buffers], "n": 3}
    received = exchanged(*party.ready(), [message])
    assert received == [{"blocks": [bytearray(content)] * 3, "n": 3}]


class Tensor:
    """As numpy's arrays do it: the data in a buffer of its own."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Tensor, (pickle.PickleBuffer(self.data),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and bytes(self.data) == bytes(other.data)

    __hash__ = None  # type: ignore[assignment]


def test_pickle_brings_back_everything_where_both_sides_ask_for_it(party: Party) -> None:
    curve = Curve.generate() if party.is_remote else None
    values = [*VALUES, (1, 2), {3, 4}, 2**200, bytearray(7), Waiting(spin=0.0)]
    values += [Tensor(bytearray(100)), [Tensor(bytearray(b"z" * 9000)), "and", bytearray(5)]]
    received = exchanged(*party.ready(codec="pickle", curve=curve), values)
    assert received == values
    assert [type(value) for value in received] == [type(value) for value in values]


class Shout:
    """A codec of the user's own."""

    name = "shout"

    def encode(self, obj: Any) -> tuple[bytes, list[bytes]]:
        return str(obj).upper().encode(), []

    def decode(self, data: Any, buffers: Any) -> str:
        return bytes(data).decode()


def test_a_codec_of_ones_own(party: Party) -> None:
    received = exchanged(*party.ready(codec=Shout()), ["hello", "h" * 500])
    assert received == ["HELLO", "H" * 500]


def test_a_message_that_the_codec_cannot_carry_is_refused_and_the_queue_goes_on(
    party: Party,
) -> None:
    writer, (reader,) = party.ready()
    for bad in (object(), 2**64, {1j: 2}):
        with pytest.raises(EncodeError):
            writer.enqueue(bad)
    with pytest.raises(EncodeError):
        writer.enqueue([pickle.PickleBuffer(b"kept?"), object()])
    writer.enqueue([1], PATIENCE)
    assert reader.call("take", 1) == [[1]]


def test_a_message_of_the_greatest_length_is_carried_and_a_longer_one_refused(
    party: Party,
) -> None:
    writer, (reader,) = party.ready(max_message_bytes=1000)
    reader.start("take", 2)
    writer.enqueue(b"x" * 1000, PATIENCE)
    with pytest.raises(EncodeError, match="1001 bytes: at most 1000"):
        writer.enqueue(b"x" * 1001)
    writer.enqueue(b"y", PATIENCE)
    assert reader.result() == [b"x" * 1000, b"y"]


def test_a_message_that_the_codec_cannot_read_counts_as_read(party: Party) -> None:
    writer = party.writer()
    reader = party.reader(writer, 0, decode_to=list[int])
    reader.start("ready")
    writer.wait_until_ready(PATIENCE)
    reader.result()
    for wrong in ("a string", ["x" * 500]):
        reader.start("take", 1)
        writer.enqueue(wrong, PATIENCE)
        with pytest.raises(DecodeError):
            reader.result()
    writer.enqueue([7], PATIENCE)
    assert reader.call("take", 1) == [[7]]


def test_memory_is_given_to_write_a_message_into_and_to_read_it_from(party: Party) -> None:
    writer, (reader,) = party.ready()
    sizes = [0, 1, CHUNK]
    reader.start("read_raw", len(sizes) + 2)
    for size in sizes:
        with writer.acquire_write(PATIENCE, length=size) as view:
            assert len(view) == size
            view[:] = b"w" * size
    writer.enqueue(b"x" * 300, PATIENCE)
    writer.enqueue([1, 2], PATIENCE)
    encoded, _ = MsgpackCodec().encode([1, 2])
    assert reader.result() == [b"w" * size for size in sizes] + [b"x" * 300, encoded]


def test_a_message_whose_writing_fails_is_not_sent(party: Party) -> None:
    writer, (reader,) = party.ready()
    with pytest.raises(ZeroDivisionError):
        with writer.acquire_write(PATIENCE, length=4) as view:
            view[:] = bytes(1 // (len(view) - 4))
    writer.enqueue(b"next", PATIENCE)
    assert reader.call("take", 1) == [b"next"]
    assert writer.statistics()["messages"] == 1


@pytest.mark.parametrize(("most", "length"), [(10_000, CHUNK), (CHUNK, CHUNK), (10, 10), (1, 1)])
def test_as_much_memory_is_given_as_a_chunk_and_a_message_may_have(
    party: Party, most: int, length: int
) -> None:
    writer, (reader,) = party.ready(max_message_bytes=most)
    reader.start("read_raw", 1)
    with writer.acquire_write(PATIENCE) as view:
        assert len(view) == length
        view[:] = b"w" * length
    assert reader.result() == [b"w" * length]
    wrong = [length + 1, -1, 10**9]
    for bad in wrong:
        with pytest.raises(ConfigurationError, match=f"0 to {length} bytes"):
            with writer.acquire_write(PATIENCE, length=bad):
                raise AssertionError("refused only when all is written")


# Waiting -------------------------------------------------------------------------------------


def test_messages_sent_before_readers_attach_wait_for_them(party: Party) -> None:
    writer = party.writer(2)
    messages = list(range(20))
    under_way = sending(writer, messages)
    readers = [party.reader(writer, rank) for rank in range(2)]
    for reader in readers:
        reader.start("take", len(messages))
    assert [reader.result() for reader in readers] == [messages] * 2
    assert under_way.finish() is None


def test_nobody_is_ready_before_all_are(party: Party) -> None:
    writer = party.writer(2)
    first = party.reader(writer, 0)
    with pytest.raises(QueueTimeoutError):
        first.call("ready", 0.05)
    with pytest.raises(QueueTimeoutError):
        writer.wait_until_ready(0.05)
    second = party.reader(writer, 1)
    first.start("ready")
    second.start("ready")
    writer.wait_until_ready(PATIENCE)
    first.result()
    second.result()


def test_a_full_queue_times_out_and_loses_nothing(party: Party) -> None:
    writer, readers = party.ready(2)
    sent = fill(writer)
    assert sent == WINDOW
    with pytest.raises(QueueTimeoutError):
        writer.enqueue(b"x" * 1000, timeout=0.0)
    assert readers[0].call("take", sent) == list(range(sent))
    with pytest.raises(QueueTimeoutError, match=r"0\.01 s") as raised:
        writer.enqueue("never", timeout=0.01)  # the other reader has read nothing yet
    assert raised.value.timeout == 0.01
    assert readers[1].call("take", sent) == list(range(sent))
    writer.enqueue("after", PATIENCE)
    for reader in readers:
        assert reader.call("take", 1) == ["after"]


def test_a_read_that_times_out_consumes_nothing(party: Party) -> None:
    writer, (reader,) = party.ready()
    for timeout in (-1.0, 0.0, 0.01):
        with pytest.raises(QueueTimeoutError):
            reader.call("take", 1, timeout)
    writer.enqueue("after", PATIENCE)
    assert reader.call("take", 1) == ["after"]


def test_a_writer_that_waits_goes_on_when_there_is_room(party: Party) -> None:
    writer, (reader,) = party.ready()
    sent = fill(writer)
    under_way = sending(writer, ["more"] * 10)
    assert reader.call("take", sent + 10) == [*range(sent), *["more"] * 10]
    assert under_way.finish() is None


# Coming and going ----------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, WINDOW])
def test_readers_read_what_was_sent_before_the_writer_closed(party: Party, sent: int) -> None:
    writer, readers = party.ready(2)
    for number in range(sent):
        writer.enqueue(number, PATIENCE)
    for reader in readers:
        reader.start("drain")
    writer.close()
    for reader in readers:
        assert reader.result() == (list(range(sent)), "QueueClosedError")
        with pytest.raises(QueueClosedError):
            reader.call("take", 1)


def test_the_writer_goes_on_without_a_reader_that_left(party: Party) -> None:
    writer, (leaving, staying) = party.ready(2)
    fill(writer)
    staying.call("take", WINDOW)
    leaving.call("close")
    staying.start("take", 50)
    for number in range(50):
        writer.enqueue(number, PATIENCE)
    assert staying.result() == list(range(50))
    assert writer.statistics()["messages"] == WINDOW + 50


def test_a_reader_in_place_of_another_reads_on_from_one_exact_message(party: Party) -> None:
    writer, (leaving, staying) = party.ready(2)
    for number in range(WINDOW):
        writer.enqueue(number, PATIENCE)
    staying.call("take", WINDOW)
    leaving.call("close")
    replacing = party.reader(writer, 0)
    staying.start("drain")
    replacing.start("drain")
    assert sending(writer, list(range(WINDOW, 500))).finish() is None
    writer.close()
    assert staying.result() == (list(range(WINDOW, 500)), "QueueClosedError")
    received, ended_by = replacing.result()
    assert ended_by == "QueueClosedError"
    assert received == list(range(500))[-len(received) :] if received else True
    if not party.is_remote:  # over TCP it may come later than all that is sent
        assert received == list(range(WINDOW, 500))


def test_a_rank_has_one_reader(party: Party) -> None:
    writer, _ = party.ready(2)
    handle = writer.export_handle().to_bytes()
    second = party.peer()
    if party.is_remote:  # the writer may be a while in noticing that a predecessor is gone
        second.call("attach", handle, 1)
        second.start("ready", 0.3)
        fill(writer)
        with pytest.raises(QueueTimeoutError):
            writer.enqueue(None, 0.2)
        with pytest.raises(QueueTimeoutError, match="connected, and not accepted yet"):
            second.result()
    else:
        with pytest.raises(SegmentError, match=r"place 1 .* has a living reader already"):
            second.call("attach", handle, 1)


def test_a_wrong_rank_is_refused(party: Party) -> None:
    writer = party.writer(1)
    for rank in (-1, 1 << 40) if party.is_remote else (-1, 1, 10**6):
        reason = "rank must be 0 to" if party.is_remote else f"rank {rank} is none of"
        with pytest.raises(ConfigurationError, match=reason):
            party.reader(writer, rank)


def test_a_closed_end_accepts_no_calls(party: Party) -> None:
    writer, (reader,) = party.ready()
    writer.enqueue(1, PATIENCE)
    reader.call("close")
    reader.call("close")
    for read in ("take", "read_raw"):
        with pytest.raises(ClosedError):
            reader.call(read, 1)
    writer.close()
    writer.close()
    with pytest.raises(ClosedError):
        writer.enqueue(2)
    with pytest.raises(ClosedError):
        with writer.acquire_write(length=1):
            pass
    with pytest.raises(ClosedError):
        writer.wait_until_ready(1.0)


def test_statistics_count_what_happened(party: Party) -> None:
    writer, readers = party.ready(2, max_chunks=8)
    for message in ("short", b"x" * 150, ["last"]):
        writer.enqueue(message, PATIENCE)
    for reader in readers:
        reader.call("take", 3)
        assert reader.call("statistics")["messages"] == 3
    counted = writer.statistics()
    assert counted["messages"] == 3
    if party.is_remote:
        assert counted["local"] is None
        assert counted["remote"]["sent"] == 3
        assert counted["remote"]["connected"] == 2
    else:
        assert counted["remote"] is None
        assert counted["local"]["chunks"] == 5
        assert counted["local"]["fragments"] == 3
        assert counted["local"]["readers_removed"] == 0
        assert readers[0].call("statistics")["local"]["behind"] == 0


# Local and remote readers of one queue -----------------------------------------------------------


@pytest.fixture
def mixed(nursery: Nursery) -> Iterator[Callable[..., tuple[MessageQueue, list[Peer]]]]:
    """Make a queue with two local readers, a thread and a process, and two remote ones."""
    with ExitStack() as stack, ended([]) as peers:

        def make(**knobs: Any) -> tuple[MessageQueue, list[Peer]]:
            writer = MessageQueue(
                4, 2, [1, 3], CHUNK, WINDOW, "127.0.0.1", remote_window=WINDOW, **knobs
            )
            stack.callback(writer.close)
            for rank in range(4):
                peers.append(ThreadPeer(End()) if rank < 2 else nursery.fork())
                peers[-1].call("attach", writer.export_handle().to_bytes(), rank)
                peers[-1].start("ready")
            writer.wait_until_ready(PATIENCE)
            for peer in peers:
                peer.result()
            return writer, peers

        yield make


def test_local_and_remote_readers_get_the_same(
    mixed: Callable[..., tuple[MessageQueue, list[Peer]]],
) -> None:
    writer, readers = mixed()
    messages: list[Any] = [[number, b"x" * (number * 7 % 300)] for number in range(100)]
    for reader in readers:
        reader.start("take", len(messages) + 2)
    for message in messages:
        writer.enqueue(message, PATIENCE)
    sizes = [len(MsgpackCodec().encode(message)[0]) for message in messages]
    fragments = [-(-(size + 8) // CHUNK) for size in sizes if size > CHUNK]
    assert writer.statistics()["local"]["fragments"] == sum(fragments)
    writer.enqueue([pickle.PickleBuffer(b"b" * 100)], PATIENCE)
    with writer.acquire_write(PATIENCE, length=5) as view:
        view[:] = b"bytes"
    for reader in readers:
        assert reader.result() == [*messages, [b"b" * 100], b"bytes"]


@pytest.mark.parametrize("slow", [1, 2])
def test_a_message_for_which_one_reader_has_no_room_reaches_none(
    mixed: Callable[..., tuple[MessageQueue, list[Peer]]], slow: int
) -> None:
    writer, readers = mixed()
    quick = [reader for rank, reader in enumerate(readers) if rank != slow]
    for number in range(WINDOW):
        writer.enqueue(number, PATIENCE)
    for reader in quick:
        assert reader.call("take", WINDOW) == list(range(WINDOW))
    for late in ("lost", "lost too"):
        with pytest.raises(QueueTimeoutError):
            writer.enqueue(late, timeout=0.05)
    with pytest.raises(QueueTimeoutError):
        with writer.acquire_write(0.05, length=4) as view:
            view[:] = b"lost"
    assert readers[slow].call("take", WINDOW) == list(range(WINDOW))
    writer.enqueue("after", PATIENCE)
    for reader in readers:
        assert reader.call("take", 1) == ["after"]


@pytest.mark.parametrize("slow", [1, 2])
def test_a_long_message_for_which_one_reader_has_room_for_the_beginning_only_reaches_none(
    mixed: Callable[..., tuple[MessageQueue, list[Peer]]], slow: int
) -> None:
    writer, readers = mixed()
    filled = WINDOW - (slow == 1)  # of a remote reader's room a message takes one, however long
    for number in range(filled):
        writer.enqueue(number, PATIENCE)
    for rank, reader in enumerate(readers):
        if rank != slow:
            assert reader.call("take", filled) == list(range(filled))
    for size in (2 * CHUNK, 10 * CHUNK):
        with pytest.raises(QueueTimeoutError):
            writer.enqueue(b"x" * size, timeout=0.05)
    assert readers[slow].call("take", filled) == list(range(filled))
    for reader in readers:
        reader.start("take", 2)
    for message in (b"y" * 10 * CHUNK, "after"):
        writer.enqueue(message, PATIENCE)
    for reader in readers:
        assert reader.result() == [b"y" * 10 * CHUNK, "after"]
    assert writer.statistics()["messages"] == filled + 2
