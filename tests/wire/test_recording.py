"""Recordings: written and read, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from kvindex.wire import RecordedMessage, RecordingWriter, read_recording
from kvindex.wire.errors import DecodeError, EncodeError
from kvindex.wire.frames import MAX_FRAME_BYTES, MAX_FRAMES

pytestmark = pytest.mark.unit

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
