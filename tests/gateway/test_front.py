"""The front between a client's socket and scripted engines: routes, answers, header fields."""

from __future__ import annotations

import gzip
import json
import logging
from typing import Any

import pytest

from kvindex.gateway.routing import NoRankError, UnknownModelError
from kvindex.gateway.waiting import ShedError
from tests.gateway.fronts import STREAM, Engine, Hang, body_of, fronted
from tests.gateway.lives import DONE, HEAD, JSON, ROLE, USAGE, WHOLE, event

pytestmark = pytest.mark.unit


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_stream_passes_through_and_its_place_is_finished_with_the_usage() -> None:
    async with fronted(Engine(headers=(*HEAD, (b"content-length", b"7")))) as served:
        status, headers, body = await served.ask()
        await served.ended()
        assert (status, body) == (200, b"".join(STREAM))
        assert headers[b"content-type"].startswith(b"text/event-stream")
        rank = served.scripted.ranks[0]
        expected = [("reserve", rank), ("first_token", rank), ("complete",), ("finish", rank, 7)]
        assert served.scripted.log == expected
        (url, path, sent, fields) = served.scripted.sent[0]
        assert (url, path) == ("http://e0", "/v1/chat/completions")
        assert json.loads(sent)["model"] == "m"
        assert fields[b"x-data-parallel-rank"] == b"0"


async def test_an_answer_says_where_it_is_from_if_it_is_to() -> None:
    async with fronted(Engine(), explains=True) as served:
        _, headers, _ = await served.ask()
        found = {name: value for name, value in headers.items() if name.startswith(b"x-kvindex-")}
        assert found == {
            b"x-kvindex-rank": b"e0/0",
            b"x-kvindex-held": b"8",
            b"x-kvindex-reason": b"held",
        }


async def test_tokens_are_counted_by_tenant_and_the_tenants_are_bounded() -> None:
    engines = [Engine([WHOLE], headers=JSON) for _ in range(267)]
    async with fronted(*engines, tenant_header="X-Team") as served:
        for tenant in (b"red", b"red", b"a,b", b"x" * 65, "ü".encode()):
            await served.ask(b"x-team: " + tenant, stream=False)
        await served.ask(stream=False)
        # As a proxy in front adds its own; the last counts in the endpoint picker, too.
        await served.ask(b"x-team: forged", b"x-team: red", stream=False)
        await served.ended()
        tenants = served.access.statistics()["tenants"]
        assert list(tenants) == ["red", "other", ""]
        assert tenants["red"] == {"prompt": 30, "output": 9, "delivered": 21}
        for number in range(260):
            await served.ask(b"x-team: %d" % number, stream=False)
        await served.ended()
        tenants = served.access.statistics()["tenants"]
        assert len(tenants) == 256
        assert tenants["other"]["prompt"] == 10 * (3 + 260 - 253)


async def test_a_whole_answer_is_one_reply_with_its_length() -> None:
    fields = (*JSON, (b"content-length", b"%d" % len(WHOLE)), (b"server", b"uvicorn"))
    async with fronted(Engine([WHOLE], headers=fields)) as served:
        status, headers, body = await served.ask(stream=False)
        assert (status, body, headers[b"content-length"]) == (200, WHOLE, b"%d" % len(WHOLE))
        assert headers[b"content-type"] == b"application/json"
        assert b"server" not in headers


async def test_a_long_whole_answer_streams_with_its_length() -> None:
    long = WHOLE + b" " * 200_000
    fields = (*JSON, (b"content-length", b"%d" % len(long)))
    async with fronted(Engine([long[:100_000], long[100_000:]], headers=fields)) as served:
        status, headers, body = await served.ask(stream=False)
        await served.ended()
        assert (status, body, headers[b"content-length"]) == (200, long, b"%d" % len(long))
        rank = served.scripted.ranks[0]
        expected = [("reserve", rank), ("first_token", rank), ("complete",), ("finish", rank, 7)]
        assert served.scripted.log == expected


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 500, 529])
async def test_an_engines_refusal_passes_through(status: int) -> None:
    engine = Engine([b'{"error":{}}'], status, (*JSON, (b"retry-after", b"9")))
    async with fronted(engine) as served:
        answer = await served.ask()
        assert (answer[0], answer[2]) == (status, b'{"error":{}}')
        assert answer[1][b"retry-after"] == b"9"
        await served.ended()
        assert served.access.statistics()["requests"][0][1:3] == (status, "status")
        rank = served.scripted.ranks[0]
        assert served.scripted.log == [("reserve", rank), ("complete",), ("cancel", rank)]


@pytest.mark.parametrize(
    ("failing", "ending"),
    [
        (Engine(fails="refused"), []),
        (Engine([ROLE[:9], "reset"]), [("close",)]),
        (Engine([], 502, JSON), [("close",)]),
        (Engine([], 503, JSON), [("close",)]),
    ],
    ids=["refused", "half an event", "502", "503"],
)
async def test_engines_that_fail_before_the_first_event_are_tried_on_other_ranks(
    failing: Engine, ending: list[Any]
) -> None:
    async with fronted(failing, failing, Engine()) as served:
        status, _, body = await served.ask(b"x-request-id: mine")
        assert (status, body) == (200, b"".join(STREAM))
        first, second, third = served.scripted.ranks[:3]
        tried = [[("reserve", rank), *ending, ("cancel", rank)] for rank in (first, second)]
        last = [("reserve", third), ("first_token", third), ("complete",), ("finish", third, 7)]
        await served.ended()
        assert served.scripted.log == [*tried[0], *tried[1], *last]
        assert [each["exclude"] for each in served.scripted.reserved] == [
            *([], [first]),
            [first, second],
        ]
        ids = [fields[b"x-request-id"] for *_, fields in served.scripted.sent]
        assert ids == [b"mine", b"mine-2", b"mine-3"]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        *((Engine(fails=reason), 503) for reason in ("refused", "timeout_head", "silent")),
        *((Engine(fails=reason), 502) for reason in ("reset", "garbage")),
        (Engine([], 503, JSON), 503),
        (Engine([], 502, JSON), 502),
        (Engine(["reset"]), 502),
    ],
)
async def test_without_an_answer_of_three_engines_there_is_one_of_the_gateway(
    engine: Engine, expected: int
) -> None:
    async with fronted(engine, engine, engine) as served:
        status, headers, body = await served.ask()
        assert (status, error_of(body)["code"]) == (expected, "no_answer")
        assert (b"retry-after" in headers) == (expected == 503)
        endings = [entry for entry in served.scripted.log if entry[0] == "cancel"]
        assert len(endings) == len(served.scripted.reserved) == 3


async def test_the_only_engine_that_fails_is_named_by_its_failure_not_as_no_rank() -> None:
    async with fronted(Engine(fails="reset")) as served:
        del served.scripted.ranks[1:]
        status, _, body = await served.ask()
        assert (status, error_of(body)["message"][-5:]) == (502, "reset")


async def test_the_head_of_a_stream_goes_out_before_its_first_event_if_that_is_late() -> None:
    engine = Engine([b": keep-alive\n\n", Hang()])
    async with fronted(engine, head_hold=0.01) as served:
        client = await served.begin()
        assert (await client.head())[0] == 200
        assert await client.reader.readuntil(b": keep-alive\n\n")
        client.writer.close()
        await served.ended()
        assert served.access.statistics()["requests"][0][1:3] == (200, "client_left")


@pytest.mark.parametrize(
    ("rest", "options", "why"),
    [
        ([b"data: {", "reset"], {}, b"broke off"),
        ([Hang()], {"silent_within": 0.01}, b"(silent)"),
    ],
    ids=["broken off", "silent"],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_whole(
    rest: list[Any], options: dict[str, float], why: bytes
) -> None:
    async with fronted(Engine([*STREAM[:2], *rest]), **options) as served:
        client = await served.begin()
        await client.head()
        body, is_whole = await client.chunks()
        start, _, error = body.partition(b'data: {"error"')
        assert start == b"".join(STREAM[:2])
        assert why in error
        assert not is_whole
        await served.ended()
        assert served.scripted.log[-2:] == [("close",), ("cancel", served.scripted.ranks[0])]


async def test_a_whole_answer_that_breaks_off_is_shorter_than_its_length() -> None:
    fields = (*JSON, (b"content-length", b"100000"))
    async with fronted(Engine([b" " * 70_000, "reset"], headers=fields)) as served:
        client = await served.begin(stream=False)
        _, headers = await client.head()
        assert headers[b"content-length"] == b"100000"
        assert len(await client.reader.read()) == 70_000


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnknownModelError("m", ["a", "b"]), 404, "model_not_found"),
        (NoRankError({"drained": 2}), 503, "no_rank"),
        (ShedError("no room", reason="full", retry_after=2.5), 429, "no_capacity"),
    ],
)
async def test_a_request_without_a_place_is_refused(
    error: Exception, status: int, code: str
) -> None:
    async with fronted() as served:
        served.scripted.refusal = error
        got, headers, body = await served.ask()
        assert (got, error_of(body)["code"]) == (status, code)
        assert headers.get(b"retry-after") == {404: None, 503: b"1", 429: b"3"}[status]
        assert served.scripted.log == []
        (row,) = served.access.statistics()["requests"]
        assert row == ("/v1/chat/completions", status, "refused", 1)


async def test_a_prompt_without_tokens_is_booked_by_its_length() -> None:
    async with fronted(Engine()) as served:
        served.scripted.token_ids = None
        await served.ask(user="x" * 400)
        (reserved,) = served.scripted.reserved
        assert reserved["token_ids"] is None
        assert 100 < reserved["prompt_tokens"] < 200


async def test_forged_and_hop_by_hop_fields_do_not_reach_the_engine() -> None:
    forged = [b"x-gateway-destination-endpoint: evil", b"x-kvindex-rank: 7", b"x-mine: 1"]
    forged += [b"x-data-parallel-rank: 7", b"connection: x-drop, keep-alive", b"x-drop: 1"]
    forged += [b"accept-encoding: gzip", b"authorization: Bearer sk-1", b"traceparent: 00-1"]
    async with fronted(Engine(), Engine(), passes_keys=True) as served:
        await served.ask(*forged)
        fields = served.scripted.sent[0][3]
        own = {b"x-mine": b"1", b"authorization": b"Bearer sk-1", b"traceparent": b"00-1"}
        pinned = {b"x-data-parallel-rank": b"0", b"content-type": b"application/json"}
        assert fields == {**own, **pinned, b"x-request-id": fields[b"x-request-id"]}
    async with fronted(Engine(), passes_keys=False) as served:
        await served.ask(*forged)
        assert b"authorization" not in served.scripted.sent[0][3]


async def test_a_sane_request_id_is_handed_to_the_engine_and_back_and_another_replaced() -> None:
    engine = Engine(headers=(*Engine().headers, (b"x-request-id", b"engine's")))
    async with fronted(engine, Engine()) as served:
        _, headers, _ = await served.ask(b"x-request-id: chat-1")
        assert headers[b"x-request-id"] == b"chat-1"
        _, headers, _ = await served.ask(b"x-request-id: a b" + b"c" * 200)
        assert headers[b"x-request-id"] == served.scripted.sent[1][3][b"x-request-id"]
        assert b" " not in headers[b"x-request-id"]
        ids = {each["request_id"] for each in served.scripted.reserved}
        assert len(ids) == 2
        assert "chat-1" not in ids, "two open requests may have the same id"


async def test_a_rank_is_pinned_in_the_body_and_wins_over_the_clients() -> None:
    async with fronted(Engine()) as served:
        served.scripted.body_fields = {"routed_dp_rank": 1}
        await served.ask(routed_dp_rank=7)
        assert json.loads(served.scripted.sent[0][2])["routed_dp_rank"] == 1


async def test_paths_and_methods_that_are_not_served_and_bodies_that_are_too_long() -> None:
    async with fronted() as served:
        status, _, body = await served.ask(path="/v1/audio")
        assert (status, error_of(body)["type"]) == (404, "invalid_request_error")
        status, headers, body = await served.ask(path="/v1/models")
        assert (status, headers[b"allow"]) == (405, b"GET")
        error_of(body)
        status, _, body = await served.ask(user="x" * 5000)
        assert (status, error_of(body)["code"]) == (413, "body")
        client = await served.connect()
        client.post("/v1/completions", b"no JSON")
        status, _, body = await client.answer()
        assert status == 400
        error_of(body)


async def test_models_health_and_readiness() -> None:
    async with fronted() as served:
        client = await served.connect()

        async def get(path: bytes) -> tuple[int, bytes]:
            client.writer.write(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
            status, _, body = await client.answer()
            return status, body

        served.scripted.names = ["org/m", "adapter"]
        listed = [{"id": "org/m", "max_model_len": 9}, {"id": "adapter", "max_model_len": 9}]
        assert json.loads((await get(b"/v1/models"))[1])["data"] == listed
        for path in (b"/v1/models/org/m", b"/v1/models/org%2Fm"):
            status, body = await get(path)
            assert (status, json.loads(body)) == (200, listed[0])
        status, body = await get(b"/v1/models/other")
        assert (status, error_of(body)["code"]) == (404, "model_not_found")
        assert (await get(b"/health"))[0] == (await get(b"/ready"))[0] == 200
        served.scripted.is_ready = False
        assert (await get(b"/ready"))[0] == 503
        served.scripted.is_ready = True
        served.front.drain()
        assert (await get(b"/ready"))[0] == 503
        assert (await get(b"/health"))[0] == 200


async def test_errors_of_the_messages_api_have_anthropics_form() -> None:
    async with fronted() as served:
        served.scripted.refusal = NoRankError({"drained": 1})
        wrong: dict[str, Any] = {"messages": []}
        for fields, status, kind in (
            ({}, 503, "overloaded_error"),
            (wrong, 400, "invalid_request_error"),
        ):
            found, _, body = await served.ask(path="/v1/messages", **fields)
            answer = json.loads(body)
            assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)
            assert answer["error"]["message"]


async def test_a_gzip_body_is_read_and_sent_plain_within_limits() -> None:
    async with fronted(Engine(), most_body=3000) as served:
        plain = body_of(user="x" * 2000)

        async def post(body: bytes, coding: bytes = b"gzip") -> tuple[int, Any]:
            client = await served.connect()
            client.post("/v1/chat/completions", body, b"content-encoding: " + coding)
            return (await client.answer())[::2]

        assert (await post(gzip.compress(plain)))[0] == 200
        (_, _, sent, fields) = served.scripted.sent[0]
        assert (sent, b"content-encoding" in fields) == (plain, False)
        for body, coding, status in (
            (gzip.compress(b" " * 3001), b"gzip", 413),
            (gzip.compress(plain)[:-9], b"gzip", 400),
            (gzip.compress(plain) + b"more", b"gzip", 400),
            (plain, b"gzip", 400),
            (plain, b"br", 415),
        ):
            assert (await post(body, coding))[0] == status


async def test_a_follow_up_goes_to_the_engine_that_has_made_the_response() -> None:
    async with fronted(Engine(), Engine([b"{}"]), Engine([b"{}"]), Engine([b"{}"])) as served:
        scripted = served.scripted
        fields = {"input": "Once", "previous_response_id": "resp_1"}
        status, _, body = await served.ask(path="/v1/responses", **fields)
        assert (status, error_of(body)["code"]) == (404, "response_not_found")
        scripted.makers["resp_1"] = scripted.servings("m")[2]
        assert (await served.ask(path="/v1/responses", **fields))[0] == 200
        assert scripted.reserved[-1]["workers"] == ["e2"]
        await served.ended()
        client = await served.connect()
        for line in (b"GET /v1/responses/resp_1?after=2", b"DELETE /v1/responses/resp_1"):
            client.writer.write(line + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await client.answer())[0] == 200
        assert (await served.ask(path="/v1/responses/resp_1/cancel"))[0] == 200
        sent = [(url, path) for url, path, *_ in scripted.sent[1:]]
        assert sent == [
            ("http://e2", "GET /v1/responses/resp_1?after=2"),
            ("http://e2", "DELETE /v1/responses/resp_1"),
            ("http://e2", "/v1/responses/resp_1/cancel"),
        ]
        for path in ("resp_2", "resp_1/other", "%0d%0aGET%20/x", "resp_1%2f..%2fx"):
            assert (await served.ask(path=f"/v1/responses/{path}"))[0] == 404
        assert len(scripted.sent) == 4


async def test_a_stream_of_a_response_is_followed_as_it_comes() -> None:
    hang = Hang()
    async with fronted(Engine([MADE, hang])) as served:
        served.scripted.makers["resp_1"] = served.scripted.servings("m")[2]
        client = await served.connect()
        line = b"GET /v1/responses/resp_1?stream=true HTTP/1.1\r\nhost: localhost\r\n\r\n"
        client.writer.write(line)
        assert b"text/event-stream" in await client.reader.readuntil(b"\r\n\r\n")
        assert MADE in await client.reader.readuntil(MADE)
        await hang.begun.wait()
        client.writer.close()
        await served.until(lambda: ("close",) in served.scripted.log)


MADE = b'data: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
RESPONSE = b'{"id":"resp_1","object":"response","usage":{"input_tokens":3,"output_tokens":1}}'


@pytest.mark.parametrize("engine", [Engine([MADE, DONE]), Engine([RESPONSE], headers=JSON)])
async def test_which_engine_has_made_a_response_is_noted(engine: Engine) -> None:
    async with fronted(engine) as served:
        await served.ask(path="/v1/responses", input="Once")
        await served.ended()
        made = [entry for entry in served.scripted.log if entry[0] == "made"]
        assert made == [("made", served.scripted.ranks[0], "resp_1")]


async def test_a_request_without_a_prompt_is_forwarded_by_load() -> None:
    async with fronted(Engine([b"{}"], headers=JSON), Engine([b"{}"], headers=JSON)) as served:
        assert (await served.ask(path="/v1/messages/count_tokens"))[0] == 200
        client = await served.connect()
        form = (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n'
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
        )
        client.post("/v1/audio/transcriptions", form)
        assert (await client.answer())[0] == 200
        assert [each["model"] for each in served.scripted.reserved] == ["m", "whisper"]
        assert served.scripted.sent[1][2] == form


async def test_tokenize_is_passed_to_an_engine_and_to_the_next_if_it_fails() -> None:
    count = Engine([b'{"count":3}'])
    async with fronted(Engine(fails="refused"), count) as served:
        status, _, body = await served.ask(path="/tokenize")
        assert (status, body) == (200, b'{"count":3}')
        first, second = (url for url, *_ in served.scripted.sent)
        assert first != second


async def test_the_access_log_has_one_line_a_request_and_no_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvindex.gateway.access")
    two_events = Engine([ROLE, event("x"), event("y") + USAGE, DONE])  # of three tokens
    async with fronted(Engine(fails="reset"), two_events) as served:
        await served.ask(b"x-request-id: chat-1")
        await served.ended()
    (record,) = caplog.records
    line = json.loads(record.getMessage())
    assert "hello" not in record.getMessage()
    seconds = {name: line.pop(name) for name in ("wait", "first_token", "duration")}
    assert 0 <= seconds["wait"] <= seconds["first_token"] <= seconds["duration"]
    assert line == {
        "id": "chat-1",
        "path": "/v1/chat/completions",
        "model": "m",
        "rank": "e1/0",
        "reason": "held",
        "tokens_from": "local",
        "prompt_tokens": 10,
        "held": 8,
        "delivered": 7,
        "output_tokens": 3,
        "status": 200,
        "end": "whole",
        "tries": 2,
        "failures": ["e0/0 reset"],
    }
    counted = served.access.statistics()
    assert counted["requests"] == [("/v1/chat/completions", 200, "whole", 1)]
    assert counted["failures"] == {"reset": 1}
    assert counted["tokens"]["delivered"] == 7
    assert sum(counted["first_token"]["buckets"]) == 1
