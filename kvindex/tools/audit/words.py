"""The audit's findings in words: numbers, shares, and the three sentences that come first."""

from __future__ import annotations

import math
from collections import Counter

from kvindex.tools.audit.report import Bar, Report, Tokens

__all__ = ["NAMES", "doublings", "duration", "headlines", "number", "origins", "quantile", "share"]

NAMES = {
    "elsewhere": "held by another rank",
    "evicted": "evicted here before, held by nobody",
    "here": "held here, computed again",
    "unreachable": "held here, behind an evicted block",
    "first": "held by nobody, as far as seen",
    "unknown": "of an unknown prompt",
}
"""Where computed tokens could have come from, in the order in which they are shown."""


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
    """Return a time as people say it.

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


def quantile(bars: list[Bar], part: float) -> float | None:
    """Return the end of the bar in which so much of the weight is reached; None if empty."""
    total = sum(bar.weight for bar in bars)
    reached = 0
    for bar in bars:
        reached += bar.weight
        if total and reached >= part * total:
            return bar.up_to
    return None


def doublings(bars: list[Bar]) -> list[Bar]:
    """Return the same weights in bars that each reach twice as far as the one before.

    Examples:
        >>> [(bar.up_to, bar.weight) for bar in doublings([Bar(0.9, 1), Bar(1.0, 2), Bar(3.1, 4)])]
        [(1.0, 3), (2.0, 0), (4.0, 4)]
    """
    weights: Counter[int] = Counter()
    for bar in bars:
        weights[math.ceil(math.log2(bar.up_to) - 1e-9)] += bar.weight
    return [Bar(2.0**n, weights[n]) for n in range(min(weights), max(weights) + 1)] if bars else []


def origins(tokens: Tokens) -> dict[str, int]:
    """Return where computed tokens could have come from: each in one place, by `NAMES`."""
    return {
        "elsewhere": tokens.elsewhere,
        "evicted": tokens.evicted - tokens.evicted_elsewhere,
        "here": tokens.here,
        "unreachable": tokens.unreachable,
        "first": tokens.first,
        "unknown": tokens.unknown,
    }


def headlines(report: Report) -> list[tuple[str, str, str]]:
    """Return (what, how much of it, a sentence) for routing, the caches and duplication."""
    return [_routing(report), _caches(report), _copies(report)]


def _routing(report: Report) -> tuple[str, str, str]:
    tokens = report.tokens
    where = (
        f" Of these, {number(tokens.other_worker)} were on another worker and "
        f"{number(tokens.same_worker)} on another dp_rank of the same worker."
        if tokens.elsewhere
        else ""
    )
    return (
        "What routing costs",
        share(tokens.elsewhere, tokens.computed),
        f"Engines computed {number(tokens.computed)} tokens. At that moment another rank held "
        f"{number(tokens.elsewhere)} of them: a KV-aware router would have saved that at most."
        + where,
    )


def _caches(report: Report) -> tuple[str, str, str]:
    tokens = report.tokens
    text = f"{number(tokens.evicted)} of the computed tokens had been in the same rank's cache."
    half = quantile(report.ages, 0.5)
    if half is not None:
        text += f" Half of these were evicted no more than {duration(half)} before."
    twice = next((saving for saving in report.savings if saving.factor == 2.0), None)
    if twice is not None and tokens.evicted:
        text += (
            f" Caches twice as large would still have held {number(twice.tokens)} "
            f"({share(twice.tokens, tokens.computed)} of what was computed)."
        )
    if tokens.evicted_elsewhere:
        text += f" Another rank held {number(tokens.evicted_elsewhere)} of them, too."
    return "What small caches cost", share(tokens.evicted, tokens.computed), text


def _copies(report: Report) -> tuple[str, str, str]:
    held = report.duplication
    copies = held.resident - held.unique
    return (
        "What duplication costs",
        share(copies, held.resident),
        f"At the end the caches hold {number(held.resident)} tokens, of which "
        f"{number(held.unique)} are different. {number(copies)} are copies of what another rank "
        "holds, too.",
    )
