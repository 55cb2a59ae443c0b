"""The shared-memory queue: how much goes through, how late it comes, what waiting costs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.bench import Bench, Contender
from benchmarks.process import Side
from benchmarks.queues.payloads import OBJECT
from benchmarks.results import OURS, Bar, Result
from benchmarks.spinloop import with_spinloop, without_spinloop
from benchmarks.stats import median, percentile

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_PACKAGE: Final = "benchmarks.queues"
_VLLM: Final = ("vLLM", "vLLM, spinloop")
_CONTENDERS: Final = (
    Contender(OURS, "kvindex", package=_PACKAGE),
    Contender(_VLLM[0], "vllm", package=_PACKAGE, environment=without_spinloop),
    Contender(_VLLM[1], "vllm", package=_PACKAGE, environment=with_spinloop),
    Contender("ZMQ PUB/SUB", "zmq", package=_PACKAGE),
)

READERS: Final = (1, 4)
CHUNKS: Final = 10
CHUNK: Final = 8 * _MIB
IDLE_SIZE: Final = 100
WAKES: Final = 3
TWICE: Final = Bar(times=2.0)
NO_WORSE: Final = Bar(times=1.0)
IDLE_BAR: Final = Bar(at_most=1.0)


@dataclass(frozen=True)
class _Flow:
    """Messages sent as fast as it goes."""

    title: str
    size: int
    bar: Bar | None = None
    chunk_bytes: int = CHUNK


@dataclass(frozen=True)
class _Pace:
    """Messages sent at a rate."""

    title: str
    size: int
    rate: float


FLOWS: Final = (
    _Flow("100 B", 100, TWICE),
    _Flow("4 KB", 4 * _KIB, TWICE),
    _Flow("256 KB", 256 * _KIB),
    _Flow("4 MB", 4 * _MIB),
    _Flow("4 MB, chunks of 1 MiB", 4 * _MIB, chunk_bytes=_MIB),
    _Flow("a dict with 64 token ids", OBJECT),
)
PACES: Final = (
    _Pace("100 B, 1,000 a second", 100, 1_000.0),
    _Pace("4 KB, 1,000 a second", 4 * _KIB, 1_000.0),
    _Pace("256 KB, 100 a second", 256 * _KIB, 100.0),
    _Pace("4 MB, 100 a second", 4 * _MIB, 100.0),
    _Pace("100 B, 20 a second", 100, 20.0),
)
CPU_PACE: Final = PACES[0]

_Samples = dict[str, list[Any]]


def run(bench: Bench) -> list[Result]:
    """Return throughput, latency and CPU of every queue."""
    with bench.start(_CONTENDERS) as sides:
        flows = _throughput(bench, sides)
        paced, paced_cpu = _latency(bench, sides)
        woken, idle_cpu = _idle(bench, sides)
    return [*flows, *paced, *woken, *paced_cpu, *idle_cpu]


def _throughput(bench: Bench, sides: Mapping[str, Side]) -> list[Result]:
    note = (
        f"One writer sends as fast as it can to every reader, over {CHUNKS} chunks of "
        f"{CHUNK // _MIB} MiB unless said otherwise; a message counts once, however many readers "
        "take it, and the clock stops when the last reader has the last one. Every reader checks "
        "number and order, and beforehand whole contents. All processes share the machine's cores; "
        "spinloop is measured only where each has one of its own."
    )
    results = []
    for readers in READERS:
        taking_part = _taking_part(sides, readers)
        for flow in FLOWS:
            samples: _Samples = {label: [] for label in taking_part}
            for label, side in _in_turn(bench, taking_part):
                one = side.call(
                    "queue.throughput",
                    readers=readers,
                    size=flow.size,
                    seconds=bench.scale.queue_seconds,
                    chunk_bytes=flow.chunk_bytes,
                    chunks=CHUNKS,
                )
                samples[label].append(one["messages"] / one["seconds"])
            results += _rates(flow, readers, samples, note)
    return results


def _rates(flow: _Flow, readers: int, samples: _Samples, note: str) -> list[Result]:
    group, measure = "queue: throughput", f"{flow.title}, {_named(readers)}"
    values = _medians(samples)
    megabytes = {label: rate * flow.size / 1e6 for label, rate in values.items()}
    rates = Result(
        group=group,
        measure=measure,
        unit="messages/s",
        values=values,
        lower=False,
        against=_VLLM,
        bar=flow.bar,
        notes=[note],
    )
    if flow.size == OBJECT:
        return [rates]
    return [
        rates,
        Result(group=group, measure=measure, unit="MB/s", values=megabytes, lower=False),
    ]


def _latency(bench: Bench, sides: Mapping[str, Side]) -> tuple[list[Result], list[Result]]:
    note = (
        "One way: from just before an object is sent to when a reader has it, both on the "
        "machine's monotonic clock; all readers' samples together. The writer sleeps between two "
        "messages."
    )
    latency: list[Result] = []
    cpu: list[Result] = []
    for readers in READERS:
        taking_part = _taking_part(sides, readers)
        for pace in PACES:
            samples: _Samples = {label: [] for label in taking_part}
            slow = pace.rate < 100
            for label, side in _in_turn(bench, taking_part):
                one = side.call(
                    "queue.latency",
                    readers=readers,
                    size=pace.size,
                    rate=pace.rate,
                    seconds=bench.scale.queue_slow_seconds if slow else bench.scale.queue_seconds,
                    chunk_bytes=CHUNK,
                    chunks=CHUNKS,
                )
                samples[label].append(one)
            measure = f"{pace.title}, {_named(readers)}"
            latency += _percentiles(measure, samples, [note], NO_WORSE)
            if pace is CPU_PACE or slow:
                cpu += _shares(measure, samples)
    return latency, cpu


def _percentiles(
    measure: str, samples: _Samples, notes: Sequence[str] = (), bar: Bar | None = None
) -> list[Result]:
    return [
        Result(
            group="queue: latency",
            measure=f"{measure}: p{percent}",
            unit="µs",
            values=_medians(
                {
                    label: [percentile(one["samples"], percent) / 1_000 for one in own]
                    for label, own in samples.items()
                }
            ),
            against=_VLLM,
            bar=bar if percent == 50 else None,
            notes=list(notes),
        )
        for percent in (50, 99)
    ]


def _shares(measure: str, samples: _Samples, bar: Bar | None = None) -> list[Result]:
    return [
        Result(
            group="queue: CPU",
            measure=f"{measure}: {party}",
            unit="% of a core",
            values=_medians({label: [one[key] for one in own] for label, own in samples.items()}),
            against=_VLLM,
            bar=bar,
        )
        for key, party in (("writer", "the writer"), ("reader", "a reader"))
    ]


def _idle(bench: Bench, sides: Mapping[str, Side]) -> tuple[list[Result], list[Result]]:
    settle, seconds = bench.scale.queue_settle, bench.scale.queue_idle
    woken: list[Result] = []
    cpu: list[Result] = []
    for readers in READERS:
        taking_part = _taking_part(sides, readers)
        samples: _Samples = {
            label: [
                side.call(
                    "queue.idle",
                    readers=readers,
                    size=IDLE_SIZE,
                    settle=settle,
                    seconds=seconds,
                    wakes=WAKES,
                    chunk_bytes=CHUNK,
                    chunks=CHUNKS,
                )
            ]
            for label, side in taking_part.items()
        }
        measure = f"{WAKES} messages, each after {settle:g} s or more, {_named(readers)}"
        woken += _percentiles(measure, samples)
        cpu += _shares(f"{seconds:g} s without a message, {_named(readers)}", samples, IDLE_BAR)
    return woken, cpu


def _taking_part(sides: Mapping[str, Side], readers: int) -> dict[str, Side]:
    """All sides; spinloop only where every process has a core, since it never yields one."""
    enough = readers < len(os.sched_getaffinity(0))
    return {label: side for label, side in sides.items() if enough or label != _VLLM[1]}


def _in_turn(bench: Bench, sides: Mapping[str, Side]) -> Iterable[tuple[str, Side]]:
    """Every side, as many times as there are rounds."""
    return (one for _ in range(bench.scale.queue_rounds) for one in sides.items())


def _medians(samples: _Samples) -> dict[str, float]:
    return {label: median(own) for label, own in samples.items()}


def _named(readers: int) -> str:
    return f"{readers} reader{'s' if readers > 1 else ''}"
