from __future__ import annotations

import pytest

from kvindex.publish import ZmqEventPublisher, offset_endpoint
from kvindex.publish.sockets import binds_endpoint, local_endpoint, port_of
from kvindex.wire import LATEST, dialect
from kvindex.wire.errors import ConfigurationError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://10.0.0.1:5557", 1, "tcp://10.0.0.1:5558"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://*:65534", 1, "tcp://*:65535"),
        ("tcp://*:0", 7, "tcp://*:0"),
        ("tcp://127.0.0.1:*", 7, "tcp://127.0.0.1:*"),
        ("inproc://cache", 0, "inproc://cache"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("inproc://tcp", 2, "inproc://tcp_dp2"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
    ],
)
def test_each_rank_has_its_own_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert offset_endpoint(endpoint, rank) == expected
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == expected
    assert ZmqEventPublisher.offset_endpoint_port(None, rank) is None


@pytest.mark.parametrize(
    ("endpoint", "rank", "said"),
    [
        ("ipc:///run/kv", 1, "ipc has no port"),
        ("tcp://*:65535", 1, "beyond 65535"),
        ("tcp://*:99999", 0, "beyond 65535"),
        ("tcp://*", 0, "needs a port"),
        ("tcp://*:kv", 0, "needs a port"),
        ("tcp://:5557", 0, "needs a port"),
        ("tcp://*:-1", 0, "needs a port"),
        ("udp://*:5557", 0, "is none of"),
        ("5557", 0, "is none of"),
        ("tcp://", 0, "is none of"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(endpoint: str, rank: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        offset_endpoint(endpoint, rank)


@pytest.mark.parametrize(
    ("endpoint", "version", "expected"),
    [
        ("tcp://*:5557", "vllm-0.9.0", True),
        ("tcp://[::]:5557", "vllm-0.9.0", True),
        ("ipc:///run/kv", "vllm-0.9.0", True),
        ("inproc://cache", "vllm-0.9.0", True),
        ("tcp://10.0.0.1:5557", "vllm-0.33.0", False),
        ("tcp://10.0.0.1:5557", "sglang-0.5.23", False),
        ("tcp://0.0.0.0:5557", "vllm-0.33.0", False),
        ("tcp://0.0.0.0:5557", "sglang-0.5.9", False),
        ("tcp://0.0.0.0:5557", "sglang-0.5.18", True),
        ("tcp://0.0.0.0:5557", "sglang-0.5.23-eagle", True),
        ("tcp://127.0.0.1:0", "vllm-0.33.0", True),
    ],
)
def test_bind_or_connect_follows_the_engine(endpoint: str, version: str, expected: bool) -> None:
    assert binds_endpoint(endpoint, dialect(version)) is expected


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://[::1]:5557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("inproc://cache", "inproc://cache"),
    ],
)
def test_a_bound_wildcard_is_reached_over_the_loopback(bound: str, expected: str) -> None:
    assert local_endpoint(bound) == expected


def test_port_of_knows_fixed_tcp_ports_only() -> None:
    assert port_of("tcp://*:5557") == 5557
    assert port_of("tcp://*:0") is None
    assert port_of("tcp://*:*") is None
    assert port_of("inproc://a:1") is None


def test_nothing_is_opened_for_an_endpoint_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="ipc has no port"):
        ZmqEventPublisher(1, "ipc:///run/kv")
    with pytest.raises(ConfigurationError, match=r"vllm-0\.33\.0"):
        ZmqEventPublisher(dialect="vllm-9")
    assert LATEST.name == "vllm-0.33.0"
