"""Engines asked over HTTP: what they answer of where they publish, in every shape and in none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import ConfigurationError, PublisherAddress
from kvindex.subscribe.discovery import DiscoveryError, ask_engine
from kvindex.subscribe.discovery.ask import (
    MAX_RANKS,
    Announcement,
    is_sglang,
    reach,
    read_models,
    read_server_info,
    read_sources,
)
from tests.canned import CannedServer, Reply
from tests.live import PATIENCE

pytestmark = pytest.mark.unit

VLLM_033 = {  # vLLM 0.33.0, --data-parallel-size 2: KVEventsConfig by rank
    str(rank): {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{5557 + rank}",
        "replay_endpoint": f"tcp://*:{5657 + rank}",
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    }
    for rank in range(2)
}
BOTH = [
    Announcement(0, "tcp://*:5557", "tcp://*:5657"),
    Announcement(1, "tcp://*:5558", "tcp://*:5658"),
]
LISTED = [
    {"data_parallel_rank": 1, "endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:5658"},
    {"data_parallel_rank": 0, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"},
]
SGLANG_0523: dict[str, Any] = {  # SGLang 0.5.23 in /server_info, among its other settings
    "served_model_name": "llama",
    "version": "0.5.23",
    "page_size": 16,
    "dp_size": 2,
    "kv_events_config": '{"publisher": "zmq", "replay_endpoint": "tcp://*:5657"}',
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 32,
        "dp_size": 2,
        "replay_endpoint_port_base": 5657,
    },
}


@pytest.mark.parametrize("answer", [VLLM_033, LISTED, {"sources": LISTED}])
def test_the_three_shapes_of_vllm_say_the_same(answer: Any) -> None:
    assert read_sources(answer) == BOTH


@pytest.mark.parametrize(
    "answer", [{}, [], {"sources": []}, {"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}]
)
def test_events_that_are_off_are_no_rank(answer: Any) -> None:
    assert read_sources(answer) == []


ZMQ = {"publisher": "zmq"}


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (read_sources, None),
        (read_sources, "tcp://*:5557"),
        (read_sources, {"zero": {"endpoint": "tcp://*:5557"}}),
        (read_sources, {"-1": {"endpoint": "tcp://*:5557"}}),
        (read_sources, {"detail": "Not Found"}),
        (read_sources, [{"data_parallel_rank": 0, "endpoint": "tcp://*:1"}] * 2),
        (read_sources, [{"data_parallel_rank": 0}]),
        (read_sources, [{"endpoint": 5557}]),
        (read_sources, [{"endpoint": "tcp://*:5557\n"}]),
        (read_sources, [{"endpoint": "x" * 5000}]),
        (read_sources, [{"data_parallel_rank": 10**9, "endpoint": "tcp://*:1"}]),
        (read_sources, [{"endpoint": "tcp://*:1"}] * (MAX_RANKS + 1)),
        (read_sources, [7]),
        (read_server_info, {"kv_events_config": "{", "dp_size": 1}),
        (read_server_info, {"kv_events_config": ZMQ, "dp_size": 0}),
        (read_server_info, {"kv_events_config": ZMQ, "dp_size": MAX_RANKS + 1}),
        (read_server_info, {"kv_events": {**ZMQ, "endpoint_port_base": "many"}}),
        (read_server_info, {"kv_events": ZMQ}),
        (read_server_info, {"kv_events": {**ZMQ, "endpoint_port_base": 1, "endpoint_host": []}}),
    ],
)
def test_what_has_another_form_is_refused(read: Callable[[Any], object], answer: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(answer)


def test_sglang_says_it_as_it_came_to_be() -> None:
    announced, block_size = read_server_info(SGLANG_0523)
    assert block_size == 32
    assert announced == [
        Announcement(rank, "tcp://*:5557", "tcp://*:5657", "kv", names_base=True)
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    "config",
    [
        '{"publisher": "zmq", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6100"}',
        {"publisher": "zmq", "endpoint": "tcp://*:6000", "replay_endpoint": "tcp://*:6100"},
    ],
)
def test_an_older_sglang_shows_its_option(config: Any) -> None:
    announced, block_size = read_server_info(
        {"kv_events_config": config, "dp_size": 2, "page_size": 64, "kv_events": None}
    )
    assert block_size == 64
    assert announced == [
        Announcement(r, "tcp://*:6000", "tcp://*:6100", "", names_base=True) for r in range(2)
    ]


@pytest.mark.parametrize("config", [None, "", '{"publisher": "null"}', "{}", {}])
def test_an_sglang_without_events_has_no_rank(config: Any) -> None:
    assert read_server_info({"kv_events_config": config, "dp_size": 1}) == ([], None)


def test_a_rank_of_sglang_with_an_address_of_its_own_is_on_that_node() -> None:
    listed: list[dict[str, Any]] = [{"dp_rank": 1, "endpoint": "tcp://10.0.0.2:5558"}]
    info = {**SGLANG_0523, "kv_events": {**SGLANG_0523["kv_events"], "publishers": listed}}
    first, second = read_server_info(info)[0]
    assert first == Announcement(0, "tcp://*:5557", "tcp://*:5657", "kv", names_base=True)
    assert second == Announcement(1, "tcp://10.0.0.2:5558", "tcp://10.0.0.2:5658", "kv")
    info["kv_events"] = {**info["kv_events"], "replay_endpoint_host": "10.0.0.1"}
    assert read_server_info(info)[0][1].replay == "tcp://10.0.0.1:5658", "it is not everywhere"
    del info["kv_events"]["replay_endpoint_port_base"], info["kv_events_config"]
    assert read_server_info(info)[0][1].replay is None
    listed[0]["replay_endpoint"] = "tcp://10.0.0.2:9"
    assert read_server_info(info)[0][1].replay == "tcp://10.0.0.2:9"
    listed[:] = [{"dp_rank": rank + 2, "endpoint": "tcp://h:1"} for rank in range(MAX_RANKS)]
    with pytest.raises(ValueError, match="above the limit"):
        read_server_info(info)


def test_the_server_info_of_vllm_is_not_taken_for_sglangs() -> None:
    assert not is_sglang({"vllm_config": "model='llama'"})
    assert not is_sglang(["page_size"])
    assert is_sglang(SGLANG_0523)


def test_adapters_are_told_apart_and_models_that_are_malformed_left_out() -> None:
    data = [{"id": 7, "owned_by": "vllm"}, "llama", {"id": "qwen"}, {"id": "x" * 5000}]
    assert read_models({"data": data}) == (("qwen",), (), "vllm")
    data = [{"id": "llama"}, {"id": "sql", "parent": "llama"}]
    assert read_models({"data": data}) == (("llama", "sql"), ("sql",), "")
    assert read_models({"data": {}}) == read_models("models") == ((), (), "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_read_or_refused(answer: Any) -> None:
    read_models(answer)
    readers = (read_sources, read_server_info)
    for read in readers if isinstance(answer, dict) else readers[:1]:
        try:
            read(answer)
        except ValueError:
            pass


# Which host is connected to -------------------------------------------------------------------


OWN = ["*", "0.0.0.0", "[::]", "engine", "10.0.0.5"]
UNREACHABLE = ["inproc://kv", "tcp://*:0", "tcp://*:70000", "udp://*:1", "ipc:///tmp/kv"]
UNREACHABLE += ["tcp://a b:1:2"]


def known(host: str) -> frozenset[str]:
    names = {"engine": "10.0.0.5", "localhost": "127.0.0.1"}
    return frozenset({names.get(host, host)})


@pytest.mark.parametrize(
    ("announced", "asked", "endpoint", "note"),
    [
        # A wildcard and the engine's own address become the host that was asked.
        *((f"tcp://{host}:5557", "engine", "tcp://engine:5558", "") for host in OWN),
        ("tcp://*:5557", "fd00::5", "tcp://[fd00::5]:5558", ""),
        ("tcp://10.0.0.8:5557", "engine", "tcp://10.0.0.8:5558", "another host than engine"),
        ("tcp://10.0.0.8:5557", "engine", "tcp://10.0.0.8:5558", "connects there instead of"),
        ("tcp://127.0.0.1:5557", "engine", "tcp://engine:5558", "loopback"),
        ("tcp://127.0.0.1:5557", "localhost", "tcp://localhost:5558", ""),
        *((endpoint, "engine", None, "") for endpoint in UNREACHABLE),
    ],
)
def test_which_host_is_connected_to_and_what_is_said_of_it(
    announced: str, asked: str, endpoint: str | None, note: str
) -> None:
    reached, remark = reach(announced, asked, 1, known)
    assert reached == endpoint
    assert note in remark
    assert bool(remark) == (bool(note) or endpoint is None)


# Over HTTP --------------------------------------------------------------------------------------


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
        "/health": (200, {}),
        "/is_sleeping": (404, {}),
    }
    report = ask_engine(server.url, token="sk-1")
    assert not report.away
    assert report.listed == {
        "llama": {"id": "llama", "owned_by": "vllm"},
        "llama-lora": {"id": "llama-lora"},
    }
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


@pytest.mark.parametrize(
    ("replies", "away"),
    [
        ({}, ""),
        ({"/health": (503, {})}, "unwell"),
        ({"/health": (500, {})}, ""),
        ({"/is_sleeping": (200, {"is_sleeping": True})}, "asleep"),
        ({"/is_sleeping": (200, {"is_sleeping": False})}, ""),
        ({"/is_sleeping": (200, {"is_sleeping": "yes"})}, ""),
        ({"/is_sleeping": (200, [])}, ""),
    ],
)
def test_an_engine_that_serves_nothing_now_is_away(
    server: CannedServer, replies: Any, away: str
) -> None:
    server.replies = {"/kv_event_sources": (200, VLLM_033), **replies}
    assert ask_engine(server.url).away == away


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
