"""The unit of everything: one engine's data-parallel rank."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Rank", "Trust"]


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


class Trust(NamedTuple):
    """How far a rank's answer can be trusted.

    Attributes:
        state: the rank's stream state, e.g. "live".
        complete: whether every batch since the publisher's first was applied.
        lag: batches known of but not applied yet.
    """

    state: str
    complete: bool
    lag: int
