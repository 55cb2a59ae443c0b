"""Connections to engines: what is accepted, what is bounded, and what ends them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvindex import ConfigurationError
from kvindex.gateway.upstream import MOST_HEAD, MOST_UNREAD, Answer, Upstream, UpstreamError
from tests.gateway.scripted import CLOSE, ScriptedServer, scripted

pytestmark = pytest.mark.e2e

PATIENCE = 300.0
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def connected(*scripts: Any, **options: Any) -> AsyncIterator[tuple[Upstream, Any]]:
    upstream = Upstream(**options)
    async with scripted(*scripts) as served:
        try:
            yield upstream, served
        finally:
            await upstream.close()


async def sent(upstream: Upstream, served: ScriptedServer, within: float = PATIENCE) -> Answer:
    return await upstream.send(served.url, "/v1/x", b"{}", head_within=within)


async def body_of(answer: Answer) -> bytes:
    body = bytearray()
    assert not await answer.pass_to(lambda piece: not body.extend(piece))  # type: ignore[func-returns-value]
    return bytes(body)


async def reason_of(failing: Awaitable[object]) -> str:
    """The reason for which there is no whole answer."""
    with pytest.raises(UpstreamError) as caught:
        await failing
    return caught.value.reason


async def whole(upstream: Upstream, served: ScriptedServer, within: float = PATIENCE) -> bytes:
    return await body_of(await sent(upstream, served, within))


async def test_an_answer_has_status_fields_and_body() -> None:
    async with connected([WHOLE], token=lambda: "key") as (upstream, served):
        answer = await upstream.send(
            served.url, "/v1/x", b"{}", [(b"x-b", b"c")], head_within=PATIENCE
        )
        assert (answer.status, await body_of(answer)) == (200, b"hello")
        assert answer.headers == [(b"content-length", b"5"), (b"x-a", b"b")]
        head = served.heads[0]
        assert head.startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-b: c\r\nauthorization: Bearer key\r\ncontent-length: 2\r\n" in head
        assert served.bodies == [b"{}"]


async def test_fields_that_belong_to_the_connection_stay_there() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Hop\r\nX-Hop: a\r\nX-B: b\r\n"
    async with connected([head + b"content-length: 0\r\n\r\n"]) as (upstream, served):
        answer = await sent(upstream, served)
        assert answer.headers == [(b"x-b", b"b"), (b"content-length", b"0")]


async def test_without_a_free_descriptor_those_of_idle_connections_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected([WHOLE], [WHOLE]) as (upstream, served):
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def full(*given: Any, **options: Any) -> Any:
            if upstream.statistics()["idle"]:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await connect(*given, **options)

        assert await whole(upstream, served) == b"hello"
        monkeypatch.setattr(loop, "create_connection", full)
        assert upstream.statistics()["idle"] == 1
        asked = await upstream.ask(served.url, "/tokenize", within=PATIENCE)
        assert asked == (200, b"hello"), "those for other questions are not used again"


@pytest.mark.parametrize("hides", [False, True], ids=["at the socket", "at the look-up"])
async def test_where_no_descriptor_is_left_that_is_no_failure_of_the_engine(
    hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected() as (upstream, served):
        full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        async def connect(*given: Any, **options: Any) -> Any:
            raise socket.gaierror(socket.EAI_AGAIN, "try again") if hides else full

        def pipe() -> Any:
            raise full

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
        monkeypatch.setattr("kvindex.gateway.upstream.os.pipe", pipe)
        assert await reason_of(sent(upstream, served)) == "no_descriptor"
        assert upstream.statistics()["failures"] == {"no_descriptor": 1}


async def test_a_clients_key_is_kept_and_a_get_has_no_body() -> None:
    async with connected([WHOLE], token=lambda: "key") as (upstream, served):
        fields = [(b"authorization", b"Bearer own")]
        answer = await upstream.send(
            served.url + "/below/", "/x", headers=fields, method="GET", head_within=PATIENCE
        )
        assert (answer.status, await body_of(answer)) == (200, b"hello")
        assert served.heads[0].startswith(b"GET /below/x HTTP/1.1\r\n")
        assert served.heads[0].count(b"authorization") == 1
        assert b"content-length" not in served.heads[0]


@pytest.mark.parametrize(
    ("script", "body"),
    [
        ([CHUNKED + b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"], b"abcde"),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil", b" closed", CLOSE], b"until closed"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE], b"hello"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        ([WHOLE[:20], WHOLE[20:40], WHOLE[40:]], b"hello"),
    ],
    ids=["chunks", "until closed", "after a 100", "no content", "pieces"],
)
async def test_each_form_of_a_body_is_read(script: list[bytes], body: bytes) -> None:
    async with connected(script) as (upstream, served):
        assert await whole(upstream, served) == body


async def test_a_connection_is_kept_and_used_again() -> None:
    async with connected([WHOLE], [WHOLE], [WHOLE]) as (upstream, served):
        for _ in range(3):
            assert await whole(upstream, served) == b"hello"
        assert served.connections == 1
        assert upstream.statistics() == {
            "opened": 1,
            "reused": 2,
            "sent_again": 0,
            "idle": 1,
            "failures": {},
        }


async def test_a_kept_connection_that_the_engine_closes_just_then_fails_no_request() -> None:
    async with connected([WHOLE], [CLOSE], [WHOLE]) as (upstream, served):
        assert await whole(upstream, served) == b"hello"
        assert await whole(upstream, served) == b"hello"
        assert served.connections == 2
        assert upstream.statistics()["sent_again"] == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([CLOSE], "reset"),
        ([WHOLE[:30], CLOSE], "reset"),
        ([WHOLE[:-1], CLOSE], "reset"),
        ([CHUNKED + b"3\r\nabc\r\n", CLOSE], "reset"),
        ([b"\x00\xff no HTTP\r\n\r\n"], "garbage"),
        ([CHUNKED + b"zz\r\n"], "garbage"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"], "garbage"),
        ([b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2 * MOST_HEAD], "head_too_long"),
    ],
    ids=[
        "no head",
        "half a head",
        "a body cut",
        "chunks cut",
        "garbage",
        "no chunk",
        "101",
        "long",
    ],
)
async def test_an_engine_that_breaks_off_or_sends_garbage_is_a_failure(
    script: list[bytes], reason: str
) -> None:
    async with connected(script) as (upstream, served):
        assert await reason_of(whole(upstream, served)) == reason
        assert upstream.statistics()["failures"] == {reason: 1}


async def test_an_engine_that_hangs_is_a_failure_once_its_time_is_over() -> None:
    async with connected([], []) as (upstream, served):
        assert await reason_of(whole(upstream, served, within=0.01)) == "timeout_head"
        await served.closed.wait()
        assert await reason_of(upstream.ask(served.url, "/x", within=0.01)) == "timeout_head"


async def test_an_engine_that_is_not_there_is_a_failure() -> None:
    upstream = Upstream()
    async with scripted() as served:
        url = served.url
    for there, reason in ((url, "refused"), ("http://no.such.host.invalid", "unreachable")):
        assert await reason_of(upstream.send(there, "/x", head_within=PATIENCE)) == reason
    assert upstream.statistics()["failures"] == {"refused": 1, "unreachable": 1}


@pytest.mark.parametrize("url", ["engine:8000", "ftp://engine", "http://", "http://e:99999"])
async def test_what_is_no_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        await Upstream().send(url, "/x", head_within=PATIENCE)


async def test_an_endless_answer_is_held_back_and_ends_when_it_is_closed() -> None:
    piece = b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16))
    endless = [CHUNKED, *[piece] * 4000]
    async with connected(endless) as (upstream, served):
        answer = await sent(upstream, served)
        sizes: list[int] = []
        for _ in range(50):
            assert await answer.pass_to(lambda piece: bool(sizes.append(len(piece))))  # type: ignore[func-returns-value]
        assert len(sizes) == 50
        assert max(sizes) <= 4 * MOST_UNREAD
        answer.close()
        await served.closed.wait()
        with pytest.raises(UpstreamError):
            await body_of(answer)
        assert not upstream.statistics()["failures"], "nobody but us has closed it"


async def test_a_whole_answer_that_is_too_long_is_a_failure() -> None:
    async with connected([WHOLE]) as (upstream, served):
        asked = upstream.ask(served.url, "/x", within=PATIENCE, most=4)
        assert await reason_of(asked) == "too_long"
        assert upstream.statistics()["failures"] == {"too_long": 1}


async def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    async with connected([]) as (upstream, served):
        task = asyncio.ensure_future(sent(upstream, served))
        while not served.heads:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.closed.wait()


async def test_a_request_is_sent_to_an_engine_twice_at_most() -> None:
    scripts = [[WHOLE] for _ in range(5)] + [[CLOSE] for _ in range(2)]
    async with connected(*scripts) as (upstream, served):
        await asyncio.gather(*(whole(upstream, served) for _ in range(5)))
        assert upstream.statistics()["idle"] == 5
        assert await reason_of(sent(upstream, served)) == "reset"
        assert upstream.statistics()["sent_again"] == 1


async def test_connections_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvindex.gateway.upstream._IDLE_SECONDS", 0.05)
    async with connected([WHOLE]) as (upstream, served):
        assert await whole(upstream, served) == b"hello"
        await asyncio.wait_for(served.closed.wait(), PATIENCE)
        assert upstream.statistics()["idle"] == 0


async def test_a_question_about_a_prompt_has_connections_of_its_own() -> None:
    async with connected([WHOLE], [WHOLE], [WHOLE]) as (upstream, served):
        assert await whole(upstream, served) == b"hello"
        for _ in range(2):
            asked = await upstream.ask(served.url, "/tokenize", b"{}", within=PATIENCE)
            assert asked == (200, b"hello")
        assert upstream.statistics()["idle"] == served.connections == 2


async def test_what_comes_on_an_idle_connection_closes_it() -> None:
    async with connected([WHOLE + WHOLE], [WHOLE]) as (upstream, served):
        assert await whole(upstream, served) == b"hello"
        assert await whole(upstream, served) == b"hello"
        assert served.connections == 2
