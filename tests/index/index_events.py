"""Events for tests of the index: blocks are numbered along one prompt and labelled from 100 on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Index, Rank
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.wire import Event

SIZE = 4
A, B, C = Rank("a"), Rank("b"), Rank("c", 3)
CLEAR = AllBlocksCleared()
both = pytest.mark.parametrize("kind", [Index, reference.Index], ids=["chosen", "python"])


# Events


def tokens(*blocks: int) -> list[int]:
    """The tokens of the blocks with these numbers; each block has tokens of its own."""
    return [1000 * block + i for block in blocks for i in range(SIZE)]


def prompt(count: int) -> list[int]:
    """The one prompt's first `count` blocks."""
    return tokens(*range(count))


def stored(*blocks: int, parent: Any = "before", base: int = 100, **fields: Any) -> BlockStored:
    """Store consecutive blocks of the one prompt; `base` is the label of block 0."""
    if parent == "before":
        parent = base + blocks[0] - 1 if blocks[0] else None
    fields.setdefault("token_ids", tokens(*blocks))
    fields.setdefault("block_size", SIZE)
    hashes = fields.pop("block_hashes", [base + block for block in blocks])
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, **fields)


def removed(*blocks: int, base: int = 100, **fields: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=[base + block for block in blocks], **fields)


def located(*blocks: int, **fields: Any) -> BlockStored:
    """Report where blocks are, without their tokens."""
    return stored(*blocks, parent=None, token_ids=[], block_size=0, **fields)


# Indexes


def apply(index: BaseIndex, rank: Rank, *events: Event) -> None:
    """Apply each event as a batch of its own, and check the index after each."""
    for event in events:
        index.apply(rank, EventBatch(ts=0.0, events=[event]))
        index.check()


def apply_together(index: BaseIndex, rank: Rank, *events: Event) -> None:
    """Apply the events as one batch, and check the index once."""
    index.apply(rank, EventBatch(ts=0.0, events=list(events)))
    index.check()


def index_of(*events: Event, rank: Rank = A, **options: Any) -> Index:
    index = Index(**options)
    apply(index, rank, *events)
    return index


def three_ranks() -> Index:
    """A holds 2 blocks of the prompt, B holds 3 and C none; C holds another block."""
    index = index_of(stored(0, 1))
    apply(index, B, stored(0, 1, 2))
    apply(index, C, stored(7, parent=None))
    return index


def restored(index: Index, **options: Any) -> Index:
    """The index after a restart from a snapshot; the Python one, which has none, as it is."""
    return Index.from_bytes(index.to_bytes(), **options) if index.backend == "native" else index


def matched(index: BaseIndex, token_ids: Iterable[int], rank: Rank = A, **options: Any) -> int:
    """How many blocks of the prompt the rank holds."""
    return index.match(list(token_ids), **options)[rank].blocks


def counts_of(index: BaseIndex, rank: Rank = A) -> dict[str, Any]:
    statistics: dict[str, Any] = index.statistics()["ranks"][str(rank)]
    return statistics
