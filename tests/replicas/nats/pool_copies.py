"""Copies of a relay's index, made by hand from its snapshot and the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvindex import Rank
from kvindex.index import Index
from kvindex.replicas.copy import Copy
from kvindex.replicas.messages import decode_message
from kvindex.replicas.nats.log import BodyReader, Log
from kvindex.replicas.nats.relay import Relay
from kvindex.replicas.nats.snapshots import PoolSnapshots, SnapshotContents
from kvindex.testing import FakeEngine
from kvindex.wire.nats import NatsPool, open_connection
from tests.live import PATIENCE, truth


def contents(index: Index, rank: Rank) -> dict[tuple[Any, str, int], int]:
    """What an index holds of a rank, in the form of `FakeEngine.truth`."""
    if rank not in index.ranks:
        return {}
    return {
        (block.block_hash, block.medium, block.group_idx): block.copies
        for block in index.tree(rank).walk()
    }


def holds(*engines: FakeEngine) -> Callable[[Copy], bool]:
    """Whether a copy holds exactly what the engines hold."""

    def is_equal(copy: Copy) -> bool:
        return all(contents(copy.index, engine.rank) == truth(engine) for engine in engines)

    return is_equal


async def store_of(pool: NatsPool, call: Callable[[PoolSnapshots], Any]) -> Any:
    """Call something of a pool's object store."""
    client = await open_connection(pool, "test", timeout=PATIENCE)
    try:
        return await call(PoolSnapshots(client, pool))
    finally:
        await client.close()


def newest_snapshot(pool: NatsPool) -> tuple[str, bytes]:
    """Return the name and the bytes of a pool's newest snapshot."""

    async def fetch(store: PoolSnapshots) -> tuple[str, bytes]:
        name = (await store.newest())[0]
        return name, await store.get(name)

    result: tuple[str, bytes] = asyncio.run(store_of(pool, fetch))
    return result


def copy_of(
    pool: NatsPool, done: Callable[[Copy], bool], snapshot: tuple[str, bytes] | None = None
) -> Copy:
    """Return a copy that has followed the log from a snapshot on until it is as it should be."""
    name, data = newest_snapshot(pool) if snapshot is None else snapshot
    snapshot_contents = SnapshotContents(data, name)
    head = snapshot_contents.head
    copy = Copy(snapshot_contents.seed, head.max_blocks_per_rank)
    copy.begin(head.begin)
    for part in snapshot_contents:
        copy.restore(part.rank, part.number, part.section, part.status)
    copy.catchup.end(head.end)
    copy.names = dict(head.names)
    asyncio.run(asyncio.wait_for(_follow(pool, head.epoch, head.position, copy, done), 60.0))
    copy.index.check()
    return copy


async def _follow(
    pool: NatsPool,
    epoch: str,
    position: int,
    copy: Copy,
    done: Callable[[Copy], bool],
) -> None:
    client = await open_connection(pool, "test", timeout=PATIENCE)
    try:
        log, bodies = await Log(client, pool).read(position), BodyReader()
        while not done(copy):
            message = await log.next(PATIENCE)
            assert (message.seq, message.epoch) == (position, epoch)
            position += 1
            for part in bodies.split(message.body):
                copy.apply(decode_message(part))
        await log.close()
    finally:
        await client.close()


def counters(relay: Relay) -> dict[str, Any]:
    """The relay's own counters."""
    own: dict[str, Any] = relay.statistics()["relay"]
    return own
