"""The report for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from kvindex.tools.audit.report import Report
from kvindex.tools.audit.words import NAMES, duration, headlines, number, origins, quantile, share

__all__ = ["text_of"]

_WIDTH = 96
_RANKS = 32  # more would push the rest off the screen; the JSON has them all


def text_of(report: Report) -> str:
    """Return the report as plain text, the three figures that matter first."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    ranks = f"{len(report.ranks)} rank{'' if len(report.ranks) == 1 else 's'}"
    yield f"{report.source or 'audit'}: {duration(report.seconds)}, {ranks}"
    for what, much, sentence in headlines(report):
        yield ""
        yield f"{what}: {much}"
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    tokens = report.tokens
    yield from _section(
        "Who held the computed tokens",
        ("", "tokens", "share"),
        [
            (NAMES[name], number(count), share(count, tokens.computed))
            for name, count in origins(tokens).items()
            if count or name == "elsewhere"
        ],
    )
    yield from _ranks(report)
    if tokens.evicted:
        yield from _section(
            "What larger caches would have held",
            ("cache", "tokens", "of computed"),
            [
                (
                    f"{saving.factor:g}x",
                    number(saving.tokens),
                    share(saving.tokens, tokens.computed),
                )
                for saving in report.savings
            ],
        )
    if report.shared:
        yield from _section(
            "Most shared prefixes",
            ("tokens", "ranks", "begins with"),
            [
                (number(one.tokens), one.ranks, " ".join(map(str, one.first_tokens)) or "-")
                for one in report.shared
            ],
        )
    if report.lifetimes:
        half, most = quantile(report.lifetimes, 0.5), quantile(report.lifetimes, 0.9)
        yield ""
        yield (
            f"Blocks that left were held for up to {duration(half or 0)} (half of them), "
            f"{duration(most or 0)} (nine in ten)."
        )
    yield ""
    yield "What the figures do not cover"
    for line in report.trust:
        yield from textwrap.wrap(line, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _ranks(report: Report) -> Iterator[str]:
    rows = [
        (
            one.rank,
            number(one.tokens.computed),
            share(one.tokens.elsewhere, one.tokens.computed),
            share(one.tokens.evicted, one.tokens.computed),
            share(one.tokens.unknown, one.tokens.computed),
            number(one.resident),
            number(one.peak),
        )
        for one in report.ranks[:_RANKS]
    ]
    header = ("rank", "computed", "elsewhere", "evicted", "unknown", "holds", "cache seen")
    yield from _section("Ranks", header, rows)
    if len(report.ranks) > _RANKS:
        yield f"and {len(report.ranks) - _RANKS} more: see --json"


def _section(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    cells = [tuple(header), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield ""
    yield title
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        yield "  ".join(["", first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()
