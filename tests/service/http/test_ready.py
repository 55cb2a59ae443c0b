"""When a server is ready, and what it says of ranks that are not live."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvindex import Client, State, Worker
from kvindex.service.catalog import Partition
from kvindex.service.service import Service
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, caught_up, until, worker_of
from tests.service.http.in_process import Asker

pytestmark = pytest.mark.service

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
