"""Spans of requests: joined to the client's, through each front, and without what is secret."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvindex import Rank
from kvindex.gateway.access import Access
from kvindex.gateway.picker.messages import NOTES
from kvindex.gateway.picker.stream import BOOKING, Picker
from kvindex.gateway.routing import NoRankError
from kvindex.gateway.tracing import new_tracer
from kvindex.gateway.waiting import ShedError
from tests.children import Program
from tests.gateway.fronts import Engine, Hang, Scripted, fronted
from tests.gateway.lives import DONE, ROLE, USAGE, event
from tests.gateway.picker.streams import BUFFERED, answer_head, body, chat, fields_of, head
from tests.gateway.picker.test_reports import USAGE as NOTED
from tests.gateway.picker.test_reports import line

pytestmark = pytest.mark.service

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
JOINED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SECRET = "sk-secret"


class Recorded:
    """A tracer of the SDK, and the spans that have ended."""

    def __init__(self, *processors: SpanProcessor) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        for processor in (*processors, SimpleSpanProcessor(self.exporter)):
            provider.add_span_processor(processor)
        self.tracer = provider.get_tracer("test")

    def named(self, name: str) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def request(self) -> Any:
        (span,) = self.named("POST /v1/chat/completions")
        return span


async def embedded(recorded: Recorded, headers: Mapping[str, Any], text: str) -> dict[bytes, bytes]:
    """Ask for a stream; return the fields that its engine has received."""
    async with fronted(Engine(), tracer=recorded.tracer) as served:
        fields = [f"{name}: {value}".encode() for name, value in headers.items()]
        await served.ask(*fields, messages=[{"role": "user", "content": text}])
        return served.scripted.sent[0][3]


async def epp(recorded: Recorded, headers: Mapping[str, Any], text: str) -> dict[bytes, bytes]:
    requests = [head(**headers), body(chat(text, stream=True))]
    requests.append(answer_head(content_type="text/event-stream"))
    pieces = (ROLE, event("x"), USAGE, DONE)
    requests += [body(each, end=each is DONE, kind="response_body") for each in pieces]
    first, *_ = await _processed(_picker(recorded), *requests)
    return {**_encoded(headers), **_encoded(fields_of(first))}


async def envoy(recorded: Recorded, headers: Mapping[str, Any], text: str) -> dict[bytes, bytes]:
    picker = _picker(recorded, has_reports=True)
    asked = head(**headers)
    asked.protocol_config.request_body_mode = BUFFERED
    first, second = await _processed(picker, asked, body(chat(text, stream=True)))
    key = first.dynamic_metadata[NOTES][BOOKING]
    assert picker.reports is not None
    picker.reports.first(f"{key} 127.0.0.1:1".encode())
    picker.reports.logged(line(key=key, usage=NOTED))
    return {**_encoded(headers), **_encoded(fields_of(second, "request_body"))}


def _picker(recorded: Recorded, **options: Any) -> Picker:
    scripted: Any = Scripted()
    scripted.ranks = [Rank("127.0.0.1:1")]
    access = Access(tracer=recorded.tracer)
    return Picker(scripted, scripted, most_bytes=1 << 20, access=access, **options)


async def _processed(picker: Picker, *requests: Any) -> list[Any]:
    async def sent() -> AsyncIterator[Any]:
        for request in requests:
            yield request

    return [answer async for answer in picker.process(sent())]


def _encoded(fields: Mapping[str, Any]) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in fields.items()
    }


Asking = Callable[[Recorded, Mapping[str, Any], str], Awaitable[dict[bytes, bytes]]]


@pytest.mark.parametrize("ask", [embedded, epp, envoy])
async def test_spans_hang_below_the_clients_and_the_engines_below_ours(ask: Asking) -> None:
    recorded = Recorded()
    headers = {**JOINED, "authorization": f"Bearer {SECRET}"}
    sent = await ask(recorded, headers, SECRET)
    request, (waiting,), (attempt,) = (
        recorded.request(),
        *(recorded.named(name) for name in ("reserve", "try")),
    )
    assert (request.kind, attempt.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert (request.context.trace_id, request.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert {waiting.parent.span_id, attempt.parent.span_id} == {request.context.span_id}
    assert sent[b"traceparent"].decode() == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    assert sent[b"tracestate"] == b"vendor=1"
    (first,) = attempt.events
    assert first.name == "first_token"
    times = [request.start_time, waiting.end_time, first.timestamp, attempt.end_time]
    assert times == sorted(times)
    assert waiting.end_time == attempt.start_time
    assert abs(times[0] - time.time_ns()) < 3600e9, "by the clock, not since the machine's start"
    assert SECRET not in "".join(span.to_json() for span in (request, waiting, attempt))


@pytest.mark.parametrize("ask", [embedded, epp, envoy])
async def test_attributes_say_where_a_request_went_and_what_it_took(ask: Asking) -> None:
    recorded = Recorded()
    await ask(recorded, {"x-request-id": "mine"}, "Once")
    request, (waiting,), (attempt,) = (
        recorded.request(),
        *(recorded.named(name) for name in ("reserve", "try")),
    )
    assert request.parent is None
    found = dict(request.attributes)
    assert found.pop("gen_ai.response.time_to_first_chunk") >= 0.0
    assert found.pop("gen_ai.request.model") in ("m", "fake-model")
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 7,
        "kvindex.request_id": "mine",
        "kvindex.tokens_from": "local",
        "kvindex.prompt_tokens": 10,
        "kvindex.tries": 1,
        "kvindex.end": "whole",
    }
    rank = attempt.attributes["kvindex.rank"]
    assert dict(waiting.attributes) == {
        "kvindex.rank": rank,
        "kvindex.reason": "held",
        "kvindex.held_tokens": 8,
        "kvindex.prompt_tokens": 10,
    }
    assert attempt.attributes["server.address"] == rank.partition(":")[0].partition("/")[0]
    assert attempt.attributes["http.response.status_code"] == 200
    assert {request.status.status_code, attempt.status.status_code} == {StatusCode.UNSET}


async def test_each_try_has_a_span_with_its_failure_and_its_engine_a_parent_of_its_own() -> None:
    recorded = Recorded()
    engines = Engine(fails="refused"), Engine([], 503), Engine()
    async with fronted(*engines, tracer=recorded.tracer) as served:
        await served.ask()
        await served.ended()
        sent = [fields[b"traceparent"].decode() for *_, fields in served.scripted.sent]
    tries = recorded.named("try")
    assert [each.attributes.get("error.type") for each in tries] == ["refused", "status_503", None]
    assert [each.attributes["kvindex.rank"] for each in tries] == ["e0/0", "e1/0", "e2/0"]
    resent = [each.attributes.get("http.request.resend_count") for each in tries]
    assert resent == [None, 1, 2]
    assert [f"{each.context.span_id:016x}" for each in tries] == [each[36:52] for each in sent]
    assert len(recorded.named("reserve")) == 3
    assert recorded.request().status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("refusal", "status", "error"),
    [
        (NoRankError({"drained": 2}), 503, "refused"),
        (ShedError("no room", reason="full", retry_after=2.5), 429, None),
    ],
)
async def test_a_refusal_has_a_span_without_a_try_and_is_an_error_if_it_is_ours(
    refusal: Exception, status: int, error: str | None
) -> None:
    recorded = Recorded()
    async with fronted(tracer=recorded.tracer) as served:
        served.scripted.refusal = refusal
        await served.ask()
    (request,) = recorded.exporter.get_finished_spans()
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == status
    assert request.attributes.get("error.type") == error


@pytest.mark.parametrize(
    ("pieces", "end", "error"),
    [
        ([ROLE, event("x"), "reset"], "broken_off", "reset"),
        ([ROLE, event("x"), b'data: {"error": {"message": "x"}}\n\n', DONE], *["error_event"] * 2),
    ],
)
async def test_a_stream_that_fails_after_its_first_token_is_an_error_with_a_first_token(
    pieces: Any, end: str, error: str
) -> None:
    recorded = Recorded()
    async with fronted(Engine(pieces), tracer=recorded.tracer) as served:
        client = await served.begin()
        await client.head()
        await client.chunks()
    (attempt,) = recorded.named("try")
    assert attempt.attributes["error.type"] == error
    assert [event.name for event in attempt.events] == ["first_token"]
    assert recorded.request().attributes["error.type"] == end


async def test_a_client_that_leaves_is_no_error() -> None:
    recorded, hang = Recorded(), Hang()
    async with fronted(Engine([hang]), tracer=recorded.tracer) as served:
        client = await served.begin()
        await hang.begun.wait()
        client.writer.close()
        await served.ended()
    for span in (recorded.request(), *recorded.named("try")):
        assert span.status.status_code is StatusCode.UNSET
    assert recorded.request().attributes["kvindex.end"] == "client_left"


@pytest.mark.parametrize("given", ["00-1", "00-" + "0" * 32 + f"-{PARENT}-01", "\xff" * 600])
async def test_a_traceparent_that_is_none_begins_a_trace_and_goes_no_further(given: str) -> None:
    recorded = Recorded()
    sent = await embedded(recorded, {"traceparent": given, "tracestate": "vendor=1"}, "Once")
    assert recorded.request().parent is None
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", sent[b"traceparent"])
    assert b"tracestate" not in sent


async def test_a_models_name_is_cut() -> None:
    recorded = Recorded()
    async with fronted(Engine(), tracer=recorded.tracer) as served:
        await served.ask(model="m" * 500)
    assert recorded.request().attributes["gen_ai.request.model"] == "m" * 128


@pytest.mark.parametrize("broken", ["on_start", "on_end"])
async def test_fault_a_span_processor_raises_and_every_request_is_answered(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug of the user's")

    processor = SpanProcessor()
    setattr(processor, broken, fail)
    recorded = Recorded(processor)
    async with fronted(Engine(fails="refused"), Engine(), tracer=recorded.tracer) as served:
        status, *_ = await served.ask()
    assert status == 200
    assert "a span could not be made" in caplog.text


def test_without_an_sdk_or_with_one_that_is_off_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert new_tracer() is None
    monkeypatch.setattr(trace, "get_tracer_provider", TracerProvider)
    assert new_tracer() is not None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert new_tracer() is None


def test_without_the_package_nothing_is_traced() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None\n"
    code += "from kvindex.gateway.tracing import new_tracer; print(new_tracer())"
    assert Program("-c", code).line() == "None\n"
