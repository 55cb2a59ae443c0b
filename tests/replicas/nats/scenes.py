"""Engines, a relay and replicas; and copies of its index, made by hand from snapshot and log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from kvindex import Rank, Worker
from kvindex.replicas import Replica, nats
from kvindex.replicas.copy import Copy
from kvindex.replicas.messages import decode_message
from kvindex.replicas.nats.log import BodyReader, Log
from kvindex.replicas.nats.relay import Relay
from kvindex.replicas.nats.snapshots import PoolSnapshots, SnapshotContents
from kvindex.testing import FakeEngine, Workload
from kvindex.wire.nats import NatsPool, open_connection
from tests.live import PATIENCE, REPLAYS, truth, until, worker_of
from tests.replicas.nats.processes import ReplicaProcess, contents, listed, seen


def holds(*engines: FakeEngine) -> Callable[[Copy], bool]:
    """Whether a copy holds exactly what the engines hold."""

    def is_equal(copy: Copy) -> bool:
        return all(contents(copy.index, engine.rank) == truth(engine) for engine in engines)

    return is_equal


def newest_snapshot(pool: NatsPool) -> tuple[str, bytes]:
    """Return the name and the bytes of a pool's newest snapshot."""

    async def fetch(client: Any) -> tuple[str, bytes]:
        store = PoolSnapshots(client, pool)
        name = (await store.newest())[0]
        return name, await store.get(name)

    result: tuple[str, bytes] = at(pool, fetch)
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
    async with connection(pool) as client:
        log, bodies = await Log(client, pool).read(position), BodyReader()
        while not done(copy):
            message = await log.next(PATIENCE)
            assert (message.seq, message.epoch) == (position, epoch)
            position += 1
            for part in bodies.split(message.body):
                copy.apply(decode_message(part))
        await log.close()


def counters(relay: Relay) -> dict[str, Any]:
    """The relay's own counters."""
    own: dict[str, Any] = relay.statistics()["relay"]
    return own


def relay_of(pool: NatsPool, *workers: Worker, **options: Any) -> Relay:
    return Relay(
        workers,
        ",".join(pool.servers),
        pool=pool.name,
        **{
            "max_bytes": 8 << 20,
            "replay_policy": REPLAYS,
            "probe_interval": 0.3,
            **pool.options,
            **options,
        },
    )


def stored(relay: Relay, times: int = 1) -> None:
    """Wait until a relay writes, and has stored so many snapshots."""
    until(lambda: counters(relay), lambda own: own.get("snapshots", 0) >= times)


def of(replica: Replica) -> dict[str, Any]:
    """The replica's own counters."""
    own: dict[str, Any] = replica.statistics()["replica"]
    return own


class FaultScene:
    """A pool with a relay that writes, and two replicas that have joined.

    Args:
        stack: ends what it starts.
        pool: of the relay and of the replicas.
        has_relay: whether it starts a relay in this process; `relay` does that later.
        options: of the relay.
    """

    def __init__(
        self, stack: ExitStack, pool: NatsPool, *, has_relay: bool = True, **options: Any
    ) -> None:
        self.pool = pool
        self.engines = [
            stack.enter_context(FakeEngine(f"e{number}", seed=number)) for number in range(3)
        ]
        self._stack = stack
        self._options = options
        self._seed = 0
        self.publish_some(40)
        if has_relay:
            self.relay = self.start_relay()
            self.join()

    def start_relay(self, *workers: Worker) -> Relay:
        """Start a relay in this process; wait until it has stored a snapshot."""
        relay = relay_of(self.pool, *map(worker_of, self.engines), *workers, **self._options)
        stored(self._stack.enter_context(relay))
        return relay

    def join(self, others: Iterable[Rank] = ()) -> None:
        """Let both replicas join; they hold ranks of the engines, and others that are empty."""
        self.replica = self._stack.enter_context(
            nats.join(str(self.pool), timeout=PATIENCE, **self.pool.options)
        )
        self.far_replica = self._stack.enter_context(ReplicaProcess(str(self.pool)))
        self.settle(others)

    def publish_some(self, requests: int = 10) -> None:
        """Let each engine serve some requests."""
        self._seed += 1
        for number, engine in enumerate(self.engines):
            engine.run(Workload(requests, seed=100 * self._seed + number))

    def settle(self, others: Iterable[Rank] = ()) -> None:
        """Publish once more, and wait until both replicas hold what the engines hold.

        Args:
            others: ranks that are live and have sent nothing yet.
        """
        self.publish_some(3)
        wanted: dict[str, Any]
        wanted = {str(e.rank): ("live", e.published - 1, listed(truth(e))) for e in self.engines}
        wanted.update({str(rank): ("live", None, []) for rank in others})
        for see in self._sights():
            until(lambda see=see: _held(see([])), lambda found: found == wanted)  # type: ignore[misc]
        self.assert_equal()

    def assert_equal(self) -> None:
        """Assert that all resident prefixes are hit as the engines would hit them."""
        prompts = [list(p.prefix) for e in self.engines for p in e.resident_prefixes()]
        wanted = [{str(e.rank): e.lookup(p).tokens for e in self.engines} for p in prompts]
        assert prompts
        for see in self._sights():
            hits = see(prompts)["hits"]
            assert [{name: hit[name] for name in wanted[0]} for hit in hits] == wanted
        self.replica.index.check()

    def are_stale(self) -> None:
        """Wait until no rank is shown as live by a replica, each with a reason."""
        for see in self._sights():
            until(
                lambda see=see: see([])["ranks"].values(),  # type: ignore[misc]
                lambda ranks: all(r["state"] == "stale" and r["reason"] for r in ranks),
            )

    def rejoined(self, reason: str) -> None:
        """Wait until both replicas have joined anew for this reason."""
        for see in self._sights():
            until(
                lambda see=see: see([])["replica"],  # type: ignore[misc]
                lambda own: own["rejoins"].get(reason, 0) >= 1 and own["following"],
            )

    def counted(self, **least: int) -> dict[str, Any]:
        """Wait until counters of the relay have reached these values; return all."""
        return until(
            lambda: counters(self.relay),
            lambda own: all(own.get(name, 0) >= value for name, value in least.items()),
        )

    def own(self) -> list[dict[str, Any]]:
        """Return the statistics of both replicas."""
        return [see([])["replica"] for see in self._sights()]

    def _sights(self) -> list[Callable[[list[list[int]]], dict[str, Any]]]:
        return [lambda prompts: seen(self.replica, prompts), self.far_replica.ask]


def _held(answer: dict[str, Any]) -> dict[str, tuple[str, int | None, Any]]:
    return {
        name: (rank["state"], rank["seq"], rank["blocks"]) for name, rank in answer["ranks"].items()
    }


@asynccontextmanager
async def connection(pool: NatsPool, **options: Any) -> AsyncIterator[Any]:
    """A connection of somebody else."""
    client = await open_connection(pool, "test", timeout=PATIENCE, **options)
    try:
        yield client
    finally:
        await client.close()


def at(pool: NatsPool, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return what a coroutine returns that is given a connection of somebody else."""

    async def run() -> Any:
        async with connection(pool) as client:
            return await call(client)

    return asyncio.run(run())


def late_rank(engine: FakeEngine) -> tuple[Worker, Rank]:
    """Return a worker whose rank is known only by its batches, and the rank's first name."""
    worker = Worker(engine.worker, engine.endpoint, replay=engine.replay_endpoint)
    return worker, Rank(engine.worker, 0)
