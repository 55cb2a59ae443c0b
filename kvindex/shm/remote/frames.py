"""What a queue's writer and its readers on other machines say to each other. No sockets here.

All numbers are big-endian. The reader speaks first; it says, in one frame each:

- `kvindexQ`, version u16, rank u32, token (32 bytes): hello, let me read
- `A`, next seq u64, bytes u64: all before this seq is consumed, so many bytes since I joined
- `B`: bye, send me nothing more

and the writer:

- `W`, next seq u64, window u32, window bytes u64, ready u8: welcome; your first message will be
  this, so much may be unacknowledged, all readers have joined (or not yet)
- `X`, reason u8: you are refused
- `R`: all readers have joined
- `?`: nothing; sent to see whether there is a connection still
- `E`: you are evicted, nothing more will come
- `C`, next seq u64: closed; the message before this seq was the last
- `P`, seq u64, number of frames u32, u32 size of each frame but the last, all frames' bytes: a
  small message
- `M`, seq u64, number of frames u32: a message whose frames follow, each a ZeroMQ part.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

import msgspec

__all__ = [
    "MAX_CONTROL_BYTES",
    "MAX_FRAMES",
    "MESSAGE_HEADER_BYTES",
    "PACKED_BYTES",
    "TOKEN_BYTES",
    "VERSION",
    "Acknowledgement",
    "Buffer",
    "Bye",
    "Closed",
    "Evicted",
    "Hello",
    "Malformed",
    "MessageHeader",
    "Probe",
    "Ready",
    "Refusal",
    "Refused",
    "Welcome",
    "acknowledgement",
    "bye",
    "closed",
    "evicted",
    "hello",
    "message_header",
    "packed_message",
    "parse_control",
    "parse_reader",
    "probe",
    "ready",
    "refused",
    "unpack_message",
    "welcome",
]

Buffer = bytes | bytearray | memoryview

VERSION = 1
TOKEN_BYTES = 32
MAX_FRAMES = 65_536  # of one message
PACKED_BYTES = 8192  # messages up to this size travel as one ZeroMQ part: half the cost

_HELLO = struct.Struct(f">8sHI{TOKEN_BYTES}s")
_VERSIONED = struct.Struct(">8sH")
_MAGIC = b"kvindexQ"
_ACKNOWLEDGEMENT = struct.Struct(">cQQ")
_WELCOME = struct.Struct(">cQIQ?")
_REFUSED = struct.Struct(">cB")
_CLOSED = struct.Struct(">cQ")
_MESSAGE = struct.Struct(">cQI")
MESSAGE_HEADER_BYTES = _MESSAGE.size
MAX_CONTROL_BYTES = _HELLO.size  # the longest that a reader says


class Refusal(enum.IntEnum):
    """Why a reader is not let in."""

    VERSION = 1
    UNKNOWN_RANK = 2
    RANK_TAKEN = 3
    WRONG_TOKEN = 4


class Malformed(ValueError):  # noqa: N818 - never leaves this part
    """Bytes that are none of the frames above; the message says how."""


class Hello(msgspec.Struct, frozen=True):
    """A reader asks to be let in. Of another version's, only the version is known."""

    version: int
    rank: int = -1
    token: bytes = b""


class Acknowledgement(msgspec.Struct, frozen=True):
    """A reader tells what it has consumed."""

    next_seq: int
    consumed_bytes: int


class Bye(msgspec.Struct, frozen=True):
    """A reader leaves."""


class Welcome(msgspec.Struct, frozen=True):
    """The writer lets a reader in."""

    next_seq: int
    window: int
    window_bytes: int
    ready: bool


class Refused(msgspec.Struct, frozen=True):
    """The writer does not let a reader in."""

    reason: Refusal


class Ready(msgspec.Struct, frozen=True):
    """All readers have joined."""


class Probe(msgspec.Struct, frozen=True):
    """Means nothing."""


class Evicted(msgspec.Struct, frozen=True):
    """The writer takes this reader off the queue."""


class Closed(msgspec.Struct, frozen=True):
    """The writer closed the queue."""

    next_seq: int


class MessageHeader(msgspec.Struct, frozen=True):
    """A message begins, whose frames follow."""

    seq: int
    frames: int


def hello(rank: int, token: bytes) -> bytes:
    """Return the frame with which a reader asks to be let in."""
    return _HELLO.pack(_MAGIC, VERSION, rank, token)


def acknowledgement(next_seq: int, consumed_bytes: int) -> bytes:
    """Return the frame that tells what was consumed."""
    return _ACKNOWLEDGEMENT.pack(b"A", next_seq, consumed_bytes)


def bye() -> bytes:
    """Return the frame with which a reader leaves."""
    return b"B"


def welcome(next_seq: int, window: int, window_bytes: int, *, ready: bool) -> bytes:
    """Return the frame that lets a reader in."""
    return _WELCOME.pack(b"W", next_seq, window, window_bytes, ready)


def refused(reason: Refusal) -> bytes:
    """Return the frame that does not let a reader in."""
    return _REFUSED.pack(b"X", reason)


def ready() -> bytes:
    """Return the frame that says that all readers have joined."""
    return b"R"


def probe() -> bytes:
    """Return a frame that means nothing."""
    return b"?"


def evicted() -> bytes:
    """Return the frame that takes a reader off the queue."""
    return b"E"


def closed(next_seq: int) -> bytes:
    """Return the frame that ends the queue."""
    return _CLOSED.pack(b"C", next_seq)


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
    """Return the seq and the frames of a `P` part.

    Raises:
        Malformed: it is too short for what it says, or has an impossible number of frames.
    """
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


def parse_reader(part: bytes) -> Hello | Acknowledgement | Bye:
    """Return what a reader (or a stranger) said.

    Raises:
        Malformed: a reader says nothing like it.
    """
    if part.startswith(_MAGIC) and len(part) >= _VERSIONED.size:
        _, version = _VERSIONED.unpack_from(part)
        if version != VERSION:
            return Hello(version)
        if len(part) == _HELLO.size:
            return Hello(*_HELLO.unpack(part)[1:])
    elif part[:1] == b"A" and len(part) == _ACKNOWLEDGEMENT.size:
        return Acknowledgement(*_ACKNOWLEDGEMENT.unpack(part)[1:])
    elif part == b"B":
        return Bye()
    raise Malformed(f"{len(part)} bytes that no reader says")


def parse_control(
    part: bytes,
) -> Welcome | Refused | Ready | Probe | Evicted | Closed | MessageHeader:
    """Return what the writer said, other than a packed message.

    Raises:
        Malformed: a writer says nothing like it.
    """
    kind, size = part[:1], len(part)
    try:
        if kind == b"M" and size == _MESSAGE.size:
            return _checked_header(MessageHeader(*_MESSAGE.unpack(part)[1:]))
        if kind == b"W" and size == _WELCOME.size:
            return _checked_welcome(Welcome(*_WELCOME.unpack(part)[1:]))
        if kind == b"C" and size == _CLOSED.size:
            return Closed(*_CLOSED.unpack(part)[1:])
        if kind == b"X" and size == _REFUSED.size:
            return Refused(Refusal(_REFUSED.unpack(part)[1]))
        return _BARE[part]
    except (KeyError, ValueError):
        raise Malformed(f"{size} bytes that no writer says") from None


_BARE: dict[bytes, Ready | Probe | Evicted] = {b"R": Ready(), b"?": Probe(), b"E": Evicted()}


def _checked_header(header: MessageHeader) -> MessageHeader:
    if not 0 < header.frames <= MAX_FRAMES:
        raise Malformed(f"a message of {header.frames} frames")
    return header


def _checked_welcome(said: Welcome) -> Welcome:
    if not said.window or not said.window_bytes:
        raise Malformed("a window of nothing")
    return said
