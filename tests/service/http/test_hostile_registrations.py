"""Registrations that nobody means well with: they change nothing that the operator has named."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvindex import Client, Worker
from kvindex.service.app import MOST_CHANGES, app_routes
from kvindex.service.catalog import Partition
from kvindex.service.http.guards import Networks, parse_networks
from kvindex.service.registry import Registry
from kvindex.service.service import Service
from kvindex.wire.errors import EndpointRefusedError
from tests.live import PATIENCE
from tests.service.http.in_process import Answer, Asker, request

pytestmark = pytest.mark.service

OURS = "tcp://127.0.0.1:1"
EVIL = "tcp://127.0.0.1:2"
GONE = {"instance_id": 7, "model_name": "m"}


@pytest.fixture
def theirs(service: Service) -> Service:
    """A service with a worker that the operator named."""
    service.registry.add(Worker("7", OURS), Partition("m"), source="file workers.toml")
    return service


def body(endpoint: str, **fields: Any) -> dict[str, Any]:
    return {"instance_id": 7, "model_name": "m", "endpoint": endpoint, "block_size": 4, **fields}


def test_a_client_cannot_move_what_the_operator_named(theirs: Service, ask: Asker) -> None:
    status, said = ask.post("/register", body(EVIL))
    assert (status, "file workers.toml" in said["error"]) == (409, True)
    as_text = {"instance_id": "7", "modelname": "m", "endpoint": EVIL, "block_size": 4}
    assert ask.post("/register", as_text)[0] == 409
    assert [each.endpoint for each in theirs.catalog.registrations] == [OURS]


def test_a_client_may_register_what_the_operator_named_as_it_is(
    theirs: Service, ask: Asker
) -> None:
    assert ask.post("/register", body(OURS))[0] == 200
    assert [each.source for each in theirs.catalog.registrations] == ["file workers.toml"]


def test_a_client_cannot_unregister_what_the_operator_named(
    theirs: Service, ask: Asker, client: Client
) -> None:
    assert ask.post("/register", body(EVIL, dp_rank=1))[0] == 201
    assert ask.post("/unregister", GONE)[0] == 409
    for dp_rank, status in ((0, 409), (1, 200)):
        rank = {**GONE, "routing_group": "default", "dp_rank": dp_rank}
        assert ask.post("/unregister", rank)[0] == status
    assert ask.post("/unregister", {"instance_id": "7"})[0] == 409
    assert [each.endpoint for each in theirs.catalog.registrations] == [OURS]
    assert len(client.ranks) == 1
    theirs.registry.unregister("7")  # the operator takes it away
    assert not client.ranks


def test_the_operator_moves_what_a_client_named(theirs: Service, ask: Asker) -> None:
    assert ask.post("/register", body(EVIL, dp_rank=1))[0] == 201
    theirs.registry.add(Worker("7", {1: "tcp://127.0.0.1:3"}), Partition("m"), source="file x")
    endpoints = {each.dp_rank: each.endpoint for each in theirs.catalog.registrations}
    assert endpoints == {0: OURS, 1: "tcp://127.0.0.1:3"}


@pytest.mark.parametrize("name", ["a\nERROR kvindex: all is lost", "a\0b", "\x1b[2J", "\u202e"])
@pytest.mark.parametrize("what", ["instance_id", "modelname", "tenant_id"])
def test_a_name_that_would_forge_lines_of_a_log_is_refused(
    theirs: Service, ask: Asker, what: str, name: str
) -> None:
    fields = {"instance_id": "x", "modelname": "x", "endpoint": EVIL, "block_size": 4}
    assert ask.post("/register", {**fields, what: name})[0] == 400
    assert len(theirs.catalog.registrations) == 1


def test_many_instances_at_one_endpoint_cost_one_line(
    theirs: Service, ask: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10, 20):
        assert ask.post("/register", body(EVIL, instance_id=number))[0] == 201
    assert len([line for line in caplog.messages if "are both at" in line]) == 1


async def test_registrations_that_wait_for_names_delay_nobody_else(client: Client) -> None:
    waiting, go_on = threading.Semaphore(0), threading.Event()

    def dial(endpoint: str) -> str:
        waiting.release()
        assert go_on.wait(PATIENCE)
        raise EndpointRefusedError(f"{endpoint} has no address", reason="name")

    asker = Asker(app_routes(Service(client, Registry(client, dial=dial))))

    async def register(number: int) -> Answer:
        return await asker.answer(request("POST", "/register", body(EVIL, instance_id=number)))

    registering = [asyncio.ensure_future(register(n)) for n in range(MOST_CHANGES)]
    try:
        assert await asyncio.to_thread(waiting.acquire, timeout=PATIENCE)
        for path in ("/ready", "/workers", "/services"):
            reply = await asyncio.wait_for(asker.answer(request("GET", path)), PATIENCE)
            assert (path, reply.status_code) == (path, 200)
        refused = await asyncio.wait_for(register(-1), PATIENCE)
        assert (refused.status_code, refused.json()["reason"]) == (503, "busy")
    finally:
        go_on.set()
    answers = await asyncio.gather(*registering)
    assert [answer.status_code for answer in answers] == [403] * MOST_CHANGES


def test_every_refused_registration_says_why_in_a_word(client: Client) -> None:
    networks = Networks(parse_networks(["loopback"]), lambda host: [])
    registry = Registry(client, dial=networks.check, max_ranks=1)
    ask = Asker(app_routes(Service(client, registry)))
    assert ask.post("/register", body(OURS))[0] == 201
    for fields, status, reason in (
        ({"endpoint": "tcp://10.1.1.1:1"}, 403, "network"),
        ({"endpoint": "tcp://ghost:1"}, 403, "name"),
        ({"endpoint": "ipc:///tmp/x"}, 403, "transport"),
        ({"endpoint": "tcp://127.0.0.1"}, 400, "invalid"),
        ({"instance_id": 8}, 503, "room"),
        ({"model_name": "other"}, 409, "conflict"),
        ({"model_name": "x" * 20_000}, 413, "body"),
    ):
        answer = ask.post("/register", {**body(OURS), **fields})
        assert (answer[0], answer[1]["reason"], bool(answer[1]["error"])) == (status, reason, True)
    status, said = ask.post("/unregister", {"instance_id": 9, "model_name": "m"})
    assert (status, said["reason"]) == (404, "unknown")
