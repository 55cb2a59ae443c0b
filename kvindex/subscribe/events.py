"""What a feed's sockets say, as values: its links yield these."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvindex.sequencer import Batch
from kvindex.subscribe.stream import DecodedBatch

__all__ = ["Connected", "Damaged", "Disconnected", "Event", "Named", "ReplayOver", "Replied", "Run"]


class Connected(NamedTuple):
    """There is a new connection to the publisher's live side."""


class Disconnected(NamedTuple):
    """The connection to the live side is over, and what it brought is told."""


class Named(NamedTuple):
    """A batch names the publisher's dp_rank, for the first time; its event comes next."""

    dp_rank: int


class Run(NamedTuple):
    """Live batches numbered without a hole; one at least.

    Attributes:
        first_seq: seq of the first.
        batches: the decoded payloads.
        timestamps: their `ts`.
        fingerprints: a hash of each payload.
        sizes: bytes of each payload.
    """

    first_seq: int
    batches: list[DecodedBatch]
    timestamps: list[float]
    fingerprints: list[int]
    sizes: list[int]

    def batch(self, position: int) -> Batch:
        """Return one of them by itself."""
        return Batch(
            self.first_seq + position,
            self.timestamps[position],
            self.batches[position],
            self.fingerprints[position],
            self.sizes[position],
        )


class Damaged(NamedTuple):
    """A live message that cannot be read; its seq, where that was legible."""

    seq: int | None


class Replied(NamedTuple):
    """A reply to a replay request; its batch is None where that cannot be decoded."""

    request: int
    seq: int
    batch: Batch | None


class ReplayOver(NamedTuple):
    """Nothing more comes of a replay request: its end marker came, or it could not be sent."""

    request: int
    failed: bool


Event: TypeAlias = Connected | Disconnected | Named | Run | Damaged | Replied | ReplayOver
