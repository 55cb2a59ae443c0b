"""The report as one page that needs nothing else: no script, no font, no other file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape

from kvindex.tools.audit.report import Report
from kvindex.tools.audit.sections import Section, duration, headlines, sections

_ROWS = 1024  # of a table; the JSON has them all
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


def html_of(report: Report) -> str:
    """Return the report as an HTML page: light and dark, with a table beside each plot."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(0.0, report.began)))
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


def _parts(report: Report) -> Iterator[str]:
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
    for key, (first, *rest) in zip(keys, section.rows[:_ROWS], strict=False):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{key}{escape(first)}</th>{cells}</tr>')
    table = (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
    folded = section.plot and not section.keys
    return f"<details><summary>As a table</summary>{table}</details>" if folded else table
