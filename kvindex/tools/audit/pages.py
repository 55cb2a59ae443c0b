"""The report for people: its parts, and how a terminal and a page show them.

A page needs nothing else: no script, no font, no other file. Plots are inline SVG, titled, with
their numbers, coloured by classes that the page defines.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import msgspec

from kvindex.tools.audit.report import AuditReport, Bar, RankReport, Tokens

# Parts --------------------------------------------------------------------------------------------


_NAMES = {
    "elsewhere": "held by another rank",
    "evicted": "evicted here before, held by nobody",
    "here": "held here, computed again",
    "unreachable": "held here, behind an evicted block",
    "first": "held by nobody, as far as seen",
    "unknown": "of an unknown prompt",
}


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table, and what belongs to it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]  # the first cell names the row
    note: str = ""  # a sentence for the page
    # A sentence that stands for the table in text: "" where text has the table, None for nothing.
    summary: str | None = ""
    plot: str = ""
    keys: Sequence[str] = ()  # the colours of the rows in the plot, by their CSS classes
    wide: bool = False


def sections(report: AuditReport) -> Iterator[Section]:
    """Yield the parts after the headlines; `summary` is None where text leaves one out."""
    computed = report.tokens.computed
    yield _rungs(report)
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


def _rungs(report: AuditReport) -> Section:
    title = "Route better, or buy memory"
    tokens, saved = report.tokens, {s.factor: s.tokens for s in report.capacity.savings}
    rungs = [
        ("first", tokens.again, "ideal: an infinite cache"),
        ("unreachable", saved[2.0], "twice the capacity"),
        ("evicted", saved[1.0], "capacity: one cache, as large as all ranks' together"),
        ("here", tokens.elsewhere, "best routing at each moment"),
        ("elsewhere", 0, "delivered"),
    ]
    left = [tokens.computed - saved for _, saved, _ in rungs]
    steps = [after - before for before, after in pairwise([0, *left])]
    return Section(
        title=title,
        header=("computed with", "tokens", "of delivered"),
        rows=[
            (words, number(computed), share(computed, tokens.computed))
            for (_, _, words), computed in zip(rungs, left, strict=True)
        ],
        note=(
            "From right to left: what a router saves at each moment; what it saves in time, as "
            "fewer copies leave room; what twice the memory saves; what only still more saves; "
            "what nothing saves. All ranks together were seen to have room for "
            f"{number(report.capacity.size)} tokens."
        ),
        plot=draw_shares(
            title, [(css, step, words) for (css, _, words), step in zip(rungs, steps, strict=True)]
        ),
        keys=[css for css, _, _ in rungs],
        wide=True,
    )


def _origins(tokens: Tokens) -> Section:
    title = "Who held the computed tokens"
    # Each computed token has one holder. What another rank holds, too, is elsewhere.
    counts = {
        **msgspec.structs.asdict(tokens),
        "evicted": tokens.evicted - tokens.evicted_elsewhere,
    }
    parts = [
        (name, counts[name], words)
        for name, words in _NAMES.items()
        if counts[name] or name == "elsewhere"
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


def _over_time(report: AuditReport) -> Section:
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
    # Eight bars in each doubling make sums exact enough, and are too many to look at.
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


def headlines(report: AuditReport) -> list[tuple[str, str, str]]:
    """Return (what, how much of it, a sentence) for routing, the caches and duplication."""
    return [_routing(report), _caches(report), _copies(report)]


def _routing(report: AuditReport) -> tuple[str, str, str]:
    tokens = report.tokens
    where = (
        f" ({number(tokens.other_worker)} on another worker, {number(tokens.same_worker)} on "
        "another dp_rank of the same worker)"
        if tokens.elsewhere
        else ""
    )
    return (
        "What routing costs",
        share(tokens.elsewhere, tokens.computed),
        f"Engines computed {number(tokens.computed)} tokens. At that moment another rank held "
        f"{number(tokens.elsewhere)} of them{where}. A KV-aware router saves these, and in time up "
        f"to about {number(report.capacity.savings[0].tokens)}, as fewer copies leave room.",
    )


def _caches(report: AuditReport) -> tuple[str, str, str]:
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


def _copies(report: AuditReport) -> tuple[str, str, str]:
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


# Plots --------------------------------------------------------------------------------------------


_WIDE, _NARROW, _HEIGHT = 1000, 480, 220  # in pixels of the page, about: text keeps its size
_CHARACTER = 7
_LEFT, _BOTTOM, _TOP = 64, 40, 12


def draw_shares(title: str, parts: Sequence[tuple[str, int, str]]) -> str:
    """Return one bar that is divided into (class, amount, name)."""
    total = sum(amount for _, amount, _ in parts)
    at, body = 0.0, []
    for css, amount, name in parts:
        width = _WIDE * amount / total if total else 0.0
        if width:
            tip = f"<title>{escape(name)}: {amount:,} ({amount / total:.1%})</title>"
            body.append(
                f'<rect class="{css}" x="{at:.1f}" y="0" width="{width:.1f}" height="36">'
                f"{tip}</rect>"
            )
        at += width
    description = "; ".join(f"{name} {amount:,}" for _, amount, name in parts if amount)
    return _svg(title, description, (_WIDE, 36), body)


def draw_bars(
    title: str,
    bars: Sequence[tuple[str, Sequence[int]]],
    classes: Sequence[str],
    *,
    across: str,
    unit: str = "tokens",
    wide: bool = False,
) -> str:
    """Return columns, each of amounts stacked from the bottom up, in the colours of the classes."""
    full = _WIDE if wide else _NARROW
    top = max((sum(amounts) for _, amounts in bars), default=0) or 1
    step = (full - _LEFT) / max(1, len(bars))
    room = _HEIGHT - _BOTTOM - _TOP
    body = _scale(top, unit, full)
    # So few columns have a label that each label has room.
    longest = max((len(label) for label, _ in bars), default=1)
    every = math.ceil((longest + 2) * _CHARACTER / step)
    for number, (label, amounts) in enumerate(bars):
        x, y = _LEFT + number * step, float(_HEIGHT - _BOTTOM)
        tip = f"<title>{escape(label)}: {', '.join(f'{a:,}' for a in amounts)}</title>"
        body.append(f"<g>{tip}")
        for css, amount in zip(classes, amounts, strict=True):
            height = room * amount / top
            y -= height
            width = max(0.5, step * 0.86)
            body.append(
                f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"/>'
            )
        body.append("</g>")
        if number % every == 0:
            # A label at either end must not stick out of the plot.
            half = len(label) * _CHARACTER / 2
            middle = max(half, min(x + step * 0.43, full - half))
            body.append(_text(middle, _HEIGHT - _BOTTOM + 16, label))
    body.append(_text((_LEFT + full) / 2, _HEIGHT - 4, across))
    description = "; ".join(f"{label}: {sum(amounts):,}" for label, amounts in bars[:24])
    return _svg(title, description, (full, _HEIGHT), body)


def _svg(title: str, description: str, size: tuple[int, int], body: Sequence[str]) -> str:
    name = "plot-" + title.lower().replace(" ", "-")
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-labelledby="{name}t {name}d">'
        f'<title id="{name}t">{escape(title)}</title>'
        f'<desc id="{name}d">{escape(description)}</desc>' + "".join(body) + "</svg>"
    )


def _scale(top: int, unit: str, full: int) -> list[str]:
    """Horizontal lines at the bottom, in the middle and at the top, with their amounts."""
    lines = []
    for part in (0.0, 0.5, 1.0):
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * part
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{full}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if part:
            value = top * part
            units = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
            size, letter = next((unit for unit in units if value >= unit[0]), (1.0, ""))
            lines.append(_text(_LEFT - 6, y + 4, f"{value / size:.3g}{letter}", anchor="end"))
    lines.append(_text(_LEFT - 6, _HEIGHT - _BOTTOM + 4, unit, anchor="end"))
    return lines


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# The text ----------------------------------------------------------------------------------------


_WIDTH = 96
_MOST_SHOWN = 32  # rows; more would push the rest off the screen; the JSON has them all


def text_of(report: AuditReport) -> str:
    """Return the report as plain text, the three figures that matter first."""
    ranks = f"{len(report.ranks)} rank{'' if len(report.ranks) == 1 else 's'}"
    lines = [f"{report.source or 'audit'}: {duration(report.seconds)}, {ranks}"]
    for title, figure, sentence in headlines(report):
        wrapped = textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += ["", f"{title}: {figure}", *wrapped]
    for section in sections(report):
        if section.summary is not None:
            lines += ["", *([section.summary] if section.summary else _columns_of(section))]
    lines += ["", "What the figures do not cover"]
    for line in report.trust:
        lines += textwrap.wrap(line, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def _columns_of(section: Section) -> Iterator[str]:
    cells = [section.header, *section.rows[:_MOST_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield section.title
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        yield "  ".join(["", first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()
    if len(section.rows) > _MOST_SHOWN:
        yield f"and {len(section.rows) - _MOST_SHOWN} more: see --json"


# The page -----------------------------------------------------------------------------------------


_MOST_ROWS = 1024  # of a table; the JSON has them all
# A report names what is from the network. Nothing that might get past the escaping can load or run.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

# Two palettes, both with enough contrast to read.
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #57606a;
  --line: #d5dae0; --elsewhere: #c2410c; --evicted: #b58900; --here: #6d28d9;
  --unreachable: #9d5b8b; --first: #2563a8; --unknown: #7b838c; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1d2126; --text: #e6e9ed;
  --soft: #a3abb5; --line: #363c44; --elsewhere: #fb8c50; --evicted: #e0b93d; --here: #b39bf5;
  --unreachable: #d99ac7; --first: #6aa8e8; --unknown: #8d959f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1080px; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 0 0 8px; font-size: 1.05rem; }
header p, footer, section > p { color: var(--soft); }
main { display: grid; gap: 16px; margin: 16px 0;
  grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); }
header p { margin: 4px 0 0; } footer { font-size: .9rem; }
section, article { min-width: 0; padding: 20px; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; }
section.wide { grid-column: 1 / -1; }
section.cards { padding: 0; border: 0; background: none; display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); }
article p { margin: 0; font-size: .95rem; }
article p.much { font-size: 2.2rem; font-weight: 650; line-height: 1.3; }
article:nth-child(1) .much { color: var(--elsewhere); }
svg { display: block; width: 100%; height: auto; margin: 8px 0; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
.elsewhere { fill: var(--elsewhere); background: var(--elsewhere); }
.evicted { fill: var(--evicted); background: var(--evicted); }
.here { fill: var(--here); background: var(--here); }
.unreachable { fill: var(--unreachable); background: var(--unreachable); }
.first { fill: var(--first); background: var(--first); }
.unknown { fill: var(--unknown); background: var(--unknown); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; }
th { font-weight: 500; } thead th { color: var(--soft); font-size: .9rem; }
th:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
td:last-child { padding-right: 0; }
summary { color: var(--soft); cursor: pointer; }
li { margin: 4px 0; }
@media (max-width: 600px) { th:first-child { white-space: normal; } body { padding: 12px; } }
@media print { section, article { break-inside: avoid; } }
"""


def html_of(report: AuditReport) -> str:
    """Return the report as an HTML page: light and dark, with a table beside each plot."""
    try:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(0.0, report.began)))
    except (ValueError, OverflowError, OSError):
        began = f"{report.began:g} s"  # a publisher's timestamp may be no time at all
    source = f"{report.source or 'audit'}, {duration(report.seconds)} from {began}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            "<title>kvindex audit</title>",
            f"<style>{_STYLE}</style>\n</head>\n<body>",
            f"<header><h1>kvindex audit</h1><p>{escape(source)}.</p></header>\n<main>",
            *_parts(report),
            f"</main>\n<footer>kvindex {escape(report.version)}. The same as data: "
            "<code>kvindex audit --json</code>.</footer>\n</body>\n</html>\n",
        ]
    )


def _parts(report: AuditReport) -> Iterator[str]:
    yield '<section class="cards wide" aria-label="The three figures">'
    for title, figure, sentence in headlines(report):
        yield (
            f'<article><h2>{escape(title)}</h2><p class="much">{escape(figure)}</p>'
            f"<p>{escape(sentence)}</p></article>"
        )
    yield "</section>"
    for section in sections(report):
        yield f'<section class="{"wide" if section.wide else "half"}"><h2>{section.title}</h2>'
        yield section.plot
        yield _table(section)
        yield f"<p>{escape(section.note)}</p></section>" if section.note else "</section>"
    yield '<section class="wide"><h2>What the figures do not cover</h2><ul>'
    yield from (f"<li>{escape(line)}</li>" for line in report.trust)
    yield "</ul></section>"


def _table(section: Section) -> str:
    """Return a table; folded up where a plot shows it and it is not the plot's legend."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in section.header)
    keys = [f'<span class="key {css}" aria-hidden="true"></span> ' for css in section.keys]
    keys += [""] * len(section.rows)
    lines = []
    for key, (first, *rest) in zip(keys, section.rows[:_MOST_ROWS], strict=False):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{key}{escape(first)}</th>{cells}</tr>')
    table = (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
    folded = section.plot and not section.keys
    return f"<details><summary>As a table</summary>{table}</details>" if folded else table
