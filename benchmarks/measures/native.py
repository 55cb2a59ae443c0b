"""The native core's own benchmark, which needs no Python: match of hashed blocks."""

from __future__ import annotations

import subprocess

from benchmarks.bench import Bench, last_core
from benchmarks.process import pinned
from benchmarks.results import OURS, Result

_GROUP = "inside the native core"


def run(bench: Bench) -> list[Result]:
    """Return what the binary prints: lines of `measure<TAB>nanoseconds`."""
    if bench.native_bench is None:
        missing = "not run: build bench_core (KVINDEX_BUILD_TESTS) and give --native-bench"
        return [Result(group=_GROUP, measure=missing, unit="", values={})]
    printed = subprocess.run(
        pinned([str(bench.native_bench)], last_core()), capture_output=True, text=True, check=True
    )
    lines = [line.split("\t") for line in printed.stdout.splitlines() if "\t" in line]
    return [
        Result(group=_GROUP, measure=measure, unit="ns", values={OURS: float(nanoseconds)})
        for measure, nanoseconds, *_ in lines
    ]
