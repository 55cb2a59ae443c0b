"""Figures, the bars they are held against, and how both are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

import msgspec

OURS: Final = "kvindex"


class Bar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ours must reach.

    Attributes:
        times: how many times better than the best peer.
        at_most: or an absolute limit of our own figure.
    """

    times: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        if self.times is None:
            return f"≤ {_number(self.at_most or 0)}"
        return f"{_number(self.times)} × better"


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measure of each side.

    Attributes:
        group: the table that it belongs to.
        measure: what was measured.
        unit: of the values.
        values: medians by side; ours is `OURS`.
        lower: whether lower is better.
        against: the sides that the bar is held against, of which the best counts; all but ours
            by default.
        bar: what must be reached, if anything.
        marks: what is written after a side's value; the notes say what it means.
        bar_only: whether the table of bars says all of it.
    """

    group: str
    measure: str
    unit: str
    values: dict[str, float]
    lower: bool = True
    against: tuple[str, ...] = ()
    bar: Bar | None = None
    marks: dict[str, str] = {}
    notes: list[str] = []
    bar_only: bool = False

    @property
    def peer(self) -> str | None:
        """The best of the sides that ours is held against."""
        names = [n for n in (self.against or self.values) if n in self.values and n != OURS]
        if not names:
            return None
        return (min if self.lower else max)(names, key=self.values.__getitem__)

    @property
    def times(self) -> float | None:
        """How many times better than the best peer ours is; None also if a value is 0."""
        if self.peer is None or OURS not in self.values:
            return None
        ours, theirs = self.values[OURS], self.values[self.peer]
        if not ours or not theirs:
            return None
        return theirs / ours if self.lower else ours / theirs

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None if there is none or nothing to hold it against."""
        if self.bar is None or OURS not in self.values:
            return None
        if self.bar.at_most is not None:
            return self.values[OURS] <= self.bar.at_most
        if self.times is None or not self.bar.times:
            return None
        return self.times >= self.bar.times


class Report(msgspec.Struct, frozen=True):
    """What a file of `benchmarks/results` has.

    Attributes:
        environment: when, where and with which command the figures were taken.
        results: the figures.
    """

    environment: dict[str, str]
    results: list[Result]


def write(file: Path, report: Report) -> None:
    """Write a report as JSON, one line for each result; a note stands at the first that has it."""
    written: set[str] = set()
    lines = []
    for result in report.results:
        notes = [note for note in result.notes if result.group + note not in written]
        written.update(result.group + note for note in notes)
        lines.append(msgspec.json.encode(msgspec.structs.replace(result, notes=notes)).decode())
    environment = msgspec.json.format(msgspec.json.encode(report.environment)).decode()
    rows = ",\n".join(lines)
    file.write_text(f'{{"environment": {environment},\n"results": [\n{rows}\n]}}\n')


def read(file: Path) -> Report:
    """Return the report that a file has.

    Raises:
        msgspec.DecodeError: the file has something else.
    """
    return msgspec.json.decode(file.read_bytes(), type=Report)


def details(results: Sequence[Result]) -> str:
    """Return one Markdown table for each group, with a column for each side."""
    shown = (result for result in results if result.met is None or not result.bar_only)
    return "\n\n".join(
        _group(name, list(members)) for name, members in groupby(shown, lambda r: r.group)
    )


def bars_table(results: Iterable[Result]) -> str:
    """Return the Markdown table of what could be held against a bar."""
    rows = [_bar_row(result) for result in results if result.met is not None]
    if not rows:
        return "No figure here was held against a bar; most bars need the peers (`--peers`)."
    head = ["measure", "unit", "kvindex", "best peer", "times better", "bar", "met"]
    return "### Bars\n\n" + _table(head, rows)


def _group(name: str, results: list[Result]) -> str:
    sides = list(dict.fromkeys(side for result in results for side in result.values))
    rows = [[r.measure, r.unit, *(_cell(r, side) for side in sides)] for r in results]
    notes = dict.fromkeys(note for result in results for note in result.notes)
    text = f"### {name}\n\n" + _table(["measure", "unit", *sides], rows)
    return text + "".join(f"\n\n{note}" for note in notes)


def _cell(result: Result, side: str) -> str:
    if side not in result.values:
        return ""
    return _number(result.values[side]) + result.marks.get(side, "")


def _bar_row(result: Result) -> list[str]:
    met: dict[bool | None, Literal["met", "missed", "–"]] = {True: "met", False: "missed"}
    peer = result.peer
    return [
        f"{result.group}: {result.measure}",
        result.unit,
        _number(result.values[OURS]) if OURS in result.values else "not run",
        f"{_number(result.values[peer])} ({peer})" if peer else "not run",
        f"{result.times:.2f}" if result.times is not None else "–",
        str(result.bar),
        met.get(result.met, "–"),
    ]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float) -> str:
    """Three digits that matter."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f}" if abs(value) >= 0.1 else f"{value:.2g}"
