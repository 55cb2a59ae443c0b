"""KV cache groups of hybrid models, and the hit that the engine itself would get.

A plain model has one group of full attention: its hit is the leading resident blocks. A hybrid
model also has groups that need only the blocks of their window before the cut. The rule was
checked against what vLLM's own lookup answered (`docs/wire.md`, "Predicting the engine's hit").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import lcm
from operator import itemgetter
from typing import NamedTuple

from kvindex.wire import GroupSpec

__all__ = ["GroupCoverage", "Spans", "engine_hit", "extend_spans"]

Spans = list[tuple[int, int]]
"""Resident stretches [start, stop) of a prompt's blocks, ascending and not touching."""


class GroupCoverage(NamedTuple):
    """What one rank holds of a prompt in one group."""

    spec: GroupSpec
    block_size: int
    spans: Spans


def extend_spans(spans: Spans, start: int, stop: int) -> None:
    """Add [start, stop) to spans whose last one does not reach beyond it."""
    if spans and spans[-1][1] >= start:
        spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
    else:
        spans.append((start, stop))


def engine_hit(groups: Sequence[GroupCoverage]) -> int:
    """Return how many leading tokens of the prompt the engine would find cached.

    Complexity: O(blocks lowered × log spans).
    """
    groups = [group for group in groups if group.spec.takes_part]
    if not groups:
        return 0
    unit = lcm(*(group.block_size for group in groups))
    windows = [g for g in groups if g.spec.needed_blocks(g.block_size) is not None]
    full = [g for g in groups if g.spec.needed_blocks(g.block_size) is None]
    hit = min(_leading(group) for group in full) if full else min(map(_reach, windows))
    hit -= hit % unit
    while hit and not all(_fits(group, hit) for group in windows):
        hit -= unit
    return hit


def _leading(group: GroupCoverage) -> int:
    """Return how many tokens are resident from the start."""
    if not group.spans or group.spans[0][0]:
        return 0
    return group.spans[0][1] * group.block_size


def _reach(group: GroupCoverage) -> int:
    """Return where the last resident block ends, in tokens."""
    return group.spans[-1][1] * group.block_size if group.spans else 0


def _fits(group: GroupCoverage, hit: int) -> bool:
    """Whether the blocks that a window needs before `hit` tokens are all resident."""
    stop = hit // group.block_size
    needed = group.spec.needed_blocks(group.block_size)
    assert needed is not None
    start = max(0, stop - needed)
    if start == stop:
        return True
    before = bisect_right(group.spans, start, key=itemgetter(0))
    return before > 0 and stop <= group.spans[before - 1][1]
