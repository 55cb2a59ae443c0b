"""Match prompts of 8,192 tokens, and the floor under it."""

from __future__ import annotations

from benchmarks.bench import Bench, Contender, last_core
from benchmarks.process import Side
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median, percentile

KINDS = {
    "everywhere": "one prompt, whole on every rank",
    "conversation": "resident prompts in turn",
    "new": "new prompts in turn, beginning known",
}
DYNAMO = ("Dynamo, one core", "Dynamo, free")
HASH_ALONE = "Dynamo, hash alone"


def run(bench: Bench) -> list[Result]:
    """Return the figures for each number of ranks."""
    results = []
    for ranks in bench.scale.match_entries:
        with bench.start(_contenders()) as sides:
            results += _at(bench, sides, ranks)
    return results + _floor(bench)


def _contenders() -> list[Contender]:
    core = last_core()
    return [
        Contender(OURS, OURS, core),
        Contender(DYNAMO[0], "dynamo", core),
        Contender(DYNAMO[1], "dynamo"),
        Contender("dict", "dict", core),
    ]


def _at(bench: Bench, sides: dict[str, Side], ranks: int) -> list[Result]:
    scale = bench.scale
    facts = {
        label: side.call(
            "match.prepare",
            source=bench.source().to_dict(),
            ranks=ranks,
            entries=scale.match_entries[ranks],
            prompts=scale.prompts,
        )
        for label, side in sides.items()
    }
    held = facts[OURS]
    note = (
        f"{ranks} ranks: {held['entries']:,} resident entries ({held['unique_blocks']:,} blocks); "
        f"different prompts: {held['prompts']}. Every answer was checked first. Garbage collection "
        "off; ours and the dict on one core."
    )
    results: list[Result] = []
    for kind, words in KINDS.items():
        if held["prompts"][kind]:
            results += _kind(bench, sides, ranks, kind, words, note)
    return results


def _kind(
    bench: Bench, sides: dict[str, Side], ranks: int, kind: str, words: str, note: str
) -> list[Result]:
    lists = _measured(bench, sides, kind, "list")
    best = _measured(bench, sides, kind, "list", call="best")
    ours = {OURS: sides[OURS]}
    buffers = {form: _measured(bench, ours, kind, form) for form in ("numpy", "array")}
    if any(label in sides for label in DYNAMO):
        hashing = {HASH_ALONE: sides[DYNAMO[0]]}
        lists.update(_measured(bench, hashing, kind, "list", call="hash"))
    group = f"match, {ranks} ranks"
    list_bar = Bar(times=4.0 if ranks <= 64 else 5.0)
    rows = [_result(group, f"{words}: list", lists, 50, list_bar, note)]
    rows.append(_result(group, f"{words}: list, p99", lists, 99, None, note))
    rows.append(_result(group, f"{words}: list, with the best rank read", best, 50, None, note))
    peers = {label: samples for label, samples in lists.items() if label != OURS}
    for form, samples in buffers.items():
        title = f"{words}: uint32 buffer ({form})"
        bar = Bar(times=15.0)
        rows.append(_result(group, title, {**peers, **samples}, 50, bar, note))
    return rows


def _measured(
    bench: Bench, sides: dict[str, Side], kind: str, form: str, call: str = "match"
) -> dict[str, list[list[int]]]:
    """Samples of each side, round by round, the sides in turn."""
    rounds: dict[str, list[list[int]]] = {label: [] for label in sides}
    for _ in range(bench.scale.rounds):
        for label, side in sides.items():
            samples = side.call(
                "match.measure", kind=kind, form=form, repeats=bench.scale.match_repeats, call=call
            )
            rounds[label].append(samples)
    return rounds


def _result(
    group: str,
    measure: str,
    rounds: dict[str, list[list[int]]],
    percent: float,
    bar: Bar | None,
    note: str,
) -> Result:
    """The median over the rounds of each round's percentile, in µs."""
    values = {
        label: median([percentile(samples, percent) for samples in own]) / 1_000
        for label, own in rounds.items()
    }
    return Result(
        group=group,
        measure=measure,
        unit="µs",
        values={label: values[label] for label in sorted(values, key=lambda name: name != OURS)},
        against=DYNAMO,
        bar=bar,
        notes=[note],
    )


def _floor(bench: Bench) -> list[Result]:
    with bench.start([Contender(OURS, OURS, last_core())]) as sides:
        floors = sides[OURS].call("floor.measure", repeats=bench.scale.match_repeats)
    if not floors:
        nothing = "not measured: the native core, or its floor_… functions, are not there"
        return [Result(group="match: the floor", measure=nothing, unit="", values={})]
    return [
        Result(
            group="match: the floor",
            measure=f"{name}, 8,192 tokens",
            unit="µs",
            values={OURS: median(samples) / 1_000},
        )
        for name, samples in floors.items()
    ]
