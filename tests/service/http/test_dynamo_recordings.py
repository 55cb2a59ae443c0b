"""All that was recorded of Dynamo's indexer, asked of ours: equal codes and values.

DEVIATIONS says where we differ on purpose, and why; docs/service.md has the same table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvindex import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Client,
    EventBatch,
    Rank,
    RankStatus,
    State,
    ZmqEventPublisher,
)
from kvindex.service.app import app_routes
from kvindex.service.service import Service
from tests.live import REPLAYS, until
from tests.service.http.scenes import Asker

pytestmark = pytest.mark.service

RECORDED = json.loads(
    (Path(__file__).parents[2] / "data/http/dynamo-indexer-1.6.1.json").read_text()
)["recorded"]
TOKENS = list(range(1, 17))
OURS = {"state", "complete", "lag", "ranks", "reason", "dp_rank"}  # fields beside theirs


class Deviation(NamedTuple):
    """What we answer instead: a status, and a function from their body to ours (None: any)."""

    why: str
    status: int
    body: Callable[[Any], Any] | None


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def without_40(workers: Any) -> Any:
    return [worker for worker in workers if worker["instance_id"] != 40]


def all_active(workers: Any) -> Any:
    for worker in workers:
        for listener in worker["listeners"].values():
            listener["status"] = "active"
    return workers


def answer(**instance: Any) -> Callable[[Any], Any]:
    scores = {"1": {dp_rank: tokens for dp_rank, tokens in instance["dp"].items() if tokens}}
    return always({"scores": scores, "frequencies": [], "instances": {"1": instance}})


def with_models(*models: str) -> Callable[[Any], Any]:
    return lambda theirs: {**theirs, "models": list(models)}


OK = always({"status": "ok"})
NO_SIZE = "a block has tokens: block_size 0 is refused"
NOT_SERVED = {"/query_by_hash", "/peers", "/register_peer", "/deregister_peer"}
NO_SUCH = "kvindex keeps no hashes of tokens, and a new replica starts from GET /snapshot"
NAMES = "a 404 for a model also names models that somebody is registered for"
BY_RFC = {"longest_matched": 16, "GPU": 12, "CPU": 16, "DISK": 16, "DP": {"0": 16, "1": 4}}
NO_PAUSE = "there is no switch for tests: nobody may stop a listener over HTTP"

DEVIATIONS = {
    "query_unknown_model": Deviation(NAMES, 404, with_models()),
    **dict.fromkeys(
        ("query_routing_group_unknown", "query_model_gone"),
        Deviation(NAMES, 404, with_models("m", "m9")),
    ),
    "register_duplicate_same": Deviation(
        "registering the same again is no conflict: a client that repeats it would loop", 200, OK
    ),
    "register_block_size_zero": Deviation(NO_SIZE, 400, None),
    **dict.fromkeys(
        ("workers_after_register", "workers_active", "workers_filter_tenant", "workers_end"),
        Deviation(NO_SIZE, 200, without_40),
    ),
    "query_rfc_field_model": Deviation(
        "`model` in the place of `model_name` is dialect B, and answered in it",
        200,
        always({"default": {"1": BY_RFC}}),
    ),
    "query_salt": Deviation(
        "blocks under a salt match the queries with that salt",
        200,
        answer(longest_matched=4, gpu=4, cpu=4, disk=4, dp={"0": 4}),
    ),
    "query_after_restore_middle": Deviation(
        "a hole that is filled is whole again: 12 tokens are on the device, not 8",
        200,
        answer(longest_matched=16, gpu=12, cpu=16, disk=16, dp={"0": 12, "1": 4}),
    ),
    "query_after_clear": Deviation(
        "AllBlocksCleared leaves what vLLM's connector holds on the host",
        200,
        answer(longest_matched=16, gpu=4, cpu=16, disk=16, dp={"0": 0, "1": 4}),
    ),
    **dict.fromkeys(
        ("dump_empty", "dump_with_blocks"),
        Deviation("GET /dump is NDJSON for people, without hashes", 200, None),
    ),
    **dict.fromkeys(
        (recorded["name"] for recorded in RECORDED if recorded["path"] in NOT_SERVED),
        Deviation(NO_SUCH, 404, None),
    ),
    **dict.fromkeys(
        ("test_pause", "test_pause_again", "test_resume", "test_resume_unknown"),
        Deviation(NO_PAUSE, 404, None),
    ),
    "workers_paused": Deviation(NO_PAUSE, 200, all_active),
    "reopen_logs": Deviation("logs go to stderr: there is no file to open again", 404, None),
    "metrics": Deviation("our own names; theirs with --compat-metrics", 200, None),
}


class Replayed(NamedTuple):
    """What we answered to one recorded request, the ports as they were recorded."""

    status: int
    body: Any
    headers: dict[str, str]


class Engines:
    """Publishers in the places of those that were recorded, by their recorded ports."""

    def __init__(self, stack: ExitStack) -> None:
        self.ports: dict[int, int] = {}
        self._publishers: dict[int, ZmqEventPublisher] = {}
        self.published: dict[Rank, int] = {}
        for port, rank in ((19557, 0), (19558, 1), (19560, 0), (19561, 0), (19571, 0)):
            publisher = stack.enter_context(
                ZmqEventPublisher(rank, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
            )
            self._publishers[port] = publisher
            self.ports[port] = int(publisher.endpoint.rpartition(":")[2])
            self.ports[port + 100] = int(str(publisher.replay_endpoint).rpartition(":")[2])

    def publish(self, port: int, *events: Any) -> None:
        rank = Rank("1", port - 19557)
        self._publishers[port].publish(EventBatch(ts=1.0, events=list(events)))
        self.published[rank] = self.published.get(rank, -1) + 1

    def before(self, name: str) -> None:
        """Publish what was published before the request of this name."""
        if name == "query_full":
            self.publish(19557, stored([101, 102, 103], 12))
            self.publish(19558, stored([201], 4))
            self.publish(19557, stored([101, 102, 103, 104], 16, medium="CPU"))
            self.publish(19557, stored([301], 4, lora_name="lora-a"))
            self.publish(19557, stored([401], 4, extra_keys=[["salt-x"]]))
        elif name == "query_after_remove_middle":
            self.publish(19557, BlockRemoved(block_hashes=[102], medium="GPU"))
        elif name == "query_after_restore_middle":
            again = BlockStored(
                block_hashes=[102],
                parent_block_hash=101,
                token_ids=[5, 6, 7, 8],
                block_size=4,
                medium="GPU",
            )
            self.publish(19557, again)
        elif name == "query_after_clear":
            self.publish(19557, AllBlocksCleared())


def stored(hashes: list[int | bytes], tokens: int, **fields: Any) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        token_ids=TOKENS[:tokens],
        block_size=4,
        **{"medium": "GPU", **fields},
    )


def replay(client: Client, engines: Engines, asker: Asker) -> dict[str, Replayed]:
    answers = {}
    for recorded in RECORDED:
        name = recorded["name"]
        engines.before(name)
        settle(client, engines)
        response = asker.send(
            recorded["method"],
            recorded["path"],
            headers=recorded["request_headers"],
            content=body_of(recorded, engines.ports),
        )
        text = response.text
        for port, actual in engines.ports.items():
            text = text.replace(f"127.0.0.1:{actual}", f"127.0.0.1:{port}")
        is_json = response.headers.get("content-type") == "application/json"
        answers[name] = Replayed(
            response.status, json.loads(text) if is_json else text, dict(response.headers)
        )
    return answers


def all_live(statuses: Mapping[Rank, RankStatus]) -> bool:
    return all(status.state is State.LIVE for status in statuses.values())


def settle(client: Client, engines: Engines) -> None:
    """Wait until every rank is live, and those of instance 1 have applied what was published."""
    until(client.statuses, all_live)
    until(
        client.statuses,
        lambda statuses: all(
            statuses[rank].seq == last
            for rank, last in engines.published.items()
            if rank in statuses and statuses[rank].replay_endpoint  # else it came too late
        ),
    )


def body_of(recorded: dict[str, Any], ports: dict[int, int]) -> bytes | None:
    body = recorded["request_body"]
    if body is None:
        return None
    if isinstance(body, str) and body.startswith("<"):
        return long_body(recorded["path"], int(body.strip("<> bytes")))
    text = body if isinstance(body, str) else json.dumps(body)
    for port, actual in ports.items():
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{actual}")
    return text.encode()


def long_body(path: str, size: int) -> bytes:
    field = "token_ids" if path == "/query" else "block_hashes"
    body = f'{{"model_name":"m","{field}":[{"9," * (size // 2)}'.encode()[: size - 3]
    return body.rstrip(b",") + b",9]}" if body.endswith(b",") else body + b"]}"


def no_metrics(workers: Any = None, *, per_rank: bool = True) -> tuple[bytes, str]:
    return b"", "text/plain"


@pytest.fixture(scope="module")
def replayed() -> Iterator[dict[str, Replayed]]:
    with ExitStack() as stack:
        engines = Engines(stack)
        client = stack.enter_context(Client(replay_policy=REPLAYS, probe_interval=0.3))
        app = app_routes(Service(client), metrics=no_metrics)
        yield replay(client, engines, Asker(app))


def stripped(value: Any) -> Any:
    """Leave out what is ours."""
    if isinstance(value, dict):
        return {k: stripped(v) for k, v in value.items() if k not in OURS}
    return [stripped(item) for item in value] if isinstance(value, list) else value


def in_order(value: Any) -> Any:
    """Sort a list of workers, whose order says nothing."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sorted(value, key=lambda worker: str(worker.get("instance_id")))
    return value


@pytest.mark.parametrize("recorded", RECORDED, ids=[r["name"] for r in RECORDED])
def test_a_recorded_request_gets_the_recorded_answer(
    recorded: dict[str, Any], replayed: dict[str, Replayed]
) -> None:
    name, theirs = recorded["name"], json.loads(json.dumps(recorded["response_body"]))
    status, compare = recorded["status"], True
    deviation = DEVIATIONS.get(name)
    if deviation is not None:
        status, compare = deviation.status, deviation.body is not None
        theirs = deviation.body(theirs) if deviation.body else theirs
    ours = replayed[name]
    assert ours.status == status, ours.body
    if recorded["response_content_type"] == "application/json" or deviation:
        if compare:
            assert in_order(stripped(ours.body)) == in_order(theirs)
    elif not recorded["response_content_type"]:
        assert ours.body == ""
    assert ours.headers.get("allow") == recorded["response_headers"].get("allow")


def test_every_deviation_is_one() -> None:
    assert DEVIATIONS.keys() <= {recorded["name"] for recorded in RECORDED}
