"""Bookings by the million, ten thousand of them open at once."""

from __future__ import annotations

from typing import Any

from benchmarks.bench import Bench, Contender, last_core
from benchmarks.results import OURS, Bar, Result

NOTHING = Bar(at_most=0.0)


def run(bench: Bench) -> list[Result]:
    """Return the figures for each number of ranks, each in a fresh process."""
    results = []
    for ranks, bookings in bench.scale.bookings.items():
        with bench.start([Contender(OURS, OURS, last_core())]) as sides:
            measured = sides[OURS].call(
                "book.measure",
                ranks=ranks,
                bookings=bookings,
                open_at_once=bench.scale.bookings_open,
            )
        results += _results(ranks, bookings, bench.scale.bookings_open, measured)
    return results


def _results(ranks: int, bookings: int, open_at_once: int, lives: dict[str, Any]) -> list[Result]:
    ended = lives["ended"]
    note = (
        f"{ranks} ranks, {bookings:,} bookings of prompts of 8,192 tokens (numpy arrays), "
        f"{open_at_once:,} open at once; half the ranks hold a part of each. {ended['finished']:,} "
        f"finished, {ended['cancelled']:,} were cancelled, {ended['expired']:,} expired. A whole "
        "life is reserve, first token, output, finish. Garbage collection on."
    )

    def result(measure: str, unit: str, value: float, bar: Bar | None = None) -> Result:
        return Result(
            group=f"bookings, {ranks} ranks",
            measure=measure,
            unit=unit,
            values={OURS: value},
            lower=unit != "a second of CPU",
            bar=bar,
            notes=[note],
        )

    turned = bookings - open_at_once
    return [
        result("whole lives", "a second of CPU", turned / lives["seconds"]),
        result("an open booking", "bytes", lives["open_bytes"]),
        result("what memory grew by in the second half", "MiB", lives["grown_bytes"] / 2**20),
        result("load that is left at the end", "", lives["left"], NOTHING),
    ]
