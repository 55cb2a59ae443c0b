"""One subscriber, replicas in other processes: every answer, and its trust, is the subscriber's."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvindex import (
    EventBatch,
    NotLiveError,
    Rank,
    RankStatus,
    State,
    Worker,
    ZmqEventPublisher,
)
from kvindex.replicas import Replica, join
from kvindex.routing import Router
from kvindex.testing import Workload
from kvindex.wire import CacheSettings, GroupSpec
from kvindex.wire.errors import ClosedError, UnknownRankError
from tests.live import PATIENCE, QUICK, caught_up, link_to, until, wait_status, within, worker_of
from tests.native_ring import needs_ring
from tests.replicas.fanout_peers import (
    BEFORE,
    LATER,
    MEANWHILE,
    PROMPTS,
    Site,
    answers,
    assert_equal,
    assert_same,
    counted,
)
from tests.replicas.hand_server import held

pytestmark = [pytest.mark.e2e, needs_ring]

SOON_LOST = replace(QUICK, attempts=1_000)  # without replay; with it, nothing is given up


def could_not_join(replica: Replica, rank: Rank, times: int) -> bool:
    """Wait until a replica has looked for its server so often in vain, and reports it."""

    def reached(statuses: Mapping[Rank, RankStatus]) -> bool:
        failures = replica.statistics()["replica"]["join_failures"]
        return failures.get("no_server", 0) >= times and "no_server" in statuses[rank].reason

    return within(PATIENCE, replica.statuses, reached)


def test_four_processes_answer_as_the_subscriber(site: Site) -> None:
    a, b = site.engine(cpu_blocks=64), site.engine("b", num_blocks=96)
    a.run(BEFORE)
    fanout = site.serve(worker_of(a), worker_of(b))
    caught_up(fanout.client, a, b)
    peers = site.peers(4)
    assert_equal(fanout.client, *peers)
    counted(fanout, replicas=4, joined=4, died=0)
    assert 2 <= fanout.statistics()["sections_taken"] <= 8
    for engine, workload in ((a, MEANWHILE), (b, BEFORE), (a, LATER)):
        engine.run(workload)
    caught_up(fanout.client, a, b)
    assert_equal(fanout.client, *peers)
    for peer in peers:
        counts = peer.call("statistics")["replica"]
        assert counts["batches"] > 0
        assert (counts["joins"], counts["rejoins"]) == (1, {})
    for peer in peers:
        peer.call("leave")
    counted(fanout, replicas=0, left=4, died=0)


def test_processes_that_join_while_events_pour_in_miss_nothing(site: Site) -> None:
    engines = site.engine(cpu_blocks=64), site.engine("b")
    fanout = site.serve(*map(worker_of, engines))
    pouring = [
        threading.Thread(target=engine.run, args=(Workload(300, seed=seed),))
        for seed, engine in enumerate(engines)
    ]
    for thread in pouring:
        thread.start()
    peers = [peer for _ in range(3) for peer in site.peers(1)]
    for thread in pouring:
        thread.join()
    caught_up(fanout.client, *engines)
    assert_equal(fanout.client, *peers)


def test_an_engine_restart_and_a_declared_loss_travel_along(site: Site) -> None:
    a, b = site.engine(), site.engine("b", replay=False)
    with link_to(b) as link:
        fanout = site.serve(worker_of(a), worker_of(b, link), replay_policy=SOON_LOST)
        client = fanout.client
        a.run(BEFORE)
        first = 0
        while client.status(b.rank).seq is None:  # without replay a stream begins when it can
            b.serve(range(first := first + 1, first + 100))
            within(0.05, lambda: client.status(b.rank).seq is not None)
        peers = site.peers(2)
        a.restart()
        a.run(MEANWHILE)
        wait_status(client, a.rank, epoch=1)
        link.drop_next(2)
        b.run(MEANWHILE)
        caught_up(client, a, b)
        assert client.status(b.rank).losses > 0
        assert not client.status(b.rank).complete
        assert_equal(client, *peers)
        for peer in peers:
            peer.end()
        fanout.close()


def test_workers_that_come_and_go_and_are_renamed_travel_along(site: Site) -> None:
    a, b = site.engine(), site.engine("b")
    with ZmqEventPublisher(5, "tcp://*:0", "tcp://*:0") as publisher:
        renamed = Worker("renamed", publisher.endpoint, replay=publisher.replay_endpoint)
        client, replica = site.serve(worker_of(a)).client, site.join()
        a.run(BEFORE)
        client.add(renamed)
        client.add(worker_of(b, cache=CacheSettings(groups={0: GroupSpec("sliding_window", 32)})))
        b.run(BEFORE)
        publisher.publish(EventBatch(1.0, []))
        wait_status(client, Rank("renamed", 5), seq=0, state=State.LIVE)
        caught_up(client, a, b)
        for follower in (replica, site.join()):
            assert_same(client, follower)
            assert follower.status(Rank("renamed", 0)).rank == Rank("renamed", 5)
        client.remove("a")
        until(replica.statuses, lambda statuses: a.rank not in statuses)
        assert replica.ranks == client.ranks
        assert held(replica.index) == held(client.index)
        for name in (a.rank, "a/0", "a"):
            with pytest.raises(UnknownRankError):
                replica.status(name)
        with pytest.raises(UnknownRankError):
            replica.wait_live(PATIENCE, ranks=["a"])


def test_a_replica_is_asked_as_a_client_is(site: Site) -> None:
    a = site.engine()
    fanout = site.serve(worker_of(a), max_blocks_per_rank=50)
    replica = site.join()
    a.run(BEFORE)
    caught_up(fanout.client, a)
    assert_same(fanout.client, replica)
    replica.wait_live()
    theirs, ours = fanout.client.status(a.rank), replica.status(a.rank)
    assert (ours.seq, ours.endpoint, ours.orphans) == (theirs.seq, theirs.endpoint, theirs.orphans)
    age = ours.last_event_age
    assert age is not None
    assert 0.0 <= age < PATIENCE
    counts = replica.statistics()
    assert counts["ranks"]["a/0"]["index"] == fanout.client.statistics()["ranks"]["a/0"]["index"]
    assert counts["ranks"]["a/0"]["ignored"]["max_blocks_per_rank"] > 0
    assert replica.index.max_blocks_per_rank == 50
    assert counts["replica"]["following"]
    assert "1 live" in repr(replica)
    assert "1 replicas" in repr(fanout)
    replica.close()
    replica.close()
    assert replica.status(a.rank).state is State.CLOSED
    assert replica.statistics()["replica"]["trouble"] == "the replica was closed"
    with pytest.raises(ClosedError, match="this Replica is closed"):
        replica.match(PROMPTS[0])
    with pytest.raises(ClosedError):
        replica.wait_live(1.0)
    with pytest.raises(ClosedError):
        replica.__enter__()


def test_a_rank_that_is_not_live_at_the_server_is_not_at_a_replica(site: Site) -> None:
    site.serve(Worker("nobody", "tcp://127.0.0.1:9"))
    with pytest.raises(NotLiveError, match="nobody/0"):
        site.join().wait_live(0.05)


def test_closing_the_server_notifies_the_replicas_and_leaves_nothing(site: Site) -> None:
    a = site.engine()
    a.run(BEFORE)
    fanout = site.serve(worker_of(a))
    replica = site.join()
    caught_up(fanout.client, a)
    before = answers(fanout.client, PROMPTS)
    ring = fanout._outflow.handle[3]
    assert Path("/dev/shm", ring).exists()
    until(lambda: fanout.statistics()["joined"] == 1)  # noted once all has been sent
    fanout.close()
    fanout.close()
    assert fanout.wait(0)
    assert fanout.statistics()["joined"] == 1
    until(replica.statuses, lambda s: s[a.rank].state is State.STALE)
    # The first reason is still shown when it could not be joined again, and again.
    for times in (1, 2):
        assert could_not_join(replica, a.rank, times)
        reason = replica.status(a.rank).reason
        assert re.search(r"lost \(server_closed\): .* joined again \(no_server\): ", reason)
        assert reason.count("server_closed") == reason.count("no_server") == 1
    assert not Path(site.path).exists()
    assert not Path("/dev/shm", ring).exists()
    # It answers from its last state, with the trust that this deserves.
    assert answers(replica, PROMPTS) == [
        {rank: (*values[:3], "stale", *values[4:]) for rank, values in answer.items()}
        for answer in before
    ]


def test_a_new_server_is_joined_and_takes_the_old_ones_place(site: Site) -> None:
    a, b = site.engine(), site.engine("b")
    a.run(BEFORE)
    b.run(MEANWHILE)
    fanout = site.serve(worker_of(a), worker_of(b))
    caught_up(fanout.client, a, b)
    replica = site.join()
    old, router = replica.index, Router(replica)
    fanout.close()
    fanout = site.serve(worker_of(a))
    caught_up(fanout.client, a)
    assert_same(fanout.client, replica)
    assert replica.index is not old
    assert replica.ranks == router.ranks == (a.rank,)
    assert replica.statistics()["replica"]["rejoins"] == {"server_closed": 1}


def test_what_was_saved_is_continued_in_every_replica_at_the_start_and_later(
    site: Site, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.kvindex"
    a, b, c = engines = [site.engine(name) for name in "abc"]
    for engine in engines:
        engine.run(BEFORE)
    with site.serve(*map(worker_of, engines)) as first:
        caught_up(first.client, *engines)
        first.client.save(saved)
    for engine in (a, b):
        engine.run(MEANWHILE)
    c.restart()
    client = site.serve(worker_of(a), resume=saved, chunk_bytes=1024, chunks=2).client
    replica = site.join()
    for engine in (b, c):  # what was saved of them is longer than the ring
        assert engine.rank not in replica.index.ranks
        client.add(worker_of(engine))
    wait_status(client, c.rank, epoch=1)
    caught_up(client, *engines)
    assert_same(client, replica)
    for rank in (a.rank, b.rank):
        status = replica.status(rank)
        assert (status.restarts, status.counters["resumed"]) == (0, 1)
    assert replica.statistics()["replica"]["rejoins"] == {}


def test_a_path_with_braces_is_shown_as_it_is(site: Site, tmp_path: Path) -> None:
    path = str(tmp_path / "{kv}.sock")
    a, server = site.engine(), site.peer()
    server.call("serve", path, [worker_of(a)])
    with join(path, PATIENCE) as replica:
        server.kill()
        until(replica.statuses, lambda s: path in s[a.rank].reason)
