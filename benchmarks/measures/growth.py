"""The cost of a match against the size of the index."""

from __future__ import annotations

from typing import Any

from benchmarks.bench import Bench, Contender, last_core
from benchmarks.results import OURS, Result

DYNAMO = "Dynamo, one core"
PROMPTS = 24  # as many as there are at the smallest size
FORMS = ("list", "numpy")


def run(bench: Bench) -> list[Result]:
    """Return p50 and p99 at each size."""
    scale = bench.scale
    curves: dict[str, list[dict[str, Any]]] = {}
    core = last_core()
    for contender in (Contender(OURS, OURS, core), Contender(DYNAMO, "dynamo", core)):
        with bench.start([contender]) as sides:
            for label, side in sides.items():
                curves[label] = side.call(
                    "grow.measure",
                    side=contender.side,
                    source=bench.source(open_at_once=16 * scale.growth_ranks).to_dict(),
                    ranks=scale.growth_ranks,
                    checkpoints=list(scale.growth),
                    prompts=PROMPTS,
                    repeats=scale.match_repeats,
                    forms=list(FORMS) if label == OURS else ["list"],
                )
    note = (
        f"{scale.growth_ranks} ranks; {curves[OURS][0]['prompts']} prompts of 8,192 tokens, "
        "sampled from all requests so far, in turn; each answer was checked. The peer takes lists "
        "only, and runs after us."
    )
    return [
        Result(
            group="match against size",
            measure=f"{point['entries']:,} entries, {point['unique_blocks']:,} blocks: {name}",
            unit="µs",
            values={
                label: curve[place][name] / 1_000
                for label, curve in curves.items()
                if name in curve[place]
            },
            notes=[note],
        )
        for place, point in enumerate(curves[OURS])
        for name in (f"{form}, {percent}" for form in FORMS for percent in ("p50", "p99"))
    ]
