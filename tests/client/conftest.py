"""Engines of which a first process has saved what they hold, and clients that go on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvindex import BlockStored, Client, EventBatch, Index, Rank, RankStatus, Worker
from kvindex.subscribe import StreamItem
from kvindex.testing import FakeEngine, Workload
from tests.live import BEFORE, caught_up, client_of, save_of

RANK = Rank("engine", 0)

Resume = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "router.kvindex"


@pytest.fixture
def engine(path: Path) -> Iterator[FakeEngine]:
    """An engine that has worked, and was saved at `path`."""
    with FakeEngine("engine", cpu_blocks=64) as engine:
        engine.run(BEFORE)
        save_of(engine, path=path)
        yield engine


@pytest.fixture(params=["connect", "add"])
def resume(request: pytest.FixtureRequest, path: Path) -> Resume:
    """Make a client that goes on from `path` with workers of its start, or added later."""

    @contextmanager
    def resume(*workers: Worker, **options: Any) -> Iterator[Client]:
        early = request.param == "connect"
        with client_of(*workers if early else (), resume=path, **options) as client:
            for worker in () if early else workers:
                client.add(worker)
            yield client

    return resume


class NotingTap:
    """A tap that may wait for batches; it counts them, and keeps what was restored."""

    def __init__(self, patience: float = 0.0) -> None:
        self.patience = patience
        self.batches = 0
        self.sections: list[tuple[Rank, bytes]] = []

    def batch(self, rank: Rank, payload: bytes) -> None:
        self.batches += 1

    def item(self, item: StreamItem) -> None: ...

    def restored(self, rank: Rank, section: bytes) -> None:
        self.sections.append((rank, section))

    def statuses(self, statuses: Sequence[RankStatus]) -> None: ...


def store(index: Index, rank: Rank, blocks: int) -> None:
    """Have a rank hold so many blocks of 4 tokens, counted from 0."""
    hashes: list[int | bytes] = list(range(1, blocks + 1))
    stored = BlockStored(block_hashes=hashes, token_ids=list(range(4 * blocks)), block_size=4)
    index.apply(rank, EventBatch(ts=0.0, events=[stored]))


@contextmanager
def two_engines(first: str, second: str, dp_rank: int = 0) -> Iterator[list[FakeEngine]]:
    """Two engines that have worked; the second one may be a further rank of the first one."""
    with FakeEngine(first) as one, FakeEngine(second, dp_rank=dp_rank) as other:
        for seed, engine in enumerate((one, other)):
            engine.run(Workload(20, seed=seed))
        yield [one, other]


def dp_worker(*engines: FakeEngine) -> Worker:
    """A worker whose ports are in this order, whatever the engines name themselves."""
    replay = {port: engine.replay_endpoint or "" for port, engine in enumerate(engines)}
    return Worker("engine", {p: e.endpoint for p, e in enumerate(engines)}, replay=replay)


def save_worker(path: Path, *engines: FakeEngine) -> None:
    """Have a first process catch up with the ranks of one worker, and save them."""
    with client_of(dp_worker(*engines)) as client:
        caught_up(client, *engines)
        client.save(path)


def replayed(client: Client, rank: Rank = RANK) -> int:
    return int(client.status(rank).counters.get("replayed", 0))


def resumed(client: Client) -> dict[str, Any]:
    """What became of the ranks in the file; the bytes of those kept aside left out."""
    counts = client.statistics()["resume"]
    assert (counts.pop("aside_bytes") > 0) == (counts["aside"] > 0)
    return dict(counts)
