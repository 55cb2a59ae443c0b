"""The states of a rank's stream."""

from __future__ import annotations

import enum

__all__ = ["State"]


class State(str, enum.Enum):
    """What a rank's stream is doing, and so how far its answers can be trusted.

    Attributes:
        CONNECTING: no connection to the publisher.
        SYNCING: connected; a replay catches up, or proves that this is still the same publisher.
        LIVE: everything that is known to exist has been applied.
        REPAIRING: batches are missing; they are awaited or asked for.
        STALE: as LIVE, but there was no sign of life for too long.
        CLOSED: closed by its owner, for good.
    """

    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    REPAIRING = "repairing"
    STALE = "stale"
    CLOSED = "closed"

    def __str__(self) -> str:
        return self.value
