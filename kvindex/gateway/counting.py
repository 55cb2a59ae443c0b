"""The counters of several processes, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def added(statistics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several `Door.statistics` come to; flags are True if all are.

    Examples:
        >>> added([{"open": 1, "shed": {"full": 1}}, {"open": 2, "shed": {}}])
        {'open': 3, 'shed': {'full': 1}}
    """
    names = dict.fromkeys(name for each in statistics for name in each)
    return {name: _sum(name, [each[name] for each in statistics if name in each]) for name in names}


def _sum(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name == "requests":  # rows of labels, and a number
        rows: Counter[tuple[Any, ...]] = Counter()
        for *labels, number in (row for value in values for row in value):
            rows[tuple(labels)] += number
        return [(*labels, number) for labels, number in rows.items()]
    if isinstance(first, Mapping):
        return added(values)
    if isinstance(first, list):
        return [sum(column) for column in zip(*values, strict=True)]
    return all(values) if isinstance(first, bool) else sum(values)
