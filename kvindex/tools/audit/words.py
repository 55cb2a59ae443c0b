"""Figures in words: numbers, shares, times, and histograms in few bars."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from kvindex.tools.audit.report import Bar

__all__ = ["doublings", "duration", "number", "quantile", "share"]


def number(value: float) -> str:
    """Return a whole number with its thousands apart.

    Examples:
        >>> number(1234567)
        '1,234,567'
    """
    return f"{value:,.0f}"


def share(part: float, whole: float) -> str:
    """Return a part in percent; "-" of nothing.

    Examples:
        >>> share(1, 3), share(0, 0)
        ('33.3 %', '-')
    """
    return f"{100 * part / whole:.1f} %" if whole else "-"


def duration(seconds: float) -> str:
    """Return a time as people write it.

    Examples:
        >>> duration(0.25), duration(42), duration(200), duration(7500), duration(200_000)
        ('0.25 s', '42 s', '3 min 20 s', '2 h 5 min', '2 d 7 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for size, unit, smaller, name in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"


def quantile(bars: Sequence[Bar], part: float) -> float | None:
    """Return the end of the bar in which so much of the weight is reached; None if empty."""
    total = sum(bar.weight for bar in bars)
    reached = 0
    for bar in bars:
        reached += bar.weight
        if total and reached >= part * total:
            return bar.up_to
    return None


def doublings(bars: Sequence[Bar]) -> list[Bar]:
    """Return the same weights in bars that each reach twice as far as the one before.

    Examples:
        >>> [(bar.up_to, bar.weight) for bar in doublings([Bar(0.9, 1), Bar(1.0, 2), Bar(3.1, 4)])]
        [(1.0, 3), (2.0, 0), (4.0, 4)]
    """
    weights: Counter[int] = Counter()
    for bar in bars:
        weights[math.ceil(math.log2(bar.up_to) - 1e-9)] += bar.weight
    return [Bar(2.0**n, weights[n]) for n in range(min(weights), max(weights) + 1)] if bars else []
