"""The fleet as one value: what every rank says, and the sums of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvindex import Index, Rank, RankStatus, State, __version__
from kvindex.service.catalog import Partition
from kvindex.service.overview import Fleet, overview
from tests.index.index_events import apply, stored

pytestmark = pytest.mark.unit


class Source:
    """What a client says of ranks that stand as they are told to."""

    def __init__(self, *statuses: RankStatus) -> None:
        self.index = Index()
        self.replica: dict[str, Any] = {}
        self.present = {status.rank: status for status in statuses}
        for rank in self.present:
            self.index.add(rank)

    def statistics(self) -> dict[str, Any]:
        index = self.index.statistics()
        by_rank = index.pop("ranks")
        ranks = {}
        for rank, status in self.present.items():
            held = by_rank[str(rank)]
            counted = {"orphans": held["orphans"], "ignored": held["ignored"]}
            ranks[str(rank)] = {**status.to_dict(), "index": held, **counted}
        return {"ranks": ranks, "index": index, "replica": self.replica}


def status_of(rank: Rank, state: State = State.LIVE, **fields: Any) -> RankStatus:
    said: dict[str, Any] = {
        "reason": "",
        "epoch": 0,
        "seq": 4,
        "complete": True,
        "lag": 0,
        "connected": True,
        "endpoint": "tcp://h:1",
        "replay_endpoint": None,
        "last_event_age": 1.0,
    }
    return RankStatus(rank=rank, state=state, **{**said, **fields})


A, B, C = Rank("b/odd", 0), Rank("a", 1), Rank("a", 0)


def seen() -> Fleet:
    source = Source(
        status_of(A, losses=2, gaps=3, lag=4),
        status_of(B, State.CONNECTING, reason="nothing listens", complete=False, seq=None),
        status_of(C, restarts=1),
    )
    apply(source.index, A, stored(0, 1, 2), stored(0, medium="CPU"))
    apply(source.index, C, stored(0, 1))
    models = {"a": Partition("m", "blue"), "b/odd": Partition("m")}
    return overview(
        source.statistics(),
        models.__getitem__,
        has_tokenizer=lambda partition: partition == Partition("m", "blue"),
        clock=lambda: 12.5,
    )


def test_each_rank_is_shown_with_its_partition_its_state_and_its_blocks_by_medium() -> None:
    fleet = seen()
    assert (fleet.now, fleet.version) == (12.5, __version__)
    assert [(r.worker, r.dp_rank) for r in fleet.ranks] == [("a", 0), ("a", 1), ("b/odd", 0)]
    third = fleet.ranks[2]
    assert (third.model, third.routing_group, third.state) == ("m", "default", "live")
    assert (third.blocks, third.block_size) == ({"CPU": 1, "GPU": 3}, 4)
    assert (fleet.ranks[1].reason, fleet.ranks[1].block_size) == ("nothing listens", None)


def test_partitions_tell_block_sizes_workers_and_whether_text_can_be_turned_into_tokens() -> None:
    shown = [
        (p.routing_group, p.block_sizes, p.instances, p.ranks, p.tokenizer)
        for p in seen().partitions
    ]
    assert shown == [("blue", [4], 1, 2, True), ("default", [4], 1, 1, False)]


def test_totals_are_the_sums_of_the_ranks_and_count_a_shared_block_once() -> None:
    totals = seen().totals
    assert totals.states == {"connecting": 1, "live": 2}
    assert (totals.ranks, totals.workers, totals.complete) == (3, 2, 2)
    assert (totals.blocks, totals.unique_blocks) == ({"CPU": 1, "GPU": 5}, 3)
    assert (totals.losses, totals.gaps, totals.restarts, totals.lag) == (2, 3, 1, 4)


def test_a_replica_of_a_pool_shows_whom_it_follows() -> None:
    source = Source(status_of(A))
    assert overview(source.statistics()).followed is None
    source.replica = {"server": "/run/kvindex.sock", "trouble": ""}
    assert overview(source.statistics()).followed is None
    source.replica = {"server": "nats://n1:4222/llama", "trouble": "silent"}
    source.replica |= {"lag_messages": 3, "lag_seconds": 0.25, "number": 12}
    assert msgspec.to_builtins(overview(source.statistics()).followed) == {
        "server": "nats://n1:4222/llama",
        "trouble": "silent",
        "lag_messages": 3,
        "lag_seconds": 0.25,
    }


def test_a_fleet_is_read_back_from_its_json() -> None:
    fleet = seen()
    assert msgspec.json.decode(msgspec.json.encode(fleet), type=Fleet) == fleet
