"""The fake engine's streamed answers, and its faults."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvindex.testing import FakeEngine, HttpEngine, HttpFaults
from kvindex.testing.http_routes import Response
from kvindex.testing.http_server import Server
from tests.live import until

pytestmark = pytest.mark.e2e

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}


@pytest.fixture
def engine() -> Iterator[HttpEngine]:
    with FakeEngine(block_size=4) as cache, HttpEngine(cache) as server:
        yield server


def post(engine: HttpEngine, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=120)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        names["content-type"] = "application/json"
        connection.request("POST", "/v1/chat/completions", json.dumps(body), names)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def events(data: bytes) -> list[Any]:
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part if part == b"[DONE]" else json.loads(part) for part in parts]


def test_a_chat_streams_its_role_then_its_tokens_then_its_end(engine: HttpEngine) -> None:
    status, data = post(engine, CHAT)
    role, *tokens, done = events(data)
    assert (status, done) == (200, b"[DONE]")
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None, None, "length"]


def test_usage_is_an_event_of_its_own_if_it_is_wanted(engine: HttpEngine) -> None:
    body = {**CHAT, "n": 2, "stream_options": {"include_usage": True}}
    usage = events(post(engine, body)[1])[-2]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 6
    assert usage["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("kind", ["reset", "reset_after_head", "cut", "garbage"])
def test_a_fault_breaks_the_answer(engine: HttpEngine, kind: Any) -> None:
    engine.faults = HttpFaults(kind=kind, after=1)
    with pytest.raises((http.client.HTTPException, OSError)):
        post(engine, CHAT)


def test_half_a_head_ends_before_its_empty_line(engine: HttpEngine) -> None:
    engine.faults = HttpFaults(kind="half_head")
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n\r\n")
        with client.makefile("rb") as answer:
            assert answer.read() == b"HTTP/1.1 200 OK\r\ncontent-ty"


def test_a_header_names_the_fault_of_one_request(engine: HttpEngine) -> None:
    assert post(engine, CHAT, x_fake_faults='{"kind":"503"}')[0] == 503
    status, data = post(engine, CHAT, x_fake_faults='{"kind":"error_event","after":1}')
    assert (status, "error" in events(data)[2]) == (200, True)
    assert post(engine, CHAT, x_fake_faults="?")[0] == 400
    assert post(engine, CHAT)[0] == 200


def test_a_client_that_closes_cancels_its_stream(engine: HttpEngine) -> None:
    engine.faults = HttpFaults(ttft=600.0)
    host, port = engine.url.removeprefix("http://").split(":")
    body = json.dumps(CHAT).encode()
    with socket.create_connection((host, int(port)), timeout=120) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert client.recv(15) == b"HTTP/1.1 200 OK"  # before the first token
    until(lambda: engine.counters.get("cancelled") == 1)
    until(lambda: engine.counters["open"] == 0)


def test_a_connection_that_comes_while_the_server_closes_is_closed() -> None:
    """Found as an unclosed transport, which failed whichever test ran when it was collected."""
    late: list[socket.socket] = []
    asked = threading.Event()

    def answer(*_: object) -> Response:
        late.append(socket.create_connection(server.address))
        with suppress(RuntimeError):  # the thread cannot wait for itself; it stops all the same
            server.close()
        asked.set()
        return Response.of_json({})

    server = Server("127.0.0.1", 0, answer)
    with socket.create_connection(server.address, timeout=120) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert asked.wait(120)
        server.close()
        gc.collect()  # what is left open now is an error
        with late[0], suppress(ConnectionError):
            late[0].settimeout(120)
            assert late[0].recv(1) == b""
