"""What the ranks of a TCP group say once all have come: parts of collectives, failures. Pure."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvindex.errors import (
    ConfigurationError,
    DecodeError,
    KVIndexError,
    PeerDiedError,
    QueueTimeoutError,
)

__all__ = ["Call", "Failure", "GroupFailure", "Part", "listed", "read_word"]

MAX_TEXT: Final = 512


class Call(msgspec.Struct, frozen=True):
    """One collective as a rank has called it.

    Attributes:
        number: how many the rank called before it.
        operation: "broadcast_object", "gather_object" or "barrier".
        root: the rank that gives, or is given, the values.
        timeout: seconds that it may take.
        deadline: until when, by `time.monotonic`.
    """

    number: int
    operation: str
    root: int
    timeout: float
    deadline: float

    def __str__(self) -> str:
        return f"{self.operation} with rank {self.root}, collective {self.number}"


class Part(msgspec.Struct, frozen=True, tag="part", array_like=True):
    """A rank's value in a collective."""

    number: int
    operation: str
    root: int
    origin: int
    data: bytes

    def is_of(self, call: Call) -> bool:
        """Return whether this belongs to that call."""
        ours = (call.number, call.operation, call.root)
        return (self.number, self.operation, self.root) == ours

    def __str__(self) -> str:
        return f"{self.operation} with rank {self.root}, collective {self.number}"


class Failure(msgspec.Struct, frozen=True, tag="failure", array_like=True):
    """Why a collective cannot be completed; no other can then, as the ranks are out of step.

    Attributes:
        kind: what error it is at every rank.
        text: for people.
        timeout: for "timeout": what was waited, in seconds.
    """

    kind: Literal["died", "timeout", "mismatch", "garbage"]
    text: str
    timeout: float = 0.0

    def error(self) -> KVIndexError:
        """Return what to raise."""
        if self.kind == "died":
            return PeerDiedError(self.text)
        if self.kind == "timeout":
            return QueueTimeoutError(self.text, timeout=self.timeout)
        if self.kind == "mismatch":
            return ConfigurationError(self.text)
        return DecodeError(self.text)

    def encode(self) -> bytes:
        """Return the frame that tells others."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self, text=self.text[:MAX_TEXT]))


class GroupFailure(Exception):  # noqa: N818 -- becomes one of our errors at the group's edge
    """Carries a `Failure` up to the group."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.text)


_decoder: Final[msgspec.msgpack.Decoder[Part | Failure]] = msgspec.msgpack.Decoder(Part | Failure)


def read_word(body: bytes, rank: int) -> Part | Failure:
    """Return what is in a frame that came from a rank.

    Raises:
        GroupFailure: nothing that we know.
    """
    try:
        return _decoder.decode(body)
    except Exception as error:  # msgspec raises several kinds
        text = f"rank {rank} sent {len(body)} bytes that are no part of a collective: {error}"
        raise GroupFailure(Failure("garbage", text)) from None


def listed(ranks: set[int]) -> str:
    """Return ranks as words.

    Examples:
        >>> listed({3, 1}), listed({2})
        ('ranks 1, 3', 'rank 2')
    """
    first = sorted(ranks)[:16]
    more = f" and {len(ranks) - len(first)} more" if len(ranks) > len(first) else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, first))}{more}"
