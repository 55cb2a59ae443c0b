"""Three servers, relays as processes, replicas: whatever fails, replicas hold what engines hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvindex import Rank, State
from kvindex.replicas import Replica, nats
from kvindex.testing import FakeEngine, Workload
from kvindex.wire.nats import NatsPool, parse_pool
from tests.live import BEFORE, PATIENCE, truth, until, within
from tests.native_ring import needs_ring
from tests.nats_server import NatsServer, cluster_of_three
from tests.replicas.nats.cut_routes import cluster_that_can_be_cut
from tests.replicas.nats.processes import RelayProcess, contents
from tests.replicas.nats.scenes import at, of

pytestmark = [pytest.mark.faults, needs_ring]

_PAUSE = 0.005  # seconds between two requests of an engine


class Scene:
    """Engines that publish all the time, relays, and replicas.

    Args:
        stack: ends what it starts.
        pool: of the replicas and relays.
        store: of the stream.
    """

    def __init__(self, stack: ExitStack, pool: NatsPool, store: str) -> None:
        self.pool = pool
        self.engines = [
            stack.enter_context(FakeEngine(f"e{number}", seed=number)) for number in range(4)
        ]
        self.relays: list[RelayProcess] = []
        self.replicas: list[Replica] = []
        self._stack = stack
        self._store = store
        self._is_publishing = threading.Lock()
        for engine in self.engines:
            engine.run(BEFORE)

    def relay(self, pool: NatsPool | None = None) -> RelayProcess:
        """Start a relay."""
        options = ("--replicas=3", f"--store={self._store}")
        relay = RelayProcess(pool or self.pool, self.engines, *options)
        self.relays.append(self._stack.enter_context(relay))
        return relay

    def replica(self, pool: NatsPool | None = None) -> Replica:
        """Join."""
        replica = nats.join(str(pool or self.pool), timeout=PATIENCE)
        self.replicas.append(self._stack.enter_context(replica))
        return replica

    def publish(self) -> None:
        """Let the engines publish from now on."""
        end = threading.Event()
        threads = [threading.Thread(target=self._run, args=(e, end)) for e in self.engines]
        for thread in threads:
            thread.start()
            self._stack.callback(thread.join)
        self._stack.callback(end.set)

    def live_again(self) -> None:
        """Wait until all replicas are live with something that was published from now on."""
        published = {engine.rank: engine.published for engine in self.engines}
        for replica in self.replicas:

            def is_newer(statuses: Any) -> bool:
                return all(
                    rank in statuses
                    and statuses[rank].state is State.LIVE
                    and (-1 if statuses[rank].seq is None else statuses[rank].seq) >= seq
                    for rank, seq in published.items()
                )

            is_live = within(PATIENCE, replica.statuses, is_newer)
            assert is_live, f"{explain(replica)}\n{[relay.report for relay in self.relays]}"

    def stale(self) -> None:
        """Wait until no replica has a live rank, and they answer all the same."""
        prompt = [1] * 16
        for replica in self.replicas:
            until(replica.statuses, are_stale)
            assert all(contents(replica.index, rank) for rank in replica.ranks)
            replica.match(prompt)

    def settle(self) -> None:
        """Wait until the replicas hold what the engines hold, rank by rank, and all are live."""
        ranks = {engine.rank for engine in self.engines}
        with self._is_publishing:
            wanted = {engine.rank: truth(engine) for engine in self.engines}
            for replica in self.replicas:
                until(
                    lambda replica=replica: differences(replica, wanted),  # type: ignore[misc]
                    lambda different: not different,
                )
                assert set(replica.ranks) == ranks
                replica.index.check()

    def _run(self, engine: FakeEngine, end: threading.Event) -> None:
        for request in Workload(1 << 30, seed=int(engine.worker[1:])):
            if end.wait(_PAUSE):
                return
            with self._is_publishing:
                engine.run([request])


def differences(replica: Replica, wanted: dict[Rank, Any]) -> dict[Rank, str]:
    """Which ranks of a replica are not live, or hold other blocks than these."""
    live = replica.live_ranks()
    return {
        rank: f"{replica.status(rank) if rank in replica.ranks else None} {replica.trouble}"
        for rank, blocks in wanted.items()
        if rank not in live or contents(replica.index, rank) != blocks
    }


def are_stale(statuses: Any) -> bool:
    return bool(statuses) and all(s.state is State.STALE for s in statuses.values())


def explain(replica: Replica) -> str:
    shown = [str(status) for status in replica.statuses().values()]
    return "\n".join([replica.trouble, str(of(replica)), *shown])


@contextmanager
def measured(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"\n{what}: {time.monotonic() - began:.1f} s")


def leader_of(pool: NatsPool, servers: list[NatsServer]) -> NatsServer:
    """Return the server that leads the stream of the log."""

    async def ask(client: Any) -> str | None:
        info = await client.jetstream(timeout=PATIENCE).stream_info(pool.stream)
        return info.cluster.leader if info.cluster else None

    name = until(lambda: at(pool, ask))
    return next(server for server in servers if server.name == name)


def at_least(seconds: float) -> None:
    """Let a fault go on for a while."""
    threading.Event().wait(seconds)


@pytest.fixture
def servers(tmp_path: Path, stack: ExitStack) -> list[NatsServer]:
    return stack.enter_context(cluster_of_three(tmp_path))


def pool_at(*servers: NatsServer) -> NatsPool:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return parse_pool(f"nats://{hosts}", "p", {})


def begun(stack: ExitStack, pool: NatsPool, store: str) -> tuple[Scene, RelayProcess]:
    """A relay that writes what engines publish, and two replicas that follow."""
    scene = Scene(stack, pool, store)
    relay = scene.relay()
    relay.wait_until_it_writes()
    for _ in range(2):
        scene.replica()
    scene.publish()
    scene.live_again()
    return scene, relay


STORES = pytest.mark.parametrize("store", ["memory", "file"])


@STORES
def test_the_leader_is_killed_and_comes_back(
    stack: ExitStack, servers: list[NatsServer], store: str
) -> None:
    scene, relay = begun(stack, pool_at(*servers), store)
    leader = leader_of(scene.pool, servers)
    leader.kill()
    with measured(f"leader killed ({store}), replicas are live again"):
        scene.live_again()
    leader.start()
    scene.live_again()
    scene.settle()
    report = relay.wait_for(bool)["relay"]
    assert report["failures"] + report["appended_again"] >= 1


@STORES
def test_the_leader_stands_still_for_a_while(
    stack: ExitStack, servers: list[NatsServer], store: str
) -> None:
    scene, relay = begun(stack, pool_at(*servers), store)
    with leader_of(scene.pool, servers).stopped(), measured(f"leader stopped ({store})"):
        at_least(5.0)
        scene.live_again()
    scene.live_again()
    scene.settle()
    report = relay.wait_for(bool)["relay"]
    assert report["failures"] >= 1


@STORES
def test_without_a_quorum_replicas_are_stale_and_go_on_with_it(
    stack: ExitStack, servers: list[NatsServer], store: str
) -> None:
    scene, relay = begun(stack, pool_at(*servers), store)
    with servers[0].stopped(), servers[1].stopped():
        at_least(4.0)
        scene.stale()
    with measured(f"quorum is back ({store}), replicas are live"):
        scene.live_again()
    scene.settle()
    report = relay.wait_for(bool)["relay"]
    assert report["failures"] >= 1


@STORES
def test_all_servers_are_killed_and_come_back(
    stack: ExitStack, servers: list[NatsServer], store: str
) -> None:
    scene, relay = begun(stack, pool_at(*servers), store)
    for server in servers:
        server.kill()
    scene.stale()
    for server in servers:
        server.start()
    with measured(f"all are back ({store}), replicas are live"):
        scene.live_again()
    scene.settle()
    report = relay.wait_for(bool)["relay"]
    assert report["epochs"] == (2 if store == "memory" else 1)


def test_a_relay_that_stands_by_goes_on_when_the_writing_one_is_killed(
    stack: ExitStack, servers: list[NatsServer]
) -> None:
    scene, relay = begun(stack, pool_at(*servers), "memory")
    standby = scene.relay()
    standby.wait_for(lambda report: "another relay" in report["relay"]["reason"])
    relay.kill()
    with measured("relay killed, the other one has begun"):
        standby.wait_for(lambda report: report["relay"]["state"] == "writing")
    with measured("and replicas are live"):
        scene.live_again()
    scene.settle()
    report = standby.wait_for(bool)["relay"]
    assert (report["epochs"], report["failures"]) == (1, 0)
    for replica in scene.replicas:
        assert of(replica)["rejoins"] == {"new_epoch": 1}


def test_a_relay_that_stood_still_is_fenced(stack: ExitStack, servers: list[NatsServer]) -> None:
    scene, relay = begun(stack, pool_at(*servers), "memory")
    standby = scene.relay()
    standby.wait_for(lambda report: "another relay" in report["relay"]["reason"])
    relay.stop()
    at_least(6.0)
    standby.wait_until_it_writes()
    relay.resume()
    report = relay.wait_for(lambda report: report["relay"]["fenced"])["relay"]
    assert (report["fenced"], report["state"]) == (1, "standing by")
    scene.live_again()
    scene.settle()
    assert standby.wait_for(bool)["relay"]["epochs"] == 1


def test_both_relays_are_killed_and_a_new_one_starts_warm(
    stack: ExitStack, servers: list[NatsServer]
) -> None:
    scene, relay = begun(stack, pool_at(*servers), "memory")
    standby = scene.relay()
    standby.wait_for(lambda report: "another relay" in report["relay"]["reason"])
    seed = scene.replicas[0].index.seed
    # The first snapshot may be older than a rank's first state: the next has all their cursors.
    relay.wait_until_it_writes(snapshots=2)
    relay.kill()
    standby.kill()
    scene.stale()
    new = scene.relay()
    new.wait_until_it_writes()
    # An engine that answers late is restored later.
    new.wait_for(lambda report: report["resume"]["restored"] == len(scene.engines))
    scene.live_again()
    scene.settle()
    assert {replica.index.seed for replica in scene.replicas} == {seed}


def test_a_replica_at_a_server_that_is_cut_off_is_stale_and_goes_on_later(
    stack: ExitStack, tmp_path: Path
) -> None:
    servers, routes = stack.enter_context(cluster_that_can_be_cut(tmp_path))
    far = pool_at(servers[0])
    scene = Scene(stack, pool_at(*servers[1:]), "memory")
    relay = scene.relay()
    relay.wait_until_it_writes()
    scene.replica()
    far_replica = scene.replica(far)
    scene.publish()
    scene.live_again()
    with routes.cut_off(0):
        until(far_replica.statuses, are_stale)
        with measured("cut off"):
            scene.live_again()
    scene.live_again()
    scene.settle()
    assert of(far_replica)["silences"] >= 1


def test_a_relay_at_a_server_that_is_cut_off_goes_on(stack: ExitStack, tmp_path: Path) -> None:
    servers, routes = stack.enter_context(cluster_that_can_be_cut(tmp_path))
    scene = Scene(stack, pool_at(*servers[1:]), "memory")
    relay = scene.relay(pool_at(servers[0]))
    relay.wait_until_it_writes()
    scene.replica()
    scene.publish()
    scene.live_again()
    with routes.cut_off(0), measured("relay cut off"):
        at_least(6.0)
        scene.live_again()
    scene.live_again()
    scene.settle()
    assert relay.wait_for(bool)["relay"]["moves"] >= 1


def test_clients_of_a_server_that_stands_still_move_on(
    stack: ExitStack, servers: list[NatsServer]
) -> None:
    scene = Scene(stack, pool_at(*servers), "memory")
    scene.relay(pool_at(servers[0])).wait_until_it_writes()
    scene.replica(pool_at(servers[0]))
    scene.publish()
    scene.live_again()
    with servers[0].stopped(), measured("the clients' server stands still"):
        at_least(3.0)
        scene.live_again()
        scene.settle()
