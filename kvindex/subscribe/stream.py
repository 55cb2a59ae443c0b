"""What a subscriber hands to its sink: ordered batches, and what happened between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from kvindex.rank import Rank
from kvindex.sequencer import RankBatch, RankLost, RankRestarted
from kvindex.subscribe.status import RankStatus
from kvindex.wire import CacheSettings, EventBatch

__all__ = [
    "BatchSink",
    "Decode",
    "DecodedBatch",
    "Fingerprint",
    "FingerprintMaker",
    "RankAdded",
    "RankRemoved",
    "RanksRenamed",
    "Sink",
    "StatusSink",
    "StreamItem",
    "Tap",
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
"""A hash of a payload, of 64 bits."""


class FingerprintMaker(Protocol):
    """What a subscriber asks of its fingerprints: that they mean the same in another process.

    Attributes:
        identity: names the function; fingerprints of different identities cannot be compared.
        of: the function.
    """

    @property
    def identity(self) -> str: ...

    @property
    def of(self) -> Fingerprint: ...


class RankAdded(msgspec.Struct, frozen=True, tag=True):
    """A rank is subscribed to from now on.

    Attributes:
        rank: which rank.
        cache: what its `Worker` tells of its cache.
    """

    rank: Rank
    cache: CacheSettings = CacheSettings()


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
    RankAdded | RankBatch[EventBatch] | RankLost | RankRestarted | RanksRenamed | RankRemoved
)
"""What an `EventStream` yields: a batch, or what happened to a rank between two batches."""

Sink: TypeAlias = Callable[[StreamItem], None]
"""Called on the subscriber's thread, one item at a time, in order for each rank."""
BatchSink: TypeAlias = Callable[[Rank, Any], None]
"""As `Sink`, but called with rank and decoded batch, without an envelope around them."""
StatusSink: TypeAlias = Callable[[Sequence[RankStatus]], None]
"""Called on the subscriber's thread with the statuses that others see from now on: at the end of
each turn (with none, if none is new), and when ranks were added or renamed."""


class Tap(Protocol):
    """What is told all that a client's index takes, in the same order, on the subscriber's thread.

    It must not raise, and holds everything up while it runs.
    """

    def batch(self, rank: Rank, payload: bytes) -> None:
        """Take a batch that was applied, as its publisher sent it."""

    def item(self, item: StreamItem) -> None:
        """Take what happened between two batches."""

    def restored(self, rank: Rank, section: bytes) -> None:
        """Take what a rank that is being added begins with: what `Index.dump` gave once."""

    def statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Take the ranks' new statuses, at the end of each turn; perhaps none."""
