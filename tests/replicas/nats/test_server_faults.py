"""One server and a fault: both replicas hold what the engines hold, and the fault is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from nats.js.api import DiscardPolicy

from kvindex import ConfigurationError
from kvindex.replicas import nats
from kvindex.replicas.nats import snapshots
from kvindex.replicas.nats.snapshots import PoolSnapshots
from kvindex.wire.nats import NatsPool
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.replicas.nats.fault_scene import FaultScene, at

pytestmark = [pytest.mark.faults, needs_ring]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


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


@pytest.mark.parametrize(
    "wrong", [{"subjects": ["something.else"]}, {"discard": DiscardPolicy.NEW}]
)
def test_fault_a_stream_that_cannot_be_used_is_refused_and_named(
    stack: ExitStack, pool: NatsPool, wrong: dict[str, Any]
) -> None:
    config = {"name": pool.stream, "subjects": [pool.log_subjects], **wrong}
    at(pool, lambda client: client.jetstream().add_stream(**config))
    scene = FaultScene(stack, pool, has_relay=False)
    with pytest.raises(ConfigurationError, match=pool.stream):
        scene.start_relay()
