"""A small fleet for the tests of routing: an index, whose ranks hold prefixes of one prompt."""

from __future__ import annotations

from collections.abc import Mapping

from kvindex import BlockStored, EventBatch, Index, Rank

BLOCK = 16
PROMPT = list(range(10 * BLOCK + 1))
"""Ten whole blocks, and the token that is computed in any case."""


def fleet(holds: Mapping[str, int], *, medium: str = "GPU") -> Index:
    """Return an index of workers, each of which holds so many blocks of `PROMPT`."""
    index = Index()
    for worker, blocks in holds.items():
        hold(index, Rank(worker), blocks, medium=medium)
    return index


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


class FollowedIndex:
    """An index whose ranks are followed: the test says which are live."""

    def __init__(self, index: Index, live: frozenset[Rank]) -> None:
        self.index = index
        self.live = live
        self.connected = frozenset(index.ranks)

    def check_open(self) -> None:
        """Raise nothing: nobody closes it."""

    def connected_ranks(self) -> frozenset[Rank]:
        return self.connected

    def live_ranks(self) -> frozenset[Rank]:
        return self.live
