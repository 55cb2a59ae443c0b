"""Objects to chunks and back: what comes in pieces, and what no honest writer sends."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.shm.codec import (
    BUFFERS,
    ENCODED,
    Codec,
    MsgpackCodec,
    PickleCodec,
    body_of,
    decoder_of,
)
from kvindex.shm.ring.receiver import Assembly
from kvindex.shm.ring.ring import CONTINUED, LENGTH_BYTES, MORE, RAW
from kvindex.shm.ring.sender import fragments
from kvindex.wire.errors import DecodeError, EncodeError, KVIndexError

pytestmark = pytest.mark.unit

MOST = 1000


def first(total: int, data: bytes = b"") -> bytes:
    return struct.pack("<Q", total) + data


def decode(kind: int, body: Any, codec: Codec) -> Any:
    return decoder_of(codec)(kind, body)


def joined(parts: list[Any]) -> bytes:
    return b"".join(bytes(part) for part in parts)


# Pieces --------------------------------------------------------------------------------------


@given(
    parts=st.lists(st.binary(max_size=60), min_size=1, max_size=6),
    chunk_bytes=st.integers(LENGTH_BYTES, 40),
)
def test_pieces_fit_chunks_and_become_the_message_again(
    parts: list[bytes], chunk_bytes: int
) -> None:
    whole = b"".join(parts)
    if len(whole) <= chunk_bytes:
        return
    pieces = [
        (kind, joined(piece)) for kind, piece in fragments(BUFFERS, parts, len(whole), chunk_bytes)
    ]
    assert all(len(piece) <= chunk_bytes for _, piece in pieces)
    assert len(pieces) == -(-(len(whole) + LENGTH_BYTES) // chunk_bytes)
    assembly = Assembly(MOST)
    *early, last = [assembly.add(kind, piece) for kind, piece in pieces]
    assert early == [None] * (len(pieces) - 1)
    assert last == (BUFFERS, whole)
    assert assembly.given_up == 0


@pytest.mark.parametrize("total", [0, 2, 3, MOST + 1, 2**32, 2**63, 2**64 - 1])
def test_an_impossible_length_is_refused_before_memory_is_taken(total: int) -> None:
    assembly = Assembly(MOST)
    with pytest.raises(DecodeError, match=str(total)):
        assembly.add(RAW | MORE, first(total, b"abc"))
    assert assembly.add(RAW | CONTINUED, b"rest") is None
    assert assembly.add(RAW, b"whole") == (RAW, b"whole")


@pytest.mark.parametrize("piece", [b"", b"1234567"])
def test_a_first_piece_without_a_length_is_refused(piece: bytes) -> None:
    with pytest.raises(DecodeError, match="without a length"):
        Assembly(MOST).add(RAW | MORE, piece)


@pytest.mark.parametrize(
    ("kind", "piece"),
    [
        (RAW | CONTINUED, b"c"),  # too short for the last
        (RAW | CONTINUED, b"cdefg"),  # too long
        (RAW | MORE | CONTINUED, b"cdef"),  # complete, but not the last
        (RAW | MORE | CONTINUED, b"cdefghij"),
        (ENCODED | CONTINUED, b"cdef"),  # of another message
    ],
)
def test_a_piece_that_does_not_belong_is_refused_and_the_message_given_up(
    kind: int, piece: bytes
) -> None:
    assembly = Assembly(MOST)
    assert assembly.add(RAW | MORE, first(6, b"ab")) is None
    with pytest.raises(DecodeError, match="of a message of 6"):
        assembly.add(kind, piece)
    assert assembly.given_up == 1
    assert assembly.add(RAW | CONTINUED, b"cdef") is None
    assert assembly.add(RAW, b"whole") == (RAW, b"whole")


@given(chunks=st.lists(st.tuples(st.integers(0, 0xFF), st.binary(max_size=40)), max_size=12))
def test_any_chunks_are_a_message_or_an_error_of_ours(
    chunks: list[tuple[int, bytes]],
) -> None:
    assembly, codec = Assembly(MOST), MsgpackCodec()
    for kind, piece in chunks:
        try:
            message = assembly.add(kind, piece)
            if message is not None:
                decode(*message, codec)
        except KVIndexError:
            pass


# Bodies --------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_buffers_come_back(contents: list[bytes]) -> None:
    codec = MsgpackCodec()
    kind, parts, size = body_of([pickle.PickleBuffer(data) for data in contents], codec)
    assert kind == BUFFERS
    body = joined(list(parts))
    assert len(body) == size
    assert decode(kind, body, codec) == contents
    assert decode(kind, memoryview(body), codec) == contents


def test_buffers_are_not_copied_on_their_way_into_a_chunk() -> None:
    data = bytearray(5000)
    for codec in (MsgpackCodec(), PickleCodec()):
        _, parts, _ = body_of({"a": pickle.PickleBuffer(data)}, codec)
        data[0] += 1
        assert any(bytes(part) == data for part in parts if not isinstance(part, int))


def test_buffers_of_other_shapes_are_bytes() -> None:
    numbers = memoryview(bytearray(struct.pack("<4i", 1, 2, 3, 4))).cast("i", (2, 2))
    codec = MsgpackCodec()
    kind, parts, _ = body_of(pickle.PickleBuffer(numbers), codec)
    assert decode(kind, joined(list(parts)), codec) == numbers.tobytes()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01\x00",
        struct.pack("<I", 1),
        struct.pack("<IQ", 0, 5),
        struct.pack("<I", 2**32 - 1) + bytes(100),
        struct.pack("<IQQ", 1, 1, 2**64 - 1) + b"\xc0",
        struct.pack("<IQQ", 1, 2**63, 2**63) + b"\xc0",
        struct.pack("<IQQ", 1, 1, 5) + b"\xc0" + b"four",
        struct.pack("<IQQ", 1, 1, 3) + b"\xc0" + b"four",
        struct.pack("<IQQ", 1, 6, 0) + b"\xc7\x04\x01\x00\x00\x00",
        struct.pack("<IQQ", 1, 7, 0) + b"\xc7\x04\x01\x00\x00\x00\x01",
        struct.pack("<IQQ", 1, 7, 0) + b"\xc7\x04\x02\x00\x00\x00\x00",
    ],
)
def test_impossible_buffers_are_refused(body: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(BUFFERS, body, MsgpackCodec())


# Codecs --------------------------------------------------------------------------------------


ENDS_EARLY = [b"", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc0\xc0"]
NAMES_NOTHING = [b"", b"\x80\x05", b"\xff", b"\x80\x05\x97.", b"c_none\nx\n."]


@pytest.mark.parametrize(
    ("codec", "data"),
    [(MsgpackCodec(), data) for data in ENDS_EARLY] + [(PickleCodec(), d) for d in NAMES_NOTHING],
)
def test_an_object_that_ends_early_or_goes_too_deep_is_refused(codec: Codec, data: bytes) -> None:
    with pytest.raises(DecodeError) as raised:
        codec.decode(data, ())
    assert raised.value.size == len(data)


def test_an_object_that_cannot_be_encoded_is_refused_and_leaves_nothing_behind() -> None:
    codec = MsgpackCodec()
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for bad in (object(), 2**64, -(2**63) - 1, {1, object()}, lambda: None, deep, "\ud800"):
        with pytest.raises(EncodeError):
            codec.encode([pickle.PickleBuffer(b"left"), bad])
        assert codec.encode([1]) == (b"\x91\x01", ())
    with pytest.raises(EncodeError):
        PickleCodec().encode(lambda: None)


class Event(msgspec.Struct):
    seq: int


def test_a_type_says_what_messages_become() -> None:
    codec = MsgpackCodec(Event)
    data, _ = codec.encode(Event(7))
    assert codec.decode(data) == Event(7)
    with pytest.raises(DecodeError, match="seq"):
        codec.decode(b"\x80")


def test_small_buffers_stay_inside_a_pickle_and_large_ones_go_beside_it() -> None:
    small, large = pickle.PickleBuffer(bytearray(10)), pickle.PickleBuffer(bytearray(10_000))
    data, buffers = PickleCodec().encode([small, large])
    assert [len(memoryview(buffer)) for buffer in buffers] == [10_000]
    got = PickleCodec().decode(data, [bytearray(10_000)])
    assert got == [bytearray(10), bytearray(10_000)]


# What encoding leaves ------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [MsgpackCodec(), PickleCodec()], ids=["msgpack", "pickle"])
def test_a_buffer_with_holes_is_an_encode_error(codec: Codec) -> None:
    holes = pickle.PickleBuffer(memoryview(bytes(20000))[::2])
    with pytest.raises(EncodeError):
        codec.encode([holes])


class BoomError(BaseException):
    """What no codec catches."""


def test_an_encoding_that_fails_leaves_no_buffer_for_the_next_message() -> None:
    codec = MsgpackCodec()

    def boom(_: object) -> None:
        raise BoomError

    raises = type("Raises", (), {"__class__": property(boom)})()  # the hook's isinstance asks it
    with pytest.raises(BoomError):
        codec.encode([pickle.PickleBuffer(b"left"), raises])
    assert codec.encode([1]) == (b"\x91\x01", ())
