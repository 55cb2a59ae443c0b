"""What a subscriber hands to its sink: ordered batches, and what happened between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from kvindex.rank import Rank
from kvindex.wire import EventBatch, GroupSpec

__all__ = [
    "BatchSink",
    "Decode",
    "DecodedBatch",
    "Fingerprint",
    "RankAdded",
    "RankBatch",
    "RankLost",
    "RankRemoved",
    "RankRestarted",
    "RanksRenamed",
    "Sink",
    "StreamItem",
]


class DecodedBatch(Protocol):
    """What a subscriber asks of a decoded payload; the rest of it is its consumer's.

    Attributes:
        ts: the publisher's clock when it made the batch, in seconds.
        data_parallel_rank: the dp_rank that the batch names, or None.
    """

    @property
    def ts(self) -> float: ...

    @property
    def data_parallel_rank(self) -> int | None: ...


Decode: TypeAlias = Callable[[bytes], DecodedBatch]
"""From payload to batch; raises DecodeError, and nothing else, for what is no batch."""

Fingerprint: TypeAlias = Callable[[bytes], int]
"""A hash of a payload, the same throughout the process."""


class RankAdded(msgspec.Struct, frozen=True, tag=True):
    """A rank is subscribed to from now on.

    Attributes:
        rank: which rank.
        groups: its KV cache groups, as its `Worker` tells them.
    """

    rank: Rank
    groups: dict[int, GroupSpec] = {}


class RankBatch(msgspec.Struct, frozen=True, tag=True):
    """The next batch of a rank, in order and without a hole since the item before.

    Attributes:
        rank: whose batch it is.
        epoch: counts the publisher's restarts.
        seq: the publisher's number of it.
        batch: its events: an `EventBatch`, or what the subscriber's own `decode` returns.
        replayed: whether it came by replay rather than live.
    """

    rank: Rank
    epoch: int
    seq: int
    batch: EventBatch
    replayed: bool


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """Batches of a rank are lost for good; the next batch follows after the hole.

    Attributes:
        rank: whose batches they are.
        epoch: counts the publisher's restarts.
        reason: why they could not be had, one word.
        first_seq: the first lost number.
        last_seq: the last lost number, inclusive; None if that is not known.
        reset: whether what the rank holds is to be dropped (`on_loss="reset"`).
    """

    rank: Rank
    epoch: int
    reason: str
    first_seq: int
    last_seq: int | None
    reset: bool


class RankRestarted(msgspec.Struct, frozen=True, tag=True):
    """A rank's publisher is another one now: drop what the rank held.

    Attributes:
        rank: which rank.
        epoch: the number of the epoch that begins.
        reason: what told it, one word.
    """

    rank: Rank
    epoch: int
    reason: str


class RanksRenamed(msgspec.Struct, frozen=True, tag=True):
    """Ranks are known by other names from now on, because their batches name them so.

    Attributes:
        names: pairs of the old and the new rank; two may have changed places.
    """

    names: tuple[tuple[Rank, Rank], ...]


class RankRemoved(msgspec.Struct, frozen=True, tag=True):
    """A rank is no longer subscribed to."""

    rank: Rank


StreamItem: TypeAlias = (
    RankAdded | RankBatch | RankLost | RankRestarted | RanksRenamed | RankRemoved
)
Sink: TypeAlias = Callable[[StreamItem], None]
"""Called on the subscriber's thread, one item at a time, in order for each rank."""
BatchSink: TypeAlias = Callable[[Rank, Any], None]
"""As `Sink`, but called with rank and decoded batch, without an envelope around them."""
