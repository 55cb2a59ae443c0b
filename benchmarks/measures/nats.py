"""Many machines on NATS: what relay and replicas cost, how late they are, joining."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.bench import Bench, Contender
from benchmarks.feed import FeedSpec
from benchmarks.measures.ingest import TIMEOUT, feed
from benchmarks.process import Lines, Side, cpu_seconds
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median, percentile

RATE: Final = 2_000.0  # batches per second
EVENT_BLOCKS: Final = 8
JOIN_RANKS: Final = 64
SETTLE: Final = 0.5  # seconds
_GROUP: Final = "many machines on NATS"
_ALONE: Final = "a subscriber of its own"
_NOTE: Final = (
    "One nats-server with a memory stream; it, the publishers and all processes share the "
    "machine's cores. CPU is that of the whole process. Lag: from when the relay's index shows a "
    "batch until the replica's does."
)


@dataclass(frozen=True)
class _Flood:
    cpu: float  # µs of a batch
    rate: float  # batches per second
    appends: float  # per second
    tail: float  # batches per second of a replica that was stopped meanwhile


@dataclass(frozen=True)
class _Paced:
    cpu: dict[str, float]  # µs of a batch, by process
    lags: list[float]


def run(bench: Bench) -> list[Result]:
    """Return the figures of relay, replica and joining."""
    results: list[Result] = []
    for ranks in bench.scale.nats_ranks:
        for blocks in (64, 1):
            results += _flood_results(bench, ranks, blocks)
    paced = [_paced(bench) for _ in range(bench.scale.rounds)]
    for name in ("relay", "replica"):
        values = {OURS: median([p.cpu[name] for p in paced])}
        values[_ALONE] = median([p.cpu["alone"] for p in paced])
        bar = Bar(times=3.0) if name == "replica" else None
        results.append(
            _result(f"{RATE:,.0f} batches/s: CPU of the {name}", "µs/batch", values, bar)
        )
    for percent, most in ((50, 12.0), (99, 40.0)):
        lag = median([percentile(p.lags, percent) for p in paced]) * 1e3
        title = f"{RATE:,.0f} batches/s: lag, p{percent}"
        results.append(_result(title, "ms", {OURS: lag}, Bar(at_most=most)))
    joins = [_join(bench) for _ in range(bench.scale.rounds)]
    title = f"joining a pool of {bench.scale.nats_join:,} blocks"
    results.append(_result(title, "s", {OURS: median(joins)}, Bar(at_most=2.0)))
    return results


def _result(
    measure: str, unit: str, values: dict[str, float], bar: Bar | None = None, lower: bool = True
) -> Result:
    return Result(
        group=_GROUP, measure=measure, unit=unit, values=values, bar=bar, lower=lower, notes=[_NOTE]
    )


def _flood_results(bench: Bench, ranks: int, blocks: int) -> Iterator[Result]:
    own = [_flood(bench, ranks, blocks) for _ in range(bench.scale.rounds)]
    alone = [_flood(bench, ranks, blocks, alone=True) for _ in range(bench.scale.rounds)]
    title = f"{ranks} ranks, batches of {blocks}"

    def values(get: str) -> dict[str, float]:
        return {
            label: median([getattr(flood, get) for flood in floods])
            for label, floods in ((OURS, own), (_ALONE, alone))
        }

    yield _result(f"{title}: CPU of the relay", "µs/batch", values("cpu"), Bar(times=1 / 1.3))
    yield _result(f"{title}: rate", "batches/s", values("rate"), lower=False)
    appends = {OURS: median([flood.appends for flood in own])}
    yield _result(f"{title}: appends", "1/s", appends, Bar(at_most=100.0))
    tail = {OURS: median([flood.tail for flood in own]), _ALONE: values("rate")[_ALONE]}
    yield _result(f"{title}: a replica's tail", "batches/s", tail, Bar(times=2.0), lower=False)


def _flood(bench: Bench, ranks: int, blocks: int, *, alone: bool = False) -> _Flood:
    scale = bench.scale
    spec = FeedSpec(
        source=bench.source(unit=blocks),
        ranks=ranks,
        blocks=scale.ingest_single_blocks if blocks == 1 else scale.ingest_blocks,
        event_blocks=blocks,
        batch_events=1,
    )
    with _crew(bench, ["relay", "replica"]) as (sides, url), feed(spec) as (process, said):
        relay, replica = sides["relay"], sides["replica"]
        _begin(process, said, relay, url, alone=alone)
        if not alone:
            replica.call("pool.join", path=url)
            os.kill(replica.pid, signal.SIGSTOP)
        try:
            used, since = cpu_seconds(relay.pid), time.monotonic()
            process.say("go")
            relay.call("pool.wait", batches=said["batches"], timeout=TIMEOUT)
            seconds = time.monotonic() - since
            used = cpu_seconds(relay.pid) - used
        finally:
            os.kill(replica.pid, signal.SIGCONT)
        if alone:
            return _Flood(1e6 * used / said["batches"], said["batches"] / seconds, 0.0, 0.0)
        since = time.monotonic()
        replica.call("pool.wait", batches=said["batches"], timeout=TIMEOUT)
        tail = said["batches"] / (time.monotonic() - since)
        _check_equal(relay, replica)
        appends = relay.call("pool.relay")["appends"] / seconds
    return _Flood(1e6 * used / said["batches"], said["batches"] / seconds, appends, tail)


def _paced(bench: Bench) -> _Paced:
    spec = FeedSpec(
        source=bench.source(),
        ranks=min(bench.scale.nats_ranks),
        blocks=min(bench.scale.busy_entries, 60_000),
        event_blocks=EVENT_BLOCKS,
        batch_events=1,
        paced_blocks=int(bench.scale.fanout_seconds * RATE * EVENT_BLOCKS),
        rate=RATE * EVENT_BLOCKS,
    )
    seconds = bench.scale.fanout_seconds
    cpu: dict[str, float] = {}
    # In two runs, so that the second subscriber does not slow the first one down.
    with _crew(bench, ["alone"]) as (sides, url), feed(spec) as (process, said):
        _begin(process, said, sides["alone"], url, alone=True)
        cpu |= _costs(process, said["batches"], sides, seconds)
    with _crew(bench, ["relay", "replica"]) as (sides, url), feed(spec) as (process, said):
        _begin(process, said, sides["relay"], url)
        cpu |= _costs(process, said["batches"], sides, seconds, url)
        _check_equal(sides["relay"], sides["replica"])
        shown = {(rank, seq): at for rank, seq, at in sides["relay"].call("pool.seen")}
        lags = [
            at - shown[rank, seq]
            for rank, seq, at in sides["replica"].call("pool.seen")
            if (rank, seq) in shown
        ]
    return _Paced(cpu, lags)


def _costs(
    process: Lines, batches: int, sides: dict[str, Side], seconds: float, url: str = ""
) -> dict[str, float]:
    """Return the µs of CPU of each side for each of the paced batches."""
    process.say("go")
    process.hear()
    time.sleep(SETTLE)  # the fast part is applied
    if url:
        sides["replica"].call("pool.join", path=url)
    first = next(iter(sides.values())).call("pool.applied")
    for side in sides.values():
        side.call("pool.watch")
    before = {name: cpu_seconds(side.pid) for name, side in sides.items()}
    process.say("go on, at the rate")
    time.sleep(seconds)  # to look whether it is done would cost CPU
    for side in sides.values():
        side.call("pool.wait", batches=batches, timeout=TIMEOUT)
    return {
        name: 1e6 * (cpu_seconds(side.pid) - before[name]) / (batches - first)
        for name, side in sides.items()
    }


def _join(bench: Bench) -> float:
    spec = FeedSpec(
        source=bench.source(unit=64),
        ranks=min(JOIN_RANKS, *bench.scale.nats_ranks),
        blocks=bench.scale.nats_join,
        event_blocks=64,
        batch_events=1,
    )
    with _crew(bench, ["relay", "replica"]) as (sides, url), feed(spec) as (process, said):
        _begin(process, said, sides["relay"], url)
        process.say("go")
        sides["relay"].call("pool.wait", batches=said["batches"], timeout=TIMEOUT)
        time.sleep(2 * SETTLE)  # the last snapshot is stored
        seconds: float = sides["replica"].call("pool.join", path=url)
        sides["replica"].call("pool.wait", batches=said["batches"], timeout=TIMEOUT)
        _check_equal(sides["relay"], sides["replica"])
    return seconds


def _begin(
    process: Lines, said: dict[str, Any], side: Side, url: str, *, alone: bool = False
) -> None:
    """Have a side subscribe to all publishers, as a relay or for itself."""
    if alone:
        side.call("pool.subscribe", endpoints=said["endpoints"])
    else:
        side.call("pool.serve", endpoints=said["endpoints"], path=url)
    process.hear()  # joined


def _check_equal(relay: Side, replica: Side) -> None:
    if relay.call("pool.blocks") != replica.call("pool.blocks"):
        raise AssertionError("a replica that differs")


@contextmanager
def _crew(bench: Bench, names: list[str]) -> Iterator[tuple[dict[str, Side], str]]:
    """Start a server of NATS and the processes; end them in the other order."""
    from tests.nats_server import NatsServer

    with TemporaryDirectory() as folder, NatsServer(Path(folder), max_mem="3GB") as server:
        with bench.start([Contender(name, OURS) for name in names]) as sides:
            left = dict(sides)
            yield left, server.url
            for side in reversed(left.values()):
                side.call("pool.close")
