"""Clients of RFC #1403, and what all dialects share."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvindex import Client
from kvindex.service.app import app_routes
from kvindex.service.service import Service
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, caught_up
from tests.service.http.scenes import Asker

pytestmark = pytest.mark.service

PROMPT = list(range(64))


class Fleet:
    """One instance of two ranks; rank 0 has the prompt, rank 1 nothing."""

    def __init__(self, engines: list[FakeEngine], client: Client, dialect: str = "auto") -> None:
        self.engines = engines
        self.client = client
        self.asker = Asker(app_routes(Service(client, dialect=dialect)))

    def register(self, engine: FakeEngine, **fields: Any) -> dict[str, Any]:
        return {
            "endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "type": "vLLM",
            "modelname": "m",
            "instance_id": "vllm-prefill-7",
            "block_size": 16,
            "dp_rank": engine.rank.dp_rank,
            **fields,
        }

    def follow(self) -> None:
        """Register each engine, and wait until all of their events are applied."""
        for engine in self.engines:
            assert self.asker.post("/register", self.register(engine))[0] == 200
        self.caught_up()

    def caught_up(self) -> None:
        caught_up(self.client, *self.engines)


@pytest.fixture
def fleet(client: Client) -> Iterator[Fleet]:
    with FakeEngine("vllm-prefill-7") as zero, FakeEngine("vllm-prefill-7", dp_rank=1) as other:
        zero.serve(PROMPT)
        yield Fleet([zero, other], client)


def without_trust(instance: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in instance.items() if k not in ("state", "complete", "lag", "ranks")}


# B: RFC #1403 ---------------------------------------------------------------------------------


def test_an_rfc_client_registers_asks_and_leaves(fleet: Fleet) -> None:
    ask = fleet.asker
    for engine in fleet.engines:
        body = fleet.register(engine, lora_name="", additionalsalt="w8a8", tenant_id="t")
        done = {"status": "registered successfully", "instance_id": "vllm-prefill-7"}
        assert ask.post("/register", body) == (200, done)
        assert ask.post("/register", body) == (200, done)
    fleet.caught_up()
    query = {"model": "m", "token_ids": PROMPT, "block_size": 16, "tenant_id": "t"}
    status, answer = ask.post("/query", query)
    assert status == 200
    instance = answer["t"]["vllm-prefill-7"]
    assert without_trust(instance) == {
        "longest_matched": 64,
        "GPU": 64,
        "CPU": 64,
        "DISK": 64,
        "DP": {"0": 64},
    }
    assert (instance["state"], set(instance["ranks"])) == ("live", {"0", "1"})
    assert ask.post("/query", {**query, "instance_id": "other"}) == (200, {"t": {}})
    assert ask.post("/query", {**query, "model": "nope"}) == (200, {"t": {}})
    assert ask.get("/services")[1]["count"] == 2
    gone = {"instance_id": "vllm-prefill-7", "modelname": "m", "tenant_id": "t", "dp_rank": 1}
    assert ask.post("/unregister", gone) == (
        200,
        {"status": "unregistered successfully", "removed_instances": ["vllm-prefill-7|t|1"]},
    )
    assert ask.post("/unregister", gone)[0] == 404


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"instance_id": 7}, 422),
        ({"block_size": 0}, 422),
        ({"dp_rank": -1}, 422),
        ({"endpoint": None}, 400),
        ({"endpoint": "nowhere"}, 400),
    ],
)
def test_what_an_rfc_registration_cannot_be(
    fleet: Fleet, fields: dict[str, Any], status: int
) -> None:
    body = fleet.register(fleet.engines[0], **fields)
    assert fleet.asker.post("/register", body)[0] == status
    assert not fleet.client.ranks


# All ------------------------------------------------------------------------------------------


def test_raw_tokens_are_asked_for_in_the_url(fleet: Fleet) -> None:
    fleet.follow()
    raw: dict[str, Any] = {
        "content": array("I", PROMPT).tobytes(),
        "headers": {"content-type": "application/octet-stream"},
    }
    answer = fleet.asker.send("POST", "/query?model_name=m", **raw).json
    assert answer["scores"] == {"vllm-prefill-7": {"0": 64}}
    assert fleet.asker.send("POST", "/query?model=m", **raw).json.keys() == {"default"}
    assert fleet.asker.send("POST", "/query", **raw).status == 422
    raw["content"] = b"abc"
    assert fleet.asker.send("POST", "/query?model=m", **raw).status == 422


@pytest.mark.parametrize("path", ["/query", "/register", "/unregister"])
def test_bodies_in_msgpack_are_refused_with_what_is_accepted(fleet: Fleet, path: str) -> None:
    packed = {"content-type": "application/msgpack"}
    response = fleet.asker.send("POST", path, content=b"\x80", headers=packed)
    assert (response.status, "application/json" in response.text) == (415, True)


@pytest.mark.parametrize(("dialect", "other"), [("dynamo", "model"), ("rfc", "model_name")])
def test_a_dialect_can_be_forced(client: Client, dialect: str, other: str) -> None:
    forced = Fleet([], client, dialect)
    assert forced.asker.post("/query", {other: "m", "token_ids": [1]})[0] == 422


def test_a_rank_that_is_registered_elsewhere_has_moved(fleet: Fleet) -> None:
    zero, other = fleet.engines
    fleet.asker.post("/register", fleet.register(zero))
    caught_up(fleet.client, zero)
    assert fleet.asker.post("/register", fleet.register(other, dp_rank=0))[0] == 200
    fleet.client.wait_live(PATIENCE)
    assert [status.endpoint for status in fleet.client.statuses().values()] == [other.endpoint]


def test_a_dump_has_a_line_for_each_rank_and_block(fleet: Fleet) -> None:
    fleet.follow()
    lines = fleet.asker.send("GET", "/dump").text.splitlines()
    entries = [msgspec.json.decode(line) for line in lines]
    assert [(each["rank"], each["blocks"]) for each in entries if "rank" in each] == [
        ("vllm-prefill-7/0", 4),
        ("vllm-prefill-7/1", 0),
    ]
    assert sorted(each["depth"] for each in entries if "depth" in each) == [0, 1, 2, 3]
    assert len(fleet.asker.send("GET", "/dump?blocks=1").text.splitlines()) == 3
    assert fleet.asker.get("/dump?blocks=-1")[0] == 422
