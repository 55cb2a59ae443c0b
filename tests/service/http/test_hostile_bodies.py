"""Bodies that nobody means well with: each is refused with a 4xx, and nothing of it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvindex import ConfigurationError
from kvindex.service.http.messages import RefusedError
from kvindex.service.page import read_question
from kvindex.service.service import Service
from kvindex.service.state import read_registrations, registrations_path
from tests.service.http.in_process import Asker

pytestmark = pytest.mark.service

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("path", ["/query", "/register", "/unregister", "/outcomes"])
def test_what_is_nested_too_deep_is_a_400(ask: Asker, path: str) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"x":' + DEEP[:6000] + DEEP[-6000:] + b"}"
    assert ask.send("POST", path, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("body", [b'{"x":' + DEEP + b"}", b'{"model":"\xff","token_ids":[]}'])
def test_a_question_that_cannot_be_read_is_a_400(body: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        read_question(body)
    assert refused.value.reply.status == 400


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
