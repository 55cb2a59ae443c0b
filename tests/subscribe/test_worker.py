"""Addresses of publishers: the engines' port rule, explicit ones, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import CacheSettings, ConfigurationError, GroupSpec, Worker, connect

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (
            Worker("w", "tcp://h:5557", replay="tcp://h:5657", dp_size=2),
            [(0, "tcp://h:5557", "tcp://h:5657"), (1, "tcp://h:5558", "tcp://h:5658")],
        ),
        (Worker("w", "tcp://h:1"), [(0, "tcp://h:1", None)]),
        (
            Worker("w", "inproc://kv", dp_size=3),
            [(0, "inproc://kv", None), (1, "inproc://kv_dp1", None), (2, "inproc://kv_dp2", None)],
        ),
        (
            Worker("w", "tcp://[::1]:5557", dp_size=2),
            [(0, "tcp://[::1]:5557", None), (1, "tcp://[::1]:5558", None)],
        ),
        (
            Worker("w", ["tcp://a:1", "ipc:///run/b"], ["tcp://a:2", "ipc:///run/c"]),
            [(0, "tcp://a:1", "tcp://a:2"), (1, "ipc:///run/b", "ipc:///run/c")],
        ),
        (
            Worker("w", {4: "tcp://a:1", 2: "tcp://b:1"}, {2: "tcp://b:2", 4: "tcp://a:2"}),
            [(2, "tcp://b:1", "tcp://b:2"), (4, "tcp://a:1", "tcp://a:2")],
        ),
    ],
    ids=["port plus rank", "no replay", "inproc suffix", "IPv6", "listed", "by dp_rank"],
)
def test_each_rank_has_an_address(
    worker: Worker, expected: list[tuple[int, str, str | None]]
) -> None:
    assert [(a.dp_rank, a.endpoint, a.replay) for a in worker.publishers()] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "non-empty"),
        ({"endpoint": "5557"}, "no endpoint"),
        ({"endpoint": "tcp://h"}, "no endpoint"),
        ({"endpoint": "inproc://"}, "no endpoint"),
        ({"endpoint": "udp://h:1"}, "no endpoint"),
        ({"endpoint": "tcp://h:0"}, "port 0"),
        ({"endpoint": "tcp://h:65535", "dp_size": 2}, "port 65536 of rank 1"),
        ({"endpoint": "ipc:///run/x", "dp_size": 2}, "list with one for each rank"),
        ({"endpoint": []}, "empty"),
        ({"endpoint": {-1: "tcp://h:1"}}, "dp_rank must be 0 or more"),
        ({"endpoint": ["tcp://h:1"], "dp_size": 2}, "endpoint lists 1, but dp_size says 2"),
        (
            {"endpoint": ["tcp://h:1", "tcp://h:2"], "replay": {0: "tcp://h:3", 2: "tcp://h:4"}},
            "same",
        ),
        ({"replay": ["tcp://h:3", "tcp://h:4"]}, "replay lists 2, but endpoint says 1"),
        ({"endpoint": None}, "endpoint must be str"),
        ({"endpoint": "tcp://*:5557"}, "nobody can connect to"),
        ({"replay": "tcp://*:5657"}, "replay 'tcp://[*]:5657': nobody can connect to"),
        ({"replay": ["tcp://*:5657"], "bind": True}, "nobody can connect to"),
        ({"dp_size": "2"}, "dp_size must be int"),
        ({"topic": b"kv"}, "topic must be str"),
        ({"curve": 3}, "curve must be Curve"),
        ({"dp_size": 0}, "dp_size must be 1"),
        ({"dp_size": 70_000}, "dp_size must be 1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Worker(**{"name": "w", "endpoint": "tcp://h:1", **arguments})


def test_the_collision_of_adjacent_ports_is_known() -> None:
    with pytest.raises(ConfigurationError, match="one publishes at tcp://h:5558, where another"):
        Worker("w", "tcp://h:5557", replay="tcp://h:5558", dp_size=2)
    near = Worker("w", ["tcp://h:5557", "tcp://h:5558"], replay=["tcp://h:5558", "tcp://h:5559"])
    far = Worker("w", "tcp://h:5557", replay="tcp://h:5657", dp_size=2)
    assert near.shared_endpoints() == ["tcp://h:5558"]
    assert far.shared_endpoints() == []


def test_equal_workers_are_one_in_a_set_whatever_their_endpoints_are_kept_in() -> None:
    def listed() -> set[Worker]:
        cache = CacheSettings(groups={0: GroupSpec("full_attention")})
        first = Worker("a", ["tcp://h:1", "tcp://h:2"], replay={0: "tcp://h:3", 1: "tcp://h:4"})
        return {first, Worker("b", {0: "tcp://h:5"}, cache=cache), Worker("c", "tcp://h:6")}

    assert listed() - listed() == set()
    assert {Worker("c", "tcp://h:7")} - listed() == {Worker("c", "tcp://h:7")}


@pytest.mark.parametrize("given", ["vllm-0:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_a_host_and_a_port_alone_are_taken_for_an_http_server_without_its_scheme(
    given: str,
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        connect(given)
    assert f'write "http://{given}" if that is the engine\'s HTTP server' in str(refused.value)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("tcp://h:5557", r"'tcp://h:5557' \(str\)"),
        (b"tcp://h:5557", r"\(bytes\)"),
        ([{"name": "a", "port": 5557}], r"\{'name': 'a', 'port': 5557\} \(dict\)"),
        ({"a": "tcp://h:5557"}, r"\{'a': 'tcp://h:5557'\} \(dict\)"),
        (["tcp://h:5557"], r"'tcp://h:5557' \(str\)"),
        (5557, r"5557 \(int\)"),
        (None, r"None \(NoneType\)"),
    ],
)
def test_what_is_no_worker_is_shown_whole_with_what_to_write(given: Any, shown: str) -> None:
    wanted = rf'{shown} is no Worker: write Worker\("NAME", "tcp://(HOST:PORT|h:5557)"'
    with pytest.raises(ConfigurationError, match=wanted):
        connect(given)
