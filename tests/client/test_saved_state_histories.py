"""However workers come, go and routers restart: what was saved is used once, and lost only by that.

Clients run as they are, but no engine is there: so a rank holds what was restored, or nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvindex import Client, Index, Rank, Worker
from kvindex.index import Fingerprints
from kvindex.index.snapshot import SnapshotReader, SnapshotWriter
from tests.client.conftest import store
from tests.examples import examples
from tests.subscribe.peers import saved_cursor

pytestmark = pytest.mark.property

SEED = 3
RANKS = [Rank("a", 0), Rank("a", 1), Rank("b", 0), Rank("c", 0)]
STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(1, 2)),
    st.tuples(st.just("remove"), st.sampled_from("abc"), st.just(0)),
    st.tuples(st.sampled_from(["save", "crash", "stop"]), st.just(""), st.just(0)),
)


def cursor_of(rank: Rank) -> bytes:
    return saved_cursor(rank.dp_rank, fingerprints=Fingerprints(SEED).identity)


def blocks_of(rank: Rank) -> int:
    return 1 + RANKS.index(rank)


def write_first(path: Path) -> None:
    index = Index(seed=SEED)
    with path.open("wb") as file:
        writer = SnapshotWriter(file, seed=SEED)
        for rank in RANKS:
            store(index, rank, blocks_of(rank))
            writer.add(rank, index.dump(rank), cursor_of(rank))
        writer.finish()


class Router:
    """One process after the other over one file, and what each must hold and have written."""

    def __init__(self, path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.path, self.context = path, context
        write_first(path)
        self.on_disk = set(RANKS)
        self.start()

    def start(self) -> None:
        self.client = Client(resume=self.path, context=self.context)
        self.aside = set(self.on_disk)
        self.warm: set[Rank] = set()
        self.added: dict[str, int] = {}

    def add(self, worker: str, dp_size: int) -> None:
        if worker in self.added:
            return
        self.added[worker] = dp_size
        name = f"inproc://nobody-{worker}"
        self.client.add(Worker(worker, name, replay=f"{name}-replay", dp_size=dp_size))
        mine = {rank for rank in self.aside if rank.worker == worker and rank.dp_rank < dp_size}
        self.aside -= mine  # its other ranks may be added later
        self.warm |= mine

    def remove(self, worker: str, _: int) -> None:
        if worker in self.added:
            del self.added[worker]
            self.client.remove(worker)
            self.warm = {rank for rank in self.warm if rank.worker != worker}

    def save(self, *_: object) -> None:
        assert set(self.client.save(self.path)) == self.warm | self.aside
        self.on_disk = self.warm | self.aside
        with SnapshotReader(self.path) as reader:
            assert {record.rank for record in reader} == self.on_disk

    def crash(self, *_: object) -> None:
        self.client.close()
        self.start()

    def stop(self, *_: object) -> None:
        self.save()
        self.crash()

    def check(self) -> None:
        index = self.client.index
        subscribed = {Rank(w, r) for w, size in self.added.items() for r in range(size)}
        assert set(index.ranks) == subscribed
        held = {rank: len(index.tree(rank)) for rank in subscribed if len(index.tree(rank))}
        assert held == {rank: blocks_of(rank) for rank in self.warm}
        assert self.client.statistics()["resume"]["aside"] == len(self.aside)


@examples(50)
@given(st.lists(STEPS, max_size=12))
def test_each_saved_rank_is_used_once_and_lost_only_by_that(
    steps: list[tuple[str, str, int]],
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        router = Router(Path(folder, "saved"), context)
        try:
            for name, worker, size in steps:
                getattr(router, name)(worker, size)
                router.check()
        finally:
            router.client.close()
    context.term()
