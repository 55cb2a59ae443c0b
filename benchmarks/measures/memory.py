"""Memory of a resident (rank, block), and what stays when everything was removed."""

from __future__ import annotations

from typing import Any

from benchmarks.bench import Bench, Contender
from benchmarks.results import OURS, Bar, Result

DYNAMO = "Dynamo RadixTree"
ROUTERS = {0.8: "conversations stay four times in five", 0.0: "a random router"}
BYTES_BAR = Bar(at_most=27.0)
KEPT_BAR = Bar(at_most=1.10)
_MIB = float(1 << 20)


def run(bench: Bench) -> list[Result]:
    """Return the bytes of an entry, and the memory of each stage."""
    routers = {0.8: "the trace"} if bench.request_traces else ROUTERS
    return [result for sticky, words in routers.items() for result in _routed(bench, sticky, words)]


def _routed(bench: Bench, sticky: float, words: str) -> list[Result]:
    """Each side in a fresh process, once: memory does not vary as time does."""
    scale = bench.scale
    stages_of: dict[str, dict[str, Any]] = {}
    for contender in (Contender(OURS, OURS), Contender(DYNAMO, "dynamo")):
        with bench.start([contender]) as sides:
            for label, side in sides.items():
                stages_of[label] = side.call(
                    "memory.measure",
                    source=bench.source(open_at_once=16 * scale.memory_ranks).to_dict(),
                    ranks=scale.memory_ranks,
                    entries=scale.memory_entries,
                    sticky=sticky,
                )
    held = stages_of[OURS]
    sharing = held["entries"] / held["unique_blocks"]
    group = f"memory, {words}"
    note = (
        f"{held['entries']:,} entries on {scale.memory_ranks} ranks, {held['unique_blocks']:,} "
        f"different blocks: {sharing:.2f} entries a block. Resident memory of a process that only "
        "reads the events from a pipe and applies them; removed by events, rank by rank."
    )

    def result(measure: str, unit: str, get: str, bar: Bar | None = None) -> Result:
        values = {label: _figure(stages, get) for label, stages in stages_of.items()}
        return Result(group=group, measure=measure, unit=unit, values=values, bar=bar, notes=[note])

    return [
        result("a resident (rank, block)", "bytes", "entry", BYTES_BAR if sticky else None),
        result("the process, empty", "MiB", "empty"),
        result("full", "MiB", "full"),
        result("after everything was removed", "MiB", "again"),
        result("the same, times empty", "", "kept", KEPT_BAR if sticky else None),
    ]


def _figure(stages: dict[str, Any], name: str) -> float:
    if name == "entry":
        return float((stages["full"] - stages["empty"]) / stages["entries"])
    if name == "kept":
        return float(stages["again"] / stages["empty"])
    return float(stages[name] / _MIB)
