"""What a registration may have this process dial."""

from __future__ import annotations

import socket
import threading

import pytest

from kvindex import ConfigurationError
from kvindex.service.networks import Networks, parse_networks, resolved
from kvindex.wire.errors import EndpointRefusedError

pytestmark = pytest.mark.unit

NAMES = {
    "engine": ["10.1.2.3"],
    "inside": ["169.254.169.254"],
    "both": ["192.168.0.9", "10.0.0.9"],
    "six": ["fd00::5"],
    "ghost": [],
}


def networks(*allowed: str) -> Networks:
    return Networks(parse_networks(allowed), lambda host: NAMES.get(host, []))


def reason(allowed: Networks, endpoint: str) -> str:
    with pytest.raises(EndpointRefusedError) as caught:
        allowed.check(endpoint)
    return caught.value.reason


def test_an_address_in_an_allowed_network_is_dialled_as_it_is() -> None:
    assert networks("10.0.0.0/8").check("tcp://10.1.2.3:5557") == "tcp://10.1.2.3:5557"
    assert networks("loopback").check("tcp://[::1]:5557") == "tcp://[::1]:5557"


def test_a_name_is_resolved_once_and_its_address_is_dialled() -> None:
    assert networks("10.0.0.0/8").check("tcp://engine:5557") == "tcp://10.1.2.3:5557"
    assert networks("fc00::/7").check("tcp://six:5557") == "tcp://[fd00::5]:5557"


def test_of_several_addresses_the_first_allowed_one_is_dialled() -> None:
    assert networks("10.0.0.0/8").check("tcp://both:1") == "tcp://10.0.0.9:1"


def test_a_name_that_points_inside_is_refused() -> None:
    assert reason(networks("10.0.0.0/8"), "tcp://inside:80") == "network"


def test_a_name_without_an_address_is_refused() -> None:
    assert reason(networks("any"), "tcp://ghost:80") == "name"


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::1]",
        "[::169.254.169.254]",
        "[64:ff9b:1::a9fe:a9fe]",
        "[fd00:ec2::254]",
        "[fd20:ce::254]",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "0.0.0.1",
        "240.0.0.1",
        "224.0.0.1",
        "[ff02::1]",
        "0.0.0.0",
        "[::]",
        "[::ffff:0.0.0.0]",
    ],
)
def test_no_wide_network_lets_a_special_address_in(host: str) -> None:
    assert reason(networks("any", "private", "loopback"), f"tcp://{host}:80") == "network"


def test_a_link_local_network_that_is_named_is_allowed() -> None:
    allowed = networks("169.254.7.0/24")
    assert allowed.check("tcp://169.254.7.9:5557")
    assert reason(allowed, "tcp://169.254.169.254:80") == "network"


@pytest.mark.parametrize("host", ["10.0.0.1", "192.168.1.1", "8.8.8.8", "[2001:db8::1]"])
def test_loopback_alone_lets_nothing_else_in(host: str) -> None:
    assert reason(networks("loopback"), f"tcp://{host}:5557") == "network"


def test_without_networks_nothing_is_dialled() -> None:
    assert reason(networks(), "tcp://127.0.0.1:5557") == "network"


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/x", "inproc://x", "udp://1.2.3.4:5", "", "x"])
def test_only_tcp_comes_from_the_network(endpoint: str) -> None:
    assert reason(networks("any"), endpoint) == "transport"


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:65536",
        "tcp://:5557",
        "tcp://10.0.0.1:5557;10.0.0.2:5557",
        "tcp://10.0.0.1:5557/x",
        "tcp://user@10.0.0.1:5557",
        "tcp://10.0.0.1:5557\n",
        "tcp://10.0.0.1:٥٥٥٧",
        "tcp://[fe80::1%eth0]:5557",
    ],
)
def test_an_endpoint_of_another_form_is_refused(endpoint: str) -> None:
    assert reason(networks("any"), endpoint) == "form"


def test_a_network_that_is_none_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigurationError, match=r"'10\.0\.0\.1/8'"):
        parse_networks(["10.0.0.1/8"])


def test_a_name_whose_server_is_silent_is_given_up_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, gone = threading.Event(), threading.Event()

    def silent(*_: object, **__: object) -> list[object]:
        said.wait()
        gone.set()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        asked = Networks(parse_networks(["any"]), lambda host: resolved(host, within=0.0))
        assert reason(asked, "tcp://engine.example:5557") == "name"
    finally:
        said.set()
    assert gone.wait(60)


def test_a_metadata_address_that_is_named_itself_may_be_dialled() -> None:
    asked = networks("100.100.100.200/32", "fd00:ec2::254")
    assert asked.check("tcp://100.100.100.200:80") == "tcp://100.100.100.200:80"
    assert asked.check("tcp://[fd00:ec2::254]:80") == "tcp://[fd00:ec2::254]:80"
    assert reason(networks("100.100.100.0/24"), "tcp://100.100.100.200:80") == "network"
