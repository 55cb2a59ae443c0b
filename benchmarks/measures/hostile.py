"""A healthy engine beside one that sends the worst payloads known."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.bench import Bench, Contender
from benchmarks.feed.hostile import KINDS
from benchmarks.process import Lines
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import percentile

RATE = 100e6  # bytes per second that the hostile engine sends
APPLIED = Bar(at_most=250.0)
MATCHED = Bar(at_most=5.0)
_NOBODY = "nobody hostile"


def run(bench: Bench) -> list[Result]:
    """Return, beside each kind of payload, what a healthy batch and a match take."""
    beside = {kind: _beside(bench, kind) for kind in (_NOBODY, *KINDS)}
    note = (
        f"One hostile engine sends such payloads over TCP, {RATE / 1e6:,.0f} MB/s of them, from a "
        "process of its own; a healthy one sends a batch of 64 blocks as soon as the one before it "
        "can be matched. The time of a batch runs from sending it until a match finds all of it."
    )

    def result(name: str, bar: Bar | None, measure: str, samples: str, percent: float) -> Result:
        value = percentile(beside[name][samples], percent) / 1e6
        return Result(
            group="beside a hostile engine",
            measure=f"{name}: {measure}",
            unit="ms",
            values={OURS: value},
            bar=bar,
            notes=[note],
        )

    results = []
    for name in beside:
        hostile = name != _NOBODY
        applied, matched = (APPLIED, MATCHED) if hostile else (None, None)
        results.append(result(name, applied, "a healthy batch, slowest", "applied", 100))
        results.append(result(name, None, "a healthy batch, median", "applied", 50))
        results.append(result(name, matched, "match, p99", "matches", 99))
        results.append(result(name, None, "match, slowest", "matches", 100))
    return results


def _beside(bench: Bench, kind: str) -> dict[str, Any]:
    hostile = kind if kind in KINDS else next(iter(KINDS))
    command = [sys.executable, "-m", "benchmarks.feed.hostile", hostile, str(RATE)]
    with Lines(command) as enemy, bench.start([Contender(OURS, OURS)]) as sides:
        side = sides[OURS]
        side.call("siege.connect", endpoint=enemy.hear()["endpoint"])
        if kind in KINDS:
            enemy.say("go")
        measured: dict[str, Any] = side.call("siege.measure", seconds=bench.scale.busy_seconds)
        side.call("siege.close")
    return measured
