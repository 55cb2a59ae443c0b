"""A relay on a real server: what it writes is what the engines hold, whatever happens to NATS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from kvindex import ConfigurationError
from kvindex.replicas.nats import snapshots
from kvindex.replicas.nats.relay import Relay
from kvindex.replicas.nats.snapshots import PoolSnapshots
from kvindex.testing import FakeEngine
from kvindex.wire.nats import NatsPool, parse_pool
from tests.live import BEFORE, LATER, MEANWHILE, caught_up, until, worker_of
from tests.nats_server import NatsServer
from tests.replicas.nats.scenes import (
    at,
    copy_of,
    counters,
    holds,
    newest_snapshot,
    relay_of,
    stored,
)

pytestmark = pytest.mark.e2e


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        engine.run(BEFORE)
        yield engine


def stored_all(relay: Relay, engine: FakeEngine) -> None:
    """Wait until a snapshot is stored that was begun after an engine's rank was live.

    Each body that the relay appends has to be followed by a snapshot.
    """
    stored(relay)
    caught_up(relay.client, engine)
    for _ in range(2):  # the first of them may have been begun earlier
        times = counters(relay)["snapshots"]
        engine.run(LATER)
        stored(relay, times + 1)


def test_a_copy_of_snapshot_and_log_holds_what_the_engines_hold(
    pool: NatsPool, engine: FakeEngine
) -> None:
    with (
        FakeEngine("b", cpu_blocks=64) as other,
        relay_of(pool, *map(worker_of, (engine, other))) as relay,
    ):
        caught_up(relay.client, engine, other)
        stored(relay)
        early = newest_snapshot(pool)
        other.run(BEFORE)
        engine.run(MEANWHILE)
        engine.restart()
        engine.run(LATER)
        copy = copy_of(pool, holds(engine, other), early)
        assert copy.index.seed == relay.client.index.seed
        caught_up(relay.client, engine, other)
        own = counters(relay)
        assert own["state"] == "writing"
        assert own["appended_again"] == own["failures"] == own["queue"]["overflows"] == 0


def test_a_relay_that_misses_the_answer_to_each_first_request_starts_and_continues(
    pool: NatsPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that is stopped for some seconds while it starts."""
    with relay_of(pool, worker_of(engine), snapshot_every=1) as first:
        stored_all(first, engine)
    request = Client.request
    asked: set[str] = set()

    async def missed_once(client: Client, subject: str, *args: Any, **options: Any) -> Any:
        answer = await request(client, subject, *args, **options)
        if subject not in asked:
            asked.add(subject)
            raise nats.errors.TimeoutError
        return answer

    monkeypatch.setattr(Client, "request", missed_once)
    with relay_of(pool, worker_of(engine)) as relay:
        assert relay.report()["resume"]["restored"] == 1
        assert not counters(relay)["restart_refused"]
    assert len(asked) == 5


def test_a_batch_that_is_too_long_for_a_body_is_cut_and_arrives_whole(tmp_path: Path) -> None:
    with (
        NatsServer(tmp_path, max_payload="64KB") as server,
        FakeEngine(num_blocks=4000) as engine,
    ):
        pool = parse_pool(server.url, "p", {})
        with relay_of(pool, worker_of(engine)) as relay:
            stored(relay)
            early = newest_snapshot(pool)
            engine.serve(list(range(40_000)))
            engine.run(LATER)
            copy_of(pool, holds(engine), early)
            own = counters(relay)
            assert own["appended_bytes"] > 100_000
            assert (own["epochs"], own["queue"]["overflows"]) == (1, 0)


def test_a_relay_restarts_warm_from_the_pools_snapshot(pool: NatsPool, engine: FakeEngine) -> None:
    with relay_of(pool, worker_of(engine), snapshot_every=1) as relay:
        stored_all(relay, engine)
        seed = relay.client.index.seed
    engine.run(MEANWHILE)
    with relay_of(pool, worker_of(engine)) as relay:
        assert relay.client.index.seed == seed
        assert relay.client.statistics()["resume"]["restored"] == 1
        caught_up(relay.client, engine)
        assert relay.client.status(engine.rank).complete
        stored(relay)  # of its own epoch
        copy_of(pool, holds(engine))


def test_a_damaged_snapshot_is_counted_and_the_older_one_is_used(
    pool: NatsPool, engine: FakeEngine
) -> None:
    with relay_of(pool, worker_of(engine), snapshot_every=1) as relay:
        stored_all(relay, engine)
    name, data = newest_snapshot(pool)
    newer = f"{int(name[:20]) + 1:020d}-{name[21:]}"

    at(pool, lambda client: PoolSnapshots(client, pool).put(newer, data[:-1]))
    with relay_of(pool, worker_of(engine)) as relay:
        assert counters(relay)["restart_refused"] == {"content": 1}
        assert relay.client.statistics()["resume"]["restored"] == 1


def test_two_snapshots_are_kept_and_another_one_follows_so_many_bytes(
    pool: NatsPool, engine: FakeEngine
) -> None:
    with relay_of(pool, worker_of(engine), snapshot_every=1000) as relay:
        for times in range(1, 5):
            stored(relay, times)
            engine.run(MEANWHILE)
        until(
            lambda: at(pool, lambda client: PoolSnapshots(client, pool).names()),
            lambda names: len(names) == 2,
        )
        copy_of(pool, holds(engine))


def test_another_relay_takes_over_from_one_that_ends(pool: NatsPool, engine: FakeEngine) -> None:
    with relay_of(pool, worker_of(engine)) as first:
        stored(first)
        with relay_of(pool, worker_of(engine)) as second:
            caught_up(second.client, engine)
            until(lambda: counters(second), lambda own: "another relay" in own["reason"])
            assert counters(second)["queue"]["messages"] == 0
            first.close()
            engine.run(MEANWHILE)
            stored(second)
            copy = copy_of(pool, holds(engine))
            assert copy.index.seed == second.client.index.seed
            assert counters(second)["epochs"] == 1


async def _delete(stream: JetStreamContext, pool: NatsPool) -> None:
    await stream.delete_object_store(pool.bucket)


async def _empty(stream: JetStreamContext, pool: NatsPool) -> None:
    await stream.purge_stream(f"OBJ_{pool.bucket}")


async def _empty_but_for_notes(stream: JetStreamContext, pool: NatsPool) -> None:
    await stream.purge_stream(f"OBJ_{pool.bucket}", subject=f"$O.{pool.bucket}.C.>")


async def _change_notes(
    stream: JetStreamContext, pool: NatsPool, change: Callable[[bytes], bytes]
) -> None:
    notes = f"$O.{pool.bucket}.M.>"
    info = await stream.stream_info(f"OBJ_{pool.bucket}", subjects_filter=notes)
    for subject in info.state.subjects or ():
        note = await stream.get_last_msg(f"OBJ_{pool.bucket}", subject)
        changed = change(note.data or b"")
        await stream.publish(subject, changed, headers={"Nats-Rollup": "sub"})


DAMAGES: dict[str, Callable[[JetStreamContext, NatsPool], Awaitable[None]]] = {
    "deleted": _delete,
    "emptied": _empty,
    "without chunks": _empty_but_for_notes,
    "with another size noted": partial(
        _change_notes, change=lambda note: note.replace(b'"size"', b'"size": 1, "_"')
    ),
    "with notes that cannot be read": partial(_change_notes, change=lambda note: b"[" * 9_999),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_fault_a_bucket_that_is_damaged_gets_another_snapshot_though_no_engine_sends(
    pool: NatsPool, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(snapshots, "_LOOK_EVERY", 0.1)

    with relay_of(pool, worker_of(engine)) as relay:
        stored(relay)
        caught_up(relay.client, engine)
        at(pool, lambda client: DAMAGES[damage](client.jetstream(), pool))
        until(lambda: counters(relay)["snapshots_lost"] > 0)
        stored(relay, 2)
        copy_of(pool, holds(engine))
        own = counters(relay)
        assert (own["snapshots"], own["snapshots_lost"]) == (2, 1)
        assert own["epochs"] == 1


# What cannot work ---------------------------------------------------------------------------------


def test_a_stream_that_holds_something_else_is_refused(pool: NatsPool, engine: FakeEngine) -> None:
    at(
        pool,
        lambda client: client.jetstream().add_stream(name=pool.stream, subjects=["something.else"]),
    )
    with pytest.raises(ConfigurationError, match="delete it"):
        relay_of(pool, worker_of(engine))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pool": "a.b"}, "letters, digits"),
        ({"replicas": 2}, "1, 3 or 5"),
        ({"store": "disk"}, '"memory" or "file"'),
        ({"max_bytes": 1}, "8 MiB"),
        ({"snapshot_every": 0}, "snapshot_every"),
        ({"name": "a-b"}, "letters and digits"),
    ],
)
def test_values_that_cannot_work_are_refused_at_once(
    pool: NatsPool, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Relay([], pool.servers[0], **{"pool": pool.name, **options})
