"""What a queue's writer and its readers on other machines say to each other. No sockets here.

The reader speaks first. Everything is one frame, a ZeroMQ part, but for long messages:

- the words below, in msgpack
- `P`, seq u64, number of frames u32, u32 size of each frame but the last, all frames' bytes: a
  small message
- `M`, seq u64, number of frames u32: a message whose frames follow, each a part.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvindex.ring import Buffer

__all__ = [
    "MAX_CONTROL_BYTES",
    "MAX_FRAMES",
    "MAX_RANK",
    "MESSAGE_HEADER_BYTES",
    "PACKED_BYTES",
    "TOKEN_BYTES",
    "VERSION",
    "Acknowledgement",
    "Bye",
    "Closed",
    "Evicted",
    "Hello",
    "Malformed",
    "Ready",
    "Refusal",
    "Refused",
    "Welcome",
    "WritersWord",
    "encode",
    "message_header",
    "packed_message",
    "parse_header",
    "parse_reader",
    "parse_writer",
    "unpack_message",
]

VERSION = 1
TOKEN_BYTES = 32
MAX_RANK = 2**32 - 1
MAX_FRAMES = 65_536  # of one message
PACKED_BYTES = 8192  # messages up to this size travel as one ZeroMQ part: half the cost

_MESSAGE = struct.Struct(">cQI")
MESSAGE_HEADER_BYTES = _MESSAGE.size
MAX_CONTROL_BYTES = 64  # a reader says nothing longer

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class Refusal(enum.IntEnum):
    """Why a reader is not let in."""

    VERSION = 1
    UNKNOWN_RANK = 2
    RANK_TAKEN = 3
    WRONG_TOKEN = 4


class Malformed(ValueError):  # noqa: N818 - never leaves this part
    """Bytes that are nothing of the above; the message says how."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A reader asks to be let in. Every version begins so."""

    version: int
    rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)] = 0
    token: bytes = b""


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A reader has consumed all before this seq."""

    next_seq: int


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A reader leaves: send it nothing more."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A reader is let in: its first message, how much may be unacknowledged, whether all joined."""

    next_seq: int
    window: _Positive
    window_bytes: _Positive
    ready: bool


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The writer does not let a reader in."""

    reason: Refusal


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All readers have joined."""


class Evicted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The writer takes this reader off the queue."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The writer closed the queue: the message before this seq was the last."""

    next_seq: int


ReadersWord: TypeAlias = Hello | Acknowledgement | Bye
WritersWord: TypeAlias = Welcome | Refused | Ready | Evicted | Closed

encode = msgspec.msgpack.Encoder().encode
"""Return the frame of a word."""

_readers: msgspec.msgpack.Decoder[ReadersWord] = msgspec.msgpack.Decoder(ReadersWord)
_writers: msgspec.msgpack.Decoder[WritersWord] = msgspec.msgpack.Decoder(WritersWord)


def message_header(seq: int, frames: int) -> bytes:
    """Return the part that goes before a message's frames."""
    return _MESSAGE.pack(b"M", seq, frames)


def packed_message(seq: int, frames: Sequence[Buffer]) -> bytes:
    """Return a whole message in one part (at least one frame)."""
    count = len(frames)
    header = _MESSAGE.pack(b"P", seq, count)
    if count == 1:
        return header + frames[0]
    sizes = [memoryview(frame).nbytes for frame in frames[:-1]]
    return b"".join([header, struct.pack(f">{count - 1}I", *sizes), *frames])


def unpack_message(part: bytes) -> tuple[int, list[memoryview]]:
    """Return the seq and the frames of a `P` part; Malformed if it lies about their sizes."""
    if len(part) < MESSAGE_HEADER_BYTES:
        raise Malformed(f"a message of {len(part)} bytes")
    _, seq, count = _MESSAGE.unpack_from(part)
    content = memoryview(part)
    if count == 1:
        return seq, [content[MESSAGE_HEADER_BYTES:]]
    begin = MESSAGE_HEADER_BYTES + 4 * (count - 1)
    if not 0 < count <= MAX_FRAMES or begin > len(part):
        raise Malformed(f"{count} frames in a message of {len(part)} bytes")
    frames = []
    for size in struct.unpack_from(f">{count - 1}I", part, MESSAGE_HEADER_BYTES):
        frames.append(content[begin : begin + size])
        begin += size
    if begin > len(part):
        raise Malformed(f"frames of {begin} bytes in a message of {len(part)}")
    frames.append(content[begin:])
    return seq, frames


def parse_header(part: bytes) -> tuple[int, int]:
    """Return the seq of an `M` part, and how many frames follow; Malformed if it is none."""
    if len(part) != MESSAGE_HEADER_BYTES:
        raise Malformed(f"a message that begins with {len(part)} bytes")
    _, seq, count = _MESSAGE.unpack(part)
    if not 0 < count <= MAX_FRAMES:
        raise Malformed(f"a message of {count} frames")
    return seq, count


def parse_reader(part: bytes) -> ReadersWord:
    """Return what a reader (or a stranger) said; Malformed if no reader says that."""
    try:
        return _readers.decode(part)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Malformed(f"{len(part)} bytes that no reader says") from None


def parse_writer(part: bytes) -> WritersWord:
    """Return what the writer said; Malformed if no writer says that."""
    try:
        return _writers.decode(part)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Malformed(f"{len(part)} bytes that no writer says") from None
