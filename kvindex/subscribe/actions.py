"""What goes into a sequencer and what comes out: batches and actions, all values."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

__all__ = ["MAX_SEQ", "Action", "Ask", "Batch", "Deliver", "Drop", "Lost", "Restarted"]

MAX_SEQ = 2**64 - 2
"""Largest number of a batch: 2**64 - 1 marks the end of a replay."""


class Batch(msgspec.Struct, frozen=True):
    """One numbered message of a publisher, its content unread.

    Attributes:
        seq: the publisher's number, 0 … `MAX_SEQ`.
        ts: the publisher's clock when it made the batch, in seconds.
        payload: passed through untouched.
        fingerprint: a hash of the payload: two batches of one seq are the same if it is equal.
        size: bytes, counted against the bound on held batches.
    """

    seq: int
    ts: float
    payload: Any
    fingerprint: int
    size: int


class Deliver(msgspec.Struct, frozen=True):
    """Hand this batch to the sink, now.

    Attributes:
        batch: the next in order.
        replayed: whether a replay brought it (else it came live).
    """

    batch: Batch
    replayed: bool


class Ask(msgspec.Struct, frozen=True):
    """Open a fresh DEALER and ask for a replay; close the one of any earlier request.

    Attributes:
        request: the number to hand back with each reply.
        start_seq: the first seq wanted.
    """

    request: int
    start_seq: int


class Drop(msgspec.Struct, frozen=True):
    """Close the DEALER of this request: nothing more is wanted from it."""

    request: int


class Lost(msgspec.Struct, frozen=True):
    """Batches that will never come; the next `Deliver` follows after the hole.

    Attributes:
        reason: why no repair was possible, one word.
        first_seq: first seq of the hole.
        last_seq: last seq of the hole, inclusive; None if its end is not known.
        reset: whether to drop what the rank holds (the policy `on_loss="reset"`).
    """

    reason: str
    first_seq: int
    last_seq: int | None
    reset: bool


class Restarted(msgspec.Struct, frozen=True):
    """Drop what the rank holds: the publisher is, or cannot be proven not to be, another one.

    Attributes:
        epoch: the number of the epoch that begins.
        reason: the sign that told, one word.
    """

    epoch: int
    reason: str


Action: TypeAlias = Deliver | Ask | Drop | Lost | Restarted
