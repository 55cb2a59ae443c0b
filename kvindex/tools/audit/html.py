"""The report as one page that needs nothing else: no script, no font, no other file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from kvindex.tools.audit.plots import Plots
from kvindex.tools.audit.report import Bar, Report
from kvindex.tools.audit.style import STYLE
from kvindex.tools.audit.words import NAMES, doublings, duration, headlines, number, origins, share

__all__ = ["html_of"]

_RANKS = 1024  # rows; the JSON has them all
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def html_of(report: Report) -> str:
    """Return the report as an HTML page: light and dark, with a table beside each plot."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(0.0, report.began)))
    what = f"{report.source or 'audit'}, {duration(report.seconds)} from {began}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            "<title>kvindex audit</title>",
            f"<style>{STYLE}</style>\n</head>\n<body>",
            f"<header><h1>kvindex audit</h1><p>{escape(what)}.</p></header>\n<main>",
            *_sections(report, Plots()),
            f"</main>\n<footer>kvindex {escape(report.version)}. The same as data: "
            "<code>kvindex audit --json</code>.</footer>\n</body>\n</html>\n",
        ]
    )


def _sections(report: Report, plots: Plots) -> Iterator[str]:
    yield '<section class="cards" aria-label="The three figures">'
    for title, much, sentence in headlines(report):
        yield (
            f'<article><h2>{escape(title)}</h2><p class="much">{escape(much)}</p>'
            f"<p>{escape(sentence)}</p></article>"
        )
    yield "</section>"
    yield from _origins(report, plots)
    yield from _over_time(report, plots)
    yield from _caches(report, plots)
    yield from _duplication(report, plots)
    yield from _lifetimes(report, plots)
    yield from _ranks(report)
    yield "<section><h2>What the figures do not cover</h2><ul>"
    yield from (f"<li>{escape(line)}</li>" for line in report.trust)
    yield "</ul></section>"


def _origins(report: Report, plots: Plots) -> Iterator[str]:
    parts = [(name, count, NAMES[name]) for name, count in origins(report.tokens).items()]
    title = "Who held the computed tokens"
    rows = [
        (_key(name, words), number(count), share(count, report.tokens.computed))
        for name, count, words in parts
    ]
    yield f"<section><h2>{title}</h2>"
    yield plots.shares(title, parts)
    yield _table(("", "tokens", "share"), rows)
    others = report.tokens
    yield (
        f"<p>Not computed: {number(others.returned)} tokens that were stored on a device while the "
        f"rank held them elsewhere, and {number(others.offloaded)} that were copied off the device."
        f" {number(others.alone)} of the computed tokens came in blocks that were stored one at a "
        "time, as generation does.</p></section>"
    )


def _over_time(report: Report, plots: Plots) -> Iterator[str]:
    if len(report.series) < 2:
        return
    title = "Computed tokens over time"
    bars = []
    for i, bucket in enumerate(report.series):
        rest = max(0, bucket.computed - bucket.elsewhere)
        bars.append((duration(i * report.bucket_seconds), (bucket.elsewhere, rest)))
    yield f"<section><h2>{title}</h2>"
    yield f"<p>{_key('elsewhere', NAMES['elsewhere'])} {_key('first', 'all others')}</p>"
    colours = ("elsewhere", "first")
    yield plots.bars(title, bars, colours, unit="tokens", across="since the start", wide=True)
    rows = [
        (
            duration(i * report.bucket_seconds),
            *map(number, (b.computed, b.elsewhere, b.evicted, b.unknown)),
        )
        for i, b in enumerate(report.series)
    ]
    header = ("from", "computed", "elsewhere", "evicted", "unknown")
    yield _folded(header, rows) + "</section>"


def _caches(report: Report, plots: Plots) -> Iterator[str]:
    computed = report.tokens.computed
    if not report.tokens.evicted:
        return
    title = "What larger caches would have held"
    yield f'<section class="two"><div><h2>{title}</h2>'
    bars = [(f"{saving.factor:g}×", (saving.tokens,)) for saving in report.savings]
    yield plots.bars(title, bars, ("evicted",), unit="tokens", across="times the cache as seen")
    rows = [
        (f"{saving.factor:g}×", number(saving.tokens), share(saving.tokens, computed))
        for saving in report.savings
    ]
    yield _folded(("cache", "tokens", "of computed"), rows) + "</div>"
    title = "How long ago it was evicted"
    yield f"<div><h2>{title}</h2>"
    yield _histogram(plots, title, report.ages, "evicted", "tokens") + "</div></section>"


def _duplication(report: Report, plots: Plots) -> Iterator[str]:
    held = report.duplication
    if not held.unique:
        return
    title = "How many ranks hold the same"
    yield f'<section class="two"><div><h2>{title}</h2>'
    bars = [(str(n), (tokens,)) for n, tokens in enumerate(held.by_ranks, 1)]
    yield plots.bars(title, bars, ("first",), unit="tokens", across="ranks")
    rows = [(n, number(tokens)) for n, (tokens,) in bars]
    yield _folded(("ranks", "different tokens"), rows) + "</div>"
    yield "<div><h2>Most shared prefixes</h2>"
    if report.shared:
        shared = [
            (number(one.tokens), one.ranks, _words(one.first_tokens)) for one in report.shared
        ]
        yield _table(("tokens", "ranks", "begins with the tokens"), shared)
        yield "<p>By tokens × ranks; of prefixes that begin alike the first.</p>"
    else:
        yield "<p>No two ranks hold the same prefix.</p>"
    yield "</div></section>"


def _lifetimes(report: Report, plots: Plots) -> Iterator[str]:
    if report.lifetimes:
        title = "How long blocks were held"
        yield f"<section><h2>{title}</h2><p>Of the blocks that left in the window.</p>"
        plot = _histogram(plots, title, report.lifetimes, "here", "blocks", wide=True)
        yield plot + "</section>"


def _histogram(
    plots: Plots, title: str, bars: list[Bar], css: str, unit: str, *, wide: bool = False
) -> str:
    named = [(duration(bar.up_to), (bar.weight,)) for bar in doublings(bars)]
    plot = plots.bars(title, named, (css,), unit=unit, across="up to", wide=wide)
    return plot + _folded(("up to", unit), [(name, number(w)) for name, (w,) in named])


def _ranks(report: Report) -> Iterator[str]:
    yield "<section><h2>Ranks</h2>"
    header = (
        "rank",
        "computed",
        "elsewhere",
        "evicted",
        "unknown",
        "holds",
        "cache seen",
        "stream",
    )
    rows = []
    for one in report.ranks[:_RANKS]:
        tokens = one.tokens
        parts = (tokens.elsewhere, tokens.evicted, tokens.unknown)
        stream = one.state or "recording"
        if one.complete is False:
            stream += ", partial"
        rows.append(
            (
                escape(one.rank),
                number(tokens.computed),
                *(share(part, tokens.computed) for part in parts),
                number(one.resident),
                number(one.peak),
                escape(stream),
            )
        )
    yield _table(header, rows)
    yield (
        "<p>In tokens. <em>Cache seen</em>: the most that its device held at a time.</p></section>"
    )


def _words(tokens: list[int]) -> str:
    return f"<code>{' '.join(map(str, tokens)) or '–'}</code>"


def _key(css: str, words: str) -> str:
    return f'<span class="key {css}" aria-hidden="true"></span> {escape(words)}'


def _folded(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return f"<details><summary>As a table</summary>{_table(header, rows)}</details>"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; cells are HTML, so whoever makes them escapes what is not ours."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
