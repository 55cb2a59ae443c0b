"""Choose a rank for a prompt of 8,192 tokens, and book the choice."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.bench import Bench, Contender, last_core
from benchmarks.process import Side
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median, percentile

KINDS = {
    "all": "every rank holds a part",
    "half": "half the ranks hold a part",
    "none": "no rank holds any",
}
FOLLOWED = "kvindex, a Client's ranks"
PLAIN = "kvindex, policy in Python"
DYNAMO = ("Dynamo, one core", "Dynamo, free")
BARRED_RANKS = 64
BAR = Bar(times=8.0)


class _Column(NamedTuple):
    """What fills a column of one row."""

    side: str
    call: str
    form: str


def run(bench: Bench) -> list[Result]:
    """Return the figures for each number of ranks."""
    results = []
    for ranks in bench.scale.select_entries:
        with bench.start(_contenders()) as sides:
            results += _at(bench, sides, ranks)
    return results


def _contenders() -> list[Contender]:
    core = last_core()
    return [
        Contender(OURS, OURS, core),
        Contender(FOLLOWED, OURS, core),
        Contender(DYNAMO[0], "dynamo-selection", core),
        Contender(DYNAMO[1], "dynamo-selection"),
    ]


def _at(bench: Bench, sides: dict[str, Side], ranks: int) -> list[Result]:
    facts: dict[str, Any] = {}
    for label, side in sides.items():
        facts[label] = side.call(
            "select.prepare",
            source=bench.source().to_dict(),
            ranks=ranks,
            entries=bench.scale.select_entries[ranks],
            prompts=bench.scale.select_prompts,
            fed="directly" if label == OURS else "zmq",
        )
    held = facts[OURS]
    note = (
        f"{ranks} ranks: {held['entries']:,} resident entries ({held['unique_blocks']:,} blocks), "
        f"{bench.scale.select_prompts} prompts of each kind in turn, of which a holder holds an "
        "eighth to all; two open requests a rank. What each side counts as held was checked first. "
        "Dynamo takes no arrays, so it is asked with lists in the rows of arrays too. Garbage "
        "collection off; ours on one core."
    )
    return [
        result
        for kind, words in KINDS.items()
        for result in _kind(bench, sides, ranks, kind, words, note)
    ]


def _kind(
    bench: Bench, sides: dict[str, Side], ranks: int, kind: str, words: str, note: str
) -> list[Result]:
    peers = [label for label in DYNAMO if label in sides]
    rounds: dict[_Column, list[list[int]]] = {}
    for _ in range(bench.scale.rounds):
        for column in _columns(peers):
            samples = sides[column.side].call(
                "select.measure",
                kind=kind,
                form=column.form,
                call=column.call,
                repeats=bench.scale.match_repeats,
            )
            rounds.setdefault(column, []).append(samples)

    def row(measure: str, call: str, form: str, percent: float, bar: Bar | None) -> Result:
        columns = {OURS: _Column(OURS, call, form)}
        if call != "match":
            columns[FOLLOWED] = _Column(FOLLOWED, call, form)
            columns.update({peer: _Column(peer, call, "list") for peer in peers})
        if call == "select":
            columns[PLAIN] = _Column(OURS, "plain", form)
        return Result(
            group=f"select, {ranks} ranks",
            measure=f"{words}: {measure}",
            unit="µs",
            values={
                label: median([percentile(samples, percent) for samples in rounds[column]]) / 1_000
                for label, column in columns.items()
            },
            against=DYNAMO,
            bar=bar if ranks == BARRED_RANKS else None,
            notes=[note],
        )

    return [
        row("select, list", "select", "list", 50, BAR),
        row("select, list, p10", "select", "list", 10, None),
        row("select, list, p99", "select", "list", 99, None),
        row("reserve and finish, list", "reserve", "list", 50, BAR),
        row("reserve and finish, list, p10", "reserve", "list", 10, None),
        row("reserve and finish, list, p99", "reserve", "list", 99, None),
        row("select, numpy array", "select", "numpy", 50, BAR),
        row("reserve and finish, numpy array", "reserve", "numpy", 50, BAR),
        row("match alone, list", "match", "list", 50, None),
        row("match alone, numpy array", "match", "numpy", 50, None),
    ]


def _columns(peers: list[str]) -> list[_Column]:
    """What one round measures, in this order."""
    ours = [
        _Column(OURS, call, form)
        for form in ("list", "numpy")
        for call in ("match", "select", "reserve", "plain")
    ]
    followed = [
        _Column(FOLLOWED, call, form)
        for form in ("list", "numpy")
        for call in ("select", "reserve")
    ]
    return ours + followed + [_Column(p, call, "list") for p in peers for call in _BOTH]


_BOTH = ("select", "reserve")
