"""Many ranks live at once: is anything lost, and how fast does it arrive?

Publishers run in a process of their own and speak real sockets at the engines' default buffers,
with replay.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.bench import Bench
from benchmarks.results import OURS, Result
from kvindex import BlockStored, Client, EventBatch, Rank, State, Worker, ZmqEventPublisher, connect

BLOCK_SIZE = 16
BLOCKS_PER_BATCH = 4
TIMEOUT = 120.0


def run(bench: Bench) -> list[Result]:
    """Publish at every rank at once; return the rate and what was lost."""
    ranks, batches = bench.scale.load_ranks, bench.scale.load_batches
    here, there = multiprocessing.Pipe()
    engines = multiprocessing.get_context("spawn").Process(target=_publish, args=(there, ranks))
    engines.start()
    endpoints: list[tuple[str, str]] = here.recv()
    live, replay = zip(*endpoints, strict=True)
    with connect([Worker("engine", list(live), list(replay))]) as client:
        client.wait_live(timeout=60.0)
        started = time.perf_counter()
        here.send(batches)
        expected = {Rank("engine", r): batches - 1 for r in range(ranks)}
        while time.perf_counter() < started + TIMEOUT:
            client.subscriber.call(lambda: None)  # shows at once what was taken
            statuses = client.statuses()
            if all(statuses[rank].seq == seq for rank, seq in expected.items()):
                break
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        results = _report(client, list(expected), batches, seconds)
    here.send(None)
    engines.join(30)
    return results


def _report(client: Client, ranks: list[Rank], batches: int, seconds: float) -> list[Result]:
    streams: dict[str, dict[str, Any]] = client.statistics()["ranks"]
    whole = sum(
        client.status(rank).state is State.LIVE
        and len(client.index.tree(rank)) == batches * BLOCKS_PER_BATCH
        for rank in ranks
    )
    total = len(ranks) * batches
    figures = [
        ("batches", "1/s", total / seconds),
        ("blocks", "1/s", total * BLOCKS_PER_BATCH / seconds),
        *((name, "", sum(s[name] for s in streams.values())) for name in ("gaps", "losses")),
        ("restarts", "", sum(stream["restarts"] for stream in streams.values())),
        ("ranks live and whole at the end", "", whole),
    ]
    note = (
        f"{total:,} batches of {BLOCKS_PER_BATCH} blocks, published by `ZmqEventPublisher` in one "
        "process as fast as it can, with replay, on the same cores."
    )
    group = f"{len(ranks)} ranks live at once"
    return [
        Result(group=group, measure=name, unit=unit, values={OURS: value}, notes=[note])
        for name, unit, value in figures
    ]


def _publish(parent: Connection, ranks: int) -> None:
    """Run every rank's publisher; publish round by round, each at a call."""
    publishers = [
        ZmqEventPublisher(
            data_parallel_rank=rank, endpoint="tcp://*:0", replay_endpoint="tcp://*:0"
        )
        for rank in range(ranks)
    ]
    parent.send([(p.endpoint, p.replay_endpoint) for p in publishers])
    batches = parent.recv()
    for number in range(batches):
        batch = _batch(number)
        for publisher in publishers:
            publisher.publish(batch)
    parent.recv()
    for publisher in publishers:
        publisher.shutdown()


def _batch(number: int) -> EventBatch:
    first = number * BLOCKS_PER_BATCH
    tokens = [number] * (BLOCKS_PER_BATCH * BLOCK_SIZE)
    hashes = list(range(first + 1, first + 1 + BLOCKS_PER_BATCH))
    stored = BlockStored(
        block_hashes=list(hashes), token_ids=tokens, block_size=BLOCK_SIZE, medium="GPU"
    )
    return EventBatch(ts=time.time(), events=[stored])
