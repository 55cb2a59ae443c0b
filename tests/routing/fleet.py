"""A small fleet for the tests of routing: an index, whose ranks hold prefixes of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvindex import BlockStored, EventBatch, Index, Rank
from kvindex.routing import Load, Router

BLOCK = 16
PROMPT = list(range(10 * BLOCK + 1))
"""Ten whole blocks, and the token that is computed in any case."""

A, B, C = Rank("a"), Rank("b"), Rank("c")
NOTHING = Load(0, 0, 0)


def fleet(holds: Mapping[str, int] | str) -> Index:
    """Return an index of workers, each with so many blocks of `PROMPT`; "ab": a and b with none."""
    index = Index()
    for worker in holds:
        hold(index, Rank(worker), 0 if isinstance(holds, str) else holds[worker])
    return index


def router_of(holds: Mapping[str, int] | str, **options: Any) -> Router:
    return Router(fleet(holds), **options)


def hold(index: Index, rank: Rank, blocks: int, *, medium: str = "GPU", first: int = 0) -> None:
    """Have a rank hold the blocks from `first` up to `blocks` of `PROMPT`."""
    index.add(rank)
    if blocks > first:
        stored = BlockStored(
            block_hashes=list(range(first + 1, blocks + 1)),
            parent_block_hash=first or None,
            token_ids=PROMPT[first * BLOCK : blocks * BLOCK],
            block_size=BLOCK,
            medium=medium,
        )
        index.apply(rank, EventBatch(ts=0.0, events=[stored]))


class Clock:
    """A clock that is moved by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Followed:
    """An index whose ranks are followed: the test sets which are live and connected."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.live = self.connected = frozenset(index.ranks)

    def check_open(self) -> None:
        """Raise nothing: nobody closes it."""

    def connected_ranks(self) -> frozenset[Rank]:
        return self.connected

    def live_ranks(self) -> frozenset[Rank]:
        return self.live
