"""The rules of the endpoint picker's protocol (GAIE proposal 004), each through a gRPC client."""

from __future__ import annotations

import json
import re
import resource
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

pytest.importorskip("grpc")

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvindex.gateway.picker import messages
from tests.gateway.picker.streams import (
    BUFFERED,
    STREAMED,
    Picker,
    answer_head,
    body,
    chat,
    endpoint_in,
    endpoints_in,
    fields_of,
    head,
    iter_open,
    picker,
    picker_of,
    streamed,
    trailers,
)
from tests.live import PATIENCE
from tests.tools.commands import http_engines, started

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def served() -> Iterator[Picker]:
    with picker() as served:
        yield served


def test_the_head_is_answered_after_the_whole_body_and_the_body_follows(served: Picker) -> None:
    whole = chat("x" * 200_000)
    parts = [whole[at : at + 60_000] for at in range(0, len(whole), 60_000)]
    requests = [head(), *(body(part, end=part is parts[-1]) for part in parts)]
    first, *others = served.process_all(requests)
    assert first.request_headers.response.clear_route_cache
    assert endpoint_in(first) in served.endpoints
    assert streamed(others) == whole


def test_a_stream_is_asked_for_its_usage_and_its_length_follows(served: Picker) -> None:
    first, *others = served.process_all([head(), body(chat(stream=True))])
    sent = streamed(others)
    assert json.loads(sent)["stream_options"] == {"include_usage": True}
    assert fields_of(first)["content-length"] == b"%d" % len(sent)


def test_trailers_may_end_a_request_and_are_answered(served: Picker) -> None:
    first, *others = served.process_all([head(), body(chat(), end=False), trailers()])
    assert endpoint_in(first) in served.endpoints
    *_, last = others
    assert last.WhichOneof("response") == "request_trailers"
    pieces = [each.request_body.response.body_mutation.streamed_response for each in others[:-1]]
    assert not any(piece.end_of_stream for piece in pieces), "the trailers end it"


@pytest.mark.parametrize("trailing", ["", "trailers", "trailers that are skipped"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_buffered_request_is_sent_by_the_answer_to_its_body(
    served: Picker, is_stream: bool, trailing: str
) -> None:
    asked = head()
    asked.protocol_config.request_body_mode = BUFFERED
    whole = body(chat(stream=is_stream), end=not trailing)
    rest = [trailers()] if trailing == "trailers" else []
    first, second, *others = served.process_all([asked, whole, *rest])
    assert [each.WhichOneof("response") for each in others] == ["request_trailers"] * len(rest)
    assert first.WhichOneof("response") == "request_headers"
    assert not fields_of(first)
    assert endpoint_in(second, "request_body") in served.endpoints
    changed = second.request_body.response.body_mutation
    assert changed.WhichOneof("mutation") == ("body" if is_stream else None)
    if is_stream:
        assert json.loads(changed.body)["stream_options"] == {"include_usage": True}
        length = fields_of(second, "request_body")["content-length"]
        assert length == b"%d" % len(changed.body)


def test_the_other_engines_follow_as_places_to_try_again(served: Picker) -> None:
    first, *_ = served.process_all([head(), body(chat())])
    assert sorted(endpoints_in(first)) == served.endpoints
    asked = head()
    own = endpoint_in(first)
    asked.metadata_context.filter_metadata[messages.SUBSET_NAMESPACE][messages.SUBSET] = own
    first, *_ = served.process_all([asked, body(chat())])
    assert endpoints_in(first) == [own], "the other one is not in the subset"


def test_an_engine_that_prefills_for_others_gets_no_request(tmp_path: Path) -> None:
    with http_engines("a", "b") as (engine, prefiller):
        listed = tmp_path / "engines.json"
        listed.write_text(json.dumps({"engines": [engine.url], "prefill": [prefiller.url]}))
        with picker_of([], "--workers-file", str(listed)) as served:
            assert sum("not found" not in served.process.out.readline() for _ in range(2)) == 2
            own = messages.endpoint_of(engine.url)
            first, *_ = served.process_all([head(), body(chat())])
            assert endpoints_in(first) == [own]
            others = [served.process_all([head("/x", "GET", end=True)]) for _ in range(20)]
            assert {endpoint_in(answer) for (answer,) in others} == {own}


def test_an_answer_names_so_many_endpoints() -> None:
    with picker("--endpoints", "1") as served:
        first, *_ = served.process_all([head(), body(chat())])
        assert len(endpoints_in(first)) == 1


def test_a_request_without_a_body_goes_to_any_engine(served: Picker) -> None:
    (answer,) = served.process_all([head("/v1/models", "GET", end=True)])
    assert endpoint_in(answer) in served.endpoints


def test_the_answer_passes_byte_for_byte_without_the_usage_nobody_asked_for(
    served: Picker,
) -> None:
    content = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}\n\n'
    done = b"data: [DONE]\n\n"
    requests = [head(), body(chat(stream=True)), answer_head(content_type="text/event-stream")]
    cuts = [content[:20], content[20:] + usage[:9], usage[9:], done]
    requests += [body(each, end=each is done, kind="response_body") for each in cuts]
    answers = served.process_all(requests)
    assert streamed(answers, "response_body") == content + done
    kinds = [answer.WhichOneof("response") for answer in answers]
    assert kinds.index("response_headers") < kinds.index("response_body")
    line = next(served.lines())
    while line["end"] != "whole":
        line = next(served.lines())
    assert line["output_tokens"] == 1


@pytest.mark.parametrize("first", [b": wait\n\n", b'data: {"error": {"code": 500}}\n\n'])
def test_what_the_proxy_cannot_have_answered_elsewhere_passes_at_once(
    served: Picker, first: bytes
) -> None:
    requests = [head(), body(chat(stream=True)), answer_head(content_type="text/event-stream")]
    requests += [body(each, end=not each, kind="response_body") for each in (first, b"")]
    answers = served.process_all(requests)
    kinds = [answer.WhichOneof("response") for answer in answers]
    piece = answers[kinds.index("response_body")].response_body.response.body_mutation
    assert piece.streamed_response.body == first


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], ""])
def test_an_empty_subset_is_refused_with_503(served: Picker, subset: Any) -> None:
    for asked, *rest in ([head(), body(chat())], [head("/v1/models", "GET", end=True)]):
        fields = asked.metadata_context.filter_metadata[messages.SUBSET_NAMESPACE]
        fields[messages.SUBSET] = subset
        answers = served.process_all([asked, *rest])
        assert [answer.immediate_response.status.code for answer in answers] == [503]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"Once", 400),
        (b'{"messages": "text"}', 400),
        (b'{"model": "x", "messages": [{}]}', 404),
        (b" " * (11 << 20), 413),
    ],
)
def test_a_bad_request_has_an_answer_in_the_form_of_its_route(
    served: Picker, data: bytes, status: int
) -> None:
    parts = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
    requests = [head(), *(body(part, end=part is parts[-1]) for part in parts)]
    (answer,) = served.process_all(requests)
    assert answer.immediate_response.status.code == status
    assert json.loads(answer.immediate_response.body)["error"]["message"]
    (answer,) = served.process_all([head("/v1/messages"), *requests[1:]])
    assert answer.immediate_response.status.code == status
    assert json.loads(answer.immediate_response.body)["type"] == "error", "that of Anthropic"


def test_the_load_moves_to_the_engine_that_has_served(served: Picker) -> None:
    first, *_ = served.process_all([head(), body(chat("moved"))])
    other = next(each for each in served.endpoints if each != endpoint_in(first))
    for name in ("metadata", "attribute"):
        answered = answer_head()
        if name == "metadata":
            answered.metadata_context.filter_metadata[messages.NAMESPACE][messages.SERVED] = other
        else:
            answered.attributes["envoy.filters.http.ext_proc"][messages.UPSTREAM] = other
        asked = head(x_request_id=f"moved-{name}")
        subset = asked.metadata_context.filter_metadata[messages.SUBSET_NAMESPACE]
        subset[messages.SUBSET] = endpoint_in(first)
        served.process_all([asked, body(chat("moved")), answered])
        line = served.line(f"moved-{name}")
        assert line["rank"] == f"{other}/0"


def test_an_answer_is_explained_by_who_has_served_it() -> None:
    with picker("--explain-headers") as served:
        for name in served.endpoints:
            answered = answer_head()
            answered.metadata_context.filter_metadata[messages.NAMESPACE][messages.SERVED] = name
            answers = served.process_all([head(), body(chat("explained")), answered])
            fields = fields_of(answers[-1], "response_headers")
            assert fields == {
                "x-kvindex-rank": f"{name}/0".encode(),
                "x-kvindex-held": b"0",
                "x-kvindex-reason": b"load",
            }


def test_a_response_is_asked_for_where_it_was_made_and_nowhere_else(served: Picker) -> None:
    path = "/v1/responses"
    asked = json.dumps({"model": "fake-model", "input": "Once upon a time"}).encode()
    made = {}
    for number in range(8):
        whole = json.dumps({"id": f"resp_{number}", "output": []}).encode()
        requests = [head(path), body(asked), answer_head(), body(whole, kind="response_body")]
        made[f"resp_{number}"] = endpoint_in(served.process_all(requests)[0])
    for response, endpoint in made.items():
        (answer,) = served.process_all([head(f"{path}/{response}", "GET", end=True)])
        assert endpoints_in(answer) == [endpoint]
        answer, *_ = served.process_all([head(f"{path}/{response}/cancel"), body(b"")])
        assert endpoints_in(answer) == [endpoint]
    (answer,) = served.process_all([head(f"{path}/resp_other", "GET", end=True)])
    assert answer.immediate_response.status.code == 404
    assert b"response_not_found" in answer.immediate_response.body


def test_clients_name_no_destination_and_no_rank(served: Picker) -> None:
    forged: dict[str, Any] = {
        "x_gateway_destination_endpoint": "10.9.9.9:1",
        "x_data_parallel_rank": "9",
        "x_kv_cache_source_host_port": "10.9.9.9:1",
    }
    first, *_ = served.process_all([head(**forged), body(chat())])
    assert endpoint_in(first) in served.endpoints, "which is overwritten"
    removed = first.request_headers.response.header_mutation.remove_headers
    assert {"x-data-parallel-rank", "x-kv-cache-source-host-port"} <= set(removed)
    assert {messages.SUBSET, messages.SERVED, "x-gateway-inference-objective"} <= set(removed)


def test_a_rank_of_an_engine_with_several_is_pinned_by_its_header() -> None:
    with picker(ranks=2) as served:
        first, *_ = served.process_all([head(x_data_parallel_rank="9"), body(chat())])
        assert fields_of(first)["x-data-parallel-rank"] in (b"0", b"1")
        removed = first.request_headers.response.header_mutation.remove_headers
        assert "x-data-parallel-rank" not in removed


def test_health_shows_whether_engines_are_known_and_the_end() -> None:
    with picker() as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        served.process.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert served.process.process.wait(PATIENCE) == 0


def test_messages_out_of_order_and_twice_end_no_stream_with_an_error(served: Picker) -> None:
    requests = [
        body(b"early", kind="response_body"),
        trailers("response_trailers"),
        answer_head(),
        body(b"{}", end=False),
        head(),
        head(),
        body(chat()),
        body(chat()),
        answer_head("x"),
        answer_head(),
        ext_proc.ProcessingRequest(),
        trailers(),
    ]
    served.process_all(requests)
    first, *_ = served.process_all([head(), body(chat())])
    assert endpoint_in(first) in served.endpoints


def test_a_stream_that_is_cut_ends_its_booking(served: Picker) -> None:
    stream = served.stub.Process(
        iter_open([head(x_request_id="cut"), body(chat())]), timeout=PATIENCE
    )
    endpoint_in(next(stream))
    stream.cancel()
    line = served.line("cut")
    assert line["end"] == "client_left"


def test_other_paths_go_to_any_engine(served: Picker) -> None:
    first, *others = served.process_all([head("/v1/audio"), body(b"sound")])
    assert endpoint_in(first) in served.endpoints
    assert streamed(others) == b"sound"


def test_by_default_it_serves_with_a_certificate_of_its_own() -> None:
    with picker(is_plain=False) as served:
        pem = ssl.get_server_certificate(("127.0.0.1", served.port), timeout=PATIENCE).encode()
        credentials = grpc.ssl_channel_credentials(pem)
        request = health_pb2.HealthCheckRequest(service="liveness")
        with grpc.secure_channel(f"localhost:{served.port}", credentials) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_engines_that_are_named_without_an_address_are_refused() -> None:
    with (
        http_engines("a") as (engine,),
        picker_of([engine.url.replace("127.0.0.1", "localhost")]) as served,
    ):
        (answer,) = served.process_all([head(), body(chat())])
        assert answer.immediate_response.status.code == 503
        assert b"named without an address" in answer.immediate_response.body


@pytest.mark.parametrize("part", ["request_body_mode", "response_body_mode"])
def test_other_body_modes_are_refused_with_the_reason(served: Picker, part: str) -> None:
    asked = head()
    setattr(asked.protocol_config, part, STREAMED)
    (answer,) = served.process_all([asked])
    assert answer.immediate_response.status.code == 500
    assert b"FULL_DUPLEX_STREAMED" in answer.immediate_response.body


def test_metrics_show_requests_and_ranks() -> None:
    with picker("--metrics-port", "0", "--tenant-header", "x-team") as served:
        url = served.printed[1].split()[-1]
        served.process_all([head(), body(chat())])
        usage = {"prompt_tokens": 40, "completion_tokens": 3}
        answered = json.dumps({"choices": [], "usage": usage}).encode()
        asked = head(x_team="forged", x_request_id="told")
        asked.request_headers.headers.headers.add(key="x-team", raw_value=b"red")
        served.process_all(
            [asked, body(chat()), answer_head(), body(answered, kind="response_body")]
        )
        assert served.line("told")["tenant"] == "red"
        with urlopen(url, timeout=PATIENCE) as answer:
            text = answer.read().decode()
        assert re.search(r"^kvindex_gateway_requests_total{.*} 1.0$", text, re.MULTILINE)
        assert 'kvindex_gateway_tenant_tokens_total{kind="output",tenant="red"} 3.0' in text
        assert "kvindex_ranks{" in text
        for path, status in (("health", 200), ("ready", 200), ("admin/statistics", 404), ("", 404)):
            assert status_of(url.replace("metrics", path)) == status


def status_of(url: str) -> int:
    try:
        with urlopen(url, timeout=PATIENCE) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_it_opens_as_many_files_as_the_system_allows() -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # what it is started with
        with picker() as served:
            soft, _ = resource.prlimit(served.process.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    assert soft >= min(hard, 65_536) or hard == resource.RLIM_INFINITY


def test_metrics_may_listen_at_another_address() -> None:
    addresses = ("--host", "127.0.0.2", "--metrics-host", "127.0.0.1")
    ports = ("--port", "0", "--plain", "--metrics-port", "0")
    with started("epp", *addresses, *ports, "http://127.0.0.1:1") as process:
        assert "127.0.0.2:" in process.out.readline()
        url = process.out.readline().split()[-1]
        assert url.startswith("http://127.0.0.1:")
        assert status_of(url) == 200
        assert status_of(url.replace("metrics", "ready")) == 503  # no engine is known
