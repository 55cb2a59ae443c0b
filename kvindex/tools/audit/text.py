"""The report for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from kvindex.tools.audit.report import Report
from kvindex.tools.audit.sections import Section, duration, headlines, sections

_WIDTH = 96
_ROWS = 32  # more would push the rest off the screen; the JSON has them all


def text_of(report: Report) -> str:
    """Return the report as plain text, the three figures that matter first."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    ranks = f"{len(report.ranks)} rank{'' if len(report.ranks) == 1 else 's'}"
    yield f"{report.source or 'audit'}: {duration(report.seconds)}, {ranks}"
    for title, figure, sentence in headlines(report):
        yield ""
        yield f"{title}: {figure}"
        yield from textwrap.wrap(sentence, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    for section in sections(report):
        if section.summary is not None:
            yield ""
            yield from [section.summary] if section.summary else _table(section)
    yield ""
    yield "What the figures do not cover"
    for line in report.trust:
        yield from textwrap.wrap(line, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _table(section: Section) -> Iterator[str]:
    cells = [section.header, *section.rows[:_ROWS]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    yield section.title
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        yield "  ".join(["", first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()
    if len(section.rows) > _ROWS:
        yield f"and {len(section.rows) - _ROWS} more: see --json"
