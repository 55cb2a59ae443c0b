"""Apply events in process: payload to tree."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.bench import Bench, Contender, last_core
from benchmarks.process import Side
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median

DYNAMO = ("Dynamo, one core", "Dynamo, free")
DICTS = ("dict", "dict by engine hash")
RANKS = 64


@dataclass(frozen=True)
class _Stream:
    title: str
    event_blocks: int
    batch_events: int
    bar: Bar | None
    against: tuple[str, ...]
    capacity: int | None = None


STREAMS = [
    _Stream("stores of 64 blocks", 64, 1, Bar(times=2.0), DYNAMO),
    _Stream("stores of one block, one a batch", 1, 1, Bar(times=2.0), DICTS),
    _Stream("stores of one block, 16 a batch", 1, 16, Bar(times=2.0), DICTS),
    _Stream("stores and removals of up to 64 blocks, full caches", 64, 1, None, (), 2_048),
]


def run(bench: Bench) -> list[Result]:
    """Return the blocks per second of each stream."""
    return [_streamed(bench, stream) for stream in STREAMS]


def _streamed(bench: Bench, stream: _Stream) -> Result:
    scale, core = bench.scale, last_core()
    contenders = [Contender(OURS, OURS, core)]
    if stream.batch_events == 1:
        contenders += [
            Contender(DYNAMO[0], "dynamo", core),
            Contender(DYNAMO[1], "dynamo"),
        ]
    contenders += [Contender(DICTS[0], "dict", core), Contender(DICTS[1], "dict by hash", core)]
    single = stream.event_blocks == 1
    with bench.start(contenders) as sides:
        facts = _prepare(bench, sides, stream, scale.apply_single_blocks if single else None)
        rates: dict[str, list[float]] = {label: [] for label in sides}
        for _ in range(scale.rounds):
            for label, side in sides.items():
                rates[label].append(side.call("apply.measure"))
    size = facts[OURS]["bytes"] / facts[OURS]["blocks"]
    notes = [
        f"{RANKS} ranks. Our payloads and the dicts' are msgpack as vLLM 0.33 writes it; Dynamo's "
        "are JSON, one event each, with the tokens hashed outside the clock. Every run is into an "
        "empty index; the answers were checked. Ours and the dicts on one core.",
        f"{stream.title}: {facts[OURS]['blocks']:,} blocks of {size:.0f} bytes in "
        f"{facts[OURS]['calls']:,} calls.",
    ]
    return Result(
        group="apply in process",
        measure=stream.title,
        unit="M blocks/s",
        values={label: median(own) / 1e6 for label, own in rates.items()},
        lower=False,
        against=stream.against,
        bar=stream.bar,
        notes=notes,
    )


def _prepare(
    bench: Bench, sides: dict[str, Side], stream: _Stream, blocks: int | None
) -> dict[str, dict[str, int]]:
    unit = 64 if stream.event_blocks == 64 and stream.capacity is None else 16
    return {
        label: side.call(
            "apply.prepare",
            source=bench.source(unit=unit).to_dict(),
            ranks=RANKS,
            blocks=blocks or bench.scale.apply_blocks,
            event_blocks=stream.event_blocks,
            batch_events=stream.batch_events,
            capacity=stream.capacity,
        )
        for label, side in sides.items()
    }
