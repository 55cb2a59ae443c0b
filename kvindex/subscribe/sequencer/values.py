"""A sequencer's input and output: batches, items and requests, all values."""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from kvindex.wire.rank import Rank, State

__all__ = [
    "MAX_COUNT",
    "MAX_SEQ",
    "Action",
    "AskReplay",
    "Batch",
    "CloseReplay",
    "RankBatch",
    "RankLost",
    "RankRestarted",
    "State",
]

MAX_SEQ = 2**64 - 2
"""Largest number of a batch: 2**64 - 1 marks the end of a replay."""

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
        replayed: whether it came by replay rather than live.
    """

    rank: Rank
    epoch: int
    seq: int
    batch: _Content
    replayed: bool


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """Batches of a rank are lost for good; the next batch follows after the hole.

    Attributes:
        rank: whose batches they are.
        epoch: counts the publisher's restarts.
        reason: why they could not be had, one word.
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
"""What a sequencer tells its owner: hand an item on, or do something about a replay socket."""
