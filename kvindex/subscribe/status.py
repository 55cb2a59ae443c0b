"""How a rank's stream stands, as a value."""

from __future__ import annotations

from typing import Any

import msgspec

from kvindex.rank import Rank, Trust
from kvindex.sequencer import State

__all__ = ["RankStatus"]


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
