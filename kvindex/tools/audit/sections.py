"""The parts of a report, as text and pages show them: sentences, tables and plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvindex.tools.audit.plots import draw_bars, draw_shares
from kvindex.tools.audit.report import Bar, RankReport, Report, Tokens

_NAMES = {
    "elsewhere": "held by another rank",
    "evicted": "evicted here before, held by nobody",
    "here": "held here, computed again",
    "unreachable": "held here, behind an evicted block",
    "first": "held by nobody, as far as seen",
    "unknown": "of an unknown prompt",
}


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table, and what belongs to it.

    Attributes:
        title: what it shows.
        header: the names of its columns.
        rows: the cells; the first one names the row.
        note: a sentence for the page.
        summary: a sentence that stands for the table in text; "" where text has the table.
        plot: drawn, for pages; "" for none.
        keys: the colours of the rows in the plot, by their CSS classes.
        wide: whether a page gives it the whole width.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    summary: str | None = ""
    plot: str = ""
    keys: Sequence[str] = ()
    wide: bool = False


def sections(report: Report) -> Iterator[Section]:
    """Yield the parts after the headlines; `summary` is None where text leaves one out."""
    computed = report.tokens.computed
    yield _origins(report.tokens)
    if len(report.series) > 1:
        yield _over_time(report)
    yield _ranks(report.ranks)
    if report.tokens.evicted:
        savings = [(f"{saving.factor:g}x", saving.tokens) for saving in report.savings]
        yield _columns(
            "What larger caches would have held",
            ("cache", "tokens", "of computed"),
            savings,
            "evicted",
            across="times the cache as seen",
            rows=[(name, number(tokens), share(tokens, computed)) for name, tokens in savings],
        )
        yield _histogram("How long ago it was evicted", report.ages, "evicted", "tokens")
    if report.duplication.unique:
        by_ranks = [(str(n), tokens) for n, tokens in enumerate(report.duplication.by_ranks, 1)]
        title = "How many ranks hold the same"
        yield _columns(title, ("ranks", "different tokens"), by_ranks, "first", summary=None)
    if report.shared:
        yield Section(
            title="Most shared prefixes",
            header=("tokens", "ranks", "begins with"),
            rows=[
                (number(p.tokens), str(p.ranks), " ".join(map(str, p.first_tokens)) or "-")
                for p in report.shared
            ],
            note="By tokens × ranks; of prefixes that begin alike the first.",
        )
    if report.lifetimes:
        half, most = quantile(report.lifetimes, 0.5), quantile(report.lifetimes, 0.9)
        summary = (
            f"Blocks that left were held for up to {duration(half or 0)} (half of them), "
            f"{duration(most or 0)} (nine in ten)."
        )
        title = "How long blocks were held"
        yield _histogram(title, report.lifetimes, "here", "blocks", note=summary, summary=summary)


def _origins(tokens: Tokens) -> Section:
    title = "Who held the computed tokens"
    parts = [
        (name, count, _NAMES[name])
        for name, count in _origins_of(tokens).items()
        if count or name == "elsewhere"
    ]
    return Section(
        title=title,
        header=("", "tokens", "share"),
        rows=[(words, number(count), share(count, tokens.computed)) for _, count, words in parts],
        note=(
            f"Not computed: {number(tokens.returned)} tokens that were stored on a device while "
            f"the rank held them elsewhere, and {number(tokens.offloaded)} that were copied off "
            f"the device. {number(tokens.alone)} of the computed tokens are in blocks that were "
            "stored one at a time, as generation does."
        ),
        plot=draw_shares(title, parts),
        keys=[name for name, _, _ in parts],
        wide=True,
    )


def _over_time(report: Report) -> Section:
    title = "Computed tokens over time"
    starts = [duration(i * report.bucket_seconds) for i in range(len(report.series))]
    bars = [
        (start, (bucket.elsewhere, max(0, bucket.computed - bucket.elsewhere)))
        for start, bucket in zip(starts, report.series, strict=True)
    ]
    return Section(
        title=title,
        header=("from", "computed", "elsewhere", "evicted", "unknown"),
        rows=[
            (start, *map(number, (b.computed, b.elsewhere, b.evicted, b.unknown)))
            for start, b in zip(starts, report.series, strict=True)
        ],
        note="Colours as above: at the bottom what another rank held, above it all others.",
        summary=None,
        plot=draw_bars(title, bars, ("elsewhere", "first"), across="since the start", wide=True),
        wide=True,
    )


def _ranks(ranks: Sequence[RankReport]) -> Section:
    rows = []
    for rank in ranks:
        tokens = rank.tokens
        parts = (tokens.elsewhere, tokens.evicted, tokens.unknown)
        stream = rank.state or "recording"
        rows.append(
            (
                rank.rank,
                number(tokens.computed),
                *(share(part, tokens.computed) for part in parts),
                number(rank.resident),
                number(rank.peak),
                stream + (", partial" if rank.complete is False else ""),
            )
        )
    return Section(
        title="Ranks",
        header=(
            *("rank", "computed", "elsewhere", "evicted", "unknown", "holds", "cache seen"),
            "stream",
        ),
        rows=rows,
        note="In tokens. Cache seen: the most that its device held at a time.",
        wide=True,
    )


def _histogram(title: str, bars: Sequence[Bar], css: str, unit: str, **details: Any) -> Section:
    columns = [(duration(bar.up_to), bar.weight) for bar in doublings(bars)]
    return _columns(title, ("up to", unit), columns, css, unit=unit, **details)


def _columns(
    title: str,
    header: Sequence[str],
    columns: Sequence[tuple[str, int]],
    css: str,
    *,
    unit: str = "tokens",
    across: str = "",
    **details: Any,
) -> Section:
    """A table of amounts by name, and the same as columns of one colour."""
    bars = [(name, (amount,)) for name, amount in columns]
    plot = draw_bars(title, bars, (css,), unit=unit, across=across or header[0])
    rows = [(name, number(amount)) for name, amount in columns]
    return Section(**{"title": title, "header": header, "rows": rows, "plot": plot, **details})


def _origins_of(tokens: Tokens) -> dict[str, int]:
    """The holders of computed tokens: each token has one, by `_NAMES`."""
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


# Figures in words -----------------------------------------------------------------------------


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
