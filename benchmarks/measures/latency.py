"""Match while events come in: the slow tail, and many threads at once."""

from __future__ import annotations

from typing import Any

from benchmarks.bench import Bench, Contender
from benchmarks.feed import FeedSpec
from benchmarks.measures.ingest import TIMEOUT, feed
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median, percentile

RANKS = 64
RATE = 32_000.0  # blocks per second that come in
EVENT_BLOCKS = 8
PAUSE = 0.001  # seconds between matches
THREADS = (1, 2, 4)
IN_PROCESS = "kvindex, in process"
DYNAMO = "Dynamo, in process"


def run(bench: Bench) -> list[Result]:
    """Return p50 and p99 of a match while 32,000 blocks a second come in."""
    rounds: dict[str, list[list[int]]] = {}
    rates: dict[str, list[float]] = {}
    with bench.start([Contender(IN_PROCESS, OURS), Contender(DYNAMO, "dynamo")]) as sides:
        _prepare(bench, sides, _incoming(bench) * bench.scale.rounds)
        for _ in range(bench.scale.rounds):
            rounds.setdefault(OURS, []).append(_over_sockets(bench))
            for label, side in sides.items():
                measured = side.call(
                    "busy.measure", seconds=bench.scale.busy_seconds, rate=RATE, pause=PAUSE
                )
                rounds.setdefault(label, []).append(measured["samples"])
                rates.setdefault(label, []).append(measured["rate"])
    came = ", ".join(f"{label} {median(own):,.0f}" for label, own in rates.items())
    note = (
        f"{RANKS} ranks, prompts of 8,192 tokens in turn, {1 / PAUSE:,.0f} a second at most; "
        f"events of up to {EVENT_BLOCKS} blocks, one a batch, at {RATE:,.0f} blocks/s (came in, "
        f"per second: {came}). {OURS} is `Client.match` behind `connect`, fed over ZMQ by "
        "another process: receiving, ordering and decoding run in the process that matches. In "
        "process, one thread applies while another one matches: our msgpack payloads, Dynamo's "
        "JSON events with the tokens hashed beforehand."
    )
    return [
        _result("match while events come in", f"p{percent}", rounds, percent, bar, note)
        for percent, bar in ((50, None), (99, Bar(times=3.0)))
    ]


def run_threads(bench: Bench) -> list[Result]:
    """Return the matches per second of several threads while one applies."""
    rates: dict[int, dict[str, list[float]]] = {}
    rounds: dict[int, dict[str, list[list[int]]]] = {}
    contenders = [Contender(OURS, OURS), Contender(DYNAMO, "dynamo")]
    with bench.start(contenders) as sides:
        _prepare(bench, sides, _incoming(bench) * bench.scale.rounds * len(THREADS))
        for _ in range(bench.scale.rounds):
            for threads in THREADS:
                for label, side in sides.items():
                    measured = side.call(
                        "busy.measure",
                        seconds=bench.scale.busy_seconds / 2,
                        rate=RATE,
                        threads=threads,
                    )
                    samples = measured["samples"]
                    own = rates.setdefault(threads, {}).setdefault(label, [])
                    own.append(len(samples) / measured["seconds"])
                    rounds.setdefault(threads, {}).setdefault(label, []).append(samples)
    note = f"{RANKS} ranks; meanwhile one more thread applies {RATE:,.0f} blocks/s."
    results = []
    for threads in THREADS:
        title = f"{threads} thread{'s' if threads > 1 else ''}"
        values = {label: median(own) for label, own in rates[threads].items()}
        results.append(
            Result(
                group="matching threads",
                measure=title,
                unit="matches/s",
                values=values,
                lower=False,
                notes=[note],
            )
        )
        results.append(
            _result("matching threads", f"{title}, p99", rounds[threads], 99, None, note)
        )
    return results


def _incoming(bench: Bench) -> int:
    """Blocks that come in during one measurement, with some to spare."""
    return int(bench.scale.busy_seconds * RATE * 1.2) + 1_000


def _prepare(bench: Bench, sides: dict[str, Any], incoming: int) -> None:
    for side in sides.values():
        side.call(
            "busy.prepare",
            source=bench.source().to_dict(),
            ranks=RANKS,
            entries=bench.scale.busy_entries,
            incoming=incoming,
            event_blocks=EVENT_BLOCKS,
        )


def _over_sockets(bench: Bench) -> list[int]:
    spec = FeedSpec(
        source=bench.source(),
        ranks=RANKS,
        blocks=bench.scale.busy_entries,
        event_blocks=EVENT_BLOCKS,
        batch_events=1,
        paced_blocks=_incoming(bench),
        rate=RATE,
    )
    with feed(spec) as (process, said), bench.start([Contender(OURS, OURS)]) as sides:
        side = sides[OURS]
        side.call("zmq.connect", endpoints=said["endpoints"])
        process.hear()  # joined
        process.say("go")
        prompts = process.hear()["prompts"]
        side.call("zmq.wait", ranks=RANKS, timeout=TIMEOUT)
        side.call("zmq.check", prompts=prompts)
        process.say("go on, at the rate")
        samples: list[int] = side.call(
            "zmq.ask", prompts=prompts, seconds=bench.scale.busy_seconds, pause=PAUSE
        )
        side.call("zmq.close")
    return samples


def _result(
    group: str,
    measure: str,
    rounds: dict[str, list[list[int]]],
    percent: float,
    bar: Bar | None,
    note: str,
) -> Result:
    values = {
        label: median([percentile(samples, percent) for samples in own]) / 1_000
        for label, own in rounds.items()
    }
    return Result(
        group=group,
        measure=measure,
        unit="µs",
        values=values,
        against=(DYNAMO,),
        bar=bar,
        notes=[note],
    )
