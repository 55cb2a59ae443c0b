"""A server of replicas that is driven by hand: its index, its tap and its snapshots are real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvindex import EventBatch, Index, Rank, RankStatus
from kvindex.client.client import follow_item
from kvindex.index import read_batch
from kvindex.replicas.copy import Copy
from kvindex.replicas.outflow import Snapshots, StreamTap
from kvindex.subscribe import RankRemoved, RanksRenamed, StreamItem
from kvindex.wire import Event, encode_batch
from tests.subscribe.test_status_board import status

_Result = TypeVar("_Result")
Held = dict[Rank, dict[tuple[Any, str, int], int]]


class HandServer:
    """Stands for outflow, client and subscriber at once; `sent` is what has left it."""

    chunk_bytes = 4096

    def __init__(self) -> None:
        self.index = Index()
        self.subscriber = self
        self.sent: list[bytes] = []
        self.shown: dict[Rank, RankStatus] = {}
        self.now = 5000.0  # by the monotonic clock of its machine
        self.tap = StreamTap(self, lambda: None, lambda: self.now)  # type: ignore[arg-type]
        # One rank at a time.
        self.snapshots = Snapshots(self, self.tap, hold=0.0)  # type: ignore[arg-type]

    # As an Outflow

    def send(self, body: bytes) -> None:
        self.sent.append(body)

    def admit(self) -> None:
        pass

    # As what fills the index

    def call(self, function: Callable[[], _Result]) -> _Result:
        return function()

    def find(self, rank: Rank) -> RankStatus | None:
        return self.shown.get(rank)

    def cursor(self, rank: Rank) -> bytes | None:
        return str(rank).encode()

    # What happens

    def tell(self, item: StreamItem) -> None:
        """Let something happen between two batches."""
        follow_item(self.index, item)
        if isinstance(item, RankRemoved):
            self.shown.pop(item.rank, None)
        elif isinstance(item, RanksRenamed):
            moved = {new: self.shown.pop(old) for old, new in item.names if old in self.shown}
            self.shown.update(moved)
        self.tap.item(item)

    def apply(self, rank: Rank, *events: Event) -> None:
        payload = encode_batch(EventBatch(ts=1.0, events=list(events)))
        self.index.apply(rank, read_batch(payload))
        self.tap.batch(rank, payload)

    def show(self, *ranks: Rank, **fields: Any) -> None:
        """End the turn, with the statuses of these ranks."""
        for rank in ranks:
            self.shown[rank] = status(rank, last_event_age=self.now, **fields)
        self.tap.statuses([self.shown[rank] for rank in ranks])

    def assert_same(self, copy: Copy) -> None:
        assert held(copy.index) == held(self.index)
        assert copy.statuses.keys() == self.shown.keys()
        assert copy.names == self.tap.names


def held(index: Index) -> Held:
    """Every resident block of every rank, on each medium, with its copies."""
    index.check()
    return {
        rank: {(b.block_hash, b.medium, b.group_idx): b.copies for b in index.tree(rank).walk()}
        for rank in index.ranks
    }
