"""How much an engine that decodes should prefill itself: see `benchmarks.routing.pairs`."""

from __future__ import annotations

import itertools
import math
import os
from typing import Final

from benchmarks.bench import Bench
from benchmarks.results import Result
from benchmarks.routing.pairs import Pairs
from benchmarks.routing.runs import Fleet, Run, Traffic, perform, spread
from benchmarks.routing.traces import has_sessions

PREFILL: Final = (2, 4)  # of 8 engines
LOCAL_TOKENS: Final = (0, 128, 512, 2_048, 8_192, math.inf)
SPEEDS: Final = (1.0, 2.0)
AGENTS: Final = (48.0, 80.0)  # sessions at a time
FIGURES: Final = {
    "first: mean": ("mean", 1),
    "first: p99": ("p99", 1),
    "end: mean": ("seconds", 1_000),
    "gap: p50": ("gap_p50", 1),
    "gap: p99": ("gap_p99", 1),
    "gap: p99.9": ("gap_p999", 1),
    "apart": ("apart", 100),
    "hit": ("hit", 100),
}
NOTE: Final = (
    "First token, end and gaps between tokens in ms, the rest in % of requests and of prompts' "
    "tokens; means over the seeds. inf: every D prefills by itself, and P is idle."
)


def run(bench: Bench) -> list[Result]:
    """Return, for every traffic, what each division of a fleet and each limit make of it."""
    fleets = {"8 engines that do both": Fleet()}
    for count, tokens in itertools.product(PREFILL, LOCAL_TOKENS):
        name = f"{count} P + {Fleet().ranks - count} D, local {tokens:,}"
        fleets[name] = Fleet(pairs=Pairs(count, tokens))
    seeds = range(bench.seed, bench.seed + bench.scale.routing_seeds)
    rows = {
        (str(traffic), name): [Run(traffic, "kvindex", seed, fleet) for seed in seeds]
        for traffic in _traffics(bench)
        for name, fleet in fleets.items()
    }
    outcomes = perform(itertools.chain(*rows.values()), processes=len(os.sched_getaffinity(0)))
    return [
        Result(
            group=f"pairs, {traffic}",
            measure=name,
            unit="ms, %",
            values={
                title: times * spread([getattr(outcomes[one], figure) for one in runs]).mean
                for title, (figure, times) in FIGURES.items()
            },
            notes=[f"{NOTE} {len(seeds)} seeds."],
        )
        for (traffic, name), runs in rows.items()
    ]


def _traffics(bench: Bench) -> list[Traffic]:
    most, last = bench.scale.routing_trace, None if bench.scale.routing_all_loads else 1
    return [
        Traffic(file.stem, load, most, file)
        for file in bench.traces
        for load in (AGENTS if has_sessions(file) else SPEEDS)[:last]
    ] or [Traffic("chat", 1.0, bench.scale.routing_requests)]
