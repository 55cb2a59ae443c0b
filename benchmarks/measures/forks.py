"""A fork of sub-agents: how long they wait where their context can be pulled, on fake engines."""

from __future__ import annotations

import heapq
from typing import Any, Final

from benchmarks.bench import Bench
from benchmarks.results import Result
from benchmarks.routing.simulation import Clock
from kvindex import EventBatch, Index
from kvindex.routing import Booking, Router
from kvindex.testing import FakeEngine

AGENTS: Final = 40
RANKS: Final = 8
CONTEXT: Final = 32_000  # tokens that all of them begin with
OWN: Final = 2_000  # tokens of each one's task
PREFILL_RATE: Final = 22_000.0  # tokens per second
PULL_RATE: Final = 220_000.0
GAPS: Final = {"at once": 0.0, "every 0.05 s": 0.05}
WAYS: Final[dict[str, tuple[bool, dict[str, Any]]]] = {
    "no sources": (False, {}),
    "sources": (True, {}),
    "sources and pull_rate": (True, {"pull_rate": PULL_RATE}),
}


def run(bench: Bench) -> list[Result]:
    """Return the first tokens' times and the tokens computed, without sources and with them."""
    results = []
    for when, gap in GAPS.items():
        runs = {way: _fork(gap, pulls, options) for way, (pulls, options) in WAYS.items()}
        for place, (measure, unit) in enumerate(
            [("first token, mean", "ms"), ("first token, last", "ms"), ("tokens computed", "")]
        ):
            results.append(
                Result(
                    group=f"a fork of {AGENTS} sub-agents over {RANKS} ranks",
                    measure=f"{when}: {measure}",
                    unit=unit,
                    values={way: figures[place] for way, figures in runs.items()},
                    notes=[
                        f"{CONTEXT:,} tokens of context on one rank, {OWN:,} of each agent's own. "
                        f"Fake engines, which compute {PREFILL_RATE:,.0f} tokens/s and pull "
                        f"{PULL_RATE:,.0f} (assumed, not measured), one request after another."
                    ],
                )
            )
    return results


def _fork(gap: float, pulls: bool, options: dict[str, Any]) -> tuple[float, float, float]:
    """Return the mean and the last first token's time in ms, and the tokens computed."""
    index, clock = Index(), Clock()
    engines = {}
    for number in range(RANKS):
        engine = FakeEngine(f"engine-{number}", num_blocks=8_192, publish=False)
        index.add(engine.rank)
        engines[engine.rank] = engine
    router = Router(index, clock=clock, seed=1, **options)
    context = list(range(CONTEXT))
    parent = next(iter(engines.values()))
    parent.serve(context)
    index.apply(parent.rank, EventBatch(ts=0.0, events=list(parent.events)))
    free_at = dict.fromkeys(engines, 0.0)
    under_way: list[tuple[float, int, Booking, list[Any]]] = []
    waits: list[float] = []
    computed = 0
    for agent in range(AGENTS):
        arrival = agent * gap
        while under_way and under_way[0][0] <= arrival:
            clock.now, _, booking, events = heapq.heappop(under_way)
            index.apply(booking.rank, EventBatch(ts=clock.now, events=events))
            booking.first_token()
            booking.finish()
        clock.now = arrival
        prompt = context + [CONTEXT + agent] * OWN
        booking = router.reserve(prompt)
        engine = engines[booking.rank]
        source = booking.pull() if pulls else None
        pulled = 0 if source is None else engine.pull(engines[source.rank], prompt)
        new = len(prompt) - engine.serve(prompt).hit_tokens
        # A rank's requests follow each other, so the engine is as it will be at this one's start.
        end = max(arrival, free_at[booking.rank]) + new / PREFILL_RATE + pulled / PULL_RATE
        free_at[booking.rank] = end
        heapq.heappush(under_way, (end, agent, booking, list(engine.events)))
        waits.append(1e3 * (end - arrival))
        computed += new
    return sum(waits) / AGENTS, max(waits), float(computed)
