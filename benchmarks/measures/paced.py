"""A fleet whose ranks speak in turn: what a batch costs, and how old an answer is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from benchmarks.bench import Bench, Contender
from benchmarks.feed import MARKS_PER_SECOND, FeedSpec, sentinel_tokens
from benchmarks.indexer import dynamo_indexer
from benchmarks.measures.ingest import TIMEOUT, feed
from benchmarks.process import cpu_seconds
from benchmarks.results import OURS, Bar, Result
from benchmarks.sides.busy import listen
from benchmarks.stats import median, percentile

WORKER_RANKS = 8
BATCH_RATES = (4_000.0, 15_000.0)  # of all ranks together, per second
BATCH_BLOCKS = (1, 8)
QUERIES = (0, 1_000)  # per second
FILLED = 20_000  # blocks that the ranks hold before
DYNAMO = "Dynamo indexer, 4 threads"
_SETTLE = 0.5  # seconds of listening after the last batch is due


@dataclass(frozen=True)
class _Cell:
    ranks: int
    rate: float
    blocks: int
    queries: int

    @property
    def title(self) -> str:
        asked = f", {self.queries:,} queries/s" if self.queries else ""
        return f"{self.rate:,.0f} batches/s of {self.blocks} blocks{asked}"


@dataclass(frozen=True)
class _Paced:
    cpu: float  # µs of a batch
    ages: list[float]  # seconds
    matches: list[int]  # ns
    longest_turn: float | None  # ms


def run(bench: Bench) -> list[Result]:
    """Return the costs and ages of each size of fleet, rate, size of batch and load of queries."""
    results: list[Result] = []
    for ranks, rate, blocks, queries in product(
        bench.scale.paced_ranks, BATCH_RATES, BATCH_BLOCKS, QUERIES
    ):
        cell = _Cell(ranks, rate, blocks, queries)
        runs: dict[str, list[_Paced]] = {}
        for _ in range(bench.scale.paced_rounds):
            runs.setdefault(OURS, []).append(_ours(bench, cell))
            if bench.peers:
                runs.setdefault(DYNAMO, []).append(_dynamo(bench, cell))
        results += _results(cell, runs)
    return results


def _spec(bench: Bench, cell: _Cell) -> FeedSpec:
    return FeedSpec(
        source=bench.source(unit=cell.blocks),
        ranks=cell.ranks,
        blocks=FILLED,
        event_blocks=cell.blocks,
        batch_events=1,
        paced_blocks=round(bench.scale.paced_seconds * cell.rate) * cell.blocks,
        batch_rate=cell.rate,
        worker_ranks=WORKER_RANKS,
    )


def _ours(bench: Bench, cell: _Cell) -> _Paced:
    spec = _spec(bench, cell)
    with feed(spec) as (process, said), bench.start([Contender(OURS, OURS)]) as sides:
        side = sides[OURS]
        side.call("zmq.connect", endpoints=said["endpoints"], worker_ranks=WORKER_RANKS)
        process.hear()  # joined
        process.say("go")
        prompts = process.hear()["prompts"]
        side.call("zmq.wait", ranks=spec.ranks, timeout=TIMEOUT)
        side.call("zmq.check", prompts=prompts)
        side.call("zmq.forget_turns")
        used = cpu_seconds(side.pid)
        process.say("go on, at the rate")
        listened = None
        if cell.queries:
            listened = side.call("zmq.listen", **_listening(bench, cell, said, prompts))
        sent = process.hear()["sent"]
        used = cpu_seconds(side.pid) - used
        thread = side.call("zmq.thread")
        side.call("zmq.close")
    return _paced(said, used, sent, listened, thread.get("longest_turn_us"))


def _dynamo(bench: Bench, cell: _Cell) -> _Paced:
    spec = _spec(bench, cell)
    with (
        feed(spec) as (process, said),
        closing(dynamo_indexer(bench.python("dynamo"), threads=4)) as indexer,
    ):
        indexer.register(said["endpoints"], WORKER_RANKS)
        process.hear()  # joined
        process.say("go")
        prompts = process.hear()["prompts"]
        indexer.wait(sentinel_tokens(), spec.ranks, TIMEOUT)
        used = cpu_seconds(indexer.pid)
        process.say("go on, at the rate")
        listened = None
        if cell.queries:
            arguments = _listening(bench, cell, said, prompts)
            arguments["prompts"] = [tokens for tokens, _ in arguments["prompts"]]
            listened = listen(indexer.depths, lambda t: bool(indexer.depths(t)), **arguments)
        sent = process.hear()["sent"]
        used = cpu_seconds(indexer.pid) - used
    return _paced(said, used, sent, listened, None)


def _listening(bench: Bench, cell: _Cell, said: Any, prompts: Any) -> dict[str, Any]:
    seconds = said["batches"] / cell.rate
    return {
        "prompts": prompts,
        "seconds": seconds + _SETTLE,
        "markers": int(seconds * MARKS_PER_SECOND),
        "pause": 1 / cell.queries,
    }


def _paced(
    said: Any, used: float, sent: Any, listened: Any, longest_turn_us: float | None
) -> _Paced:
    times = dict(map(tuple, sent))
    seen = [] if listened is None else listened["seen"]
    since = 0.0 if listened is None else listened["since"]
    return _Paced(
        cpu=used / said["batches"] * 1e6,
        ages=[when - times[number] for number, when in seen if times[number] >= since],
        matches=[] if listened is None else listened["samples"],
        longest_turn=None if longest_turn_us is None else longest_turn_us / 1_000,
    )


_Get = Callable[[_Paced], float]


def _results(cell: _Cell, runs: dict[str, list[_Paced]]) -> Iterator[Result]:
    note = (
        f"{WORKER_RANKS} ranks a worker, which speak in turn; the publishers share the last core "
        "with whatever the subscriber runs there. CPU is that of the whole process, queries "
        "included. An age is the time from the sending of a batch to the first query that finds "
        "its blocks; one query in two looks for it. Queries are of 8,192 tokens: ours a call in "
        "the process that receives, theirs HTTP from another one."
    )

    def result(measure: str, unit: str, get: _Get, bar: Bar | None = None) -> Result:
        return Result(
            group=f"{cell.ranks} ranks that speak in turn",
            measure=f"{cell.title}: {measure}",
            unit=unit,
            values={label: median([get(paced) for paced in own]) for label, own in runs.items()},
            bar=bar,
            notes=[note],
        )

    has_bars = (cell.rate, cell.blocks, cell.queries) == (BATCH_RATES[-1], BATCH_BLOCKS[-1], 0)
    cpu_bar = Bar(times=3.0) if has_bars else None
    yield result("CPU", "µs/batch", lambda paced: paced.cpu, cpu_bar)
    if cell.queries:
        for percent in (50, 99):
            yield result(f"age, p{percent}", "ms", partial(_age, percent))
        for percent in (50, 99):
            yield result(f"match, p{percent}", "µs", partial(_match, percent))
    longest = [paced.longest_turn for paced in runs[OURS] if paced.longest_turn is not None]
    yield Result(
        group=f"{cell.ranks} ranks that speak in turn",
        measure=f"{cell.title}: longest turn",
        unit="ms",
        values={OURS: max(longest, default=0.0)},
        bar=Bar(at_most=10.0) if has_bars else None,
        notes=[note],
    )


def _age(percent: float, paced: _Paced) -> float:
    return percentile(paced.ages, percent) * 1e3


def _match(percent: float, paced: _Paced) -> float:
    return percentile(paced.matches, percent) / 1e3
