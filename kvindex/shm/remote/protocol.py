"""The packets between a queue's writer and its remote readers.

A reader sends `Hello`. The writer answers `Welcome` or `Refused`. Then the writer sends messages,
and the reader acknowledges them. Each packet is a msgpack array in one ZeroMQ part. Only the frames
of a large message follow as parts of their own, so that they are not copied into an array.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

VERSION = 1
MAX_RANK = 2**32 - 1
MAX_WINDOW = 4096  # messages
SMALL_BYTES = 8192  # up to this size, a message and its frames are one part: half the cost
MAX_READER_BYTES = 64  # a reader sends nothing longer

_MAX_FRAMES = 65_538  # of one message: its kind, the encoded object, and its buffers


class Packet(msgspec.Struct, array_like=True, tag=True):
    """A message of one end to the other."""


class Hello(Packet):
    """A reader asks to be admitted. Every version of the protocol begins like this."""

    version: int
    rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)] = 0


class Acknowledgement(Packet):
    """A reader has consumed all messages before this seq."""

    next_seq: int


class Bye(Packet):
    """A reader leaves."""


class Welcome(Packet):
    """A reader is admitted: its first message, its window, and whether all readers have joined."""

    next_seq: int
    window: Annotated[int, msgspec.Meta(gt=0)]
    ready: bool


class Refused(Packet):
    """The writer does not admit a reader."""

    reason: Annotated[str, msgspec.Meta(max_length=500)]


class Ready(Packet):
    """All readers have joined."""


class Probe(Packet):
    """Wants no answer: the writer finds out whether ZeroMQ still has the connection."""


class Evicted(Packet):
    """The writer removed this reader from the queue."""


class Closed(Packet):
    """The writer closed the queue: the message before this seq was the last."""

    next_seq: int


class Message(Packet):
    """A message with its frames; without any, they follow as parts."""

    seq: int
    frames: Annotated[list[memoryview], msgspec.Meta(max_length=_MAX_FRAMES)]


encode = msgspec.msgpack.Encoder().encode
"""Return a packet as the bytes of its part."""

_AnyPacket: TypeAlias = (
    Hello | Acknowledgement | Bye | Welcome | Refused | Ready | Probe | Evicted | Closed | Message
)
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(_AnyPacket)


class Malformed(ValueError):  # noqa: N818 - never leaves this package
    """Parts that are no packet of this protocol."""


def decode(part: bytes) -> Packet:
    """Return the packet in a part, and frames as views of it; Malformed if there is none."""
    try:
        return _decoder.decode(part)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Malformed(f"{len(part)} bytes that are no packet of this protocol") from None
