"""The fake engine over HTTP, whole and streamed, and its faults."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from kvindex import Worker, connect
from kvindex.testing import FakeEngine, HttpEngine, HttpFaults, HttpOptions
from kvindex.testing.http_server import Response, Server
from kvindex.wire.errors import ConfigurationError
from tests.live import PATIENCE, until

pytestmark = pytest.mark.e2e

NINE = {"prompt": list(range(1, 10)), "max_tokens": 1}
MESSAGES = [{"role": "user", "content": "Tell me of ships."}]


@contextmanager
def serving(
    options: HttpOptions | None = None, **engine: Any
) -> Iterator[tuple[HttpEngine, FakeEngine]]:
    """Serve an engine of small blocks, which publishes nothing unless told to."""
    with FakeEngine(**{"block_size": 4, "publish": False, **engine}) as fake:
        with HttpEngine(fake, options=options or HttpOptions()) as server:
            yield server, fake


def ask(url: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    fields = {"content-type": "application/json", **(headers or {})}
    with urlopen(Request(url, data, fields), timeout=PATIENCE) as answer:
        text = answer.read()
        return json.loads(text) if "json" in answer.headers["Content-Type"] else text.decode()


def refused(url: str, body: object = None, headers: Mapping[str, str] | None = None) -> int:
    return refusal(url, body, headers)[0]


def refusal(url: str, *asked: Any) -> tuple[int, Any]:
    """The status and the error with which a request is refused."""
    with pytest.raises(HTTPError) as raised:
        ask(url, *asked)
    with raised.value:
        error = json.loads(raised.value.read())["error"]
    assert error["message"]
    return raised.value.code, error


def cached(server: HttpEngine, body: dict[str, Any], **headers: str) -> int:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    usage = ask(server.url + path, {"max_tokens": 1, **body}, headers)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def connected(server: HttpEngine) -> http.client.HTTPConnection:
    """A connection of a client, open and served."""
    client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    client.request("GET", "/health")
    client.getresponse().read()
    return client


def test_an_engine_listens_at_its_port_again_at_once() -> None:
    with serving() as (server, engine):
        client = connected(server)
        server.close()
        client.close()  # after the server: the address is kept for a while
        with HttpEngine(engine, port=int(server.url.rpartition(":")[2])) as again:
            assert ask(again.url + "/version")


def test_a_prompt_sent_twice_is_cached_counted_and_indexed() -> None:
    with serving(publish=True) as (server, engine):
        worker = Worker("w", engine.endpoint, replay=engine.replay_endpoint)
        prompt = list(range(1, 14))
        assert cached(server, {"prompt": prompt}) == 0
        assert cached(server, {"prompt": prompt}) == 12 == engine.hit(prompt)
        with connect([worker]) as client:
            client.wait_live(timeout=PATIENCE)
            until(
                client.statuses,
                lambda statuses: all(status.seq is not None for status in statuses.values()),
            )
            assert client.match(prompt)["w/0"].tokens == 12
        text = ask(server.url + "/metrics")
        assert 'vllm:prefix_cache_queries_total{engine="0",model_name="fake-model"} 26.0' in text
        assert 'vllm:prefix_cache_hits_total{engine="0",model_name="fake-model"} 12.0' in text
        assert 'block_size="4",enable_prefix_caching="True"' in text


def test_every_route_reads_a_prompt_as_the_same_tokens() -> None:
    with serving(HttpOptions(render=True)) as (server, engine):
        text = "Tell me of ships."
        tokens = ask(server.url + "/tokenize", {"prompt": text})["tokens"]
        assert tokens == [256, *text.encode()]
        rendered = ask(server.url + "/v1/completions/render", {"prompt": text})
        assert [request["token_ids"] for request in rendered] == [tokens]
        cached(server, {"prompt": text})
        assert cached(server, {"prompt": tokens}) == engine.hit(tokens) > 0

        chat = ask(server.url + "/v1/chat/completions/render", {"messages": MESSAGES})["token_ids"]
        assert chat == ask(server.url + "/tokenize", {"messages": MESSAGES})["tokens"]
        assert chat[:2] != tokens[:2]
        cached(server, {"messages": MESSAGES})
        assert cached(server, {"prompt": chat}) == engine.hit(chat) > 0


def test_render_is_refused_unless_asked_for_as_vllm_does() -> None:
    with serving() as (server, _):
        for path in ("/v1/completions/render", "/v1/chat/completions/render"):
            code, error = refusal(server.url + path, {"prompt": "x", "messages": MESSAGES})
            assert code == error["code"] == 403
            assert error["type"] == "PermissionDeniedError"
            assert "Restart vllm serve with --enable-scale-out" in error["message"]


@pytest.mark.parametrize("shape", ["ranks", "list", "sources"])
def test_event_sources_come_in_all_three_shapes(shape: Any) -> None:
    options = HttpOptions(sources=shape)
    with FakeEngine(dp_rank=0) as zero, FakeEngine(dp_rank=1) as one:
        with HttpEngine([zero, one], options=options) as server:
            answer = ask(server.url + "/kv_event_sources")
            if shape == "ranks":
                sources = [answer["0"], answer["1"]]
                assert sources[0]["enable_kv_cache_events"] is True
            else:
                sources = answer if shape == "list" else answer["sources"]
                assert [source["data_parallel_rank"] for source in sources] == [0, 1]
            assert [source["endpoint"] for source in sources] == [zero.endpoint, one.endpoint]


def test_an_engine_without_events_names_no_sources() -> None:
    with serving() as (server, _):
        assert ask(server.url + "/kv_event_sources") == {}
    with serving(HttpOptions(sources=None)) as (server, _):
        assert refused(server.url + "/kv_event_sources") == 404


def test_sglang_describes_itself_and_its_publishers() -> None:
    sglang = {"dialect": "sglang-0.5.22", "block_size": 8, "topic": "kv", "publish": True}
    with serving(HttpOptions(role="decode"), **sglang) as (server, engine):
        info = ask(server.url + "/server_info")
        assert info == ask(server.url + "/get_server_info")
        assert (info["version"], info["page_size"]) == ("0.5.22", 8)
        assert info["disaggregation_mode"] == "decode"
        port = int(engine.endpoint.rpartition(":")[2])
        assert info["kv_events"]["endpoint_port_base"] == port
        assert info["kv_events"]["topic"] == "kv"
        assert refused(server.url + "/kv_event_sources") == 404
        assert "sglang:cached_tokens_total" in ask(server.url + "/metrics")


def test_ranks_behind_one_port_take_turns_unless_one_is_named() -> None:
    ranks = [FakeEngine(dp_rank=rank, block_size=4, publish=False) for rank in (0, 1)]
    prompt = {"prompt": list(range(1, 10))}
    with HttpEngine(ranks) as server:
        assert [cached(server, prompt) for _ in range(4)] == [0, 0, 8, 8]
        named = {"X-data-parallel-rank": "1"}
        assert ranks[1].hit(prompt["prompt"]) == cached(server, prompt, **named) == 8
        assert refused(server.url + "/v1/completions", {**prompt, "data_parallel_rank": 7}) == 400


@pytest.mark.parametrize(
    ("options", "hits", "holds", "publishes"),
    [
        (HttpOptions(), [0, 8], True, True),
        (HttpOptions(prefix_caching=False), [0, 0], False, False),
        (HttpOptions(reads_cache=False), [0, 0], True, True),
        (HttpOptions(silent=True), [0, 8], True, False),
    ],
)
def test_an_engine_holds_reports_and_publishes_as_its_options_say(
    options: HttpOptions, hits: list[int], holds: bool, publishes: bool
) -> None:
    with serving(options, publish=True) as (server, engine):
        assert [cached(server, NINE) for _ in range(2)] == hits
        assert cached(server, {**NINE, "prompt_logprobs": 1}) == 0, "these leave the cache unread"
        assert bool(engine.truth()) is holds
        assert (engine.published > 0) is publishes


def test_salts_and_adapters_are_namespaces_of_their_own() -> None:
    with serving(HttpOptions(loras=("tone",))) as (server, _):
        for extra in ({}, {"cache_salt": "x"}, {"model": "tone"}):
            assert [cached(server, {**NINE, **extra}) for _ in range(2)] == [0, 8]
        names = [model["id"] for model in ask(server.url + "/v1/models")["data"]]
        assert names == ["fake-model", "tone"]
        assert refused(server.url + "/v1/completions", {"model": "x", "prompt": [1]}) == 404


def test_a_hit_may_be_a_block_short_and_stay_unreported() -> None:
    prompt = {"prompt": list(range(1, 14)), "max_tokens": 1}
    with serving(HttpOptions(drops_blocks=1)) as (server, _):
        assert [cached(server, prompt) for _ in range(2)] == [0, 8]
    with serving(HttpOptions(cached_tokens=False)) as (server, _):
        usage = [ask(server.url + "/v1/completions", prompt)["usage"] for _ in range(2)][-1]
        assert usage["prompt_tokens_details"] is None


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [-1]}, 400),
        ("/v1/completions", {"prompt": "x", "max_tokens": "1"}, 400),
        ("/v1/completions", {"prompt": "x", "n": 0.5}, 400),
        ("/v1/completions", {"prompt": [1] * 9_000}, 400),
        ("/v1/completions", {"prompt": [1] * 4_000}, 400),  # more than the cache has
        ("/v1/completions", {"messages": MESSAGES}, 400),
        ("/v1/completions", [1], 400),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": ""}]}, 400),
        ("/v1/chat/completions", {"messages": ["x"]}, 400),
        ("/nowhere", {}, 404),
        ("/health", {}, 405),
        ("/v1/completions", None, 405),
    ],
)
def test_requests_that_make_no_sense_are_refused_with_a_reason(
    path: str, body: object, code: int
) -> None:
    with serving(block_size=16, num_blocks=64) as (server, _):
        assert refused(server.url + path, body) == code


def test_a_key_that_is_wrong_is_refused_but_for_health() -> None:
    with serving(HttpOptions(api_key="secret")) as (server, _):
        assert refused(server.url + "/health", {}) == 405  # not 401
        assert refused(server.url + "/v1/models") == 401
        assert ask(server.url + "/kv_event_sources") == {}  # vLLM guards /v1 alone
        assert ask(server.url + "/v1/models", headers={"Authorization": "Bearer secret"})


def test_closing_cuts_open_connections_and_may_be_repeated() -> None:
    with serving() as (server, _):
        connection = connected(server)
        server.close()
        server.close()
        connection.auto_open = 0
        assert connection.sock is not None
        assert connection.sock.recv(1) == b""
        connection.close()


def test_an_address_that_is_taken_is_an_error_at_the_call() -> None:
    with serving() as (server, engine):
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match="cannot listen at"):
            HttpEngine(engine, port=port)
        with pytest.raises(ConfigurationError, match="one for each DP rank"):
            HttpEngine([engine, engine])


def test_images_are_placeholders_and_distinguish_their_blocks() -> None:
    def chat(image: str) -> list[Any]:
        picture = {"type": "image_url", "image_url": {"url": image}}
        return [{"role": "user", "content": [picture, {"text": "and what is this?"}]}]

    with serving(HttpOptions(render=True)) as (server, _):
        body = {"messages": chat("a"), "max_tokens": 1}
        rendered = ask(server.url + "/v1/chat/completions/render", body)
        (place,) = rendered["features"]["mm_placeholders"]["image"]
        assert rendered["token_ids"][place["offset"]] == 262
        assert [cached(server, body) for _ in range(2)] == [0, 20]
        assert cached(server, {"messages": chat("b"), "max_tokens": 1}) == 0


def test_an_engine_may_see_another_prompt_than_was_sent() -> None:
    with serving(HttpOptions(prepends=True)) as (server, _):
        assert ask(server.url + "/v1/completions", NINE)["usage"]["prompt_tokens"] == 10
    with serving(HttpOptions(salt="s")) as (server, engine):
        assert [cached(server, NINE) for _ in range(2)] == [0, 8]
        assert [engine.hit(range(1, 10), salt=salt) for salt in ("s", None)] == [8, 0]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_is_not_declared_as_json_is_refused_as_vllm_does(kind: str, path: str) -> None:
    body = {"prompt": "x", "messages": MESSAGES}
    with serving() as (server, _):
        code, error = refusal(server.url + path, body, {"content-type": kind})
        assert code == error["code"] == 400
        assert "Only 'application/json' is allowed" in error["message"]
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
        assert ask(server.url + path, body, {"content-type": "Application/JSON; charset=utf-8"})


@pytest.mark.parametrize("missing", [{"content": None}, {}])
def test_an_agents_history_has_no_content_beside_its_tool_calls(missing: dict[str, None]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [*MESSAGES, {"role": "assistant", **missing, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "1", "content": "nothing"})
    with serving() as (server, _):
        cached(server, {"messages": history})
        assert cached(server, {"messages": history}) > 0
        without_calls = [{"role": "assistant", **missing}]
        url = server.url + "/v1/chat/completions"
        assert refused(url, {"messages": without_calls}) == 400


# Streams -----------------------------------------------------------------------------------------


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}


@pytest.fixture
def engine() -> Iterator[HttpEngine]:
    with FakeEngine(block_size=4) as cache, HttpEngine(cache) as server:
        yield server


def post(engine: HttpEngine, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
    with closing(connected(engine)) as connection:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        names["content-type"] = "application/json"
        connection.request("POST", "/v1/chat/completions", json.dumps(body), names)
        answer = connection.getresponse()
        return answer.status, answer.read()


def events(data: bytes) -> list[Any]:
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part if part == b"[DONE]" else json.loads(part) for part in parts]


def test_a_chat_streams_its_role_then_its_tokens_then_its_end(engine: HttpEngine) -> None:
    status, data = post(engine, CHAT)
    role, *tokens, done = events(data)
    assert (status, done) == (200, b"[DONE]")
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None, None, "length"]


def test_usage_is_an_event_of_its_own_if_it_is_wanted(engine: HttpEngine) -> None:
    body = {**CHAT, "n": 2, "stream_options": {"include_usage": True}}
    usage = events(post(engine, body)[1])[-2]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 6
    assert usage["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("kind", ["reset", "reset_after_head", "cut", "garbage"])
def test_a_fault_breaks_the_answer(engine: HttpEngine, kind: Any) -> None:
    engine.faults = HttpFaults(kind=kind, after=1)
    with pytest.raises((http.client.HTTPException, OSError)):
        post(engine, CHAT)


def test_half_a_head_ends_before_its_empty_line(engine: HttpEngine) -> None:
    engine.faults = HttpFaults(kind="half_head")
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\n\r\n")
        with client.makefile("rb") as answer:
            assert answer.read() == b"HTTP/1.1 200 OK\r\ncontent-ty"


def test_a_header_names_the_fault_of_one_request(engine: HttpEngine) -> None:
    assert post(engine, CHAT, x_fake_faults='{"kind":"503"}')[0] == 503
    status, data = post(engine, CHAT, x_fake_faults='{"kind":"error_event","after":1}')
    assert (status, "error" in events(data)[2]) == (200, True)
    assert post(engine, CHAT, x_fake_faults="?")[0] == 400
    assert post(engine, CHAT)[0] == 200


def test_a_client_that_closes_cancels_its_stream(engine: HttpEngine) -> None:
    engine.faults = HttpFaults(ttft=600.0)
    host, port = engine.url.removeprefix("http://").split(":")
    body = json.dumps(CHAT).encode()
    with socket.create_connection((host, int(port)), timeout=120) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert client.recv(15) == b"HTTP/1.1 200 OK"  # before the first token
    until(lambda: engine.counters.get("cancelled") == 1)
    until(lambda: engine.counters["open"] == 0)


def test_a_connection_that_comes_while_the_server_closes_is_closed() -> None:
    """Found as an unclosed transport, which failed whichever test ran when it was collected."""
    late: list[socket.socket] = []
    asked = threading.Event()

    def answer(*_: object) -> Response:
        late.append(socket.create_connection(server.address))
        with suppress(RuntimeError):  # the thread cannot wait for itself; it stops all the same
            server.close()
        asked.set()
        return Response.of_json({})

    server = Server("127.0.0.1", 0, answer)
    with socket.create_connection(server.address, timeout=120) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert asked.wait(120)
        server.close()
        gc.collect()  # what is left open now is an error
        with late[0], suppress(ConnectionError):
            late[0].settimeout(120)
            assert late[0].recv(1) == b""
