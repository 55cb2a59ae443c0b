"""What the parties of a remote queue say, as bytes."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.shm.remote.protocol import (
    MAX_READER_BYTES,
    VERSION,
    Acknowledgement,
    Bye,
    Closed,
    Evicted,
    Hello,
    Malformed,
    Message,
    Packet,
    Probe,
    Refused,
    Welcome,
    decode,
    encode,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "packet",
    [
        Hello(VERSION, 3),
        Acknowledgement(2**64 - 1),
        Bye(),
        Welcome(9, 64, True),
        Refused("why"),
        Probe(ready=True),
        Evicted(),
        Closed(12),
        Message(4, 2, []),
    ],
)
def test_a_packet_comes_out_as_it_went_in(packet: Packet) -> None:
    assert decode(encode(packet)) == packet
    assert len(encode(packet)) <= MAX_READER_BYTES


def test_a_hello_of_another_version_has_the_version() -> None:
    assert decode(msgspec.msgpack.encode(["Hello", 7])) == Hello(7)
    hello = decode(msgspec.msgpack.encode(["Hello", 7, 1, b"token", "new"]))
    assert isinstance(hello, Hello)
    assert hello.version == 7


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"A",
        msgspec.msgpack.encode(["Hello"]),
        encode(Hello(VERSION, -1)),
        encode(Hello(VERSION, 2**32)),
        encode(Hello(VERSION, 1))[:-1],
        encode(Hello(VERSION, 1)) + b"x",
        encode(Bye()) * 2,
        b"C123",
        msgspec.msgpack.encode(["Refused", 99]),
        encode(Refused("x" * 501)),
        encode(Welcome(0, 0, False)),
        encode(Message(0, 0, [memoryview(b"whole")]))[:-1],
        encode(Message(0, 0, [memoryview(b"")] * 65_538)),
        b"HTTP/1.1 400 Bad Request",
    ],
)
def test_other_bytes_are_no_packet(part: bytes) -> None:
    with pytest.raises(Malformed):
        decode(part)


@given(seq=st.integers(0, 2**63), frames=st.lists(st.binary(max_size=40), min_size=1))
def test_a_small_message_comes_out_as_it_went_in(seq: int, frames: list[bytes]) -> None:
    decoded = decode(encode(Message(seq, 1, [memoryview(frame) for frame in frames])))
    assert isinstance(decoded, Message)
    assert (decoded.seq, [bytes(frame) for frame in decoded.frames]) == (seq, frames)


@given(st.binary(max_size=80))
def test_no_bytes_upset_the_decoder(part: bytes) -> None:
    with suppress(Malformed):
        decode(part)
