"""HTTP over real sockets, byte by byte: answers at once, later and in pieces."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Iterator
from http.client import HTTPException

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
from kvindex.service.http.messages import Writer
from kvindex.service.traffic import Traffic
from tests.live import until
from tests.service.http.scenes import (
    Listening,
    Transport,
    connection_on,
    listening,
    listening_on,
    post,
    read_until,
    responses,
    site_of,
)

pytestmark = pytest.mark.service

TOKEN = "a-token-of-16-characters"


@pytest.fixture(scope="module")
def served() -> Iterator[Listening]:
    with listening(limits=Limits(body_bytes=4096)) as served:
        yield served


@pytest.fixture
def transport() -> Transport:
    return Transport()


def test_a_query_is_answered_and_the_connection_is_kept(served: Listening) -> None:
    connection = served.connect()
    for size in (3, 4000):
        connection.request("POST", "/query?a=1", bytes(size), {"content-type": "x/y"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.read() == b"x/y a=1 %d" % size
        assert response.getheader("content-type") == "text/plain"
        assert response.getheader("date")
        assert response.getheader("connection") is None
    connection.close()


def test_a_path_is_served_as_a_whole_and_by_its_methods_alone(served: Listening) -> None:
    assert served.ask(b"abc", "/query/") == (200, b"app /query/ 3")
    assert served.ask(b"abc", "/queryx") == (200, b"app /queryx 3")
    with served.raw(b"GET /query HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
        assert responses(connection, 1)[0][0] == 405


@pytest.mark.parametrize(
    ("target", "status"),
    [("http://localhost/query?a=1", 200), ("http://localhost", 200), ("http://[::1/query", 400)],
)
def test_a_target_may_be_whole_as_proxies_are_asked(
    served: Listening, target: str, status: int
) -> None:
    head = f"POST {target} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
    with served.raw(head.encode()) as connection:
        assert responses(connection, 1)[0][0] == status


def test_a_request_may_be_answered_later(served: Listening) -> None:
    assert served.ask(b"unknown") == (200, b"app /query 7")


def test_a_query_that_fails_is_a_500_and_the_connection_goes_on(served: Listening) -> None:
    with served.raw(post(b"/query", body=b"broken"), post(b"/query", body=b"x")) as connection:
        failed, answered = responses(connection, 2)
    assert failed[0] == 500
    assert answered == (200, b"none  1")


@pytest.mark.parametrize(("body", "answer"), [(b"abc", b"none  3"), (b"unknown", b"app /query 7")])
def test_a_client_that_expects_100_gets_it_once_before_it_sends(
    served: Listening, body: bytes, answer: bytes
) -> None:
    length = b"content-length: %d" % len(body)
    with served.raw(post(b"/query", b"expect: 100-continue", length)) as connection:
        assert connection.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert responses(connection, 1) == [(200, answer)]


@pytest.mark.parametrize(
    ("version", "headers", "kept"),
    [
        (b"1.1", (), True),
        (b"1.1", (b"connection: close",), False),
        (b"1.0", (), False),
    ],
)
def test_a_connection_is_kept_or_closed_as_the_client_asks(
    served: Listening, version: bytes, headers: tuple[bytes, ...], kept: bool
) -> None:
    request = post(b"/query", *headers, b"content-length: 1", body=b"", version=version)
    with served.raw(request + b"x") as connection:
        assert responses(connection, 1) == [(200, b"none  1")]
        if kept:
            connection.sendall(post(b"/query", body=b"xy"))
            assert responses(connection, 1) == [(200, b"none  2")]
        else:
            assert connection.recv(1) == b""


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_limit_is_a_413_that_its_sender_sees(
    served: Listening, announced: bool
) -> None:
    before = served.guard.counters["body"]
    body = bytes(9000)
    if announced:
        request = post(b"/query", body=body)
    else:
        head = b"POST /query HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        request = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with served.raw(request) as connection:
        [(status, answer)] = responses(connection, 1)
        assert connection.recv(1) == b""
    assert status == 413
    assert b"4096" in answer
    assert served.guard.counters["body"] == before + 1


def test_a_body_without_end_is_cut_off(served: Listening) -> None:
    head = b"POST /query HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with served.raw(head) as connection:
        try:
            for _ in range(10_000):
                connection.sendall(b"400\r\n" + bytes(1024) + b"\r\n")
        except OSError:
            return
    raise AssertionError("10 MB were taken")


def refused_on(connection: Connection, reason: str) -> int:
    return connection._site.guard.counters[reason]


@pytest.mark.parametrize(
    ("seconds", "read", "is_served"),
    [(20, 0, True), (40, 0, False), (40, 100_000, False), (40, 200_000, True)],
)
async def test_a_client_that_reads_nothing_or_too_little_of_a_long_answer_is_cut_off(
    transport: Transport, seconds: int, read: int, is_served: bool
) -> None:
    connection = connection_on(transport)
    transport.unread = 300_000
    connection.pause_writing()
    connection.check_time(0.0)
    transport.unread -= read
    connection.check_time(float(seconds))
    assert transport.closed is not is_served
    assert refused_on(connection, "slow_reader") == (not is_served)


async def test_a_client_that_reads_what_is_written_piece_by_piece_is_served(
    transport: Transport,
) -> None:
    connection = connection_on(transport)
    for second in range(100):
        transport.unread = 300_000 - second  # as full as before whenever somebody looks
        connection.pause_writing()
        connection.check_time(float(second))
        connection.resume_writing()
    assert refused_on(connection, "slow_reader") == 0


async def test_a_client_that_reads_on_is_asked_for_its_body_once(transport: Transport) -> None:
    connection = connection_on(transport)
    connection.data_received(post(b"/query", b"expect: 100-continue", b"content-length: 3"))
    connection.pause_writing()
    connection.resume_writing()
    assert transport.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]


async def test_a_client_that_does_not_read_gets_no_further_answers(transport: Transport) -> None:
    requests: list[bytes] = []

    def ask(request: Request) -> Reply:
        requests.append(request.body)
        return Reply(200)

    connection = connection_on(transport, ask)
    connection.pause_writing()
    connection.data_received(post(b"/query", body=b"x") * 10)
    assert transport.paused
    assert not transport.closed
    connection.data_received(post(b"/query", body=b"x") * 100)
    assert transport.closed
    assert requests == []


def test_a_request_that_is_not_admitted_is_refused_and_counted_once() -> None:
    traffic = Traffic()
    with listening_on(site_of(Guard(tokens=[TOKEN]), traffic)) as served:
        status, body = served.ask(b"x")
        assert status == 401
        assert b"token_missing" in body
        assert served.guard.counters["token_missing"] == 1
        assert served.ask(b"x", authorization=f"Bearer {TOKEN}")[0] == 200
        assert served.ask(b"x", host="evil.example")[0] == 421
        assert traffic.requests() == {
            ("POST", "/query", 401): 1,
            ("POST", "/query", 200): 1,
            ("POST", "/query", 421): 1,
        }


def test_who_expects_100_and_is_not_admitted_need_not_send() -> None:
    with listening(tokens=[TOKEN]) as served:
        head = post(b"/query", b"expect: 100-continue", b"content-length: 3000000")
        with served.raw(head) as connection:
            assert responses(connection, 1)[0][0] == 401
            assert connection.recv(1) == b""


@pytest.mark.parametrize("sent", [post(b"/query", b"content-length: 3"), b"POST /query HTTP/1.1"])
def test_a_slow_head_or_body_is_a_408(sent: bytes) -> None:
    with listening(limits=Limits(head_seconds=0.1, body_seconds=0.1)) as served:
        with served.raw(sent) as connection:
            assert responses(connection, 1)[0][0] == 408
            assert connection.recv(1) == b""


def test_a_few_requests_may_wait_on_a_connection_and_no_more(served: Listening) -> None:
    def refused() -> int:
        return served.guard.counters["pipelined"]

    before = refused()
    requests = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with served.raw(requests.replace(b"/x", b"/never") + 16 * requests) as connection:
        held = served.server.site.connections
        until(lambda: [len(each._waiting) for each in held if each._waiting] == [16])
        assert refused() == before
    with served.raw(requests.replace(b"/x", b"/never") + 17 * requests) as connection:
        assert connection.recv(1) == b""
    assert refused() == before + 1


async def test_many_queries_at_once_are_answered_in_turns(transport: Transport) -> None:
    connection = connection_on(transport)
    # Fewer may wait than are sent here, but of those that are answered at once none waits.
    connection.data_received(post(b"/query", body=b"x") * 20)
    for answered in (16, 20, 20):
        assert len(transport.written) == answered
        await asyncio.sleep(0)


@pytest.mark.parametrize("body", [b"", b"x"])
async def test_a_flood_of_requests_without_a_token_is_refused_in_turns(
    transport: Transport, body: bytes
) -> None:
    connection = connection_on(transport, tokens=[TOKEN])
    connection.data_received(post(b"/query", body=body) * 1000)
    assert len(transport.written) <= 17
    assert transport.closed
    assert refused_on(connection, "pipelined") == 1


async def test_a_client_that_does_not_read_gets_no_further_refusals(transport: Transport) -> None:
    connection = connection_on(transport, tokens=[TOKEN])
    connection.pause_writing()
    connection.data_received(post(b"/query", b"content-length: 1"))
    assert transport.written == []
    connection.resume_writing()
    assert [answer[:12] for answer in transport.written] == [b"HTTP/1.1 401"]
    connection.data_received(b"x")
    assert len(transport.written) == 1


async def test_a_client_that_waits_to_be_asked_for_its_body_is_refused_in_its_turn(
    transport: Transport,
) -> None:
    connection = connection_on(transport, tokens=[TOKEN])
    expecting = post(b"/query", b"expect: 100-continue", b"content-length: 3")
    connection.data_received(post(b"/query") * 16 + expecting)
    assert len(transport.written) == 16
    await asyncio.sleep(0)
    assert len(transport.written) == 17
    assert transport.closed


@pytest.mark.parametrize("path", [b"/slow", b"/pieces"])
async def test_an_answer_to_a_client_that_has_gone_is_dropped(
    transport: Transport, path: bytes
) -> None:
    connection = connection_on(transport)
    connection.data_received(post(path))
    connection.transport.close()
    connection.connection_lost(None)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert transport.written == []


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_an_answer_in_pieces_is_whole(served: Listening, version: bytes) -> None:
    with served.raw(b"GET /pieces HTTP/%b\r\nhost: localhost\r\n\r\n" % version) as connection:
        head, _, body = read_until(connection, b"0\r\n\r\n" if version == b"1.1" else None)
    assert b" 200 " in head
    assert body == (b"5\r\npiece\r\n" * 3 + b"0\r\n\r\n" if version == b"1.1" else b"piece" * 3)


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(served: Listening) -> None:
    connection = served.connect()
    connection.request("GET", "/pieces?4")
    with pytest.raises((HTTPException, OSError)):
        connection.getresponse().read()
    connection.close()


def test_the_head_of_an_answer_comes_without_its_body(served: Listening) -> None:
    for path in ("/pieces", "/other", "/endless"):
        connection = served.connect()
        for _ in range(2):
            connection.request("HEAD", path)
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b"")
        connection.close()


def test_a_client_that_goes_ends_its_stream() -> None:
    with listening() as served:
        with served.raw(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
            read_until(connection, b": hello\r\n")
            [held] = served.server.site.connections
            task = held._task
        until(lambda: task.done() and not served.server.site.connections)


def test_a_kept_connection_that_asks_nothing_is_closed() -> None:
    with listening(limits=Limits(idle_seconds=0.1)) as served:
        with served.raw(post(b"/query", body=b"x")) as connection:
            assert responses(connection, 1) == [(200, b"none  1")]
            assert connection.recv(1) == b""


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


async def test_the_pieces_let_go_of_what_they_hold_if_the_client_left_before_the_first() -> None:
    let_go = []

    async def held() -> AsyncGenerator[bytes, None]:
        try:
            yield b"piece"
        finally:
            let_go.append(True)

    async def drain() -> None:
        raise ConnectionAbortedError("the client has gone")

    with pytest.raises(ConnectionAbortedError):
        await sending(held())(Writer(lambda piece: None, lambda: False, drain))
    assert let_go


async def test_a_status_without_a_name_is_sent_as_a_number() -> None:
    connection, transport = connected(Route("POST", "/query", lambda _: Reply(529)))
    connection.data_received(post(b"/query"))
    assert transport.written[0].startswith(b"HTTP/1.1 529 \r\n")
    connection.connection_lost(None)


async def test_refusals_have_the_form_that_the_guard_is_given() -> None:
    def form(refusal: Refusal, path: str) -> Reply:
        return Reply(refusal.status, b"", b"", ((b"x-form", b"of %b" % path.encode()),))

    guard = Guard(form=form, limits=Limits(body_bytes=4))
    route = Route("POST", "/query", lambda _: Reply(200))
    for sent, path in (
        (post(b"/query", body=b"12345"), b"/query"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"/other"),
        (b"no HTTP\r\n\r\n", b""),
    ):
        connection, transport = connected(route, guard)
        connection.data_received(sent)
        assert b"x-form: of %b\r\n" % path in transport.written[0]
        connection.connection_lost(None)


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"POST /query HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000, 431),
        (b"POST /query HTTP/2.0\r\nhost: localhost\r\ncontent-length: 0", 505),
        (b"POST /query HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked", 501),
    ],
)
async def test_what_is_not_read_here_is_refused_by_its_name(head: bytes, code: int) -> None:
    connection, transport = connected(Route("POST", "/query", lambda _: Reply(200)))
    connection.data_received(head + b"\r\n\r\n")
    assert transport.written[0].startswith(b"HTTP/1.1 %d" % code)
    connection.connection_lost(None)


async def test_a_bug_in_a_route_is_answered_in_the_form_of_the_guard() -> None:
    def fail(_: Request) -> Reply:
        raise ZeroDivisionError

    guard = Guard(form=lambda refusal, _: Reply(refusal.status, b"own form", b""))
    connection, transport = connected(Route("POST", "/query", fail), guard)
    connection.data_received(post(b"/query"))
    assert transport.written[0].startswith(b"HTTP/1.1 500")
    assert transport.written[0].endswith(b"own form")
    connection.connection_lost(None)


async def test_bodies_of_all_connections_are_bounded_and_let_go_with_their_requests() -> None:
    answering, done = asyncio.Event(), asyncio.Event()

    async def serve(_: Request) -> Reply:
        answering.set()
        await done.wait()
        return Reply(200)

    guard = Guard(limits=Limits(body_bytes=100, bodies_bytes=150))
    site = Site([Route("POST", "/query", serve)], guard)

    def open_one(body: bytes, length: int = 100) -> tuple[Connection, Transport]:
        connection, transport = Connection(site), Transport()
        connection.connection_made(transport)
        head = b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length
        connection.data_received(head + body)
        return connection, transport

    half, _ = open_one(b"x" * 90)
    whole, answered = open_one(b"x" * 60, 60)
    assert site.held_bytes == 150
    refused, transport = open_one(b"x")
    assert transport.written[0].startswith(b"HTTP/1.1 503")
    assert guard.counters["bodies"] == 1
    half.connection_lost(None)  # amid its body
    assert (site.held_bytes, half._incoming) == (60, None)
    await answering.wait()
    assert site.held_bytes == 60, "its request has not ended"
    done.set()
    await turns()
    assert answered.written[0].startswith(b"HTTP/1.1 200")
    assert site.held_bytes == 0
    for connection in (refused, whole):
        connection.connection_lost(None)
    assert site.held_bytes == 0


@pytest.mark.parametrize("origin", [b"https://chat.example.com", b"http://localhost"])
async def test_an_answer_says_that_a_page_of_another_site_may_read_it(origin: bytes) -> None:
    guard = Guard(allowed_origins=["https://chat.example.com"])
    connection, transport = connected(Route("POST", "/query", lambda _: Reply(200)), guard)
    connection.data_received(post(b"/query", b"origin: " + origin, b"content-length: 0"))
    allows = b"access-control-allow-origin: " + origin
    assert (allows in transport.written[0]) == (origin != b"http://localhost"), "not to its own"
    connection.connection_lost(None)


async def test_what_a_handler_holds_for_a_request_counts_as_its_body_does() -> None:
    found = []

    def serve(request: Request) -> Reply:
        found.append([request.hold(size) for size in (90, 20)])
        return Reply(200)

    guard = Guard(limits=Limits(bodies_bytes=100))
    connection, _ = connected(Route("POST", "/query", serve), guard)
    for _ in range(2):
        connection.data_received(post(b"/query", body=b"x" * 5))
    assert found == [[True, False]] * 2, "it is let go with its request"
    connection.connection_lost(None)


async def test_a_body_goes_with_its_connection_and_waits_for_no_collector() -> None:
    gc.disable()
    try:
        connection, transport = connected(Route("POST", "/query", lambda _: Reply(200)))
        connection.data_received(
            b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nhalf"
        )
        body = weakref.ref(connection._incoming.body)  # type: ignore[union-attr]
        connection.connection_lost(None)
        del connection, transport
        assert body() is None
    finally:
        gc.enable()


async def test_an_answered_request_waits_for_no_collector() -> None:
    kept = []

    def serve(request: Request) -> Reply:
        kept.append(weakref.ref(request.hold))
        return Reply(200)

    gc.disable()
    try:
        connection, _ = connected(Route("POST", "/query", serve))
        connection.data_received(post(b"/query", body=b"x"))
        assert kept[0]() is None
        connection.connection_lost(None)
    finally:
        gc.enable()
