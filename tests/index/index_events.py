"""Events for tests of the index, and stories of events and answers.

Blocks are numbered along one prompt and labelled from 100 on. A story is a list of steps: an event,
applied as a batch of its own, or a check. Each story is run in each of the `WAYS`: by the index
that is under test, by that index restarted from a snapshot after each step, and by the Python one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import pytest

from kvindex import (
    BACKEND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    EventBatch,
    Index,
    Rank,
)
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.wire import BlockHash, Event

SIZE = 4
A, B, C = Rank("a"), Rank("b"), Rank("c", 3)
CLEAR = AllBlocksCleared()


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


# Stories

Action = Callable[[BaseIndex], object]
Step = Event | Action


class Story(NamedTuple):
    steps: tuple[Step, ...]
    options: dict[str, Any]


class Scene(NamedTuple):
    steps: tuple[Step, ...]


def scene(*parts: Step | Scene) -> Scene:
    """Steps that belong together; nothing else."""
    steps = [part.steps if isinstance(part, Scene) else (part,) for part in parts]
    return Scene(tuple(chain.from_iterable(steps)))


def story(*parts: Step | Scene, **options: Any) -> Story:
    """A story of rank A, unless a step names another; the options are the index's."""
    return Story(scene(*parts).steps, options)


def of(rank: Rank, *events: Event) -> Action:
    return lambda index: apply(index, rank, *events)


def together(*events: Event) -> Action:
    return lambda index: apply_together(index, A, *events)


def configured(**settings: Any) -> Action:
    return lambda index: index.configure(A, CacheSettings(**settings))


def cleared(index: BaseIndex) -> None:
    """Clear the rank as after a restart of its engine."""
    index.tree(A).clear()


def holds(
    blocks: int, token_ids: list[int] | None = None, rank: Rank = A, **options: Any
) -> Action:
    """Check how many blocks of a prompt the rank holds; of the one prompt, unless given."""
    question = prompt(12) if token_ids is None else token_ids

    def check(index: BaseIndex) -> None:
        assert matched(index, question, rank, **options) == blocks

    return check


def answers(token_ids: list[int] | None = None, media: Any = None, **fields: Any) -> Action:
    """Check fields of rank A's match with a prompt."""
    question = prompt(12) if token_ids is None else token_ids

    def check(index: BaseIndex) -> None:
        match = index.match(question, media=media)[A]
        assert {name: getattr(match, name) for name in fields} == fields

    return check


def counts(**numbers: Any) -> Action:
    """Check some of rank A's statistics."""

    def check(index: BaseIndex) -> None:
        statistics = counts_of(index)
        assert {name: statistics[name] for name in numbers} == numbers

    return check


def walked(*blocks: tuple[BlockHash, str, int, int, int], group: int | None = None) -> Action:
    """Check label, medium, group, depth and copies of each block of rank A, or of one group's."""

    def check(index: BaseIndex) -> None:
        assert {
            (block.block_hash, block.medium, block.group_idx, block.depth, block.copies)
            for block in index.tree(A).walk()
            if group is None or block.group_idx == group
        } == set(blocks)

    return check


def totals(**numbers: int) -> Action:
    """Check some statistics of the whole index."""

    def check(index: BaseIndex) -> None:
        statistics = index.statistics()
        assert {name: statistics[name] for name in numbers} == numbers
        assert len(index) == statistics["blocks"]

    return check


NATIVE = BACKEND == "native"
WAYS = ["once", *(["restarted", "python"] if NATIVE else [])]


def run(story: Story, way: str) -> None:
    """Apply and check a story's steps one after another."""
    index: Any = (reference.Index if way == "python" else Index)(**story.options)
    for step in story.steps:
        go_on(index, step)
        if way == "restarted":
            index = restored(index, **story.options)


def go_on(index: BaseIndex, *parts: Step | Scene) -> None:
    for step in scene(*parts).steps:
        if callable(step):
            step(index)
            index.check()
        else:
            apply(index, A, step)


def stories(table: dict[str, Story], *, restarts: bool = True) -> pytest.MarkDecorator:
    """Run a test with each story of a table in each way: the test's body is `run(story, way)`."""
    ways = [way for way in WAYS if restarts or way != "restarted"]
    return pytest.mark.parametrize(
        ("story", "way"),
        [
            pytest.param(steps, way, id=f"{name} ({way})")
            for name, steps in table.items()
            for way in ways
        ],
    )
