"""Where everything lies in a ring: Python and the native core agree, and strangers are refused."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvindex.shm import ShmRingBuffer
from kvindex.shm.ring.ring import HEADER_BYTES, Layout, SlotState
from kvindex.wire.errors import ClosedError, ConfigurationError, SegmentError
from tests.native_ring import KIND, LENGTH, NEXT_SEQ, SEQ, SLOT_STATE, STATE, needs_ring

if TYPE_CHECKING:
    from kvindex.wire._native import RingReader, RingWriter

pytestmark = [pytest.mark.unit, needs_ring]

GEOMETRIES = [(1, 1, 1), (2, 3, 64), (3, 4, 65), (39, 2, 100), (40, 5, 4097), (200, 2, 8)]


@pytest.fixture
def ring(request: pytest.FixtureRequest) -> Iterator[ShmRingBuffer]:
    """A ring of the geometry that the test is run with; else for two readers."""
    n_reader, max_chunks, max_chunk_bytes = getattr(request, "param", (2, 3, 100))
    with ShmRingBuffer(n_reader, max_chunk_bytes, max_chunks) as ring:
        yield ring


of_each_shape = pytest.mark.parametrize("ring", GEOMETRIES, indirect=True)


def parties(ring: ShmRingBuffer) -> tuple[RingWriter, list[RingReader], list[ShmRingBuffer]]:
    places = range(ring.layout.n_reader)
    writer = ring.writer()
    for place in places:
        writer.reserve(place)
    rings = [ShmRingBuffer(*ring.handle()) for _ in places]
    return writer, [ring.reader(place) for place, ring in zip(places, rings, strict=True)], rings


def number(ring: ShmRingBuffer, form: str, at: int) -> int:
    return int(struct.unpack_from(form, ring.segment.memory, at)[0])


@of_each_shape
def test_chunks_and_flags_are_where_the_parties_have_them(ring: ShmRingBuffer) -> None:
    layout = ring.layout
    writer, readers, rings = parties(ring)
    for seq in range(2 * layout.max_chunks + 1):
        chunk = seq % layout.max_chunks
        body = bytes([seq + 1]) * layout.max_chunk_bytes
        assert writer.index == chunk
        assert writer.write(5, body, 0.0, 0.0)
        with ring.get_data(chunk) as data, ring.get_metadata(chunk) as flags:
            assert bytes(data) == body
            assert list(flags) == [1] + [0] * layout.n_reader
        record = layout.record(chunk)
        assert number(ring, "=Q", record + SEQ) == seq
        assert number(ring, "=Q", record + LENGTH) == layout.max_chunk_bytes
        assert number(ring, "=I", record + KIND) == 5
        assert number(ring, "=Q", NEXT_SEQ) == seq + 1
        for place, reader in enumerate(readers):
            assert reader.read(1 << 30, 0.0, 0.0) == (5, body)
            with ring.get_metadata(chunk) as flags:
                assert list(flags[1:]) == [1] * (place + 1) + [0] * (layout.n_reader - place - 1)
    for attached in rings:
        attached.close()


@of_each_shape
def test_states_are_where_the_parties_have_them(ring: ShmRingBuffer) -> None:
    last = ring.layout.n_reader - 1
    writer = ring.writer()
    state = ring.layout.slot(last) + SLOT_STATE
    writer.reserve(last)
    assert number(ring, "=I", state) == SlotState.RESERVED
    other = ShmRingBuffer(*ring.handle())
    reader = other.reader(last)
    assert number(ring, "=I", state) == SlotState.ACTIVE
    reader.leave()
    assert number(ring, "=I", state) == SlotState.LEFT
    reader.attach()
    assert number(ring, "=I", state) == SlotState.JOINING
    assert writer.admit() == 1
    assert number(ring, "=I", state) == SlotState.ACTIVE
    assert writer.remove(last, True)
    assert number(ring, "=I", state) == SlotState.EVICTED
    assert reader.evicted
    writer.state |= 2
    assert number(ring, "=I", STATE) == reader.state == 2
    other.close()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_nothing_overlaps(geometry: tuple[int, int, int]) -> None:
    layout = Layout(*geometry)
    regions = [(0, HEADER_BYTES)]
    regions += [(layout.slot(place), 64) for place in range(layout.n_reader)]
    regions += [(layout.record(i), 25 + layout.n_reader) for i in range(layout.max_chunks)]
    regions += [(layout.chunk(i), layout.max_chunk_bytes) for i in range(layout.max_chunks)]
    for (start, size), (following, _) in pairwise(regions):
        assert start + size <= following
    assert sum(regions[-1]) <= layout.total_bytes


@pytest.mark.parametrize("bad", [0, -1, 1 << 50])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_sizes_out_of_range_are_refused(position: int, bad: int) -> None:
    sizes: list[Any] = [1, 64, 1]
    sizes[position] = bad
    with pytest.raises(ConfigurationError):
        ShmRingBuffer(*sizes)


# Attaching -----------------------------------------------------------------------------------


def test_a_ring_attaches_by_its_handle_and_by_pickle() -> None:
    with ShmRingBuffer(2, 100, 3) as ring:
        assert ring.handle() == (2, 100, 3, ring.name)
        for attached in (ShmRingBuffer(*ring.handle()), pickle.loads(pickle.dumps(ring))):
            with attached, ring.get_data(2) as ours, attached.get_data(2) as theirs:
                ours[:3] = b"abc"
                assert bytes(theirs[:3]) == b"abc"
                assert attached.handle() == ring.handle()
                assert not attached.is_maker
            assert attached.segment.closed
        with ShmRingBuffer(*pickle.loads(pickle.dumps(ring)).handle()) as again:
            assert again.name == ring.name
    with pytest.raises(SegmentError):
        ShmRingBuffer(*ring.handle())


@pytest.mark.parametrize("chunk", [-1, 3, 1000])
def test_there_are_only_so_many_chunks(ring: ShmRingBuffer, chunk: int) -> None:
    for view in (ring.get_data, ring.get_metadata):
        with pytest.raises(IndexError):
            with view(chunk):
                pass
    ring.close()
    with pytest.raises(ClosedError), ring.get_data(0):
        pass


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (0, b"X", "is not a ring"),
        (8, b"\x09", "version 9 and this kvindex speaks 2"),
        (12, b"\x09", r"\[9, 3, 100\]; the handle says \[2, 3, 100\]"),
        (16, b"\x09", r"\[2, 9, 100\]"),
        (20, b"\x09", r"\[2, 3, 9\]"),
    ],
)
def test_a_header_that_says_something_else_is_refused(
    ring: ShmRingBuffer, at: int, value: bytes, text: str
) -> None:
    ring.segment.memory[at : at + 1] = value
    with pytest.raises(SegmentError, match=text):
        ShmRingBuffer(*ring.handle())


def test_memory_shorter_than_the_header_says_is_refused() -> None:
    layout = Layout(2, 3, 100)
    with memoryview(layout.header().ljust(HEADER_BYTES, b"\0")) as memory:
        with pytest.raises(SegmentError, match=f"has 4096 bytes, not {layout.total_bytes}"):
            layout.check_header(memory, "short")
        with pytest.raises(SegmentError, match="of 100 bytes is no ring"):
            layout.check_header(memory[:100], "short")


def test_there_are_only_so_many_places_and_each_has_one_living_reader(ring: ShmRingBuffer) -> None:
    with ShmRingBuffer(*ring.handle()) as first, ShmRingBuffer(*ring.handle()) as second:
        for place in (-1, 2):
            with pytest.raises(SegmentError, match=f"no place {place}"):
                first.reader(place)
        first.reader(1)
        with pytest.raises(SegmentError, match=r"place 1 .* has a living reader"):
            second.reader(1)
        assert second.reader_lives(1)
        assert not second.reader_lives(0)
        first.close()
        second.reader(1)


# Damaged memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [(1, 2, 64)], indirect=True)
def test_the_parties_refuse_what_their_memory_cannot_hold(ring: ShmRingBuffer) -> None:
    from kvindex.wire._native import RingReader, RingWriter

    with pytest.raises(ValueError, match="does not hold such a ring"):
        RingWriter(ring.segment.memory, 1, 500, 64)
    with pytest.raises(ValueError, match="does not hold such a ring"):
        RingReader(ring.segment.memory, 1, 500, 64, 0)
    writer, (reader,), (attached,) = parties(ring)
    with pytest.raises(ValueError, match="longer than a chunk"):
        writer.write(0, bytes(65), 0.0, 0.0)
    with pytest.raises(ValueError, match="longer than a chunk"):
        writer.write(0, [bytes(60), bytes(5)], 0.0, 0.0)
    with pytest.raises(ValueError, match="longer than a chunk"):
        writer.publish(0, 65)
    for use in (writer.reserve, writer.slot_state, lambda place: writer.remove(place, True)):
        with pytest.raises((IndexError, TypeError)):
            use(-1)
        with pytest.raises(IndexError):
            use(1)
    assert reader.read(64, 0.0, 0.0) is None
    assert writer.write(0, [], 0.0, 0.0)
    assert writer.write(0, b"x", 0.0, 0.0)
    assert not writer.write(0, b"full", 0.0, 0.0)
    with pytest.raises(ValueError, match="not free"):
        writer.publish(0, 1)
    attached.close()


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_removed_reader_gets_an_error(ring: ShmRingBuffer, evict: bool, started: bool) -> None:
    with ShmRingBuffer(*ring.handle()) as other:
        writer, reader = ring.writer(), other.reader(0)
        assert not reader.evicted
        writer.admit()
        if started:
            assert not reader.ready()
        assert not reader.evicted
        assert writer.remove(0, evict)
        assert reader.evicted
        writer.reserve(0)  # the place is another's
        assert reader.evicted
