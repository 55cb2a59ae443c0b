"""The app over a client and an engine: what is registered is answered for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvindex import (
    BusyError,
    Client,
    ConfigurationError,
    KVIndexError,
    Rank,
    Worker,
)
from kvindex.service.catalog import Partition
from kvindex.service.registry import Registry
from kvindex.service.service import Service
from kvindex.testing import FakeEngine
from kvindex.wire.errors import RegistrationError
from tests.live import PATIENCE, caught_up, worker_of
from tests.service.http.in_process import Asker, body_of

pytestmark = pytest.mark.service

PROMPT = list(range(64))


def test_what_is_registered_is_answered_for_until_it_is_unregistered(
    client: Client, ask: Asker
) -> None:
    with FakeEngine("1") as engine:
        engine.serve(PROMPT)
        assert ask.post("/register", body_of(engine)) == (201, {"status": "ok"})
        assert ask.post("/register", body_of(engine)) == (200, {"status": "ok"})
        caught_up(client, engine)
        query = {"token_ids": PROMPT, "model_name": "m"}
        status, answer = ask.post("/query", query)
        assert (status, answer["scores"]) == (200, {"1": {"0": 64}})
        [worker] = ask.get("/workers")[1]
        assert (worker["instance_id"], worker["status"]) == (1, "active")
        assert ask.get("/ready")[0] == 200
        gone = {"instance_id": 1, "model_name": "m"}
        assert ask.post("/unregister", gone) == (200, {"status": "ok"})
        assert ask.post("/query", query)[0] == 404
        assert not client.ranks


@pytest.mark.parametrize("error", [BusyError(1.0), ConfigurationError("no room")])
def test_what_one_cannot_subscribe_to_is_registered_and_subscribed_to_by_nobody(
    client: Client, error: KVIndexError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(worker: Worker) -> None:
        raise error

    monkeypatch.setattr(client, "add", add)
    registry = Registry(client)
    with FakeEngine("1") as engine, pytest.raises((BusyError, RegistrationError)):
        registry.add(worker_of(engine), Partition("m"))
    assert not registry.catalog.registrations
    assert not client.ranks


def test_what_a_late_call_has_subscribed_to_is_registered(client: Client) -> None:
    registry = Registry(client)
    with FakeEngine("1", dp_rank=3) as engine:
        client.add(worker_of(engine))
        registry.add(worker_of(engine), Partition("m"))
        [(_, status)] = registry.statuses()
        assert status is not None
        assert status.endpoint == engine.endpoint


def test_registering_rank_after_rank_looks_at_no_other_rank(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    for name in ("status", "statuses"):
        monkeypatch.setattr(client, name, lambda *_: looked.append(1))
    registry = Registry(client)
    endpoints = {number: f"inproc://nobody-publishes-at-{number}" for number in range(64)}
    registry.add(Worker("w", endpoints), Partition("m"))
    assert len(client.ranks) == 64
    assert not looked


def test_whoever_asks_for_standings_waits_for_no_registration(
    client: Client, service: Service
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    with ThreadPoolExecutor() as pool:
        held = pool.submit(client.subscriber.call, hold)
        assert begun.wait(PATIENCE)
        worker = Worker("w", "inproc://nobody-publishes-here")
        entered = threading.Event()
        service.registry.on_change(lambda _: entered.set())
        registered = pool.submit(service.registry.add, worker, Partition("m"))
        assert entered.wait(PATIENCE)
        try:
            standing = pool.submit(service.standing).result(PATIENCE)
            assert list(standing.waiting) == [Rank("w")]
            assert not registered.done()
        finally:
            go_on.set()
        held.result(PATIENCE)
        registered.result(PATIENCE)


def test_blocks_have_the_size_that_the_events_tell_where_nobody_told_it(
    client: Client, service: Service, ask: Asker
) -> None:
    with FakeEngine("1", dp_rank=3) as engine:
        service.registry.add(worker_of(engine), Partition("m"))
        assert [each["block_size"] for each in ask.get("/workers")[1]] == [0]
        engine.serve(PROMPT)
        caught_up(client, engine)
        assert [each["block_size"] for each in ask.get("/workers")[1]] == [16]
        assert [each["BlockSize"] for each in ask.get("/services")[1]["services"]] == [16]


def test_who_asks_for_an_unknown_model_learns_some_that_are_known(
    service: Service, ask: Asker
) -> None:
    for number in range(25):
        worker = Worker(f"w{number}", f"inproc://nobody-publishes-at-{number}")
        service.registry.add(worker, Partition(f"m{number:02}"))
    status, answer = ask.post("/query", {"token_ids": [1], "model_name": "M00"})
    assert (status, answer["error"]) == (404, "no indexer for model=M00 routing_group=default")
    assert answer["models"] == [f"m{number:02}" for number in range(20)]


def test_a_worker_that_nobody_registered_is_never_answered_for(client: Client, ask: Asker) -> None:
    with FakeEngine("1") as engine, FakeEngine("2") as other:
        for each in (engine, other):
            each.serve(PROMPT)
        ask.post("/register", body_of(engine))
        client.add(worker_of(other))
        caught_up(client, engine, other)
        answer = ask.post("/query", {"token_ids": PROMPT, "model_name": "m"})[1]
        assert set(answer["instances"]) == {"1"}


def test_a_rank_that_its_batches_name_otherwise_counts_for_its_instance(
    client: Client, ask: Asker
) -> None:
    with FakeEngine("1", dp_rank=3) as engine:
        engine.serve(PROMPT)
        ask.post("/register", body_of(engine, dp_rank=0))
        caught_up(client, engine)
        answer = ask.post("/query", {"token_ids": PROMPT, "model_name": "m"})[1]
        assert answer["scores"] == {"1": {"3": 64}}
        group = {"routing_group": "default", "dp_rank": 0}
        ask.post("/unregister", {"instance_id": 1, "model_name": "m", **group})
        assert Rank("1", 3) not in client.ranks
