"""One subscriber, replicas in other processes: every answer, and its trust, is the subscriber's."""

from __future__ import annotations

import gc
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvindex import (
    BACKEND,
    ConfigurationError,
    EventBatch,
    NotLiveError,
    Rank,
    RankStatus,
    State,
    Worker,
    ZmqEventPublisher,
)
from kvindex.index.replicas import FanOut, Replica, join
from kvindex.routing import Router
from kvindex.testing import FakeEngine, Workload
from kvindex.wire import CacheSettings, GroupSpec
from kvindex.wire.errors import ClosedError, QueueTimeoutError, UnknownRankError
from kvindex.wire.forks import prepare_forks
from tests.children import in_child
from tests.index.replicas.fanout_peers import (
    BEFORE,
    LATER,
    MEANWHILE,
    PROMPTS,
    answers,
    assert_equal,
    ended,
    fan_out,
    held,
    mark,
    nursery,
)
from tests.live import PATIENCE, QUICK, caught_up, link_to, until, wait_status, worker_of
from tests.native_ring import needs_ring
from tests.shm.queue_peers import Nursery, ProcessPeer

pytestmark = [pytest.mark.e2e, needs_ring]

ROOT = Path(__file__).parents[3]
SOON_LOST = replace(QUICK, attempts=1_000)  # without replay; with it, nothing is given up


@pytest.fixture(scope="module")
def processes() -> Iterator[Nursery]:
    started = nursery()
    yield started
    started.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kvindex.sock")


def counted(fanout: FanOut, **counts: Any) -> bool:
    """Wait until the server's statistics have these values."""

    def reached(_: Any) -> bool:
        found = fanout.statistics()
        return all(found[name] == value for name, value in counts.items())

    return fanout.client.wait_for(reached, PATIENCE)


def could_not_join(replica: Replica, rank: Rank, times: int) -> bool:
    """Wait until a replica has looked for its server so often in vain, and says so."""

    def reached(statuses: Mapping[Rank, RankStatus]) -> bool:
        failures = replica.statistics()["replica"]["join_failures"]
        return failures.get("no_server", 0) >= times and "no_server" in statuses[rank].reason

    return replica.wait_for(reached, PATIENCE)


def joined(processes: Nursery, path: str, count: int, **options: Any) -> list[ProcessPeer]:
    peers = [processes.fork() for _ in range(count)]
    for peer in peers:
        peer.start("join", path, **options)
    for peer in peers:
        peer.result()
    return peers


def test_four_processes_answer_as_the_subscriber(processes: Nursery, path: str) -> None:
    with FakeEngine("a", cpu_blocks=64) as a, FakeEngine("b", num_blocks=96) as b:
        a.run(BEFORE)
        with fan_out(path, worker_of(a), worker_of(b)) as fanout:
            caught_up(fanout.client, a, b)
            with ended(joined(processes, path, 4)) as peers:
                assert_equal(fanout.client, *peers, prompts=PROMPTS)
                assert counted(fanout, replicas=4, joined=4, died=0)
                assert 2 <= fanout.statistics()["sections_taken"] <= 8
                for engine, workload in ((a, MEANWHILE), (b, BEFORE), (a, LATER)):
                    engine.run(workload)
                caught_up(fanout.client, a, b)
                assert_equal(fanout.client, *peers, prompts=PROMPTS)
                for peer in peers:
                    found = peer.call("statistics")["replica"]
                    assert found["batches"] > 0
                    assert (found["joins"], found["rejoins"]) == (1, {})
                for peer in peers:
                    peer.call("leave")
                assert counted(fanout, replicas=0, left=4, died=0)


def test_processes_that_join_while_events_pour_in_miss_nothing(
    processes: Nursery, path: str
) -> None:
    with FakeEngine("a", cpu_blocks=64) as a, FakeEngine("b") as b:
        with fan_out(path, worker_of(a), worker_of(b)) as fanout:
            pouring = [
                threading.Thread(target=engine.run, args=(Workload(300, seed=seed),))
                for seed, engine in enumerate((a, b))
            ]
            for thread in pouring:
                thread.start()
            with ended([]) as peers:
                for _ in range(3):
                    peers += joined(processes, path, 1)
                for thread in pouring:
                    thread.join()
                caught_up(fanout.client, a, b)
                assert_equal(fanout.client, *peers, prompts=PROMPTS)


def test_an_engine_restart_and_a_declared_loss_travel_along(processes: Nursery, path: str) -> None:
    with FakeEngine("a") as a, FakeEngine("b", replay=False) as b:
        workers = worker_of(a), worker_of(b, link := link_to(b))
        with link, fan_out(path, *workers, replay_policy=SOON_LOST) as fanout:
            client = fanout.client
            a.run(BEFORE)
            first = 0
            while client.status(b.rank).seq is None:  # without replay a stream begins when it can
                b.serve(range(first := first + 1, first + 100))
                client.wait_for(lambda s: s[b.rank].seq is not None, 0.05)
            with ended(joined(processes, path, 2)) as peers:
                a.restart()
                a.run(MEANWHILE)
                wait_status(client, a.rank, epoch=1)
                link.drop_next(2)
                b.run(MEANWHILE)
                caught_up(client, a, b)
                assert client.status(b.rank).losses > 0
                assert not client.status(b.rank).complete
                assert_equal(client, *peers, prompts=PROMPTS)


def test_workers_that_come_and_go_and_are_renamed_travel_along(path: str) -> None:
    with (
        ZmqEventPublisher(
            data_parallel_rank=5, endpoint="tcp://*:0", replay_endpoint="tcp://*:0"
        ) as publisher,
        FakeEngine("a") as a,
        FakeEngine("b") as b,
    ):
        renamed = Worker("renamed", publisher.endpoint, replay=publisher.replay_endpoint)
        with fan_out(path, worker_of(a)) as fanout, join(path) as replica:
            client = fanout.client
            a.run(BEFORE)
            client.add(renamed)
            client.add(
                worker_of(b, cache=CacheSettings(groups={0: GroupSpec("sliding_window", 32)}))
            )
            b.run(BEFORE)
            publisher.publish(EventBatch(1.0, []))
            wait_status(client, Rank("renamed", 5), seq=0, state=State.LIVE)
            caught_up(client, a, b)
            assert replica.wait_for(
                lambda s: mark(s) == mark(client.subscriber.statuses()), PATIENCE
            )
            assert replica.ranks == client.ranks
            assert replica.status(Rank("renamed", 0)).rank == Rank("renamed", 5)
            assert held(replica) == held(client)
            assert answers(replica, PROMPTS) == answers(client, PROMPTS)
            with join(path) as late:
                assert late.status(Rank("renamed", 0)).rank == Rank("renamed", 5)
                assert answers(late, PROMPTS) == answers(client, PROMPTS)
            client.remove("a")
            assert replica.wait_for(lambda statuses: a.rank not in statuses, PATIENCE)
            assert replica.ranks == client.ranks
            assert held(replica) == held(client)
            for name in (a.rank, "a/0", "a"):
                with pytest.raises(UnknownRankError):
                    replica.status(name)
            with pytest.raises(UnknownRankError):
                replica.wait_live(PATIENCE, ranks=["a"])


def test_a_replica_is_asked_as_a_client_is(path: str) -> None:
    with FakeEngine("a") as a, fan_out(path, worker_of(a)) as fanout, join(path) as replica:
        a.run(BEFORE)
        caught_up(fanout.client, a)
        caught_up(replica, a)  # type: ignore[arg-type]  # it has what that asks
        replica.wait_live()
        theirs, ours = fanout.client.status(a.rank), replica.status(a.rank)
        assert (ours.seq, ours.endpoint, ours.orphans) == (theirs.seq, theirs.endpoint, 0)
        age = ours.last_event_age
        assert age is not None
        assert 0.0 <= age < PATIENCE
        found = replica.statistics()
        assert found["ranks"]["a/0"]["index"] == fanout.client.statistics()["ranks"]["a/0"]["index"]
        assert found["replica"]["following"]
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


def test_replicas_keep_to_the_servers_bound_of_each_rank(path: str) -> None:
    with (
        FakeEngine("a") as a,
        fan_out(path, worker_of(a), max_blocks_per_rank=5) as fanout,
        join(path) as replica,
    ):
        a.run(BEFORE)
        caught_up(fanout.client, a)
        caught_up(replica, a)  # type: ignore[arg-type]  # it has what that asks
        assert fanout.client.statistics()["ranks"]["a/0"]["ignored"]["max_blocks_per_rank"] > 0
        assert len(fanout.client.index) <= 5
        assert held(replica) == held(fanout.client)
        assert replica.index.max_blocks_per_rank == 5


def test_a_rank_that_is_not_live_at_the_server_is_not_at_a_replica(path: str) -> None:
    with fan_out(path, Worker("nobody", "tcp://127.0.0.1:9")), join(path) as replica:
        with pytest.raises(NotLiveError, match="nobody/0"):
            replica.wait_live(0.05)


def test_closing_the_server_tells_the_replicas_and_leaves_nothing(path: str) -> None:
    with FakeEngine("a") as a:
        a.run(BEFORE)
        with fan_out(path, worker_of(a)) as fanout, join(path) as replica:
            caught_up(fanout.client, a)
            before = answers(fanout.client, PROMPTS)
            ring = fanout._outflow.handle[3]
            assert Path("/dev/shm", ring).exists()
            until(lambda: fanout.statistics()["joined"] == 1)  # noted once all has been sent
            fanout.close()
            fanout.close()
            assert fanout.wait(0)
            assert fanout.statistics()["joined"] == 1
            assert replica.wait_for(lambda s: s[a.rank].state is State.STALE, PATIENCE)
            # Why it was lost is said still when it could not be joined again, and again.
            for times in (1, 2):
                assert could_not_join(replica, a.rank, times)
                reason = replica.status(a.rank).reason
                assert re.search(r"lost \(server_closed\): .* joined again \(no_server\): ", reason)
                assert reason.count("server_closed") == reason.count("no_server") == 1
            assert not Path(path).exists()
            assert not Path("/dev/shm", ring).exists()
            # It answers from what it knew, and says so.
            after = answers(replica, PROMPTS)
            assert [{r: v[:3] for r, v in one.items()} for one in after] == [
                {r: v[:3] for r, v in one.items()} for one in before
            ]
            assert all(v[3] == "stale" for one in after for v in one.values())


def test_a_new_server_is_joined_and_takes_the_old_ones_place(path: str) -> None:
    with FakeEngine("a") as a, FakeEngine("b") as b:
        a.run(BEFORE)
        b.run(MEANWHILE)
        fanout = fan_out(path, worker_of(a), worker_of(b))
        caught_up(fanout.client, a, b)
        with join(path) as replica:
            old, router = replica.index, Router(replica)
            fanout.close()
            with fan_out(path, worker_of(a)) as fanout:
                caught_up(fanout.client, a)
                wanted = mark(fanout.client.subscriber.statuses())
                assert replica.wait_for(lambda s: mark(s) == wanted, PATIENCE)
                assert replica.index is not old
                assert replica.ranks == router.ranks == (a.rank,)
                assert held(replica) == held(fanout.client)
                assert answers(replica, PROMPTS) == answers(fanout.client, PROMPTS)
                assert replica.statistics()["replica"]["rejoins"] == {"server_closed": 1}


def test_a_warm_restart_is_joined_as_any(path: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.kvindex"
    with FakeEngine("a") as a:
        a.run(BEFORE)
        with fan_out(path, worker_of(a)) as fanout:
            caught_up(fanout.client, a)
            fanout.client.save(saved)
        a.run(MEANWHILE)
        with fan_out(path, worker_of(a), resume=saved) as fanout, join(path) as replica:
            caught_up(fanout.client, a)
            wanted = mark(fanout.client.subscriber.statuses())
            assert replica.wait_for(lambda s: mark(s) == wanted, PATIENCE)
            assert fanout.client.status(a.rank).counters["resumed"] == 1
            assert held(replica) == held(fanout.client)


def test_a_worker_that_goes_on_later_from_what_was_saved_does_so_in_every_replica(
    path: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.kvindex"
    with FakeEngine("a") as a, FakeEngine("b") as b, FakeEngine("c") as c:
        for engine in (a, b, c):
            engine.run(BEFORE)
        with fan_out(path, worker_of(a), worker_of(b), worker_of(c)) as fanout:
            caught_up(fanout.client, a, b, c)
            fanout.client.save(saved)
        for engine in (a, b):
            engine.run(MEANWHILE)
        c.restart()
        with (
            fan_out(path, worker_of(a), resume=saved, chunk_bytes=1024, chunks=2) as fanout,
            join(path) as replica,
        ):
            client = fanout.client
            for engine in (b, c):  # what was saved of them is longer than the ring
                assert engine.rank not in replica.index.ranks
                client.add(worker_of(engine))
            wait_status(client, c.rank, epoch=1)
            caught_up(client, a, b, c)
            wanted = mark(client.subscriber.statuses())
            assert replica.wait_for(lambda s: mark(s) == wanted, PATIENCE)
            for rank in (a.rank, b.rank):
                status = replica.status(rank)
                assert (status.restarts, status.counters["resumed"]) == (0, 1)
            assert held(replica) == held(client)
            assert answers(replica, PROMPTS) == answers(client, PROMPTS)
            assert replica.statistics()["replica"]["rejoins"] == {}


def test_a_message_longer_than_a_chunk_arrives(path: str) -> None:
    with FakeEngine("a") as a:
        with fan_out(path, worker_of(a), chunk_bytes=1024, chunks=8) as fanout:
            with join(path) as replica:
                a.serve(range(2000))
                caught_up(fanout.client, a)
                caught_up(replica, a)  # type: ignore[arg-type]
                assert held(replica) == held(fanout.client)
                found = fanout.statistics()
                assert found["chunks"] > found["messages"]


def test_a_replica_from_before_a_fork_says_in_the_child_at_once_that_it_is_the_parents(
    processes: Nursery, path: str
) -> None:
    with FakeEngine("a") as a:
        a.run(BEFORE)
        with fan_out(path, worker_of(a)) as fanout, ended([processes.fork()]) as peers:
            caught_up(fanout.client, a)
            peers[0].call("join", path)
            assert_equal(fanout.client, *peers, prompts=PROMPTS)
            told = peers[0].call("ask_in_child", PROMPTS)
            (reason,) = told["reasons"].values()
            assert "join in this process" in reason
            assert told["errors"] == [reason, reason]
            found = told["replica"]
            assert (found["following"], found["trouble"], found["backlog"]) == (False, reason, 0)
            # What was known at the fork, with the trust that it deserves.
            assert told["answers"] == [
                {a.rank: (*answer[a.rank][:3], "closed", *answer[a.rank][4:])}
                for answer in answers(fanout.client, PROMPTS)
            ]
            assert_equal(fanout.client, *peers, prompts=PROMPTS)  # the parent's is as it was
            assert peers[0].call("statistics")["replica"]["joins"] == 1


class Begun:
    """Is told when a fork has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        prepare_forks(self, lambda begun, _: begun.begun.set())


def test_a_child_can_ask_though_another_thread_was_asking_at_the_fork(path: str) -> None:
    fork, within = Begun(), threading.Event()  # it is told before the replica, which comes later

    def slow_keys() -> Iterator[None]:
        within.set()
        assert fork.begun.wait(PATIENCE)
        yield None

    with FakeEngine("a") as a, fan_out(path, worker_of(a)) as fanout, join(path) as replica:
        a.run(BEFORE)
        caught_up(fanout.client, a)
        asking = threading.Thread(
            target=replica.match, args=(PROMPTS[0],), kwargs={"extra_keys": slow_keys()}
        )
        asking.start()
        assert within.wait(PATIENCE)
        assert in_child(lambda: replica.match(PROMPTS[0])) == 0
        asking.join(PATIENCE)
        assert not asking.is_alive()
        assert replica.match(PROMPTS[0])


def test_a_path_with_braces_is_said_as_it_is(processes: Nursery, tmp_path: Path) -> None:
    path = str(tmp_path / "{kv}.sock")
    with FakeEngine("a") as a, ended([processes.fork()]) as servers:
        servers[0].call("serve", path, [worker_of(a)])
        with join(path, PATIENCE) as replica:
            servers[0].kill()
            assert replica.wait_for(lambda s: path in s[a.rank].reason, PATIENCE)


def test_there_is_nobody_to_join(path: str) -> None:
    with pytest.raises(QueueTimeoutError, match=r"no_server.*No such file") as caught:
        join(path, timeout=0.2)
    assert isinstance(caught.value, TimeoutError)


def test_a_server_that_comes_later_is_waited_for(path: str) -> None:
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(join(path, PATIENCE)))
    waiting.start()
    with fan_out(path):
        waiting.join()
        found[0].close()


def test_more_processes_than_places_are_told_so(path: str) -> None:
    with fan_out(path, max_replicas=1) as fanout:
        with join(path):

            def refused() -> bool:
                with pytest.raises(QueueTimeoutError) as raised:
                    join(path, timeout=0.3)
                return "max_replicas" in str(raised.value)

            assert until(refused)
            assert fanout.statistics()["turned_away"]["full"] > 0
        with join(path):  # the place is free again
            pass


def test_the_socket_is_private_and_one_servers(path: str, tmp_path: Path) -> None:
    with fan_out(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(ConfigurationError, match="living server"):
            fan_out(path)
        with join(path):
            pass  # the first one is as it was
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigurationError, match="others may write"):
        fan_out(str(shared / "socket"))
    with pytest.raises(ConfigurationError, match="no directory"):
        fan_out(str(tmp_path / "none" / "socket"))
    with pytest.raises(ConfigurationError, match="too long"):
        fan_out(str(tmp_path / ("x" * 120)))
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigurationError, match="is no socket"):
        fan_out(str(file))
    assert file.read_text() == "precious"


@pytest.mark.parametrize(
    "option",
    [{"patience": 0.0}, {"max_replicas": 0}, {"replay_policy": 3}],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_and_leaves_nothing(
    path: str, option: dict[str, Any]
) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError):
        FanOut((), path, **option)
    assert not Path(path).exists()
    assert threading.active_count() == before


def test_connections_that_come_while_it_closes_are_closed(path: str) -> None:
    for _ in range(30):
        with FanOut((), path):
            coming = [socket.socket(socket.AF_UNIX) for _ in range(3)]
            for connection in coming:
                connection.connect(path)
        for connection in coming:
            connection.close()
    gc.collect()  # an open socket warns when it goes, and a warning is an error


@pytest.mark.parametrize("option", [{"timeout": 0}, {"stale_after": -1.0}, {"buffer_bytes": 0}])
def test_a_joiners_setting_that_cannot_work_is_refused(path: str, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        join(path, **option)


def test_the_other_kind_of_index_is_refused_with_what_to_do(path: str) -> None:
    other = "python" if BACKEND == "native" else "native"
    script = f"from kvindex.index.replicas import join; join({path!r})"
    with fan_out(path):
        if other == "native":  # which may not be built: say that we are it
            script = "import kvindex.index\nkvindex.index.Index.backend = 'native'\n" + script
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "KVINDEX_BACKEND": "python", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert "ConfigurationError" in done.stderr
    assert f"KVINDEX_BACKEND={BACKEND}" in done.stderr


def test_a_forked_child_is_no_server_and_keeps_no_place(path: str, processes: Nursery) -> None:
    with fan_out(path) as fanout:
        assert in_child(fanout.close) == 0  # as a `with` that the child leaves would
        with join(path) as replica:
            assert replica.ranks == ()
