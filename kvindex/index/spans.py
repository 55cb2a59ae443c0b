"""Stretches of a prompt, and the KV cache group that an answer counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from kvindex.wire import GroupSpec

Spans = list[tuple[int, int]]
"""Stretches [start, stop) of a prompt's blocks or tokens, ascending and not touching."""


class _HasSpec(Protocol):
    @property
    def spec(self) -> GroupSpec: ...


def extend_spans(spans: Spans, start: int, stop: int) -> None:
    """Add [start, stop) to spans whose last one does not reach beyond it."""
    if spans and spans[-1][1] >= start:
        spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
    else:
        spans.append((start, stop))


def union(stretches: Iterable[tuple[int, int]]) -> Spans:
    """Return the spans that cover these stretches, which may overlap, in any order."""
    spans: Spans = []
    for start, stop in sorted(stretches):
        extend_spans(spans, start, stop)
    return spans


def main_group(groups: Mapping[int, _HasSpec]) -> int:
    """Return the index of the group whose blocks an answer counts.

    That is the first that needs all blocks before the cut, else the first.
    """
    return min(groups, key=lambda group_idx: (not groups[group_idx].spec.needs_all, group_idx))
