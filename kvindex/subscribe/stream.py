"""What a subscriber delivers: ordered batches, the items between them, and streams' statuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from kvindex.subscribe.sequencer import RankBatch, RankLost, RankRestarted, State
from kvindex.wire import CacheSettings, EventBatch
from kvindex.wire.rank import Rank, Trust

__all__ = [
    "BatchSink",
    "Decode",
    "DecodedBatch",
    "Fingerprint",
    "FingerprintMaker",
    "RankAdded",
    "RankRemoved",
    "RankStatus",
    "RanksRenamed",
    "Sink",
    "StatusSink",
    "StreamItem",
    "Tap",
]


class DecodedBatch(Protocol):
    """The part of a decoded payload that a subscriber reads; the rest is its consumer's.

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
    """A function for fingerprints that are the same in every process.

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
        cache: what its `Worker` states about its cache.
    """

    rank: Rank
    cache: CacheSettings = CacheSettings()


class RanksRenamed(msgspec.Struct, frozen=True, tag=True):
    """Ranks have other names from now on, because their batches name them so.

    Attributes:
        names: pairs of the old and the new rank; two may have changed places.
    """

    names: tuple[tuple[Rank, Rank], ...]


class RankRemoved(msgspec.Struct, frozen=True, tag=True):
    """A rank is no longer subscribed to."""

    rank: Rank


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank's stream.

    Attributes:
        rank: which rank.
        state: what the stream is doing.
        reason: why it is not live, or what it waits for, and what to try; of a live rank, why
            gaps cannot be repaired (no replay endpoint, or none that answers); "" if all is well.
        epoch: counts the publisher's restarts, from 0.
        seq: number of the last applied batch, None before the first.
        complete: whether every batch since the publisher's first was applied.
        lag: batches known of but not applied yet.
        connected: whether there is a connection to the PUB socket.
        endpoint: the PUB socket.
        replay_endpoint: the ROUTER socket, or None.
        last_event_age: seconds since the last batch was applied, None before the first.
        gaps: holes found in the numbering.
        replays_asked, replays_filled, replays_failed: replay requests, those that reached their
            end, and those that did not.
        losses: holes that could not be filled.
        restarts: changes of publisher.
        duplicates: batches that came again.
        decode_failures: messages or batches that could not be decoded.
        orphans: blocks that wait for their parent (through a client; else 0).
        ignored: blocks left out by the index, by reason (through a client; else empty).
        counters: every counter of the stream by name.
    """

    rank: Rank
    state: State
    reason: str
    epoch: int
    seq: int | None
    complete: bool
    lag: int
    connected: bool
    endpoint: str
    replay_endpoint: str | None
    last_event_age: float | None
    gaps: int = 0
    replays_asked: int = 0
    replays_filled: int = 0
    replays_failed: int = 0
    losses: int = 0
    restarts: int = 0
    duplicates: int = 0
    decode_failures: int = 0
    orphans: int = 0
    ignored: dict[str, int] = {}
    counters: dict[str, int] = {}

    @property
    def trust(self) -> Trust:
        """The part of it that tells how far to trust an answer."""
        return Trust(self.state, self.complete, self.lag)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {**plain, "rank": str(self.rank)}


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
    """Receives all that a client's index receives, in the same order, on the subscriber's thread.

    It must not raise, and delays everything while it runs.
    """

    def batch(self, rank: Rank, payload: bytes) -> None:
        """Receive a batch that was applied, as its publisher sent it."""

    def item(self, item: StreamItem) -> None:
        """Receive an item between two batches."""

    def restored(self, rank: Rank, section: bytes) -> None:
        """Receive the contents that an added rank begins with, as `Index.dump` returned them."""

    def statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Receive the ranks' new statuses, at the end of each turn; perhaps none."""
