"""The app over a client and an engine: what is registered is answered for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvindex import (
    BusyError,
    Client,
    ConfigurationError,
    KVIndexError,
    Rank,
    State,
    Worker,
)
from kvindex.service.catalog import Partition
from kvindex.service.registry import Registry
from kvindex.service.service import Service
from kvindex.testing import FakeEngine
from kvindex.wire.errors import RegistrationError
from tests.live import PATIENCE, caught_up, until, worker_of
from tests.service.http.scenes import Asker, body_of

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


MODEL = Partition("m")
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture
def engine(client: Client, service: Service) -> Iterator[FakeEngine]:
    """An engine that is registered and live."""
    with FakeEngine("live") as engine:
        service.registry.add(worker_of(engine), MODEL)
        caught_up(client, engine)
        yield engine


def test_a_server_is_ready_once_each_rank_was_live_and_strict_asks_for_now(
    service: Service, ask: Asker, now: list[float]
) -> None:
    assert ask.get("/ready")[0] == 200
    service.registry.add(Worker("dead", NOWHERE), MODEL)
    status, said = ask.get("/ready")
    assert (status, list(said["waiting"])) == (503, ["dead/0"])
    now[0] = 31.0  # since the server began
    status, said = ask.get("/ready")
    assert (status, list(said["given_up"])) == (200, ["dead/0"])
    assert said["given_up"]["dead/0"]
    assert ask.get("/ready?strict=1")[0] == 503


def test_ranks_are_waited_for_since_the_server_began_not_since_somebody_asked(
    service: Service, now: list[float]
) -> None:
    service.registry.add(Worker("dead", NOWHERE), MODEL)
    now[0] = 31.0
    assert service.standing().ready


def test_a_new_rank_that_is_not_live_yet_takes_nobodys_answers_away(
    engine: FakeEngine, service: Service, ask: Asker, now: list[float]
) -> None:
    for seconds in (10.0, 1000.0):  # before the server's patience is over, and long after
        now[0] = seconds
        assert ask.get("/ready")[0] == 200
        service.registry.add(Worker(f"new{seconds:g}", NOWHERE), MODEL)
        status, said = ask.get("/ready")
        assert (status, said["live"], f"new{seconds:g}/0" in said["given_up"]) == (200, False, True)


def test_one_standing_answers_all_who_ask_at_once(
    service: Service, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.registry.add(Worker("dead", NOWHERE), MODEL)
    looks: list[int] = []
    statuses = service.statuses

    def look() -> Any:
        looks.append(1)
        return statuses()

    monkeypatch.setattr(service, "statuses", look)
    with ThreadPoolExecutor(8) as pool:
        for seconds, is_ready in ((0.0, False), (29.0, False), (30.0, True)):
            now[0] = seconds
            standings = [pool.submit(service.standing) for _ in range(100)]
            assert {each.result(PATIENCE).ready for each in standings} == {is_ready}
    assert len(looks) == 3


def test_a_rank_that_was_live_is_behind_later_even_if_nobody_asked_before(
    engine: FakeEngine, client: Client, ask: Asker
) -> None:
    engine.close()
    until(
        client.statuses, lambda now: all(status.state is not State.LIVE for status in now.values())
    )
    status, said = ask.get("/ready")
    assert (status, said["live"], list(said["behind"])) == (200, False, ["live/0"])


def test_an_engine_that_is_not_found_is_waited_for_and_named(
    service: Service, ask: Asker, now: list[float]
) -> None:
    service.missing = lambda: {"http://127.0.0.1:1": "refuses the connection"}
    status, said = ask.get("/ready")
    assert (status, said["missing"]) == (503, {"http://127.0.0.1:1": "refuses the connection"})
    now[0] = 31.0
    assert ask.get("/ready")[0] == 200
    assert ask.get("/ready?strict=1")[0] == 503
