"""Engines asked over HTTP: what they say, and what is made of servers that say nothing useful."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from kvindex import ConfigurationError, PublisherAddress
from kvindex.subscribe.discovery import DiscoveryError, ask_engine
from tests.canned import CannedServer, Reply
from tests.live import PATIENCE
from tests.subscribe.discovery.test_answers import SGLANG_0523, VLLM_033

pytestmark = pytest.mark.unit

MODELS = {"data": [{"id": "llama", "owned_by": "vllm"}, {"id": "llama-lora"}]}


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with CannedServer() as server:
        yield server


def test_a_vllm_tells_its_ranks(server: CannedServer) -> None:
    server.replies = {
        "/kv_event_sources": (200, VLLM_033),
        "/v1/models": (200, MODELS),
        "/version": (200, {"version": "0.33.0"}),
    }
    report = ask_engine(server.url, token="sk-1")
    assert (report.kind, report.version, report.model) == ("vllm", "0.33.0", "llama")
    assert report.publishes
    assert not report.notes
    assert report.ranks == (
        PublisherAddress(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"),
        PublisherAddress(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658"),
    )
    worker = report.worker()
    assert worker.name == server.url.removeprefix("http://")
    assert tuple(worker.publishers()) == report.ranks
    assert set(server.asked) == {(path, "Bearer sk-1") for path in server.replies}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_an_sglang_tells_its_ranks_and_keeps_its_secrets(server: CannedServer, path: str) -> None:
    server.replies = {path: (200, {**SGLANG_0523, "api_key": "sk-secret"})}
    report = ask_engine(server.url)
    assert (report.kind, report.version, report.block_size) == ("sglang", "0.5.23", 32)
    assert [address.endpoint for address in report.ranks] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
    ]
    assert report.worker("s").topic == "kv"
    assert "sk-secret" not in repr(report)


def redirect(request: BaseHTTPRequestHandler) -> None:
    request.send_response(302)
    request.send_header("Location", "/v1/models")
    request.send_header("Content-Length", "0")
    request.end_headers()


def hang_up(request: BaseHTTPRequestHandler) -> None:
    request.connection.shutdown(2)


def greet_as_zeromq(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f")
    request.close_connection = True


@pytest.mark.parametrize(
    ("replies", "reason", "words"),
    [
        ({}, "status", "/kv_event_sources answers 404: vLLM before 0.31 .* name a Worker"),
        ({"/v1/models": (200, MODELS)}, "unsaid", "/kv_event_sources answers 404"),
        ({"/v1/models": (401, {})}, "denied", "token="),
        ({"/kv_event_sources": (200, {})}, "off", "enable_kv_cache_events"),
        (
            {"/server_info": (200, {"kv_events": None, "page_size": 1})},
            "off",
            "--kv-events-config",
        ),
        (
            {"/server_info": (200, {"kv_events": {"endpoint_port_base": "x"}})},
            "content",
            "cannot be used",
        ),
        ({"/kv_event_sources": redirect}, "status", "answers 302"),
        ({"/kv_event_sources": hang_up}, "unreachable", "hangs up"),
        ({"/kv_event_sources": greet_as_zeromq}, "content", "does not answer in HTTP"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_cannot_be_subscribed_to_says_why(
    server: CannedServer, replies: dict[str, Reply], reason: str, words: str
) -> None:
    server.replies = replies
    with pytest.raises(DiscoveryError, match=words) as caught:
        ask_engine(server.url).worker()
    assert (caught.value.reason, caught.value.url) == (reason, server.url)
    assert len(server.asked) == len(set(server.asked)), "each is asked once, and none redirected"


def test_the_base_url_of_openais_clients_is_no_engines_url(server: CannedServer) -> None:
    with pytest.raises(DiscoveryError, match="/v1/kv_event_sources answers 404: leave out the /v1"):
        ask_engine(f"{server.url}/v1").worker()


def test_what_an_engine_said_of_itself_is_in_the_report_though_its_events_are_not(
    server: CannedServer,
) -> None:
    server.replies = {"/v1/models": (200, MODELS)}
    report = ask_engine(server.url)
    assert (report.kind, report.publishes) == ("vllm", None)
    server.replies = {"/kv_event_sources": (200, {})}
    assert ask_engine(server.url).publishes is False
    server.replies = {"/kv_event_sources": (200, b"<html>"), "/v1/models": (200, MODELS)}
    failures = ask_engine(server.url).failures
    assert failures["/kv_event_sources"].startswith("answers what cannot be used")


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
@pytest.mark.parametrize("path", ["/v1/models", "/kv_event_sources", "/server_info", "/version"])
def test_an_answer_that_is_nested_too_deeply_cannot_be_used(
    server: CannedServer, path: str, depth: int
) -> None:
    nested = b'{"page_size": 16, "data": ' + b"[" * depth + b"]" * depth + b"}"
    other = "/version" if path == "/v1/models" else "/v1/models"
    server.replies = {path: (200, nested), other: (200, MODELS)}
    failures = ask_engine(server.url).failures
    if depth > 1000:  # what is less deep may be read, by a Python that can
        assert "answers what cannot be used" in failures[path]


def test_an_answer_without_end_is_cut(server: CannedServer, monkeypatch: Any) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Connection", "close")
        request.end_headers()
        while True:
            request.wfile.write(b"[" * 65_536)

    server.replies = dict.fromkeys(("/kv_event_sources", "/server_info"), endless)
    server.replies["/v1/models"] = (200, MODELS)
    report = ask_engine(server.url)
    assert "more than 8388608 bytes" in report.failures["/kv_event_sources"]
    assert report.model == "llama"


def test_a_server_that_drips_is_given_up_in_time(server: CannedServer) -> None:
    hung_up = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        try:
            request.send_response(200)
            request.send_header("Content-Length", "100000")
            request.end_headers()
            while not hung_up.wait(0.01):
                request.wfile.write(b" ")
        except OSError:
            hung_up.set()

    server.replies = {"/kv_event_sources": drip}
    with pytest.raises(DiscoveryError, match=r"does not answer within 0\.2 s, which") as caught:
        ask_engine(server.url, 0.2)
    assert caught.value.reason == "timeout"
    assert hung_up.wait(PATIENCE)  # the connection is not left open


def test_a_port_where_nothing_listens_is_told_apart_from_an_unknown_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(DiscoveryError, match="nothing listens") as refused:
            ask_engine(f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert refused.value.reason == "refused"
    with pytest.raises(DiscoveryError, match="no such host") as unknown:
        ask_engine("http://nobody.invalid:8000")
    assert unknown.value.reason == "name"


ODD_URLS = ["http://u:p@a", "http://a/?x=1", "http://a b", "http://a\r\nX: y"]
NO_URLS = ["engine:8000", "tcp://a:5557", "http://", "http://a:99999", "http://a:0"]


@pytest.mark.parametrize("url", [*NO_URLS, *ODD_URLS, "", 7])
def test_what_is_no_url_of_an_engine_is_refused_at_once(url: Any) -> None:
    with pytest.raises(ConfigurationError):
        ask_engine(url)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigurationError, match="timeout"):
        ask_engine("http://a:1", timeout)
