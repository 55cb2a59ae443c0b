"""What the parties of a remote queue say, as bytes."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.errors import ConfigurationError
from kvindex.ring import Buffer
from kvindex.shm.remote.frames import (
    MAX_CONTROL_BYTES,
    VERSION,
    Acknowledgement,
    Bye,
    Closed,
    Evicted,
    Hello,
    Malformed,
    Ready,
    Refusal,
    Refused,
    Welcome,
    encode,
    message_header,
    packed_message,
    parse_header,
    parse_reader,
    parse_writer,
    unpack_message,
)
from kvindex.shm.remote.sockets import RemoteLink

TOKEN = bytes(range(32))


def unpacked(part: bytes) -> tuple[int, list[bytes]]:
    seq, frames = unpack_message(part)
    return seq, [bytes(frame) for frame in frames]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (encode(Hello(VERSION, 3, TOKEN)), Hello(VERSION, 3, TOKEN)),
        (encode(Acknowledgement(2**64 - 1)), Acknowledgement(2**64 - 1)),
        (encode(Bye()), Bye()),
    ],
)
def test_what_readers_say_is_understood(part: bytes, said: object) -> None:
    assert parse_reader(part) == said
    assert len(part) <= MAX_CONTROL_BYTES


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (encode(Welcome(9, 64, 1000, True)), Welcome(9, 64, 1000, True)),
        *((encode(Refused(reason)), Refused(reason)) for reason in Refusal),
        (encode(Ready()), Ready()),
        (encode(Evicted()), Evicted()),
        (encode(Closed(12)), Closed(12)),
    ],
)
def test_what_the_writer_says_is_understood(part: bytes, said: object) -> None:
    assert parse_writer(part) == said


def test_a_hello_of_another_version_tells_the_version() -> None:
    assert parse_reader(msgspec.msgpack.encode(["Hello", 7])) == Hello(7)
    said = parse_reader(msgspec.msgpack.encode(["Hello", 7, 1, TOKEN, "what version 7 adds"]))
    assert isinstance(said, Hello)
    assert said.version == 7


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"A",
        msgspec.msgpack.encode(["Hello"]),
        encode(Hello(VERSION, -1, TOKEN)),
        encode(Hello(VERSION, 2**32, TOKEN)),
        encode(Hello(VERSION, 1, TOKEN))[:-1],
        encode(Hello(VERSION, 1, TOKEN)) + b"x",
        encode(Bye()) * 2,
        encode(Ready()),
    ],
)
def test_what_no_reader_says_is_malformed(part: bytes) -> None:
    with pytest.raises(Malformed):
        parse_reader(part)


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"Z",
        b"C123",
        msgspec.msgpack.encode(["Refused", 99]),
        encode(Welcome(0, 0, 10, False)),
        encode(Welcome(0, 10, 0, False)),
        message_header(0, 1),
        b"HTTP/1.1 400 Bad Request",
    ],
)
def test_what_no_writer_says_is_malformed(part: bytes) -> None:
    with pytest.raises(Malformed):
        parse_writer(part)


def test_a_header_says_how_many_frames_follow() -> None:
    assert parse_header(message_header(4, 3)) == (4, 3)


@pytest.mark.parametrize(
    "part", [message_header(0, 0), message_header(0, 65_537), b"M", message_header(0, 1) + b"x"]
)
def test_a_header_that_cannot_be_is_malformed(part: bytes) -> None:
    with pytest.raises(Malformed):
        parse_header(part)


@given(seq=st.integers(0, 2**64 - 1), frames=st.lists(st.binary(max_size=40), min_size=1))
def test_a_packed_message_comes_out_as_it_went_in(seq: int, frames: list[bytes]) -> None:
    assert unpacked(packed_message(seq, frames)) == (seq, frames)


def test_frames_may_be_any_buffers_of_bytes() -> None:
    frames: list[Buffer] = [bytearray(b"one"), memoryview(b"two"), b"three"]
    assert unpacked(packed_message(0, frames)) == (0, [b"one", b"two", b"three"])
    assert unpacked(packed_message(0, [memoryview(b"one")])) == (0, [b"one"])


@pytest.mark.parametrize(
    "part",
    [
        b"P",
        struct.pack(">cQI", b"P", 0, 0),
        struct.pack(">cQI", b"P", 0, 2**32 - 1),
        struct.pack(">cQII", b"P", 0, 2, 1),
        struct.pack(">cQII", b"P", 0, 2, 2**32 - 1) + b"short",
    ],
)
def test_a_packed_message_that_lies_about_its_sizes_is_malformed(part: bytes) -> None:
    with pytest.raises(Malformed):
        unpack_message(part)


@given(st.binary(max_size=80))
def test_no_bytes_upset_the_parsers(part: bytes) -> None:
    for parse in (parse_reader, parse_writer, parse_header, unpack_message):
        try:
            parse(part)
        except Malformed:
            pass


@pytest.mark.parametrize("field", ["heartbeat", "heartbeat_timeout", "handshake_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_link_without_time_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=field):
        RemoteLink(**{field: value})


def test_a_link_may_linger_for_no_time_but_not_for_less() -> None:
    assert RemoteLink(linger=0.0).linger == 0.0
    with pytest.raises(ConfigurationError, match="linger"):
        RemoteLink(linger=-1.0)
