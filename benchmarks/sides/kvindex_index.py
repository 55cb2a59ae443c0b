"""kvindex itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.workload import MsgpackEncoder
from kvindex import Index, Match, Rank


class KVIndex:
    """An `Index`, fed with engines' payloads."""

    answers = True
    batches = True

    def __init__(self) -> None:
        self.index = Index()

    def encoder(self) -> MsgpackEncoder:
        """Return what writes engines' payloads."""
        return MsgpackEncoder()

    def reset(self) -> None:
        """Begin again with an empty index."""
        self.index = Index()

    def rank(self, number: int) -> Rank:
        """Return a rank of the one worker."""
        return Rank("engine", number)

    def applier(self) -> Callable[[Any, bytes], object]:
        """Return `Index.apply`."""
        return self.index.apply

    def matcher(self) -> Callable[[Any], Match]:
        """Return `Index.match`."""
        return self.index.match

    def drain(self) -> None:
        """Nothing is ever queued."""

    def best(self, answer: Match) -> int:
        """Return the blocks of the best rank."""
        return answer.best.blocks if answer.best else 0

    def depths(self, answer: Match) -> dict[int, int]:
        """Return the blocks by dp_rank."""
        return {m.rank.dp_rank: m.blocks for m in answer if m.blocks}
