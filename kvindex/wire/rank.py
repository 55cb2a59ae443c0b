"""The unit of everything: one engine's data-parallel rank, and how its stream stands."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Rank(NamedTuple):
    """One data-parallel rank of one worker: one publisher, one numbering, one cache, one tree.

    Attributes:
        worker: the id of the engine deployment, chosen by the user.
        dp_rank: the data-parallel rank within it, from 0.

    Examples:
        >>> str(Rank("vllm-0", 1))
        'vllm-0/1'
    """

    worker: str
    dp_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker}/{self.dp_rank}"


class State(str, enum.Enum):
    """The state of a rank's stream, and so how far its answers can be trusted.

    Attributes:
        CONNECTING: no connection to the publisher.
        SYNCING: connected; a replay catches up, or proves that this is still the same publisher.
        LIVE: everything that is known to exist has been applied.
        REPAIRING: batches are missing; they are awaited or requested.
        STALE: as LIVE, but there was no sign of life (a batch, a reply to a replay request, a new
            connection) for too long.
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


class Trust(NamedTuple):
    """How far a rank's answer can be trusted.

    Attributes:
        state: what the rank's stream is doing.
        complete: whether every batch since the publisher's first was applied.
        lag: batches known of but not applied yet.
    """

    state: State
    complete: bool
    lag: int
