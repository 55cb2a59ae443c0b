"""Clients that leave before their answer, and answers that break off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvindex.service.http import (
    BrokenOffError,
    Guard,
    Limits,
    Refusal,
    Reply,
    Request,
    Route,
    Site,
    Stream,
    sending,
)
from kvindex.service.http.connections import Connection
from tests.service.http.listening import Transport, post

pytestmark = pytest.mark.service


class Handler:
    """Notes how far it comes with a request that it never answers."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    async def __call__(self, request: Request) -> Reply:
        self.noted.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.noted.append("cancelled")
            raise
        return Reply(200)


def connected(route: Route, guard: Guard | None = None) -> tuple[Connection, Transport]:
    transport = Transport()
    connection = Connection(Site([route], guard or Guard()))
    connection.connection_made(transport)
    return connection, transport


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_route_says_whether_its_handler_ends_with_the_client(
    cancels: bool, waits: bool
) -> None:
    handler = Handler()
    connection, _ = connected(Route("POST", "/query", handler, cancels=cancels))
    connection.data_received(post(b"/query"))
    if waits:
        await turns()
    connection.connection_lost(None)  # in the same turn, or a later one
    await turns()
    assert handler.noted == (["begun", "cancelled"] if cancels else ["begun"])
    connection.abort()
    await turns()


async def pieces() -> AsyncGenerator[bytes, None]:
    yield b"piece"
    raise BrokenOffError


@pytest.mark.parametrize(
    ("version", "length", "delivers"),
    [(b"1.1", None, True), (b"1.1", 9, True), (b"1.0", 9, True), (b"1.0", None, False)],
)
async def test_an_answer_that_breaks_off_is_delivered_so_far_but_never_looks_whole(
    version: bytes, length: int | None, delivers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(Transport, "close", lambda self: closed.append("close"))
    monkeypatch.setattr(Transport, "abort", lambda self: closed.append("abort"))

    async def serve(_: Request) -> Stream:
        return Stream(sending(pieces()), (), length=length)

    connection, transport = connected(Route("POST", "/query", serve))
    connection.data_received(post(b"/query", version=version))
    await turns()
    assert closed == ["close" if delivers else "abort"]
    assert b"piece" in transport.written[-1]
    connection.connection_lost(None)


async def test_a_status_without_a_name_is_sent_as_a_number() -> None:
    connection, transport = connected(Route("POST", "/query", lambda _: Reply(529)))
    connection.data_received(post(b"/query"))
    assert transport.written[0].startswith(b"HTTP/1.1 529 \r\n")
    connection.connection_lost(None)


async def test_refusals_have_the_form_that_the_guard_is_given() -> None:
    def form(refusal: Refusal) -> Reply:
        return Reply(refusal.status, refusal.reason.encode(), b"", ((b"x-form", b"own"),))

    guard = Guard(form=form, limits=Limits(body_bytes=4))
    route = Route("POST", "/query", lambda _: Reply(200))
    for sent in (post(b"/query", body=b"12345"), b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        connection, transport = connected(route, guard)
        connection.data_received(sent)
        assert b"x-form: own\r\n" in transport.written[0]
        connection.connection_lost(None)
