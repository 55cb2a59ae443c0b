"""Bodies, registrations and connections that nobody means well with.

Nothing of them is kept, what the operator has named stays, and each answer is its own request's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvindex import Client, Worker
from kvindex.service.app import MOST_CHANGES, app_routes
from kvindex.service.catalog import Partition
from kvindex.service.http.guards import Limits, Networks, parse_networks
from kvindex.service.http.messages import Request
from kvindex.service.registry import Registry
from kvindex.service.service import Service
from kvindex.service.state import snapshot_route
from kvindex.service.timeline import StreamCounters, Timeline, event_stream
from kvindex.wire.errors import EndpointRefusedError
from tests.live import PATIENCE, until
from tests.service.http.scenes import (
    Answer,
    Asker,
    Listening,
    certificate_in,
    listening,
    pieces_of,
    post,
    request,
    responses,
)

pytestmark = pytest.mark.service


@pytest.mark.parametrize("path", ["/query", "/register", "/unregister", "/outcomes"])
def test_what_is_nested_too_deep_is_a_400(ask: Asker, path: str) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"x":' + b"[" * 6000 + b"]" * 6000 + b"}"
    assert ask.send("POST", path, content=body, headers=headers).status == 400


def test_a_registration_of_many_bytes_is_a_413_and_is_not_kept(
    service: Service, ask: Asker
) -> None:
    fields = {"instance_id": "x" * 20_000, "modelname": "m", "block_size": 4}
    status, _ = ask.post("/register", {**fields, "endpoint": "tcp://127.0.0.1:1"})
    assert status == 413
    assert service.catalog.registrations == ()


def test_a_long_name_that_nobody_knows_is_not_repeated_in_full(ask: Asker) -> None:
    status, answer = ask.post("/query", {"token_ids": [1], "model_name": "x" * 100_000})
    assert status == 404
    assert 200 < len(answer["error"]) < 500


# Registrations

OURS = "tcp://127.0.0.1:1"
EVIL = "tcp://127.0.0.1:2"
GONE = {"instance_id": 7, "model_name": "m"}


@pytest.fixture
def theirs(service: Service) -> Service:
    """A service with a worker that the operator named."""
    service.registry.add(Worker("7", OURS), Partition("m"), source="file workers.toml")
    return service


def body(endpoint: str, **fields: Any) -> dict[str, Any]:
    return {"instance_id": 7, "model_name": "m", "endpoint": endpoint, "block_size": 4, **fields}


def test_a_client_cannot_move_what_the_operator_named(theirs: Service, ask: Asker) -> None:
    status, said = ask.post("/register", body(EVIL))
    assert (status, "file workers.toml" in said["error"]) == (409, True)
    as_text = {"instance_id": "7", "modelname": "m", "endpoint": EVIL, "block_size": 4}
    assert ask.post("/register", as_text)[0] == 409
    assert [each.endpoint for each in theirs.catalog.registrations] == [OURS]


def test_a_client_may_register_what_the_operator_named_as_it_is(
    theirs: Service, ask: Asker
) -> None:
    assert ask.post("/register", body(OURS))[0] == 200
    assert [each.source for each in theirs.catalog.registrations] == ["file workers.toml"]


def test_a_client_cannot_unregister_what_the_operator_named(
    theirs: Service, ask: Asker, client: Client
) -> None:
    assert ask.post("/register", body(EVIL, dp_rank=1))[0] == 201
    assert ask.post("/unregister", GONE)[0] == 409
    for dp_rank, status in ((0, 409), (1, 200)):
        rank = {**GONE, "routing_group": "default", "dp_rank": dp_rank}
        assert ask.post("/unregister", rank)[0] == status
    assert ask.post("/unregister", {"instance_id": "7"})[0] == 409
    assert [each.endpoint for each in theirs.catalog.registrations] == [OURS]
    assert len(client.ranks) == 1
    theirs.registry.unregister("7")  # the operator takes it away
    assert not client.ranks


def test_the_operator_moves_what_a_client_named(theirs: Service, ask: Asker) -> None:
    assert ask.post("/register", body(EVIL, dp_rank=1))[0] == 201
    theirs.registry.add(Worker("7", {1: "tcp://127.0.0.1:3"}), Partition("m"), source="file x")
    endpoints = {each.dp_rank: each.endpoint for each in theirs.catalog.registrations}
    assert endpoints == {0: OURS, 1: "tcp://127.0.0.1:3"}


@pytest.mark.parametrize("name", ["a\nERROR kvindex: all is lost", "a\0b", "\x1b[2J", "\u202e"])
@pytest.mark.parametrize("what", ["instance_id", "modelname", "tenant_id"])
def test_a_name_that_would_forge_lines_of_a_log_is_refused(
    theirs: Service, ask: Asker, what: str, name: str
) -> None:
    fields = {"instance_id": "x", "modelname": "x", "endpoint": EVIL, "block_size": 4}
    assert ask.post("/register", {**fields, what: name})[0] == 400
    assert len(theirs.catalog.registrations) == 1


def test_many_instances_at_one_endpoint_cost_one_line(
    theirs: Service, ask: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10, 20):
        assert ask.post("/register", body(EVIL, instance_id=number))[0] == 201
    assert len([line for line in caplog.messages if "are both at" in line]) == 1


async def test_registrations_that_wait_for_names_delay_nobody_else(client: Client) -> None:
    waiting, go_on = threading.Semaphore(0), threading.Event()

    def dial(endpoint: str) -> str:
        waiting.release()
        assert go_on.wait(PATIENCE)
        raise EndpointRefusedError(f"{endpoint} has no address", reason="name")

    asker = Asker(app_routes(Service(client, Registry(client, dial=dial))))

    async def register(number: int) -> Answer:
        return await asker.answer(request("POST", "/register", body(EVIL, instance_id=number)))

    registering = [asyncio.ensure_future(register(n)) for n in range(MOST_CHANGES)]
    try:
        assert await asyncio.to_thread(waiting.acquire, timeout=PATIENCE)
        for path in ("/ready", "/workers", "/services"):
            reply = await asyncio.wait_for(asker.answer(request("GET", path)), PATIENCE)
            assert (path, reply.status) == (path, 200)
        refused = await asyncio.wait_for(register(-1), PATIENCE)
        assert (refused.status, refused.json["reason"]) == (503, "busy")
    finally:
        go_on.set()
    answers = await asyncio.gather(*registering)
    assert [answer.status for answer in answers] == [403] * MOST_CHANGES


def test_every_refused_registration_says_why_in_a_word(client: Client) -> None:
    networks = Networks(parse_networks(["loopback"]), lambda host: [])
    registry = Registry(client, dial=networks.check, max_ranks=1)
    ask = Asker(app_routes(Service(client, registry)))
    assert ask.post("/register", body(OURS))[0] == 201
    for fields, status, reason in (
        ({"endpoint": "tcp://10.1.1.1:1"}, 403, "network"),
        ({"endpoint": "tcp://ghost:1"}, 403, "name"),
        ({"endpoint": "ipc:///tmp/x"}, 403, "transport"),
        ({"endpoint": "tcp://127.0.0.1"}, 400, "invalid"),
        ({"instance_id": 8}, 503, "room"),
        ({"model_name": "other"}, 409, "conflict"),
        ({"model_name": "x" * 20_000}, 413, "body"),
    ):
        answer = ask.post("/register", {**body(OURS), **fields})
        assert (answer[0], answer[1]["reason"], bool(answer[1]["error"])) == (status, reason, True)
    status, said = ask.post("/unregister", {"instance_id": 9, "model_name": "m"})
    assert (status, said["reason"]) == (404, "unknown")


# Connections

CHUNKED = b"transfer-encoding: chunked"


@pytest.fixture
def served() -> Iterator[Listening]:
    with listening(limits=Limits(body_bytes=4096, head_bytes=4096)) as served:
        yield served


def rest_of(connection: socket.socket) -> bytes:
    """Read until the server hangs up."""
    connection.settimeout(PATIENCE)
    read = b""
    try:
        while piece := connection.recv(1 << 16):
            read += piece
    except ConnectionError:
        pass  # it had not read all that was sent
    return read


@pytest.mark.parametrize("path", [b"/query", b"/other"])
@pytest.mark.parametrize("behind", [b"a: b\r\n" * 2000, b"a: " + b"b" * 12_000])
def test_what_stands_behind_a_body_in_chunks_is_bounded(
    served: Listening, path: bytes, behind: bytes
) -> None:
    with served.raw(post(path, CHUNKED), b"0\r\n", behind) as connection:
        assert b" 200 " not in rest_of(connection)
    assert served.guard.counters["head"] == 1


@pytest.mark.parametrize(
    ("path", "answer"), [(b"/query", b"none  5"), (b"/other", b"app /other 5")]
)
def test_what_stands_behind_a_body_is_no_header(
    served: Listening, path: bytes, answer: bytes
) -> None:
    behind = b"host: evil\r\nauthorization: Bearer x\r\ncontent-type: x/y\r\n\r\n"
    pieces = [b"3\r\nabc\r\n", b"2\r\nd", b"e\r\n0\r\n", behind]
    with served.raw(post(path, CHUNKED), *pieces) as connection:
        assert responses(connection, 1) == [(200, answer)]


def test_a_body_in_the_smallest_chunks_is_whole(served: Listening) -> None:
    with served.raw(post(b"/query", CHUNKED), b"1\r\na\r\n" * 2000, b"0\r\n\r\n") as connection:
        assert responses(connection, 1) == [(200, b"none  2000")]


def test_an_offer_to_upgrade_is_ignored_and_the_body_still_counts(served: Listening) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAA"
    offered = post(b"/query", *offer, body=b"abc")
    other = post(b"/other", *offer, body=b"abcd")
    with served.raw(offered + other + offered) as connection:
        assert responses(connection, 3) == [
            (200, b"none  3"),
            (200, b"app /other 4"),
            (200, b"none  3"),
        ]


LONG = b"x" * 9000


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (post(b"/query", CHUNKED) + b"5;" + LONG, 431, "head"),
        (b"GET / HTTP/1.1\r\nx: " + LONG, 431, "head"),
        (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, "malformed"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "malformed"),
        (b"POST /query HTTP/1.1\r\nhost localhost\r\n\r\n", 400, "malformed"),
    ],
    ids=["a chunk's head without end", "a head without end", "a tunnel", "TLS", "no colon"],
)
def test_what_is_no_request_is_refused_and_counted(
    served: Listening, sent: bytes, status: int, reason: str
) -> None:
    with served.raw(sent) as connection:
        answer = rest_of(connection)
    assert b" %d " % status in answer
    assert b"connection: close" in answer
    assert served.guard.counters[reason] == 1


def test_a_refusal_never_stands_in_the_place_of_an_earlier_answer(served: Listening) -> None:
    with served.raw(post(b"/other") + b"no HTTP\r\n\r\n") as connection:
        assert b" 400 " not in rest_of(connection)
    assert served.guard.counters["malformed"] == 1


def test_a_request_gets_one_answer_even_if_its_body_is_overdue(served: Listening) -> None:
    evil = b"POST /other HTTP/1.1\r\nhost: evil\r\n" + CHUNKED + b"\r\n\r\n"
    with served.raw(evil) as connection:
        assert responses(connection, 1)[0][0] == 421
        connection.sendall(b"0\r\n" + b"a: b\r\n" * 2000)
        assert rest_of(connection) == b""
    assert served.guard.counters["head"] == 1


@pytest.mark.parametrize("answers", [1, 8])  # one may be in the system's buffer as a whole
def test_a_client_that_reads_nothing_is_cut_off(served: Listening, answers: int) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(post(b"/query", body=b"long") * answers)
        assert connection.recv(1)
        [held] = served.server.site.connections
        for seconds in (0, 1000):  # looked at twice, long apart
            swept = threading.Event()

            def look(seconds: float = seconds, swept: threading.Event = swept) -> None:
                held.check_time(held._loop.time() + seconds)
                swept.set()

            held._loop.call_soon_threadsafe(look)
            assert swept.wait(PATIENCE)
        rest_of(connection)
    assert served.guard.counters["slow_reader"] == 1


@pytest.fixture
def tls(tmp_path: Path) -> tuple[str, str]:
    cert, key = certificate_in(tmp_path)
    return str(cert), str(key)


@pytest.fixture
def encrypted(tls: tuple[str, str]) -> Iterator[Listening]:
    with listening(limits=Limits(connections=3), tls=tls) as served:
        yield served


def test_connections_without_a_handshake_count_and_the_next_is_refused(
    encrypted: Listening,
) -> None:
    with ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(encrypted.raw())
        until(lambda: len(encrypted.server._shaking) == 3)
        assert rest_of(opened.enter_context(encrypted.raw())) == b""
    assert encrypted.guard.counters["connections"] == 1
    until(lambda: encrypted.guard.counters["handshake"] == 3)


def test_a_handshake_that_never_ends_is_ended(tls: tuple[str, str]) -> None:
    with listening(limits=Limits(head_seconds=0.05), tls=tls) as served:
        with served.raw() as connection:
            assert rest_of(connection) == b""
        until(lambda: served.guard.counters["handshake"] == 1)


def test_what_comes_with_the_end_of_the_handshake_is_answered(encrypted: Listening) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for _ in range(20):
        with context.wrap_socket(encrypted.raw(), server_hostname="localhost") as connection:
            connection.sendall(post(b"/query", body=b"abc") + post(b"/other", body=b"abcd"))
            assert responses(connection, 2) == [(200, b"none  3"), (200, b"app /other 4")]
        until(lambda: not encrypted.server.site.connections)


async def test_what_a_new_event_stream_begins_with_is_made_beside_the_event_loop() -> None:
    made_by: list[threading.Thread] = []

    def present() -> dict[str, Any]:
        made_by.append(threading.current_thread())
        return {}

    stream = event_stream(Timeline(), present, StreamCounters())
    pieces = pieces_of(stream)
    await asyncio.wait_for(pieces.__anext__(), PATIENCE)
    await pieces.aclose()
    assert made_by != [threading.current_thread()]


async def test_a_slow_reader_of_the_snapshot_keeps_nobody_waiting() -> None:
    saves, now = [0], [0.0]

    class Saved:
        def save(self, path: str) -> None:
            saves[0] += 1
            Path(path).write_text(str(saves[0]))

    serve: Any = snapshot_route(Saved(), clock=lambda: now[0]).serve  # type: ignore[arg-type]

    async def begin(seconds: float) -> Any:
        now[0] = seconds
        pieces = pieces_of(await serve(Request.of("GET", b"/snapshot")))
        return pieces, await pieces.__anext__()

    begun = [await begin(seconds) for seconds in (0.0, 5.0, 20.0, 100.0)]  # nobody reads on
    assert [first for _, first in begun] == [b"1", b"1", b"2", b"2"]
    for body, _ in begun:
        assert [piece async for piece in body] == []
    body, first = await begin(100.0)
    await body.aclose()
    assert first == b"3"


def test_each_connection_leaves_a_descriptor_free_for_its_engine() -> None:
    with listening(limits=Limits(head_seconds=600.0)) as served, ExitStack() as opened:
        site, counters = served.server.site, served.guard.counters
        until(lambda: site.others)
        site.most_descriptors = site.others + 30 + 16  # 16 are for all else
        for number in range(1, 31):
            opened.enter_context(served.raw(b"POST /query"))
            until(lambda: len(site.connections) + counters["connections"] == number)  # noqa: B023
        # Each has two in this process, its client's and its own, and one that stays free; its
        # client's counts from the next look on.
        assert 8 <= len(site.connections) <= 15


def test_files_above_the_lowest_free_one_count_too() -> None:
    with ExitStack() as opened:
        files = [opened.enter_context(socket.socket()) for _ in range(100)]
        files[0].close()  # the next connection's descriptor is this low one
        with listening() as served:
            until(lambda: served.server.site.others >= 99)
