"""One server and a fault: both replicas hold what the engines hold, and the fault is counted."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import APIError

from kvindex import EventBatch, Rank
from kvindex.replicas import nats
from kvindex.replicas.messages import (
    BatchApplied,
    Entry,
    RingMessage,
    decode_message,
    encode_message,
)
from kvindex.replicas.nats import snapshots
from kvindex.replicas.nats.log import BodyReader, join_bodies
from kvindex.replicas.nats.snapshots import PoolSnapshots
from kvindex.testing import FakeEngine, Workload
from kvindex.wire import AllBlocksCleared, encode_batch
from kvindex.wire.nats import NatsPool, parse_pool
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.nats_server import NatsServer
from tests.replicas.nats.processes import RelayProcess
from tests.replicas.nats.scenes import FaultScene, at, late_rank

pytestmark = [pytest.mark.faults, needs_ring]


def test_fault_a_purged_stream_loses_nothing_that_replicas_do_not_get_otherwise(
    stack: ExitStack, pool: NatsPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_LOOK_EVERY", 0.1)
    scene = FaultScene(stack, pool)
    for times in range(2):
        scene.publish_some()
        at(pool, lambda client: client.jetstream().purge_stream(pool.stream))
        scene.settle()
        scene.counted(snapshots=2 + times)  # one that the log continues


def test_fault_a_deleted_bucket_is_made_again(stack: ExitStack, pool: NatsPool) -> None:
    scene = FaultScene(stack, pool, snapshot_every=1000)
    at(pool, lambda client: client.jetstream().delete_object_store(pool.bucket))
    stored = scene.counted()["snapshots"]
    scene.settle()
    own = scene.counted(snapshots=stored + 1)
    assert own["snapshots_lost"] >= 1
    scene.settle()


def test_fault_a_snapshot_deleted_or_cut_while_it_is_fetched_is_counted_and_replaced(
    stack: ExitStack, pool: NatsPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = FaultScene(stack, pool, snapshot_every=1000)
    fetch = PoolSnapshots.get
    faults = ["delete", "cut"]

    async def get(store: PoolSnapshots, name: str) -> bytes:
        if not faults:
            return await fetch(store, name)
        stream = store._stream
        note = await store._note(name)
        subject = store._meta(name) if faults.pop() == "delete" else store._chunks + note.nuid
        await stream.purge_stream(store._stream_name, subject=subject)
        return await fetch(store, name)

    monkeypatch.setattr(PoolSnapshots, "get", get)
    late = nats.follow(str(pool), stale_after=PATIENCE)
    stack.callback(late.close)

    def has_joined() -> bool:
        scene.publish_some()  # so that there is another snapshot
        return bool(late.statistics()["replica"]["following"])

    until(has_joined)
    own = late.statistics()["replica"]
    assert own["snapshots_refused"].keys() == {"download"}
    assert own["snapshots_refused"]["download"] >= 2  # more if one was replaced meanwhile
    scene.replica = late
    scene.settle()


def test_fault_a_foreign_client_publishes_amid_appends_and_each_batch_is_applied_once(
    stack: ExitStack, pool: NatsPool
) -> None:
    scene = FaultScene(stack, pool)

    async def intrude(client: Any) -> None:
        for _ in range(3):
            await client.jetstream().publish(f"{pool.log_prefix}{'x' * 20}", b"\xff nonsense")

    for _ in range(2):
        scene.publish_some()
        at(pool, intrude)
        scene.publish_some()
        scene.settle()
    own = scene.counted(fenced=1, epochs=2)
    assert own["refused"] >= 1
    scene.rejoined("new_epoch")


@pytest.mark.parametrize("kind", ["garbage", "empty", "status", "headers", "batch", "heartbeat"])
def test_fault_a_foreign_client_writes_in_the_relays_own_epoch_and_nobody_stays_misled(
    stack: ExitStack, pool: NatsPool, kind: str
) -> None:
    scene = FaultScene(stack, pool)

    async def intrude(client: Any) -> None:
        """Be faster than the relay: take the number that its next message would have."""
        while True:
            info = await client.jetstream().stream_info(pool.stream)
            head = await client.jetstream().get_msg(pool.stream, seq=info.state.last_seq)
            headers = {"Nats-Expected-Last-Sequence": str(head.seq), **HEADERS.get(kind, {})}
            body = foreign(kind, head.data, scene.engines[0].rank)
            with suppress(APIError):
                await client.jetstream().publish(head.subject, body, headers=headers)
                return

    at(pool, intrude)
    scene.counted(foreign=1, epochs=2)
    scene.settle()
    assert all(own["rejoins"] for own in scene.own())
    assert scene.counted()["epochs"] == 2


HEADERS = {
    "headers": {"Nats-Msg-Id": "x", "Nats-Expected-Stream": "", "Status": "503"},
    "status": {"Status": "100", "Description": "Idle Heartbeat"},
}


def foreign(kind: str, newest: bytes, rank: Rank) -> bytes:
    """Return a body, well-formed with the next number if it is a batch or a heartbeat."""
    if kind in ("empty", "status"):
        return b""
    if kind not in ("batch", "heartbeat"):
        return b"\xff" * 40
    *_, last = BodyReader().split(newest)
    clear = encode_batch(EventBatch(ts=1.0, events=[AllBlocksCleared()]))
    entries: list[Entry] = [BatchApplied(rank, clear)] if kind == "batch" else []
    number = decode_message(last).number + 1
    return join_bodies([encode_message(RingMessage(number, time.monotonic(), entries))])


@pytest.mark.parametrize("is_made_again", [False, True])
def test_fault_a_deleted_stream_is_made_again_with_a_new_epoch(
    stack: ExitStack, pool: NatsPool, is_made_again: bool
) -> None:
    scene = FaultScene(stack, pool)

    async def delete(client: Any) -> None:
        stream = client.jetstream()
        await stream.delete_stream(pool.stream)
        if is_made_again:
            await stream.add_stream(name=pool.stream, subjects=[pool.log_subjects])

    scene.publish_some()
    at(pool, delete)
    scene.publish_some()
    scene.settle()
    assert scene.counted(epochs=2)["failures"] + scene.counted()["refused"] >= 1
    assert all(own["rejoins"] for own in scene.own())


def test_fault_a_killed_server_that_stores_in_files_makes_ranks_stale_and_goes_on(
    stack: ExitStack, own_server: NatsServer
) -> None:
    scene = FaultScene(stack, parse_pool(own_server.url, "p", {}), store="file")
    scene.publish_some()
    own_server.kill()
    scene.publish_some()
    scene.are_stale()
    until(lambda: scene.counted()["connection"])
    own_server.start()
    scene.settle()
    own = scene.counted()
    assert own["epochs"] == 1
    assert own["failures"] >= 1
    assert all(own["silences"] >= 1 and not own["rejoins"] for own in scene.own())


def test_fault_a_killed_server_that_stores_in_memory_begins_a_new_epoch(
    stack: ExitStack, own_server: NatsServer
) -> None:
    scene = FaultScene(stack, parse_pool(own_server.url, "p", {}))
    own_server.kill()
    scene.publish_some()
    scene.engines[0].restart()
    scene.publish_some()
    scene.are_stale()
    own_server.start()
    scene.settle()
    assert scene.counted(epochs=2)["epochs"] == 2
    assert all(own["rejoins"] for own in scene.own())


def test_fault_a_store_rolled_back_gets_what_it_forgot_again(
    stack: ExitStack, own_server: NatsServer, tmp_path: Path
) -> None:
    scene = FaultScene(stack, parse_pool(own_server.url, "p", {}), store="file")
    own_server.copy_store(tmp_path / "copy")
    position = scene.counted()["position"]
    scene.settle()
    until(lambda: scene.counted()["position"] > position + 1)
    own_server.roll_back(tmp_path / "copy")
    scene.publish_some()
    scene.settle()
    own = scene.counted(forgotten=1, appended_again=1)
    assert own["epochs"] == 1


def test_fault_a_store_rolled_back_and_its_relay_killed_makes_replicas_join_anew(
    stack: ExitStack, own_server: NatsServer, tmp_path: Path
) -> None:
    pool = parse_pool(own_server.url, "p", {})
    scene = FaultScene(stack, pool, has_relay=False)
    first = stack.enter_context(RelayProcess(pool, scene.engines, "--store=file"))
    first.wait_until_it_writes()
    scene.join()
    # The first snapshot may be older than a rank's first state: the next has all their cursors.
    while first.report["relay"]["snapshots"] < 2:
        scene.publish_some(300)
    own_server.copy_store(tmp_path / "copy")
    scene.settle()
    first.kill()
    scene.publish_some()
    own_server.roll_back(tmp_path / "copy")
    scene.are_stale()
    second = stack.enter_context(RelayProcess(pool, scene.engines, "--store=file"))
    second.wait_until_it_writes()
    report = second.wait_for(lambda report: report["resume"]["restored"] == len(scene.engines))
    scene.settle()
    assert report["relay"]["epochs"] == 1
    scene.rejoined("new_epoch")


def test_fault_a_replica_that_stands_still_until_the_log_is_trimmed_joins_anew(
    stack: ExitStack, pool: NatsPool
) -> None:
    scene = FaultScene(stack, pool, snapshot_every=1 << 20)
    scene.far_replica.stop()
    head = at(pool, lambda client: client.jetstream().stream_info(pool.stream)).state.last_seq

    def is_trimmed() -> bool:
        scene.publish_some(300)
        info = at(pool, lambda client: client.jetstream().stream_info(pool.stream))
        return bool(info.state.first_seq > head + 1)

    until(is_trimmed)
    scene.far_replica.resume()
    scene.settle()
    here, far = scene.own()
    assert far["rejoins"], far  # trimmed, or an upset connection before that is noticed
    assert not here["rejoins"]
    assert scene.counted()["epochs"] == 1


@pytest.mark.parametrize("store", ["file", "memory"])
def test_fault_a_server_that_is_slow_doubles_nothing(
    stack: ExitStack, own_server: NatsServer, store: str
) -> None:
    scene = FaultScene(stack, parse_pool(own_server.url, "p", {}), store=store)
    rest = threading.Event()  # never set
    for _ in range(6):
        with own_server.stopped():
            scene.publish_some()
            rest.wait(0.5)
        scene.publish_some()
        rest.wait(0.5)
    scene.settle()
    own = scene.counted()
    assert own["epochs"] == 1
    assert own["queue"]["overflows"] == 0


@pytest.mark.parametrize("store", ["file", "memory"])
def test_fault_an_engine_restarts_and_a_rank_gets_its_name_while_the_server_is_down(
    stack: ExitStack, own_server: NatsServer, store: str
) -> None:
    scene = FaultScene(stack, parse_pool(own_server.url, "p", {}), has_relay=False, store=store)
    late = stack.enter_context(FakeEngine("late", dp_rank=3))
    worker, first_name = late_rank(late)
    relay = scene.relay = scene.start_relay(worker)
    scene.join(others=[first_name])
    own_server.kill()
    scene.engines[0].restart()
    scene.publish_some()
    late.run(Workload(10, seed=9))
    until(lambda: late.rank in relay.client.ranks)
    own_server.start()
    scene.engines.append(late)
    scene.settle()
    assert first_name not in scene.replica.ranks
    assert scene.counted()["epochs"] == (1 if store == "file" else 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_fault_a_full_disk_makes_ranks_stale_until_there_is_room(
    stack: ExitStack, tmp_path: Path
) -> None:
    store = tmp_path / "server" / "store"
    store.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(store)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    stack.callback(subprocess.run, ["umount", "-l", str(store)], check=True)
    server = stack.enter_context(NatsServer(tmp_path / "server"))
    scene = FaultScene(stack, parse_pool(server.url, "p", {}), store="file", max_bytes=12 << 20)
    ballast = store / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass

    def has_failed() -> bool:
        scene.publish_some(30)
        return bool(scene.counted()["failures"])

    until(has_failed)
    scene.are_stale()
    ballast.unlink()
    server.kill()  # nats-server shuts JetStream down when a write fails
    server.start()
    scene.settle()
    assert all(own["silences"] >= 1 for own in scene.own())
