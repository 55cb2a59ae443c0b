"""A sequencer's settings, input and output, all values: batches, items, requests and cursors."""

from __future__ import annotations

import math
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank

MAX_SEQ = 2**64 - 2
"""Largest number of a batch: 2**64 - 1 marks the end of a replay."""

MANY_RESTARTS = 5
"""So many restarts on one connection within `RESTARTS_WITHIN` show several publishers there."""

RESTARTS_WITHIN = 30.0
"""Seconds, see `MANY_RESTARTS`."""

MAX_COUNT = 2**63 - 1
"""No count passes this: a publisher chooses its numbers, and 64 bits must hold their sum."""

_Content = TypeVar("_Content")


class Batch(msgspec.Struct, frozen=True):
    """One numbered batch of a publisher, as it goes into a sequencer.

    Attributes:
        seq: the publisher's number, 0 … `MAX_SEQ`.
        ts: the publisher's clock when it made the batch, in seconds.
        content: the batch's contents; passed on unchanged.
        fingerprint: a hash of it: two batches of one seq are the same if their hashes are equal.
        size: bytes, counted against the bound on held batches.
    """

    seq: int
    ts: float
    content: Any
    fingerprint: int
    size: int


class RankBatch(msgspec.Struct, Generic[_Content], frozen=True, tag=True):
    """The next batch of a rank, in order and without a hole since the item before.

    Attributes:
        rank: whose batch it is.
        epoch: counts the publisher's restarts.
        seq: the publisher's number of it.
        batch: its events: an `EventBatch`, or what the subscriber's own `decode` returns.
        replayed: whether it arrived by replay rather than live.
    """

    rank: Rank
    epoch: int
    seq: int
    batch: _Content
    replayed: bool


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """Batches of a rank are lost for good; the next batch follows after the hole.

    Attributes:
        rank, epoch: as in `RankBatch`.
        reason: why replay did not bring them, one word.
        first_seq: the first lost number.
        last_seq: the last lost number, inclusive; None if that is not known.
        reset: whether the rank's contents must be dropped (`on_loss="reset"`).
    """

    rank: Rank
    epoch: int
    reason: str
    first_seq: int
    last_seq: int | None
    reset: bool


class RankRestarted(msgspec.Struct, frozen=True, tag=True):
    """A rank's publisher was restarted, or may have been: drop the rank's contents.

    Attributes:
        rank: which rank.
        epoch: the number of the epoch that begins.
        reason: the evidence, one word.
    """

    rank: Rank
    epoch: int
    reason: str


class AskReplay(msgspec.Struct, frozen=True):
    """Open a fresh DEALER socket and ask for a replay; close that of any earlier request.

    Attributes:
        request: the number to hand back with each reply.
        start_seq: the first seq wanted.
    """

    request: int
    start_seq: int


class CloseReplay(msgspec.Struct, frozen=True):
    """Close the DEALER socket of this request: its replies are no longer needed."""

    request: int


Action: TypeAlias = RankBatch[Any] | RankLost | RankRestarted | AskReplay | CloseReplay
"""What a sequencer has its owner do: deliver an item, or open or close a replay socket."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """How far a stream was applied: all that a sequencer needs to go on from there.

    Attributes:
        epoch: restarts so far.
        seq: the last batch applied.
        ts: its timestamp, in seconds of the publisher's clock.
        next_seq: the seq that must follow; above `seq` + 1 where a loss was declared.
        complete: whether every batch from the publisher's first on was applied.
        oldest_ts: batches older than this belong to an earlier epoch.
        kept_losses: whether batches were lost and the rank's contents were kept nevertheless.
        recent: fingerprints of the last batches applied, by seq; that of `seq` is among them.

    Raises:
        ConfigurationError: values that no sequencer can have had.
    """

    epoch: int
    seq: int
    ts: float
    next_seq: int
    complete: bool
    oldest_ts: float
    kept_losses: bool
    recent: dict[int, int]

    def __post_init__(self) -> None:
        follows = 0 <= self.seq < self.next_seq <= MAX_SEQ + 1
        known = self.seq in self.recent and min(self.recent) >= 0 and max(self.recent) == self.seq
        whole = self.next_seq == self.seq + 1 and not self.kept_losses
        if self.epoch < 0 or not follows or not known or (self.complete and not whole):
            raise ConfigurationError(
                f"no stream stands at epoch {self.epoch}, seq {self.seq}, next {self.next_seq}, "
                f"{len(self.recent)} fingerprints, complete {self.complete}"
            )


def _check(
    values: msgspec.Struct, prefix: str, *, seconds: tuple[str, ...], counts: tuple[str, ...]
) -> None:
    """Require finite seconds above 0, and counts of at least 1, in fields of these names."""
    for name in seconds:
        value = getattr(values, name)
        if not 0 < value < math.inf:
            raise ConfigurationError(
                f"{prefix}{name} must be a positive number of seconds, not {value!r}"
            )
    for name in counts:
        if getattr(values, name) < 1:
            value = getattr(values, name)
            raise ConfigurationError(f"{prefix}{name} must be at least 1, not {value!r}")


class ReplayPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long a subscriber waits for replay, and how often it asks.

    Attributes:
        timeout: seconds without a reply after which a request has failed.
        attempts: requests without progress after which the subscriber gives up.
        backoff: seconds before the second try; doubles with each further one.
        max_backoff: longest wait between tries, in seconds.

    Raises:
        ConfigurationError: a duration that is not positive and finite, fewer than one attempt,
            or `max_backoff` below `backoff`.

    Examples:
        >>> ReplayPolicy(attempts=5).timeout
        2.0
    """

    timeout: float = 2.0
    attempts: int = 3
    backoff: float = 0.1
    max_backoff: float = 5.0

    def __post_init__(self) -> None:
        _check(
            self,
            "ReplayPolicy.",
            seconds=("timeout", "backoff", "max_backoff"),
            counts=("attempts",),
        )
        if self.max_backoff < self.backoff:
            raise ConfigurationError(
                f"ReplayPolicy.max_backoff {self.max_backoff!r} is below backoff {self.backoff!r}"
            )


class SequencerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one rank's sequencer.

    Attributes:
        has_replay: whether the publisher has a replay endpoint.
        on_loss: "reset" drops the rank's blocks at a loss, "keep" keeps them, flagged.
        replay_policy: patience with replay; its timeout is also how long a gap waits where
            there is no replay.
        probe_interval: seconds without a new batch after which the tail is checked by replay.
        stale_after: seconds without a proof of life after which the rank is stale.
        max_held: most batches held out of order.
        max_held_bytes: most bytes held out of order.
        recent: how many applied batches are remembered, to recognise duplicates of them.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    has_replay: bool
    on_loss: Literal["reset", "keep"] = "reset"
    replay_policy: ReplayPolicy = ReplayPolicy()
    probe_interval: float = 5.0
    stale_after: float = 30.0
    max_held: int = 10_000
    max_held_bytes: int = 64 * 1024 * 1024
    recent: int = 256

    def __post_init__(self) -> None:
        if self.on_loss not in ("reset", "keep"):
            raise ConfigurationError(f"on_loss must be 'reset' or 'keep', not {self.on_loss!r}")
        counts = ("max_held", "max_held_bytes", "recent")
        _check(self, "", seconds=("probe_interval", "stale_after"), counts=counts)
