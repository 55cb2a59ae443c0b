"""What the ranks of a `TcpProcessGroup` say to each other, as ZeroMQ frames. No sockets here.

A message is one frame with a word, then the word's values. A value is cut into frames of
`FRAME_BYTES`; the last one is shorter, perhaps empty. So a socket can refuse longer frames, and
nobody can make it hold more before a handshake.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

import msgspec
import zmq

from kvindex.errors import (
    ConfigurationError,
    DecodeError,
    KVIndexError,
    PeerDiedError,
    QueueTimeoutError,
)

__all__ = ["FRAME_BYTES", "Call", "Failure", "Hello", "Seats", "Settings", "cut", "listed", "parse"]

FRAME_BYTES: Final = 1 << 16
_MAX_TEXT: Final = 512  # characters


class Settings(msgspec.Struct, frozen=True):
    """What must be the same at every rank."""

    world_size: int
    max_object_bytes: int
    version: int = 1

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(self).items())


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank asks for its seat."""

    rank: int
    settings: Settings


class Seats(msgspec.Struct, frozen=True, tag="seats"):
    """Rank 0 tells who has not come yet; once that is nobody, collectives may begin."""

    missing: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """One collective: `operation` is "broadcast_object", "gather_object" or "barrier".

    A rank sends rank 0 its own value with it, and is sent the values that it is owed.
    """

    number: int
    operation: str
    root: int

    def owed(self, rank: int, world_size: int) -> list[int]:
        """Return the ranks whose values this rank is sent."""
        if self.operation == "gather_object" and rank == self.root:
            return [origin for origin in range(world_size) if origin != rank]
        return [self.root] if self.operation == "broadcast_object" and rank != self.root else []

    def __str__(self) -> str:
        return f"{self.operation} with rank {self.root}, collective {self.number}"


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Why the group has ended, or why a rank is refused: the error that its reader raises."""

    kind: Literal["ConfigurationError", "DecodeError", "PeerDiedError", "QueueTimeoutError"]
    text: str
    timeout: float = 0.0

    @classmethod
    def of(cls, error: KVIndexError) -> Failure:
        """Return the word for an error of one of these kinds."""
        kind: Any = type(error).__name__
        return cls(kind, str(error)[:_MAX_TEXT], getattr(error, "timeout", 0.0))

    def error(self) -> KVIndexError:
        """Return what to raise."""
        if self.kind == "QueueTimeoutError":
            return QueueTimeoutError(self.text, timeout=self.timeout)
        return _ERRORS[self.kind](self.text)


_ERRORS: Final = {kind.__name__: kind for kind in (ConfigurationError, DecodeError, PeerDiedError)}
Word = Hello | Seats | Call | Failure
_decoder: Final[msgspec.msgpack.Decoder[Word]] = msgspec.msgpack.Decoder(Word)


def cut(word: Word, values: Sequence[bytes] = ()) -> list[bytes]:
    """Return the frames of a message."""
    frames = [msgspec.msgpack.encode(word)]
    for value in values:
        frames += [value[i : i + FRAME_BYTES] for i in range(0, len(value) + 1, FRAME_BYTES)]
    return frames


def parse(frames: Sequence[zmq.Frame], sender: str, max_bytes: int) -> tuple[Word, list[bytes]]:
    """Return the word and the values of a message.

    Raises:
        DecodeError: it is none, or has a value of more than `max_bytes`.
    """
    values, begin = [], 1
    try:
        word = _decoder.decode(frames[0].bytes)
        for end, frame in enumerate(frames[1:], 2):
            if len(frame) < FRAME_BYTES:
                values.append(b"".join(piece.buffer for piece in frames[begin:end]))
                begin = end
        if begin < len(frames) or any(len(value) > max_bytes for value in values):
            raise ValueError(f"a value has no end, or more than {max_bytes} bytes")
    except Exception as error:  # msgspec raises several kinds
        size = sum(map(len, frames))
        raise DecodeError(
            f"{sender} sent {size} bytes that are no part of a collective: {error}", size=size
        ) from None
    return word, values


def listed(ranks: Collection[int]) -> str:
    """Return ranks as words.

    Examples:
        >>> listed({3, 1}), listed({2}), listed(range(1, 100))[-14:]
        ('ranks 1, 3', 'rank 2', '16 and 83 more')
    """
    first = sorted(ranks)[:16]
    more = f" and {len(ranks) - len(first)} more" if len(ranks) > len(first) else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, first))}{more}"
