"""Who is let in, and what those who are not are told."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from typing import Any

import pytest

from kvindex import ConfigurationError
from kvindex.service.http.guards import (
    Guard,
    Limits,
    Networks,
    check_tokens,
    parse_networks,
    resolved,
)
from kvindex.service.http.messages import Reply, Request, Route
from kvindex.service.http.site import Site
from kvindex.wire.errors import EndpointRefusedError

pytestmark = pytest.mark.unit

TOKEN = "a-token-of-more-than-16"
HOST = (b"host", b"localhost:8090")


def bearer(token: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + token.encode()


def basic(rest: bytes) -> tuple[bytes, bytes]:
    return b"authorization", b"Basic " + rest


def status(guard: Guard, *headers: tuple[bytes, bytes]) -> int:
    refusal = guard.admit(headers)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("hosts", "code"),
    [
        *(([host], 200) for host in (b"localhost", b"LOCALHOST:1", b"127.0.0.1:8090")),
        *(([host], 200) for host in (b"[::1]:8090", b"a.localhost", b"10.0.0.7")),
        *(([host], 200) for host in (b"kvindex.example.com.:80", b"a.b.svc.cluster.local")),
        *(([host], 421) for host in (b"svc.cluster.local", b"other.example.com")),
        # Names that are bound to this machine elsewhere.
        *(([host], 421) for host in (b"localhost.evil.example:8090", b"127.0.0.1.nip.io")),
        *((hosts, 400) for hosts in ([], [b""], [b"a", b"a"])),
        *(([host], 400) for host in (b"a b", b"a:port", b"http://a")),
    ],
)
def test_a_request_names_one_host_that_is_this_server(hosts: list[bytes], code: int) -> None:
    guard = Guard(allowed_hosts=["KVINDEX.example.com", "*.svc.cluster.local"])
    headers = [(b"host", host) for host in hosts]
    assert [status(guard, *headers) for _ in range(2)] == [code, code]
    assert sum(guard.counters.values()) == (0 if code == 200 else 2)
    assert status(Guard(allowed_hosts=["*"]), *headers) == (400 if code == 400 else 200)


@pytest.mark.parametrize("scheme", [b"http", b"https"])  # a proxy may speak TLS for this server
def test_a_page_of_another_origin_is_refused(scheme: bytes) -> None:
    guard = Guard()
    evil = b"http://evil.example", b"http://evil//localhost:8090", b"//localhost:8090"
    for origin in (*evil, b"null", b"http://localhost:9999"):
        assert status(guard, HOST, (b"origin", origin)) == 403
    assert status(guard, HOST, (b"origin", scheme + b"://localhost:8090")) == 200
    assert status(guard, (b"host", b"[::1]:1"), (b"origin", scheme + b"://[::1]:1")) == 200


def test_pages_of_origins_that_are_allowed_may_ask_and_ask_whether_they_may() -> None:
    guard = Guard(tokens=[TOKEN], allowed_origins=["https://Chat.example.com/"])
    site = Site([Route("POST", "/query", lambda _: Reply(200))], guard)
    for origin, code in ((b"https://chat.example.com", 401), (b"https://evil.example", 403)):
        assert status(guard, HOST, (b"origin", origin)) == code
        asks = (b"access-control-request-method", b"POST")
        preflight = Request("OPTIONS", "/query", (HOST, (b"origin", origin), asks))
        refusal = site.admit(preflight)
        assert (204 if refusal is None else refusal.status) == (204 if code == 401 else 403)
        reply = site.answer(preflight)
        assert isinstance(reply, Reply)
        assert dict(reply.headers)[b"access-control-allow-headers"] == b"*, authorization"
    assert status(Guard(allowed_origins=["*"]), HOST, (b"origin", b"https://evil.example")) == 200


def test_many_names_take_bounded_memory() -> None:
    guard = Guard()
    for number in range(1000):
        assert status(guard, (b"host", b"h%d.example" % number)) == 421
    assert len(guard._hosts) <= 256


# Tokens -----------------------------------------------------------------------------------------


PASSWORD = base64.b64encode(f"me:{TOKEN}".encode())


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ([bearer(TOKEN)], ""),
        ([bearer("another-token-of-the-file")], ""),
        ([(b"authorization", b"bEARER  " + TOKEN.encode())], ""),
        ([basic(PASSWORD)], ""),  # as browsers give it
        ([], "token_missing"),
        ([bearer(TOKEN[:-1])], "token"),
        ([bearer("another-token-of-16"), bearer(TOKEN)], "token"),  # two are none
        *(([basic(broken)], "token") for broken in (b"", b"???", PASSWORD[:-4])),
        *(([(b"authorization", other)], "token") for other in (b"Digest x", b"")),
    ],
)
def test_only_a_token_of_the_server_opens(fields: list[tuple[bytes, bytes]], refused: str) -> None:
    guard = Guard(tokens=[TOKEN, "another-token-of-the-file"])
    assert status(guard, HOST, *fields) == (401 if refused else 200)
    counted = [reason for reason, count in guard.counters.items() if count]
    assert counted == ([refused] if refused else [])


OPERATOR = "a-token-of-an-operator"


@pytest.mark.parametrize(
    ("tokens", "operators", "is_local", "token", "client", "operator"),
    [
        ("", "", True, "", 200, 200),
        ("", "", False, "", 200, 403),  # only this machine's own clients are operators
        (TOKEN, "", True, TOKEN, 200, 200),
        (TOKEN, "", True, "", 401, 401),
        (TOKEN, "", False, TOKEN, 200, 403),
        (TOKEN, OPERATOR, True, TOKEN, 200, 403),  # who has a token of theirs is one, nobody else
        (TOKEN, OPERATOR, False, OPERATOR, 200, 200),
        (TOKEN, OPERATOR, False, "", 401, 401),
        (TOKEN, OPERATOR, False, "some-other-token-here", 401, 401),
        ("", OPERATOR, True, "", 200, 401),
        ("", OPERATOR, False, OPERATOR, 200, 200),
    ],
)
@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_what_is_for_operators_opens_to_them_alone(
    tokens: str,
    operators: str,
    is_local: bool,
    token: str,
    client: int,
    operator: int,
    name: bytes,
) -> None:
    guard = Guard(tokens=[tokens][: bool(tokens)], operator_tokens=[operators][: bool(operators)])
    scheme = b"Bearer " if name == b"authorization" else b""
    headers = [HOST, *([(name, scheme + token.encode())] if token else [])]
    for is_operators, expected in ((False, client), (True, operator)):
        refusal = guard.admit(headers, is_operators=is_operators, is_local=is_local)
        assert (200 if refusal is None else refusal.status) == expected


def test_of_two_keys_the_authorization_counts() -> None:
    guard = Guard(tokens=[TOKEN])
    assert (
        status(guard, HOST, (b"authorization", b"Bearer x"), (b"x-api-key", TOKEN.encode())) == 401
    )
    assert status(guard, HOST, (b"x-api-key", TOKEN.encode()), (b"x-api-key", b"x")) == 401


def test_a_refusal_says_why_in_json_and_how_to_log_in() -> None:
    refusal = Guard(tokens=[TOKEN]).admit([HOST])
    assert refusal is not None
    assert json.loads(refusal.reply.body)["reason"] == "token_missing"
    assert (b"www-authenticate", b'Bearer realm="kvindex"') in refusal.reply.headers


@pytest.mark.parametrize("tokens", [[], ["short"], [TOKEN, "with-ümlaut-and-long-enough"]])
def test_a_token_that_cannot_be_used_is_an_error_that_says_where(tokens: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="/run/token"):
        check_tokens(tokens, "/run/token")


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="body_bytes"):
        Limits(body_bytes=0)


# The site ---------------------------------------------------------------------------------------


def ask(site: Site, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """Return status and body of one request."""

    async def answered() -> tuple[int, bytes]:
        request = Request("GET", path, headers)
        refusal = site.admit(request)
        answer: Any = refusal.reply if refusal else site.answer(request)
        reply = answer if isinstance(answer, Reply) else await answer
        return reply.status, reply.body

    return asyncio.run(answered())


async def reasons(_: Request) -> Reply:
    return Reply(503, b"why not")


ROUTES = [
    Route("GET", "/health", lambda _: Reply(200)),
    Route("GET", "/ready", reasons),
    Route("GET", "/workers", lambda _: Reply(200, b"[]")),
]


def test_probes_need_no_token_and_learn_no_reasons() -> None:
    site = Site(ROUTES, Guard(tokens=[TOKEN]))
    assert ask(site, "/health", (b"host", b"10.1.2.3:8090")) == (200, b"")
    assert ask(site, "/ready", (b"host", b"pod.example")) == (503, b"")
    assert ask(site, "/ready", HOST, bearer(TOKEN)) == (503, b"why not")
    assert ask(site, "/workers", HOST)[0] == 401


def test_a_path_without_a_route_is_a_404_and_another_method_a_405() -> None:
    site = Site(ROUTES, Guard())
    assert ask(site, "/nothing", HOST) == (404, b"")
    reply = site.answer(Request("POST", "/workers", [HOST]))
    assert isinstance(reply, Reply)
    assert (reply.status, reply.headers) == (405, ((b"allow", b"GET, HEAD"),))


def test_requests_are_counted_under_names_that_the_server_knows() -> None:
    counted: list[tuple[str, str, int]] = []
    site = Site(ROUTES, Guard(), lambda *request: counted.append(request))
    for method, path in (("GET", "/workers"), ("BREW", "/workers"), ("GET", "/x")):
        site.count(Request(method, path), 200)
    other = "(other)"
    assert counted == [("GET", "/workers", 200), (other, "/workers", 200), ("GET", other, 200)]


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
