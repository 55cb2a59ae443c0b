"""Frames of live messages, replay requests and replies; and recordings of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvindex.wire import (
    END_SEQ,
    LiveFrame,
    RecordedMessage,
    RecordingWriter,
    ReplayReply,
    live_frames,
    parse_live,
    parse_replay,
    parse_replay_request,
    read_recording,
    replay_end,
    replay_frames,
    replay_request,
)
from kvindex.wire.errors import DecodeError, EncodeError
from kvindex.wire.frames import MAX_FRAME_BYTES, MAX_FRAMES

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


# Recordings -------------------------------------------------------------------------------------


MESSAGES = [
    RecordedMessage("live", [b"topic", bytes(8), b"payload"]),
    RecordedMessage("replay", [b"", bytes(8), b""]),
    RecordedMessage("replay", []),
    RecordedMessage("publisher", [b"vllm-0", b"1"]),
]
DATA = (
    b"L\0\0\0\3\0\0\0\5topic\0\0\0\10\0\0\0\0\0\0\0\0\0\0\0\7payload"
    b"R\0\0\0\3\0\0\0\0\0\0\0\10\0\0\0\0\0\0\0\0\0\0\0\0"
    b"R\0\0\0\0"
    b"P\0\0\0\2\0\0\0\6vllm-0\0\0\0\0011"
)


def test_write_gives_the_documented_bytes() -> None:
    file = io.BytesIO()
    writer = RecordingWriter(file)
    for message in MESSAGES:
        writer.write(message.kind, message.frames)
    assert file.getvalue() == DATA


def test_read_from_path_and_from_file(tmp_path: Path) -> None:
    path = tmp_path / "x.frames"
    path.write_bytes(DATA)
    assert list(read_recording(path)) == MESSAGES
    assert list(read_recording(str(path))) == MESSAGES
    file = io.BytesIO(DATA)
    assert list(read_recording(file)) == MESSAGES
    assert not file.closed


def test_messages_before_the_damage_are_read() -> None:
    messages = read_recording(io.BytesIO(DATA + b"X"))
    assert [next(messages) for _ in MESSAGES] == MESSAGES
    with pytest.raises(DecodeError, match=f"byte {len(DATA) + 1}: b'X'"):
        next(messages)


def test_every_cut_inside_a_record_is_noticed() -> None:
    first_record = len(DATA) - DATA.index(b"R")
    for size in range(1, len(DATA) - first_record):
        with pytest.raises(DecodeError, match=f"byte {size}: cut off"):
            list(read_recording(io.BytesIO(DATA[:size])))


@pytest.mark.parametrize(
    "data",
    [
        b"L" + (MAX_FRAMES + 1).to_bytes(4, "big"),
        b"L\0\0\0\1" + (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    ],
)
def test_claimed_sizes_are_bounded(data: bytes) -> None:
    with pytest.raises(DecodeError, match="at most"):
        list(read_recording(io.BytesIO(data)))


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_recording(tmp_path / "none"))


@pytest.mark.parametrize(
    ("kind", "frames"), [("L", []), (None, []), ("live", [b""] * (MAX_FRAMES + 1))]
)
def test_what_could_not_be_read_back_is_not_written(kind: Any, frames: list[bytes]) -> None:
    file = io.BytesIO()
    with pytest.raises(EncodeError):
        RecordingWriter(file).write(kind, frames)
    assert file.getvalue() == b""
