"""One server and a fault: both replicas hold what the engines hold, and the fault is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvindex.wire.nats import NatsPool, parse_pool
from tests.index.nats.fault_scene import FaultScene, at
from tests.live import until
from tests.native_ring import needs_ring
from tests.nats_server import NatsServer

pytestmark = [pytest.mark.faults, needs_ring]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may kill."""
    with NatsServer(tmp_path / "server") as server:
        yield server


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


def test_fault_a_purged_stream_loses_nothing_that_replicas_do_not_get_otherwise(
    stack: ExitStack, pool: NatsPool
) -> None:
    scene = FaultScene(stack, pool)
    for _ in range(2):
        scene.publish_some()
        at(pool, lambda client: client.jetstream().purge_stream(pool.stream))
        scene.settle()


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


def test_fault_a_deleted_bucket_is_made_again(stack: ExitStack, pool: NatsPool) -> None:
    scene = FaultScene(stack, pool, snapshot_every=1000)
    at(pool, lambda client: client.jetstream().delete_object_store(pool.bucket))
    stored = scene.counted()["snapshots"]
    scene.settle()
    own = scene.counted(snapshots=stored + 1)
    assert own["snapshot_failures"]["NoStreamError"] >= 1
    scene.settle()


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
