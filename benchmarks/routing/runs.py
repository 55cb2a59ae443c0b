"""Runs: what is simulated, with which seed, and what came of it."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from benchmarks.routing.engine import Model
from benchmarks.routing.field import make_policy
from benchmarks.routing.generated import generate
from benchmarks.routing.pairs import Pairs, PairSimulation
from benchmarks.routing.sharing import Boards, Exchange
from benchmarks.routing.simulation import Clock, Loss, Request, Simulation
from benchmarks.routing.traces import agents, has_sessions, mooncake
from benchmarks.routing.traffic import Session
from benchmarks.stats import percentile
from kvindex import Index
from kvindex.routing import Router

_STUDENT: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Of 2, 3, … values: so many standard errors hold 95 %."""

_REPORT: Final = 100  # runs


@dataclass(frozen=True)
class Traffic:
    """Which requests come.

    Attributes:
        kind: one of `generated.KINDS`, or what a trace is called.
        load: of a trace, how many times faster than recorded it runs, and if it has sessions, how
            many of them are open at a time; of generated traffic, its prompts' tokens over what the
            engines could prefill in the time, without any cache.
        requests: how many, about.
        trace: the file of a trace.
    """

    kind: str
    load: float
    requests: int
    trace: Path | None = None

    def __str__(self) -> str:
        return f"{self.kind} ×{self.load:g}"

    @property
    def at_once(self) -> int | None:
        """How many sessions are open at a time; None if each begins at its own time."""
        return int(self.load) if self.trace is not None and has_sessions(self.trace) else None

    def sessions(self, fleet: Fleet, seed: int) -> list[Session]:
        """Return the sessions, the same ones for the same seed."""
        return _sessions(self, fleet.prefill_rate, seed)


@lru_cache(maxsize=1)
def _sessions(traffic: Traffic, rate: float, seed: int) -> list[Session]:
    if traffic.at_once is not None and traffic.trace is not None:
        return agents(traffic.trace, seed=seed, most=traffic.requests)
    if traffic.trace is not None:
        return mooncake(traffic.trace, speed=traffic.load, seed=seed, most=traffic.requests)
    sessions = generate(traffic.kind, requests=traffic.requests, seconds=1.0, seed=seed)
    tokens = sum(turn.prompt for session in sessions for turn in session.turns)
    seconds = tokens / (traffic.load * rate)
    return [Session(session.start * seconds, session.turns) for session in sessions]


@dataclass(frozen=True)
class Fleet:
    """What serves them.

    Attributes:
        ranks: how many engines.
        model: what each can do.
        event_delay: seconds until the index learns what an engine did.
        losses: engines that die.
        gateways: how many routers share the requests out, at random.
        shared: seconds until a gateway learns what another one booked; None: never.
        gauges: seconds between which all gateways learn of all bookings at once; None: never.
        exchange: seconds for which a message of `SharedLoad` is under way; None: without it.
        predict: as `Router(predict=...)`.
        pairs: how prefill and decoding are apart; None: every engine does both.
    """

    ranks: int = 8
    model: Model = field(default_factory=Model)
    event_delay: float = 0.0
    losses: tuple[Loss, ...] = ()
    gateways: int = 1
    shared: float | None = None
    gauges: float | None = None
    exchange: float | None = None
    predict: float | None = None
    pairs: Pairs | None = None

    @property
    def prefill_rate(self) -> float:
        """Tokens per second that all engines together can prefill."""
        return self.ranks * self.model.prefill_rate


@dataclass(frozen=True)
class Run:
    """One simulation."""

    traffic: Traffic
    policy: str
    seed: int
    fleet: Fleet = Fleet()


@dataclass(frozen=True)
class Outcome:
    """What came of a run; times to the first token (TTFT) in ms.

    Attributes:
        hit: tokens found cached over tokens of all prompts.
        seconds: mean time to the last token.
        missed: tokens predicted and not found, or found and not predicted, over all.
        refused: requests that no engine has room for.
        gap_p50: ms between two tokens of an answer.
        gap_p99: the same, 99 %.
        gap_p999: the same, 99.9 %.
        apart: requests that one engine prefilled and another one decoded, over all.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    hit: float
    seconds: float
    missed: float
    refused: int
    gap_p50: float
    gap_p99: float
    gap_p999: float
    apart: float


@dataclass(frozen=True)
class Spread:
    """A figure over several seeds: its mean, and how far chance may have moved that."""

    mean: float
    noise: float

    @property
    def matters(self) -> bool:
        """Whether it differs from nothing by more than noise."""
        return abs(self.mean) > self.noise


def spread(values: Sequence[float]) -> Spread:
    """Return the mean and half the width of its 95 % interval (Student's t); infinite for one."""
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return Spread(mean, math.inf)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Spread(mean, _STUDENT[min(count, len(_STUDENT) + 1) - 2] * math.sqrt(variance / count))


def perform(runs: Iterable[Run], *, processes: int) -> dict[Run, Outcome]:
    """Simulate all of these, several at a time, and say on stderr how far it is."""
    wanted = list(dict.fromkeys(runs))
    context = multiprocessing.get_context("spawn")
    outcomes: dict[Run, Outcome] = {}
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for run, outcome in zip(wanted, pool.map(simulate, wanted), strict=True):
            outcomes[run] = outcome
            if len(outcomes) % _REPORT == 0:
                print(f"… {len(outcomes)} of {len(wanted)} runs", file=sys.stderr, flush=True)
    return outcomes


def simulate(run: Run) -> Outcome:
    """Simulate one run."""
    fleet, clock, index = run.fleet, Clock(), Index(seed=run.seed)
    boards: Boards | Exchange = Boards(fleet.gateways)
    if fleet.exchange is not None:
        boards = Exchange(fleet.gateways, fleet.exchange)
    routers = [
        Router(
            index,
            policy=make_policy(run.policy),
            loads=board,
            predict=fleet.predict,
            clock=clock,
            seed=run.seed + number,
        )
        for number, board in enumerate(boards)
    ]
    kind = Simulation if fleet.pairs is None else partial(PairSimulation, pairs=fleet.pairs)
    simulation = kind(
        index,
        routers,
        clock,
        ranks=fleet.ranks,
        model=fleet.model,
        event_delay=fleet.event_delay,
        seed=run.seed,
    )
    simulation.lose(fleet.losses)
    if isinstance(boards, Exchange):
        boards.start(simulation)
    else:
        boards.share(simulation, delay=fleet.shared, period=fleet.gauges)
    gc.disable()  # it would look at every request again and again
    try:
        requests = simulation.run(run.traffic.sessions(fleet, run.seed), run.traffic.at_once)
    finally:
        gc.enable()
    return _outcome(requests, simulation)


def _outcome(requests: Sequence[Request], simulation: Simulation) -> Outcome:
    waits = [1e3 * (one.first - one.arrival) for one in requests if one.first is not None]
    prompts = sum(one.turn.prompt for one in requests)
    lasted = [one.finished - one.arrival for one in requests if one.finished is not None]
    if not len(waits) == len(lasted) == len(requests):
        raise AssertionError("requests that have no answer")
    gaps = sum((place.engine.gaps for place in simulation.places if place.engine), Counter())
    return Outcome(
        mean=sum(waits) / len(waits),
        p50=percentile(waits, 50),
        p90=percentile(waits, 90),
        p99=percentile(waits, 99),
        hit=sum(one.hit for one in requests) / prompts,
        seconds=sum(lasted) / len(lasted),
        missed=sum(abs(one.hit - one.predicted) for one in requests) / prompts,
        refused=simulation.refused,
        gap_p50=_gap(gaps, 0.50),
        gap_p99=_gap(gaps, 0.99),
        gap_p999=_gap(gaps, 0.999),
        apart=sum(one.apart for one in requests) / len(requests),
    )


def _gap(gaps: Counter[float], share: float) -> float:
    """Return the ms between two tokens that this share of all do not exceed; NaN without any."""
    lengths = sorted(gaps)
    counts = itertools.accumulate(gaps[length] for length in lengths)
    wanted = share * gaps.total()
    reached = (length for length, n in zip(lengths, counts, strict=True) if n >= wanted)
    return 1e3 * next(reached, math.nan)
