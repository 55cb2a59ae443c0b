"""What a registration may have this process dial."""

from __future__ import annotations

import socket
import threading

import pytest

from kvindex import ConfigurationError
from kvindex.service.http.guards import Networks, parse_networks, resolved
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


@pytest.mark.parametrize(
    ("allowed", "endpoint", "dialled"),
    [
        ("10.0.0.0/8", "tcp://10.1.2.3:5557", "tcp://10.1.2.3:5557"),
        ("loopback", "tcp://[::1]:5557", "tcp://[::1]:5557"),
        ("10.0.0.0/8", "tcp://engine:5557", "tcp://10.1.2.3:5557"),
        ("fc00::/7", "tcp://six:5557", "tcp://[fd00::5]:5557"),
        ("10.0.0.0/8", "tcp://both:1", "tcp://10.0.0.9:1"),  # the first that is allowed
        # A special network that is named itself.
        ("169.254.7.0/24", "tcp://169.254.7.9:5557", "tcp://169.254.7.9:5557"),
        ("100.100.100.200/32", "tcp://100.100.100.200:80", "tcp://100.100.100.200:80"),
        ("fd00:ec2::254", "tcp://[fd00:ec2::254]:80", "tcp://[fd00:ec2::254]:80"),
    ],
)
def test_an_address_in_an_allowed_network_is_dialled(
    allowed: str, endpoint: str, dialled: str
) -> None:
    assert networks(allowed).check(endpoint) == dialled


SPECIAL = [
    *("169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]"),
    *("[2002:a9fe:a9fe::1]", "[::169.254.169.254]", "[64:ff9b:1::a9fe:a9fe]", "[fd00:ec2::254]"),
    *("[fd20:ce::254]", "100.100.100.200", "168.63.129.16", "192.0.0.192", "0.0.0.1", "240.0.0.1"),
    *("224.0.0.1", "[ff02::1]", "0.0.0.0", "[::]", "[::ffff:0.0.0.0]"),
]
MALFORMED = [
    *("*:5557", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", ":5557"),
    *("10.0.0.1:5557;10.0.0.2:5557", "10.0.0.1:5557/x", "user@10.0.0.1:5557"),
    *("10.0.0.1:5557\n", "10.0.0.1:٥٥٥٧", "[fe80::1%eth0]:5557"),
]
ANY = ("any", "private", "loopback")  # none of them lets a special address in


@pytest.mark.parametrize(
    ("allowed", "endpoint", "why"),
    [
        *((ANY, f"tcp://{host}:80", "network") for host in SPECIAL),
        *((ANY, f"tcp://{rest}", "form") for rest in MALFORMED),
        *((ANY, other, "transport") for other in ("ipc:///tmp/x", "inproc://x", "udp://1:5", "")),
        (ANY, "tcp://ghost:80", "name"),
        (("10.0.0.0/8",), "tcp://inside:80", "network"),  # a name of a metadata server
        (("169.254.7.0/24",), "tcp://169.254.169.254:80", "network"),
        (("100.100.100.0/24",), "tcp://100.100.100.200:80", "network"),
        *(
            (("loopback",), f"tcp://{host}:5557", "network")
            for host in ("10.0.0.1", "192.168.1.1", "8.8.8.8", "[2001:db8::1]")
        ),
        ((), "tcp://127.0.0.1:5557", "network"),
    ],
)
def test_an_endpoint_elsewhere_or_of_another_form_is_refused(
    allowed: tuple[str, ...], endpoint: str, why: str
) -> None:
    assert reason(networks(*allowed), endpoint) == why


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
        guarded = Networks(parse_networks(["any"]), lambda host: resolved(host, within=0.0))
        assert reason(guarded, "tcp://engine.example:5557") == "name"
    finally:
        said.set()
    assert gone.wait(60)
