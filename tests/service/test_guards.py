"""Who is let in, and what those who are not are told."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvindex import ConfigurationError
from kvindex.service.counters import Counters
from kvindex.service.gate import ASGIApp, Gate, Message, Receive, Scope, Send
from kvindex.service.guards import REASONS, Guard, Limits, check_tokens

pytestmark = pytest.mark.unit

TOKEN = "a-token-of-more-than-16"
HOST = (b"host", b"localhost:8090")


def status(guard: Guard, *headers: tuple[bytes, bytes]) -> int:
    refusal = guard.admit(headers)
    return 200 if refusal is None else refusal.status


def bearer(token: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + token.encode()


# Host and origin --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LOCALHOST:1", b"127.0.0.1:8090", b"[::1]:8090", b"a.localhost", b"10.0.0.7"],
)
def test_local_names_and_addresses_are_let_in(host: bytes) -> None:
    assert status(Guard(), (b"host", host)) == 200


@pytest.mark.parametrize(
    "host", [b"evil.example", b"localhost.evil.example:8090", b"127.0.0.1.nip.io"]
)
def test_a_name_that_is_bound_to_this_machine_elsewhere_is_refused(host: bytes) -> None:
    guard = Guard()
    assert [status(guard, (b"host", host)) for _ in range(2)] == [421, 421]
    assert guard.counters.values()["host"] == 2


def test_an_allowed_name_is_let_in_and_what_is_below_a_starred_one() -> None:
    guard = Guard(allowed_hosts=["KVINDEX.example.com", "*.svc.cluster.local"])
    assert status(guard, (b"host", b"kvindex.example.com.:80")) == 200
    assert status(guard, (b"host", b"a.b.svc.cluster.local")) == 200
    assert status(guard, (b"host", b"svc.cluster.local")) == 421
    assert status(guard, (b"host", b"other.example.com")) == 421
    assert status(Guard(allowed_hosts=["*"]), (b"host", b"anything")) == 200


@pytest.mark.parametrize("hosts", [[], [b""], [b"a", b"a"], [b"a b"], [b"a:port"], [b"http://a"]])
def test_a_request_without_one_host_name_is_refused(hosts: list[bytes]) -> None:
    assert status(Guard(), *((b"host", host) for host in hosts)) == 400


def test_a_request_with_two_tokens_has_none() -> None:
    guard = Guard(tokens=[TOKEN])
    assert status(guard, HOST, bearer(TOKEN)) == 200
    assert status(guard, HOST, bearer("another-token-of-16"), bearer(TOKEN)) == 401


def test_a_page_of_another_origin_is_refused() -> None:
    guard = Guard()
    evil = b"http://evil.example", b"http://evil//localhost:8090", b"//localhost:8090"
    for origin in (*evil, b"null", b"http://localhost:9999"):
        assert status(guard, HOST, (b"origin", origin)) == 403
    for scheme in (b"http", b"https"):  # a proxy may speak TLS for this server
        assert status(guard, HOST, (b"origin", scheme + b"://localhost:8090")) == 200
    assert status(guard, (b"host", b"[::1]:1"), (b"origin", b"http://[::1]:1")) == 200


def test_many_names_take_bounded_memory() -> None:
    guard = Guard()
    for number in range(1000):
        assert status(guard, (b"host", b"h%d.example" % number)) == 421
    assert len(guard._hosts) <= 256


# Tokens -----------------------------------------------------------------------------------------


def test_only_a_token_of_the_server_opens() -> None:
    guard = Guard(tokens=[TOKEN, "another-token-of-the-file"])
    assert status(guard, HOST) == 401
    assert status(guard, HOST, bearer(TOKEN[:-1])) == 401
    assert status(guard, HOST, bearer(TOKEN)) == 200
    assert status(guard, HOST, bearer("another-token-of-the-file")) == 200
    assert status(guard, HOST, (b"authorization", b"bEARER  " + TOKEN.encode())) == 200
    assert guard.counters.values()["token_missing"] == guard.counters.values()["token"] == 1


def test_a_browser_may_give_it_as_a_password() -> None:
    guard = Guard(tokens=[TOKEN])
    basic = base64.b64encode(f"me:{TOKEN}".encode())
    assert status(guard, HOST, (b"authorization", b"Basic " + basic)) == 200
    for broken in (b"Basic ", b"Basic ???", b"Basic " + basic[:-4], b"Digest x", b""):
        assert status(guard, HOST, (b"authorization", broken)) == 401


def test_a_refusal_says_why_in_json_and_how_to_log_in() -> None:
    refusal = Guard(tokens=[TOKEN]).admit([HOST])
    assert refusal is not None
    assert json.loads(refusal.body)["reason"] == "token_missing"
    assert (b"www-authenticate", b'Bearer realm="kvindex"') in refusal.headers


@pytest.mark.parametrize("tokens", [[], ["short"], [TOKEN, "with-ümlaut-and-long-enough"]])
def test_a_token_that_cannot_be_used_is_an_error_that_says_where(tokens: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="/run/token"):
        check_tokens(tokens, "/run/token")


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="body_bytes"):
        Limits(body_bytes=0)


def test_counters_of_one_process_are_read_through_the_same_memory() -> None:
    memory = memoryview(bytearray(Counters.size(REASONS)))
    Counters(REASONS, memory).add("host", 3)
    assert Counters(REASONS, memory).values()["host"] == 3


# The gate ---------------------------------------------------------------------------------------


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body, as Starlette would: 500 if the client goes meanwhile."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            await respond(send, 500, b"")
            raise RuntimeError("the client has gone")
        size += len(message["body"])
        if not message["more_body"]:
            break
    await respond(send, 200, b"%d" % size)


async def respond(send: Send, code: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": code, "headers": []})
    await send({"type": "http.response.body", "body": body})


def ask(
    gate: ASGIApp,
    path: str = "/workers",
    headers: tuple[tuple[bytes, bytes], ...] = (HOST,),
    body: tuple[bytes, ...] = (b"",),
) -> tuple[int, bytes]:
    """Return status and body of one request."""
    sent: list[Message] = []
    parts = list(body)

    async def receive() -> Message:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    asyncio.run(_awaited(gate(scope, receive, send)))
    assert [message["type"] for message in sent[:1]] == ["http.response.start"]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def _awaited(it: Awaitable[None]) -> None:
    await it


def test_a_body_within_the_limit_gets_through() -> None:
    gate = Gate(echo, Guard(limits=Limits(body_bytes=10)))
    assert ask(gate, body=(b"12345", b"67890")) == (200, b"10")


def test_a_body_that_grows_too_long_is_refused_even_if_the_app_said_something_else() -> None:
    guard = Guard(limits=Limits(body_bytes=10))
    code, body = ask(Gate(echo, guard), body=(b"12345", b"67890", b"1", b"2"))
    assert (code, json.loads(body)["reason"]) == (413, "body")
    assert guard.counters.values()["body"] == 1


def test_a_body_that_announces_itself_too_long_is_not_given_to_the_app() -> None:
    async def never(*_: Any) -> None:
        raise AssertionError

    gate = Gate(never, Guard(limits=Limits(body_bytes=10)))
    assert ask(gate, headers=(HOST, (b"content-length", b"11")), body=(b"x" * 11,))[0] == 413
    assert ask(gate, headers=(HOST, (b"content-length", b"9" * 12)))[0] == 413


def test_an_error_of_the_app_is_the_apps_own() -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask(Gate(broken, Guard()))


def test_probes_need_no_token_and_learn_no_reasons() -> None:
    gate = Gate(echo, Guard(tokens=[TOKEN]))
    assert ask(gate, "/health", ((b"host", b"10.1.2.3:8090"),)) == (200, b"0")
    assert ask(gate, "/ready", ((b"host", b"pod.example"),)) == (200, b"")
    assert ask(gate, "/ready", (HOST, bearer(TOKEN))) == (200, b"0")
    assert ask(gate, "/workers")[0] == 401


def endless(opened: Callable[[], None]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b": hello\n\n", "more_body": True})
        opened()
        await asyncio.Event().wait()

    return app


def test_streams_are_counted_and_end_whole_at_a_shutdown() -> None:
    async def run() -> tuple[list[Message], list[Message]]:
        begun = asyncio.Event()
        gate = Gate(endless(begun.set), Guard(limits=Limits(streams=1)))
        scope = {"type": "http", "path": "/events", "headers": [HOST]}
        first: list[Message] = []
        second: list[Message] = []

        def into(sent: list[Message]) -> Send:
            async def send(message: Message) -> None:
                sent.append(message)

            return send

        async def receive() -> Message:
            return await asyncio.Future()

        stream = asyncio.ensure_future(_awaited(gate(scope, receive, into(first))))
        await begun.wait()
        await gate(scope, receive, into(second))
        gate.end_streams()
        await stream
        return first, second

    first, second = asyncio.run(run())
    assert second[0]["status"] == 503
    assert first[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
