"""Bodies that nobody means well with: each is refused with a 4xx, and nothing of it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvindex import ConfigurationError
from kvindex.service.explaining import read_question
from kvindex.service.http.messages import RefusedError
from kvindex.service.service import Service
from kvindex.service.state import read_registrations, registrations_path
from tests.service.http.in_process import Asker

pytestmark = pytest.mark.service

DEEP = b"[" * 100_000 + b"]" * 100_000
PACKED = {"content-type": "application/msgpack"}
CONDUCTOR = {
    "endpoint": "tcp://127.0.0.1:1",
    "type": "vLLM",
    "modelname": "m",
    "instance_id": "c",
    "block_size": 4,
    "dp_rank": 0,
}


@pytest.mark.parametrize("path", ["/query", "/register", "/unregister", "/outcomes"])
def test_what_is_nested_too_deep_is_a_400(ask: Asker, path: str) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"x":' + DEEP[:6000] + DEEP[-6000:] + b"}"
    assert ask.send("POST", path, content=body, headers=headers).status_code == 400
    if path != "/outcomes":  # which is JSON only
        packed = b"\x81\xa1x" + b"\x91" * 6000 + b"\xc0"
        assert ask.send("POST", path, content=packed, headers=PACKED).status_code == 400


@pytest.mark.parametrize("body", [b'{"x":' + DEEP + b"}", b'{"model":"\xff","token_ids":[]}'])
def test_a_question_that_cannot_be_read_is_a_400(body: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        read_question(body)
    assert refused.value.reply.status == 400


@pytest.mark.parametrize("name", ["model", "tenant_id"])
@pytest.mark.parametrize("value", [[1], {}, msgspec.msgpack.Ext(1, b""), 7])
def test_a_msgpack_query_whose_names_are_no_strings_is_a_400(
    ask: Asker, name: str, value: Any
) -> None:
    fields = {"model": "m", "block_size": 4, "token_ids": b"", name: value}
    response = ask.packed("/query", fields)
    answer = msgspec.msgpack.decode(response.content)
    assert (response.status_code, answer["field"]) == (400, name)


@pytest.mark.parametrize(
    "profile",
    [{"a": msgspec.msgpack.Ext(5, b"x")}, {(1, 2): 3}, {1: "x"}, {"a": {"b": 1}}, {"a": b"\xff"}],
)
def test_a_profile_that_cannot_be_shown_again_is_refused_and_not_kept(
    service: Service, ask: Asker, profile: Any
) -> None:
    body = msgspec.msgpack.encode({**CONDUCTOR, "hash_profile": profile})
    response = ask.send("POST", "/register", content=body, headers=PACKED)
    assert response.status_code == 400
    assert service.catalog.registrations == ()


def test_a_profile_as_clients_send_it_is_shown_again(service: Service, ask: Asker) -> None:
    profile = {"strategy": "vllm_v1", "python_hash_seed": "0", "version": 1, "x": None}
    body = msgspec.msgpack.encode({**CONDUCTOR, "hash_profile": profile})
    assert ask.send("POST", "/register", content=body, headers=PACKED).status_code == 200
    assert ask.get("/services")[1]["services"][0]["HashProfile"] == profile


def test_a_registration_of_many_bytes_is_a_413_and_is_not_kept(
    service: Service, ask: Asker
) -> None:
    fields = {"instance_id": "x" * 20_000, "modelname": "m", "block_size": 4}
    status, _ = ask.post("/register", {**fields, "endpoint": "tcp://127.0.0.1:1"})
    assert status == 413
    assert service.catalog.registrations == ()


def test_a_long_name_that_nobody_knows_is_not_repeated_in_full(ask: Asker) -> None:
    status, answer = ask.post("/query", {"token_ids": [1], "model_name": "x" * 100_000})
    assert status == 404
    assert 200 < len(answer["error"]) < 500


@pytest.mark.parametrize("data", [b'[{"x": "\xff"}]', DEEP, b"{}", b"", b"[1]"])
def test_saved_registrations_that_are_none_are_a_clear_error(tmp_path: Path, data: bytes) -> None:
    registrations_path(tmp_path / "state").write_bytes(data)
    with pytest.raises(ConfigurationError, match="holds no registrations"):
        read_registrations(tmp_path / "state")
