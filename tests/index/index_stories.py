"""Stories of events and answers, given to an index step by step.

A step is an event, applied as a batch of its own, or a check. Each story runs in each of the
`WAYS`: by the index under test, by that index restarted from a snapshot after each step, and by
the Python one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from kvindex import CacheSettings, EventBatch, Index, Rank
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.wire import BlockHash, Event
from tests.index.index_events import (
    A,
    apply,
    apply_together,
    counts_of,
    matched,
    prompt,
    restored,
)

Action = Callable[[BaseIndex], object]
Step = Event | Action


class Scene:
    """Steps that belong together."""

    def __init__(self, *parts: Step | Scene) -> None:
        steps = [part.steps if isinstance(part, Scene) else (part,) for part in parts]
        self.steps: tuple[Step, ...] = tuple(chain.from_iterable(steps))

    def go_on(self, index: BaseIndex) -> None:
        """Apply and check the steps one after another."""
        for step in self.steps:
            if callable(step):
                step(index)
                index.check()
            else:
                apply(index, A, step)


class Story(Scene):
    """A story of rank A, unless a step names another; the options are the index's."""

    def __init__(self, *parts: Step | Scene, **options: Any) -> None:
        super().__init__(*parts)
        self.options = options

    def run(self, way: str) -> None:
        index: Any = (reference.Index if way == "python" else Index)(**self.options)
        for step in self.steps:
            Scene(step).go_on(index)
            if way == "restarted":
                index = restored(index, **self.options)


def of(rank: Rank, *events: Event) -> Action:
    return lambda index: apply(index, rank, *events)


def together(*events: Event) -> Action:
    return lambda index: apply_together(index, A, *events)


def unknown(*tags: str) -> Action:
    """Apply a batch of events of unknown kinds."""
    return lambda index: index.apply(A, EventBatch(ts=0.0, events=[], skipped=tags))


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


WAYS = ["once", *(["restarted", "python"] if Index.backend == "native" else [])]


def stories(table: dict[str, Story], *, restarts: bool = True) -> pytest.MarkDecorator:
    """Run a test with each story of a table in each way: the test's body is `story.run(way)`."""
    ways = [way for way in WAYS if restarts or way != "restarted"]
    return pytest.mark.parametrize(
        ("story", "way"),
        [
            pytest.param(steps, way, id=f"{name} ({way})")
            for name, steps in table.items()
            for way in ways
        ],
    )
