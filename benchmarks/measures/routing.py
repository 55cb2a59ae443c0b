"""Which policy makes prompts wait least, on simulated engines: see `benchmarks.routing`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.bench import Bench
from benchmarks.results import OURS, Bar, Result
from benchmarks.routing.engine import Model
from benchmarks.routing.field import FIELD, POLICIES
from benchmarks.routing.plots import Line, line_chart
from benchmarks.routing.referee import referee
from benchmarks.routing.runs import (
    Fleet,
    Outcome,
    Run,
    Spread,
    Traffic,
    perform,
    spread,
)
from benchmarks.routing.simulation import Loss

DEFAULT: Final = "kvindex"
LOAD_ALONE: Final = "least-queued"
SPEEDS: Final = (1.0, 3.0, 4.0)
AGENTS: Final = (48.0, 80.0)  # sessions at a time
LOADS: Final[dict[str, tuple[float, ...]]] = {
    "chat": (1.0, 3.0),
    "rag": (0.7, 1.0, 1.4, 2.0),
    "bursts": (0.5, 0.7, 1.0),
}
PLOTTED: Final = (DEFAULT, "lmetric", "dynamo", "dynamo-agentic", "llm-d", "smg-gate", LOAD_ALONE)
SMALL: Final = Fleet(model=Model(cache=262_144))
TIGHT: Final = Fleet(model=Model(cache=600_000))
LARGE: Final = Fleet(ranks=32)
DELAYS: Final = (1.0, 5.0, 30.0)
NOISE: Final = (
    "Noise is the 95 % interval of the difference, seed by seed (Student's t), and at least 1 %."
)
LEAST: Final = 0.01
LATE: Final = (0.02, 0.1, 0.5)
UNDER_WAY: Final = (0.0, 0.005, 0.015)


@dataclass(frozen=True)
class _Study:
    """All runs, by what they are."""

    outcomes: dict[Run, Outcome]
    seeds: Sequence[int]

    def figures(self, traffic: Traffic, policy: str, fleet: Fleet, name: str) -> list[float]:
        """Return one figure of each seed."""
        return [
            float(getattr(self.outcomes[Run(traffic, policy, seed, fleet)], name))
            for seed in self.seeds
        ]

    def difference(
        self, traffic: Traffic, policy: str, other: str, fleet: Fleet, name: str
    ) -> Spread:
        """Return by how much a policy's figure is above another's, seed by seed."""
        return _difference(
            self.figures(traffic, policy, fleet, name), self.figures(traffic, other, fleet, name)
        )


def run(bench: Bench) -> list[Result]:
    """Return, for every traffic, what each policy makes of it, and what faults change."""
    seeds = range(bench.seed, bench.seed + bench.scale.routing_seeds)
    grids = _grids(bench)
    variants = _variants(bench)
    runs = [
        Run(traffic, policy, seed, fleet)
        for fleet, groups in grids
        for traffics in groups
        for traffic in traffics
        for seed in seeds
        for policy in POLICIES
    ]
    runs += [
        Run(row.traffic, policy, seed, fleet)
        for table in variants
        for seed in seeds
        for row in table.rows
        for fleet in (Fleet(), *row.fleets)
        for policy in table.policies
    ]
    study = _Study(perform(runs, processes=len(os.sched_getaffinity(0))), seeds)
    results = [
        result
        for fleet, groups in grids
        for group in groups
        for result in _policies(study, fleet, group)
    ]
    for fleet, groups in grids:
        for group in groups:
            results += _bars(study, fleet, group)
    results += [result for table in variants for result in _variant(study, table)]
    if bench.images is not None:
        _draw(bench, study, grids[0][1])
    if bench.peers and bench.request_traces:
        results += referee(bench, seeds)
    return results


def _grids(bench: Bench) -> list[tuple[Fleet, list[list[Traffic]]]]:
    """Return by fleet the traffic that every policy meets, at several loads each."""
    requests = bench.scale.routing_requests
    last = None if bench.scale.routing_all_loads else 1
    traces = [
        [Traffic(file.stem, speed, bench.scale.routing_trace, file) for speed in SPEEDS[:last]]
        for file in bench.request_traces
    ]
    agents = [
        [Traffic(file.stem, count, bench.scale.routing_trace, file) for count in AGENTS[:last]]
        for file in bench.traces
        if file not in bench.request_traces
    ]
    made = [[Traffic(kind, load, requests) for load in LOADS[kind][:last]] for kind in LOADS]
    grids: list[tuple[Fleet, list[list[Traffic]]]] = [(Fleet(), traces + agents + made)]
    if bench.scale.routing_all_loads and agents:
        grids.append((TIGHT, agents))
    if bench.scale.routing_all_loads and traces:
        grids.append((SMALL, [[replace(one, load=2.0) for one in group[:1]] for group in traces]))
        grids.append((LARGE, [[replace(one, load=12.0) for one in group[:1]] for group in traces]))
    return grids


# What every policy makes of it --------------------------------------------------------------------


def _policies(study: _Study, fleet: Fleet, group: Sequence[Traffic]) -> list[Result]:
    note = (
        "TTFT in ms, hit in % of the prompts' tokens; means over "
        f"{len(study.seeds)} seeds. ▲ marks what is worse than `{DEFAULT}`, ▼ what is better, by "
        f"more than noise. {NOISE}"
    )
    return [_policy(study, fleet, group, policy, note) for policy in POLICIES]


def _policy(
    study: _Study, fleet: Fleet, group: Sequence[Traffic], policy: str, note: str
) -> Result:
    values, marks = {}, {}
    for traffic in group:
        for name in ("mean", "p99"):
            column = f"×{traffic.load:g} {name}"
            values[column] = spread(study.figures(traffic, policy, fleet, name)).mean
            marks[column] = _mark(study.difference(traffic, policy, DEFAULT, fleet, name))
        values[f"×{traffic.load:g} hit"] = (
            100 * spread(study.figures(traffic, policy, fleet, "hit")).mean
        )
    return Result(
        group=f"{group[0].kind}, {_named(fleet)}",
        measure=policy,
        unit="ms, %",
        values=values,
        marks=marks,
        notes=[note],
    )


def _mark(difference: Spread) -> str:
    if not difference.matters:
        return ""
    return " ▲" if difference.mean > 0 else " ▼"


def _difference(figures: Sequence[float], others: Sequence[float]) -> Spread:
    difference = spread([a - b for a, b in zip(figures, others, strict=True)])
    return Spread(difference.mean, max(difference.noise, LEAST * spread(others).mean))


def _named(fleet: Fleet) -> str:
    return f"{fleet.ranks} ranks, caches of {fleet.model.cache / 1e6:.2g} M tokens"


def _bars(study: _Study, fleet: Fleet, group: Sequence[Traffic]) -> list[Result]:
    """Hold the default policy against the best of the field, and against load alone."""
    results = []
    for traffic in group:
        for name in ("mean", "p99"):
            means = {
                policy: spread(study.figures(traffic, policy, fleet, name)).mean
                for policy in (*FIELD, LOAD_ALONE, DEFAULT)
            }
            best = min((*FIELD, LOAD_ALONE), key=means.__getitem__)
            noise = study.difference(traffic, DEFAULT, best, fleet, name).noise
            results.append(
                Result(
                    group="beside the best other policy",
                    measure=f"{traffic}, {_named(fleet)}: TTFT {name} (best: {best})",
                    unit="ms",
                    values={OURS: means[DEFAULT], "best other": means[best]},
                    bar=Bar(times=1.0 - noise / means[DEFAULT]) if len(study.seeds) > 1 else None,
                    bar_only=True,
                )
            )
    return results


# What faults and gateways change ------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One line: its traffic, and a fleet for each column."""

    title: str
    traffic: Traffic
    fleets: tuple[Fleet, ...]


@dataclass(frozen=True)
class _Table:
    title: str
    columns: tuple[str, ...]
    policies: tuple[str, ...]
    rows: tuple[_Row, ...]
    note: str


def _variants(bench: Bench) -> list[_Table]:
    requests = bench.scale.routing_requests
    steady = [
        Traffic(file.stem, 3.0, bench.scale.routing_trace, file)
        for file in bench.request_traces[:1]
    ] or [Traffic("rag", 1.0, requests)]
    traffic = steady[0]
    lost = tuple(Loss(rank, 20.0 + 40.0 * rank) for rank in range(Fleet().ranks))
    faults = [_Row("none", traffic, (Fleet(),))]
    faults += [
        _Row(f"events {delay:g} s late", traffic, (Fleet(event_delay=delay),)) for delay in DELAYS
    ]
    faults.append(_Row("each rank lost for 30 s, in turn", traffic, (Fleet(losses=lost),)))
    sharing = [
        _Row("one gateway", traffic, (Fleet(), Fleet())),
        _Row("nothing", traffic, _gateways()),
    ]
    sharing += [
        _Row(f"each booking, {1e3 * delay:g} ms late", traffic, _gateways(shared=delay))
        for delay in (0.0, *LATE)
    ]
    sharing += [
        _Row(f"`SharedLoad`, {1e3 * delay:g} ms under way", traffic, _gateways(exchange=delay))
        for delay in UNDER_WAY
    ]
    sharing += [
        _Row(f"all bookings, every {1e3 * delay:g} ms", traffic, _gateways(gauges=delay))
        for delay in LATE
    ]
    bursts = [Traffic("bursts", load, requests) for load in LOADS["bursts"]]
    predictions = [_Row(str(one), one, (Fleet(), Fleet(predict=5.0))) for one in (*bursts, traffic)]
    return [
        _Table(
            f"faults, {traffic}",
            ("",),
            (DEFAULT, "lmetric", LOAD_ALONE),
            tuple(faults),
            "What a dead engine had is sent elsewhere when its death is noticed, a second later; "
            "it comes back empty. Times count from the first arrival.",
        ),
        _Table(
            f"several gateways, {traffic}: what they tell each other",
            ("4 gateways", "16 gateways"),
            (DEFAULT,),
            tuple(sharing),
            "Requests reach a gateway at random. Each knows its own bookings at once.",
        ),
        _Table(
            "predictions: what was just sent to a rank counts as held there",
            ("off", "5 s"),
            (DEFAULT,),
            tuple(predictions),
            "",
        ),
    ]


def _gateways(
    *,
    shared: float | None = None,
    gauges: float | None = None,
    exchange: float | None = None,
) -> tuple[Fleet, ...]:
    return tuple(
        Fleet(gateways=count, shared=shared, gauges=gauges, exchange=exchange) for count in (4, 16)
    )


def _variant(study: _Study, table: _Table) -> list[Result]:
    note = (
        f"{table.note} ▲ marks what is worse than with one gateway, no fault and no prediction, "
        f"▼ what is better, by more than noise. {NOISE}"
    )
    return [
        Result(
            group=table.title,
            measure=row.title,
            unit="ms, %",
            values=dict(_values(study, table, row)),
            marks=dict(_marks(study, table, row)),
            notes=[note.strip()],
        )
        for row in table.rows
    ]


def _values(study: _Study, table: _Table, row: _Row) -> Iterator[tuple[str, float]]:
    for policy, column, fleet in _cells(table, row):
        for name in ("mean", "p99", "hit"):
            value = spread(study.figures(row.traffic, policy, fleet, name)).mean
            yield _side(table, policy, column, name), 100 * value if name == "hit" else value


def _marks(study: _Study, table: _Table, row: _Row) -> Iterator[tuple[str, str]]:
    for policy, column, fleet in _cells(table, row):
        for name in ("mean", "p99"):
            figures = study.figures(row.traffic, policy, fleet, name)
            base = study.figures(row.traffic, policy, Fleet(), name)
            yield _side(table, policy, column, name), _mark(_difference(figures, base))


def _cells(table: _Table, row: _Row) -> Iterator[tuple[str, str, Fleet]]:
    for policy in table.policies:
        for column, fleet in zip(table.columns, row.fleets, strict=True):
            yield policy, column, fleet


def _side(table: _Table, policy: str, column: str, name: str) -> str:
    own = policy if len(table.policies) > 1 else ""
    return " ".join(filter(None, [own, column, name]))


# Pictures -----------------------------------------------------------------------------------------


def _draw(bench: Bench, study: _Study, groups: Iterable[Sequence[Traffic]]) -> None:
    assert bench.images is not None
    for group in groups:
        if len(group) < 2:
            continue
        lines = [
            Line(
                policy,
                [
                    (one.load, spread(study.figures(one, policy, Fleet(), "mean")).mean)
                    for one in group
                ],
            )
            for policy in PLOTTED
        ]
        chart = line_chart(f"{group[0].kind}: mean TTFT in ms by load", lines)
        bench.images.mkdir(exist_ok=True)
        (bench.images / f"routing-{group[0].kind}.svg").write_text(chart)
