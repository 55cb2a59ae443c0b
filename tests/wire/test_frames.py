"""Frames of live messages, replay requests and replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvindex.wire import (
    END_SEQ,
    LiveFrame,
    ReplayReply,
    live_frames,
    parse_live,
    parse_replay,
    parse_replay_request,
    replay_end,
    replay_frames,
    replay_request,
)
from kvindex.wire.errors import DecodeError, EncodeError

pytestmark = pytest.mark.unit

SEQ = b"\x00\x00\x00\x00\x00\x00\x01\x02"


def test_live_message_round_trip() -> None:
    frames = live_frames(b"kv", 258, b"data")
    assert frames == [b"kv", SEQ, b"data"]
    assert parse_live(frames) == LiveFrame(b"kv", 258, b"data")


@pytest.mark.parametrize(("with_topic", "topic"), [(True, b"kv"), (False, None)])
def test_replay_reply_round_trip_in_both_shapes(with_topic: bool, topic: bytes | None) -> None:
    frames = replay_frames(b"id", b"kv", 258, b"data", with_topic=with_topic)
    assert frames[0] == b"id"
    assert parse_replay(frames[1:]) == ReplayReply(topic, 258, b"data", False)


def test_both_ends_of_a_replay() -> None:
    assert replay_end(b"id", with_topic=False) == [b"id", b"", b"\xff" * 8, b""]
    assert replay_end(b"id", with_topic=True) == [b"id", b"", b"", b"\xff" * 8, b""]
    for with_topic in (False, True):
        reply = parse_replay(replay_end(b"id", with_topic=with_topic)[1:])
        assert reply.end
        assert reply.seq == END_SEQ


@pytest.mark.parametrize(("seq", "payload"), [(b"\xff" * 8, b"data"), (SEQ, b"")])
def test_half_an_end_is_no_end(seq: bytes, payload: bytes) -> None:
    assert not parse_replay([b"", seq, payload]).end


@pytest.mark.parametrize("start_seq", [0, 258, END_SEQ])
def test_replay_request_round_trip(start_seq: int) -> None:
    frames = replay_request(start_seq)
    assert len(frames) == 2
    assert parse_replay_request([b"id", *frames]) == (b"id", start_seq)


@pytest.mark.parametrize(("start", "seq"), [(b"", 0), (b"\x07", 7), (b"\x00" * 19 + b"\x09", 9)])
def test_replay_request_takes_a_number_of_any_length(start: bytes, seq: int) -> None:
    assert parse_replay_request([b"id", b"", start]) == (b"id", seq)


REFUSED: dict[Callable[[list[bytes]], object], list[list[bytes]]] = {
    parse_live: [
        *([], [b"data"], [SEQ, b"data"], [b"", b"", SEQ, b"data"], [b""] * 100),
        *([b"kv", seq, b"data"] for seq in (b"", b"\x00", SEQ[1:], SEQ + b"\x00")),
    ],
    parse_replay: [
        *([], [b""], [b"", SEQ], [SEQ, b"data"], [b"kv", SEQ, b"data"], [b"id", b"", SEQ, b"data"]),
        *([b"", b"kv", b"more", SEQ, b"data"], [b"", SEQ[1:], b"data"], [b"", b"", b"", b""]),
    ],
    parse_replay_request: [
        *([], [b"id"], [b"id", SEQ], [b"id", b"", SEQ, b""], [b"id", b"x", SEQ]),
        [b"id", b"", bytes(65)],
    ],
}


@pytest.mark.parametrize(
    ("parse", "frames"), [(parse, frames) for parse, lists in REFUSED.items() for frames in lists]
)
def test_frames_of_another_shape_are_refused(
    parse: Callable[[list[bytes]], object], frames: list[bytes]
) -> None:
    with pytest.raises(DecodeError):
        parse(frames)


@pytest.mark.parametrize("seq", [-1, 2**64, 1.0, None])
def test_numbers_beyond_64_bits_are_refused(seq: Any) -> None:
    with pytest.raises(EncodeError):
        live_frames(b"", seq, b"")
    with pytest.raises(EncodeError):
        replay_request(seq)
    with pytest.raises(EncodeError):
        replay_frames(b"id", b"", seq, b"", with_topic=True)
