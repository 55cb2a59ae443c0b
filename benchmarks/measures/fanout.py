"""One subscriber for several processes: what each further one costs, how late it is, its start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.bench import Bench, Contender
from benchmarks.feed import FeedSpec
from benchmarks.measures.ingest import TIMEOUT, feed
from benchmarks.process import Lines, Side, cpu_seconds
from benchmarks.results import OURS, Result
from benchmarks.stats import median, percentile

RANKS: Final = 64
RATE: Final = 32_000.0  # blocks per second
EVENT_BLOCKS: Final = 8
REPLICAS: Final = (0, 1, 2, 4)
JOIN_BLOCKS: Final = 2_000
SETTLE: Final = 0.3  # seconds


@dataclass(frozen=True)
class _Run:
    """One measurement.

    Attributes:
        server: µs of CPU of the subscribing process, for each batch.
        replica: of a replica, likewise.
        lags: seconds from when the server shows a batch as applied until a replica does.
    """

    server: float
    replica: float
    lags: list[float]


def run(bench: Bench) -> list[Result]:
    """Return CPU of server and replicas by number of replicas, lag, and time to join."""
    runs = {count: [_paced(bench, count) for _ in range(bench.scale.rounds)] for count in REPLICAS}
    joins = [_join(bench) for _ in range(bench.scale.rounds)]
    note = (
        f"{RANKS} ranks, {RATE:,.0f} blocks/s in batches of one event of up to {EVENT_BLOCKS} "
        "blocks; CPU is that of the whole process, its I/O threads included. Lag: from when the "
        "server's index has a batch and shows it until a replica's does. All processes share the "
        "machine's cores with the feed."
    )

    def result(measure: str, unit: str, value: float) -> Result:
        return Result(
            group="fan-out to router processes",
            measure=measure,
            unit=unit,
            values={OURS: value},
            notes=[note],
        )

    results = [
        result(f"{_named(count)}: CPU of the server", "µs/batch", median([r.server for r in own]))
        for count, own in runs.items()
    ]
    for count, own in runs.items():
        if count:
            cpu = median([r.replica for r in own])
            results.append(result(f"{_named(count)}: CPU of a replica", "µs/batch", cpu))
            for percent in (50, 99):
                lag = median([percentile(r.lags, percent) for r in own]) * 1e6
                results.append(result(f"{_named(count)}: lag, p{percent}", "µs", lag))
    title = f"joining: {bench.scale.fanout_ranks} ranks of {JOIN_BLOCKS:,} blocks"
    return [*results, result(title, "ms", median(joins) * 1e3)]


def _paced(bench: Bench, replicas: int) -> _Run:
    spec = FeedSpec(
        source=bench.source(),
        ranks=RANKS,
        blocks=min(bench.scale.busy_entries, 60_000),
        event_blocks=EVENT_BLOCKS,
        batch_events=1,
        paced_blocks=int(bench.scale.fanout_seconds * RATE),
        rate=RATE,
    )
    with feed(spec) as (process, said), _crew(bench, replicas) as (server, others, path):
        server.call("fan.serve", endpoints=said["endpoints"], path=path)
        process.hear()  # joined
        process.say("go")
        process.hear()
        time.sleep(SETTLE)  # the fast part is applied
        for other in others:
            other.call("fan.join", path=path)
        return _measured(bench, process, said["batches"], server, others)


def _measured(bench: Bench, process: Lines, batches: int, server: Side, others: list[Side]) -> _Run:
    sides = [server, *others]
    first = server.call("fan.applied")
    for side in sides:
        side.call("fan.watch")
    before = [cpu_seconds(side.pid) for side in sides]
    process.say("go on, at the rate")
    time.sleep(bench.scale.fanout_seconds)  # to look whether it is done would cost CPU
    for side in sides:
        side.call("fan.wait", batches=batches, timeout=TIMEOUT)
    used = [cpu_seconds(side.pid) - b for side, b in zip(sides, before, strict=True)]
    checks = [side.call("fan.check") for side in sides]
    if any(check != {"evicted": 0, "blocks": checks[0]["blocks"]} for check in checks):
        raise AssertionError(f"replicas that differ: {checks}")
    shown = {(rank, seq): at for rank, seq, at in server.call("fan.seen")}
    lags = [
        at - shown[rank, seq]
        for other in others
        for rank, seq, at in other.call("fan.seen")
        if (rank, seq) in shown
    ]
    per_batch = [1e6 * seconds / (batches - first) for seconds in used]
    return _Run(per_batch[0], median(per_batch[1:]) if others else 0.0, lags)


def _join(bench: Bench) -> float:
    with _crew(bench, 1) as (server, (other,), path):
        server.call("fan.serve", endpoints=[], path=path)
        server.call("fan.fill", ranks=bench.scale.fanout_ranks, blocks=JOIN_BLOCKS)
        seconds: float = other.call("fan.join", path=path)
        if other.call("fan.check") != server.call("fan.check"):
            raise AssertionError("a replica that differs")
    return seconds


@contextmanager
def _crew(bench: Bench, replicas: int) -> Iterator[tuple[Side, list[Side], str]]:
    """Start the processes; end the replicas before the server."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        names = ["server", *(f"replica {number}" for number in range(replicas))]
        sides = stack.enter_context(bench.start([Contender(name, OURS) for name in names]))
        server, *others = (sides[name] for name in names)
        yield server, others, str(Path(folder) / "kvindex.sock")
        for side in (*others, server):
            side.call("fan.close")


def _named(replicas: int) -> str:
    return f"{replicas or 'no'} replica{'s' if replicas != 1 else ''}"
