"""Workers that grow and shrink rank by rank, while their other ranks run on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvindex import Client, ConfigurationError, EventBatch, Rank, UnknownRankError, Worker
from kvindex.index.snapshot import SnapshotReader
from kvindex.publish import ZmqEventPublisher
from kvindex.replicas import FanOut, join
from kvindex.testing import FakeEngine, Workload
from tests.live import (
    PATIENCE,
    REPLAYS,
    assert_true,
    caught_up,
    client_of,
    followed,
    until,
    wait_status,
    worker_of,
)

pytestmark = pytest.mark.e2e

ZERO, ONE = Rank("engine", 0), Rank("engine", 1)


@pytest.fixture
def first(engine: FakeEngine) -> FakeEngine:
    engine.run(Workload(10, seed=0))
    return engine


@pytest.fixture
def second() -> Iterator[FakeEngine]:
    with FakeEngine("engine", dp_rank=1) as engine:
        engine.run(Workload(10, seed=1))
        yield engine


@contextmanager
def named_publisher(client: Client, port: int, dp_rank: int) -> Iterator[ZmqEventPublisher]:
    """Publish a batch that names a dp_rank; the client has it as the publisher of `port`."""
    with ZmqEventPublisher(dp_rank, endpoint="tcp://*:0", replay_endpoint="tcp://*:0") as publisher:
        publisher.publish(EventBatch(ts=float(port), events=[]))
        replay = {port: str(publisher.replay_endpoint)}
        client.add(Worker("engine", {port: publisher.endpoint}, replay=replay))
        yield publisher


def test_a_worker_gets_a_further_rank_and_loses_one_while_the_other_runs_on(
    first: FakeEngine, second: FakeEngine
) -> None:
    with followed(first) as client:
        client.add(worker_of(second))
        caught_up(client, first, second)
        assert_true(client, first, second)
        client.remove(ZERO)
        assert client.ranks == client.index.ranks == (ONE,)
        second.run(Workload(5, seed=7))
        caught_up(client, second)
        assert_true(client, second)
        client.add(worker_of(first))
        caught_up(client, first, second)
        assert_true(client, first, second)
        client.remove("engine")
        assert not client.ranks
        assert not client.index.ranks


def test_ranks_that_are_renamed_while_they_are_saved_are_saved_under_their_new_names(
    first: FakeEngine, second: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(worker_of(first), worker_of(second, worker="b")) as c:
        other, moved = Rank("b", 1), Rank("b", 7)
        wait_status(c, ZERO, seq=first.published - 1)
        wait_status(c, other, seq=second.published - 1)
        call, roster, calls = c.subscriber.call, c.subscriber._thread.roster, []

        def rename() -> None:
            feed = roster.feeds[other]
            feed.reader.named = moved.dp_rank  # as its next batch would
            roster._settle_names(feed)

        def call_and_rename(function: Callable[[], object]) -> object:
            calls.append(function)
            if len(calls) == 2:  # the ranks are listed, and neither is copied
                call(rename)
            return call(function)

        monkeypatch.setattr(c.subscriber, "call", call_and_rename)
        path = tmp_path / "saved"
        assert c.save(path) == (moved, ZERO)
        with SnapshotReader(path) as reader:
            sections = {record.rank: record.section for record in reader}
        assert sections == {rank: c.index.dump(rank) for rank in (moved, ZERO)}


def test_a_dp_rank_that_is_there_already_is_refused_and_nothing_is_added() -> None:
    with client_of(Worker("engine", "tcp://127.0.0.1:1")) as client:
        both = Worker("engine", {0: "tcp://127.0.0.1:1", 1: "tcp://127.0.0.1:2"})
        with pytest.raises(ConfigurationError, match="subscribed to already, at dp_rank 0"):
            client.add(both)
        assert client.ranks == (ZERO,)


def test_a_rank_is_removed_by_its_text_and_by_its_ports_own_name(
    first: FakeEngine, second: FakeEngine
) -> None:
    with client_of() as client:
        client.add(Worker("engine", {4: first.endpoint}))
        client.add(worker_of(second))
        seeds = itertools.count(5)

        def ranks_after_a_batch() -> tuple[Rank, ...]:
            first.run(Workload(1, seed=next(seeds)))  # names dp_rank 0, where the port says 4
            return client.ranks

        until(ranks_after_a_batch, lambda ranks: ZERO in ranks)
        client.remove("engine/1")
        assert client.ranks == (ZERO,)
        with pytest.raises(UnknownRankError):
            client.remove(ONE)
        client.remove(Rank("engine", 4))
        assert not client.ranks


def test_publishers_that_come_one_by_one_at_swapped_ports_are_sorted_out() -> None:
    with ExitStack() as stack, client_of() as client:
        for port, dp_rank in enumerate((1, 0)):
            publisher = stack.enter_context(named_publisher(client, port, dp_rank))
            wait_status(client, Rank("engine", dp_rank), seq=0, endpoint=publisher.endpoint)
        assert client.ranks == (ZERO, ONE)


def test_when_one_of_two_that_claim_a_name_leaves_the_other_gets_it() -> None:
    with client_of() as client, named_publisher(client, 0, 1), named_publisher(client, 1, 1):
        until(
            client.statuses,
            lambda all_: sum(s.counters.get("dp_rank_conflicts", 0) for s in all_.values()) == 1,
        )
        kept = client.status(ZERO).endpoint
        client.remove(ONE)
        assert client.ranks == (ONE,)
        assert client.status(ONE).endpoint == kept


def test_replicas_follow_a_worker_that_grows_and_shrinks(
    first: FakeEngine, second: FakeEngine, tmp_path: Path
) -> None:
    with (
        FanOut(worker_of(first), f"{tmp_path}/fan", replay_policy=REPLAYS) as fan_out,
        join(f"{tmp_path}/fan", PATIENCE) as replica,
    ):
        caught_up(fan_out.client, first)
        fan_out.client.add(worker_of(second))
        caught_up(fan_out.client, first, second)
        last = second.published - 1
        until(replica.statuses, lambda s: ONE in s and s[ONE].seq == last)
        fan_out.client.remove(ZERO)
        until(replica.statuses, lambda statuses: set(statuses) == {ONE})
        assert replica.index.ranks == (ONE,)


def test_a_rank_that_publishes_where_another_replays_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = Worker("engine", {0: "tcp://127.0.0.1:3"}, replay={0: "tcp://127.0.0.1:4"})
    with client_of(first) as client, caplog.at_level(logging.WARNING):
        client.add(Worker("engine", {1: "tcp://127.0.0.1:4"}))
        assert "one rank publishes at tcp://127.0.0.1:4, where another replays" in caplog.text
