"""Ingest over ZMQ, from the publishers' sockets to the tree, until everything is applied."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.bench import Bench, Contender, last_core
from benchmarks.feed import FeedSpec, sentinel_tokens
from benchmarks.indexer import Indexer, dynamo_indexer
from benchmarks.process import Lines, cpu_seconds, pinned
from benchmarks.results import OURS, Bar, Result
from benchmarks.sides.busy import ask
from benchmarks.stats import median

RANKS = 8
TIMEOUT = 60.0
QUERY_SECONDS = 0.2
DYNAMO = {1: "Dynamo indexer, 1 thread", 4: "Dynamo indexer, 4 threads"}


@dataclass(frozen=True)
class _Flow:
    title: str
    unit: int
    event_blocks: int
    batch_events: int
    rate_bar: Bar | None
    cpu_bar: Bar


FLOWS = [
    _Flow("batches of 64 blocks", 64, 64, 1, Bar(times=2.0), Bar(times=3.0)),
    _Flow("batches of 16 one-block events", 16, 1, 16, None, Bar(times=2.0)),
    _Flow("batches of one block", 1, 1, 1, None, Bar(times=3.0)),
]


@dataclass(frozen=True)
class _Ingested:
    rate: float  # M blocks/s
    cpu: float  # µs of CPU a block
    query: float  # µs of a query afterwards


def run(bench: Bench) -> list[Result]:
    """Return the rate and the CPU a block of each flow."""
    return [result for flow in FLOWS for result in _flow(bench, flow)]


@contextmanager
def feed(spec: FeedSpec) -> Iterator[tuple[Lines, dict[str, Any]]]:
    """Start the publishers on a core of their own; yield the process and what it says first."""
    command = [sys.executable, "-m", "benchmarks.feed", json.dumps(spec.to_dict())]
    with Lines(pinned(command, last_core())) as process:
        yield process, process.hear()


def _flow(bench: Bench, flow: _Flow) -> list[Result]:
    single = flow.event_blocks == 1
    spec = FeedSpec(
        source=bench.source(unit=flow.unit),
        ranks=RANKS,
        blocks=bench.scale.ingest_single_blocks if single else bench.scale.ingest_blocks,
        event_blocks=flow.event_blocks,
        batch_events=flow.batch_events,
    )
    runs: dict[str, list[_Ingested]] = {}
    for _ in range(bench.scale.rounds):
        runs.setdefault(OURS, []).append(_ours(bench, spec))
        for threads, label in DYNAMO.items() if bench.peers else ():
            runs.setdefault(label, []).append(_dynamo(bench, spec, threads))
    note = (
        f"{RANKS} ranks, one connection each; the publishers share the last core with whatever the "
        "subscriber runs there; the clock stops when the last batch of every rank can be matched. "
        "CPU is that of the whole subscribing process, its I/O threads and polls included. A query "
        "is of up to 8,192 tokens, as they come: ours a call, theirs HTTP on a kept connection."
    )

    def result(measure: str, unit: str, lower: bool, bar: Bar | None, get: _Get) -> Result:
        values = {label: median([get(one) for one in own]) for label, own in runs.items()}
        return Result(
            group="ingest over ZMQ",
            measure=measure,
            unit=unit,
            values=values,
            lower=lower,
            bar=bar,
            notes=[note],
        )

    return [
        result(flow.title, "M blocks/s", False, flow.rate_bar, lambda one: one.rate),
        result(f"{flow.title}: CPU", "µs/block", True, flow.cpu_bar, lambda one: one.cpu),
        result(f"{flow.title}: a query then", "µs", True, None, lambda one: one.query),
    ]


_Get = Callable[[_Ingested], float]


def _ours(bench: Bench, spec: FeedSpec) -> _Ingested:
    with feed(spec) as (process, said), bench.start([Contender(OURS, OURS)]) as sides:
        side = sides[OURS]
        side.call("zmq.connect", endpoints=said["endpoints"])
        process.hear()  # joined
        rate, cpu = _drained(
            side.pid,
            process,
            said["blocks"],
            lambda: side.call("zmq.wait", ranks=spec.ranks, timeout=TIMEOUT),
        )
        prompts = process.hear()["prompts"]
        side.call("zmq.check", prompts=prompts)
        queries = side.call("zmq.ask", prompts=prompts, seconds=QUERY_SECONDS, pause=0.0)
        side.call("zmq.close")
    return _Ingested(rate, cpu, median(queries) / 1_000)


def _dynamo(bench: Bench, spec: FeedSpec, threads: int) -> _Ingested:
    sentinel = sentinel_tokens()
    with feed(spec) as (process, said), closing(_indexer(bench, threads)) as indexer:
        indexer.register(said["endpoints"])
        process.hear()  # joined
        rate, cpu = _drained(
            indexer.pid,
            process,
            said["blocks"],
            lambda: indexer.wait(sentinel, spec.ranks, TIMEOUT),
        )
        prompts = process.hear()["prompts"]
        for tokens, depths in prompts:
            if indexer.depths(tokens) != dict(depths):
                raise AssertionError("Dynamo's indexer gave a wrong answer")
        queries: list[int] = []
        token_lists = [tokens for tokens, _ in prompts]
        ask(indexer.depths, token_lists, QUERY_SECONDS, 0.0, queries)
    return _Ingested(rate, cpu, median(queries) / 1_000)


def _indexer(bench: Bench, threads: int) -> Indexer:
    return dynamo_indexer(bench.python("dynamo"), threads=threads)


def _drained(pid: int, process: Lines, blocks: int, wait: Callable[[], Any]) -> tuple[float, float]:
    """Let the feed go and wait; return M blocks/s, and µs of CPU a block."""
    used, started = cpu_seconds(pid), time.perf_counter()
    process.say("go")
    wait()
    seconds = time.perf_counter() - started
    return blocks / seconds / 1e6, (cpu_seconds(pid) - used) / blocks * 1e6
