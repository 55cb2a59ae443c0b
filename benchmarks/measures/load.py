"""Many ranks live at once: is anything lost, and how fast does it arrive?

Publishers run in a process of their own and speak real sockets at the engines' default buffers.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from kvindex import BlockStored, EventBatch, Rank, State, Worker, ZmqEventPublisher, connect

BLOCK_SIZE = 16
BLOCKS_PER_BATCH = 4


def run(ranks: int, batches: int) -> None:
    """Publish `batches` batches at each of `ranks` ranks and print what arrived."""
    print(
        f"load: {ranks} ranks live at once, {batches:,} batches of {BLOCKS_PER_BATCH} blocks each"
    )
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
        client.wait_for(
            lambda statuses: all(statuses[rank].seq == seq for rank, seq in expected.items()),
            timeout=120.0,
        )
        seconds = time.perf_counter() - started
        _report(client.statistics()["ranks"], seconds, ranks * batches)
        live_ranks = sum(client.status(rank).state is State.LIVE for rank in expected)
        held = {len(client.index.tree(rank)) for rank in expected}
        print(f"  {live_ranks} ranks live; blocks held by each rank: {sorted(held)}")
    here.send(None)
    engines.join(30)


def _report(ranks: dict[str, dict[str, int]], seconds: float, batches: int) -> None:
    def total(name: str) -> int:
        return sum(rank[name] for rank in ranks.values())

    rate = batches / seconds
    print(
        f"  {rate:,.0f} batches/s, {rate * BLOCKS_PER_BATCH:,.0f} blocks/s in {seconds:.2f} s; "
        f"gaps {total('gaps')}, losses {total('losses')}, restarts {total('restarts')}"
    )


def _publish(parent: Connection, ranks: int) -> None:
    """Run every rank's publisher; publish round by round when told."""
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
