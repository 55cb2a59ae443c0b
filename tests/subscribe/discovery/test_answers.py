"""What engines answer about where they publish, in every shape, and in none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.subscribe.discovery.answers import (
    MAX_RANKS,
    Announcement,
    is_sglang,
    named_models,
    reach,
    read_server_info,
    read_sources,
)

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
SGLANG_0523 = {  # SGLang 0.5.23 in /server_info, among its other settings
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


def test_the_server_info_of_vllm_is_not_taken_for_sglangs() -> None:
    assert not is_sglang({"vllm_config": "model='llama'"})
    assert not is_sglang(["page_size"])
    assert is_sglang(SGLANG_0523)


def test_models_that_are_malformed_are_left_out() -> None:
    data = [{"id": 7, "owned_by": "vllm"}, "llama", {"id": "qwen"}, {"id": "x" * 5000}]
    assert named_models({"data": data}) == (("qwen",), "vllm")
    assert named_models({"data": {}}) == ((), "")
    assert named_models("models") == ((), "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_read_or_refused(answer: Any) -> None:
    named_models(answer)
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
    reached = reach(announced, asked, offset=1, resolve=known)
    assert reached.endpoint == endpoint
    assert note in reached.note
    assert bool(reached.note) == (bool(note) or endpoint is None)
