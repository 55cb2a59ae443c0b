"""Bodies of any form: each is answered, and none is our failure."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvindex import Client, Worker
from kvindex.service.catalog import BY_CLIENTS, Partition
from kvindex.service.dialects import answer, register, unregister
from kvindex.service.http.messages import Reply
from kvindex.service.registry import Registry
from kvindex.service.service import Service
from kvindex.wire.errors import EndpointRefusedError
from tests.service.http.scenes import request

pytestmark = pytest.mark.service

NAMES = [
    "model",
    "model_name",
    "modelname",
    "token_ids",
    "routing_group",
    "tenant_id",
    "lora_name",
    "cache_salt",
    "instance_id",
    "hit_detail",
    "block_size",
    "dp_rank",
    "endpoint",
    "replay_endpoint",
    "medium_endpoints",
    "hash_profile",
    "type",
]
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["m", "default", "1", "tcp://h:1", "x", ""])
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(NAMES) | st.integers(0, 3)
BODIES = st.dictionaries(KEYS, VALUES, max_size=8)


def dial(endpoint: str) -> str:
    raise EndpointRefusedError(f"{endpoint} is not allowed", reason="network")


@pytest.fixture(scope="module")
def service() -> Any:
    with Client() as client:
        service = Service(client, Registry(client, dial=dial))
        for name in ("1", "2"):
            worker = Worker(name, "tcp://127.0.0.1:9")
            service.registry.add(worker, Partition("m" * int(name)), source=BY_CLIENTS)
        yield service


@pytest.mark.parametrize("ask", [answer, register, unregister])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES | VALUES)
def test_any_body_is_answered(service: Service, ask: Any, body: Any) -> None:
    encoded = msgspec.json.encode(body)
    reply: Reply = ask(service, request("POST", "/", encoded, content_type="application/json"))
    assert reply.status < 500


@pytest.mark.parametrize("ask", [answer, register, unregister])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=60), kind=st.sampled_from(["msgpack", "json", "octet-stream", ""]))
def test_any_bytes_are_answered(service: Service, ask: Any, body: bytes, kind: str) -> None:
    question = request("POST", "/", body, content_type=f"application/{kind}" if kind else None)
    assert ask(service, question).status < 500
