"""Bodies of the log: every message comes out as it went in, and nothing else comes out."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.replicas.nats.log import AROUND_BYTES, BodyReader, cut_message, join_bodies
from kvindex.wire.errors import DecodeError
from tests.examples import examples

pytestmark = pytest.mark.property

MESSAGES = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def split(*bodies: bytes, most: int = 1 << 20) -> list[bytes]:
    reader = BodyReader(most)
    return [bytes(message) for body in bodies for message in reader.split(body)]


@examples(40)
@given(st.lists(MESSAGES), st.integers(AROUND_BYTES + 1, 50))
def test_messages_come_out_as_they_went_in_whatever_was_cut(
    turns: list[list[bytes]], room: int
) -> None:
    bodies: list[bytes] = []
    for messages in turns:
        bodies.append(join_bodies(messages))
        bodies += cut_message(b"long" * 20, room)
    wanted = [message for messages in turns for message in [*messages, b"long" * 20]]
    assert split(*bodies) == wanted
    assert all(len(body) <= room for body in cut_message(b"long" * 20, room))


@given(st.integers(1, 8))
def test_a_reader_that_begins_within_a_message_leaves_that_one_out(skipped: int) -> None:
    bodies = [*cut_message(bytes(40), 9), join_bodies([b"whole", b"other"])]
    assert len(bodies) == 9
    assert split(*bodies[skipped:]) == [b"whole", b"other"]


def test_the_body_that_begins_an_epoch_is_empty() -> None:
    assert join_bodies([]) == b""
    assert split(b"", join_bodies([b"a"])) == [b"a"]


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_are_pieces_in_order(body: bytes) -> None:
    try:
        messages = split(body)
    except DecodeError:
        return
    assert sum(map(len, messages)) <= len(body)
    assert b"" not in messages


@pytest.mark.parametrize(
    ("bodies", "reason"),
    [
        ([b"\0\0"], "within a length"),
        ([b"\0\0\0\x05abc"], "5 bytes: 3 follow"),
        ([b"\0\0\0\0"], "0 bytes"),
        ([join_bodies([b"a"]), *cut_message(bytes(20), 14)[1:]], "continues nothing"),
        ([cut_message(bytes(20), 14)[0], join_bodies([b"a"])], "a piece is missing"),
        ([cut_message(bytes(20), 14)[0] + join_bodies([b"a"])], "others follow it here"),
    ],
)
def test_what_is_wrong_is_refused_by_its_reason(bodies: list[bytes], reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        split(*bodies)


def test_a_message_that_never_ends_is_refused_and_memory_is_bounded() -> None:
    piece = struct.pack(">I", 1 << 30 | 1 << 16) + bytes(1 << 16)
    more = struct.pack(">I", 3 << 30 | 1 << 16) + bytes(1 << 16)
    reader = BodyReader(most=1 << 20)
    assert list(reader.split(piece)) == []
    for _ in range(15):
        assert list(reader.split(more)) == []
    with pytest.raises(DecodeError, match="over 1048576 bytes"):
        list(reader.split(more))


def test_the_cost_of_tiny_messages_is_that_of_their_bytes() -> None:
    body = join_bodies([b"x"] * 20_000)
    reader = BodyReader()
    tracemalloc.start()
    try:
        assert sum(1 for _ in reader.split(body)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
