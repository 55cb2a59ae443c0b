"""Envoy's Lua program by itself: it forwards and notes what `Events` does, whatever the chunks."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("grpc")
pytest.importorskip("lupa")

from lupa import luajit21

from kvindex.gateway.envoy.config import lua
from kvindex.gateway.events import Events, Usage, is_failure
from kvindex.gateway.picker.stream import usage_noted
from tests.gateway.test_events import (
    BESIDE_CHOICES,
    DONE,
    ERRORS,
    LAST,
    REPORT,
    ROLE,
    STAMPED,
    TEXT,
    USAGE,
    chunk,
    event,
    failed_response,
    read,
)

pytestmark = pytest.mark.service

HARNESS = """
return function(pieces, content_type, notes, status, coding)
  local out, metadata, calls, removed = {}, {kvindex = notes}, {}, {}
  local function chunk_of(data)
    local chunk = {data = data}
    function chunk:length() return #self.data end
    function chunk:getBytes(at, n) return string.sub(self.data, at + 1, at + n) end
    function chunk:setBytes(data) self.data = data end
    return chunk
  end
  local fields = {["content-type"] = content_type, ["x-kvindex-served"] = "10.0.0.5:8000"}
  local added = {}
  fields[":status"], fields["content-encoding"] = status, coding
  local headers, info, handle = {}, {}, {}
  function headers:get(name) return fields[name] end
  function headers:add(name, value) added[name] = value end
  function headers:remove(name) removed[#removed + 1] = name end
  function info:dynamicMetadata() return self end
  function info:get(space) return metadata[space] end
  function info:set(space, name, value) metadata[space][name] = value end
  function handle:headers() return headers end
  function handle:streamInfo() return info end
  function handle:httpCall(cluster, fields, body)
    calls[#calls + 1] = body
  end
  function handle:bodyChunks()
    local at, last = 0, nil
    return function()
      if last then out[#out + 1] = last.data end
      at = at + 1
      last = pieces[at] and chunk_of(pieces[at])
      return last
    end
  end
  envoy_on_response(handle)
  return table.concat(out), metadata.kvindex, calls, #removed, added
end
"""


JSON = "application/json"


class Answer(NamedTuple):
    """What the client receives, and what the picker learns."""

    body: bytes
    notes: dict[str, str]
    calls: list[bytes]
    fields: dict[bytes, bytes]


@pytest.fixture(scope="module")
def program() -> Any:
    runtime = luajit21.LuaRuntime(encoding=None)
    runtime.execute(lua().encode())
    run = runtime.execute(HARNESS.encode())
    return lambda pieces, *others: run(runtime.table_from(list(pieces)), *others), runtime


def answered(
    program: Any,
    pieces: Sequence[bytes],
    *,
    hides: bool = False,
    kind: str = "text/event-stream",
    status: bytes = b"200",
    notes: Mapping[str, str] = {},
    coding: bytes | None = None,
) -> Answer:
    """Have the program read an answer in these chunks, and its end."""
    run, runtime = program
    given = {b"booking": b"key-1", **({b"hides": b"yes"} if hides else {})}
    given |= {name.encode(): note.encode() for name, note in notes.items()}
    body, noted, calls, removed, added = run(
        [*pieces, b""], kind.encode(), runtime.table_from(given), status, coding
    )
    assert removed == 1, "the client does not see who has served"
    said = {name.decode(): value.decode() for name, value in noted.items()}
    return Answer(body, said, list(calls.values()), dict(added.items()))


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Cut a stream into chunks, none of which is empty."""
    bounds = [0, *sorted({place % (len(data) + 1) for place in places} - {0, len(data)}), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(bounds) if begin < end]


COMMENT = b": keep-alive\n\n"
ANTHROPIC = [
    event({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}}),
    event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}),
    event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 5}}),
    event({"type": "message_stop"}),
]
RESPONSES = [
    event({"type": "response.created", "response": {"usage": None}}),
    event({"type": "response.output_text.delta", "delta": "a"}),
    event({"type": "response.incomplete", "response": {"usage": {"input_tokens": 4}}}),
]
# What a client has sent, or a model has written, where an engine repeats it.
ECHOES = [
    event({"type": "response.created", "response": {"id": "resp_1", "metadata": metadata}})
    for metadata in (
        {"error": "boom"},
        {"a": "data: {", "error": "boom"},
        {"type": "error", "a": "event: response.failed\n", "error": {"code": 500}},
    )
]
ECHOES += [
    event({"type": "response.completed", "response": {"tools": [{"a": {"error": {"type": "b"}}}]}}),
    event({"choices": [{"text": "a", "logprobs": {"top_logprobs": [{"error": -0.1}]}}]}),
    event(chunk(content='data: {"error": {"code": 500}}')),
]
PARTS = [*ECHOES, event({"type": "error", "message": "boom"}), failed_response("server_error")]
PARTS += [ROLE, TEXT, LAST, REPORT, DONE, b": keep-alive\n\n", event({"error": {"message": "m"}})]
PARTS += [event(chunk(content='"usage": {"a": 1} [DONE]')), event(chunk(tool_calls=[{"id": 1}]))]
PARTS += [event(chunk(reasoning_content="b")), event({"choices": [{"text": "a"}], "usage": None})]
PARTS += [
    STAMPED,
    BESIDE_CHOICES,
    event({"error": {"message": "m"}, "choices": [], "usage": USAGE}),
]
PARTS += [part.replace(b"\n", b"\r\n") for part in (TEXT, REPORT)]


def judged(answer: Answer) -> bool:
    """Whether the picker holds an error against the engine."""
    return is_failure(b'{"error":%b}' % answer.notes.get("error", "null").encode())


@given(
    st.lists(st.sampled_from(PARTS), max_size=12) | st.sampled_from([ANTHROPIC, RESPONSES]),
    st.lists(st.integers(0, 5_000), max_size=12),
    st.booleans(),
    st.sampled_from([b"", b"data: {", b"data: [DO"]),
)
def test_the_client_and_the_picker_get_what_the_gateway_itself_would_give_them(
    program: Any, parts: list[bytes], places: list[int], hides: bool, rest: bytes
) -> None:
    stream = b"".join(parts) + rest
    events = Events(hides_usage=hides)
    expected = events.feed(stream) + events.end()
    answer = answered(program, cut(stream, places), hides=hides)
    assert answer.body == expected
    assert usage_noted(answer.notes) == events.usage
    assert ("error" in answer.notes) == (events.error is not None)
    assert judged(answer) == events.has_failed
    assert len(answer.calls) == events.has_content


def test_a_stream_that_is_over_is_noted_as_such(program: Any) -> None:
    for parts in ([ROLE, TEXT, DONE], ANTHROPIC, RESPONSES):
        assert "last" in answered(program, parts).notes
        assert "last" not in answered(program, parts[:-1]).notes


def test_the_first_content_is_reported_with_the_request_and_who_serves_it(program: Any) -> None:
    assert answered(program, [ROLE, TEXT, TEXT]).calls == [b"key-1 10.0.0.5:8000"]
    assert not answered(program, [ROLE, LAST, DONE]).calls


@pytest.mark.parametrize(("error", "has_failed"), ERRORS)
def test_whose_fault_an_error_is_is_noted(program: Any, error: bytes, has_failed: bool) -> None:
    for parts in ([error], [COMMENT, TEXT + error.replace(b"\n", b"\r\n") + DONE]):
        answer = answered(program, parts)
        assert ("error" in answer.notes, judged(answer)) == (True, has_failed)
    if error.startswith(b"data: "):
        answer = answered(program, [error[6:]], kind=JSON)
        assert ("error" in answer.notes, judged(answer)) == (True, has_failed)


def test_what_an_engine_repeats_is_no_error_of_its_own(program: Any) -> None:
    for part in [*ECHOES, event({"error": None})]:
        assert read(part)[0].error is None
        assert "error" not in answered(program, [part]).notes
        assert "error" not in answered(program, [part[6:]], kind=JSON).notes


def test_the_words_of_an_error_that_are_noted_are_bounded(program: Any) -> None:
    error = dict.fromkeys(("type", "code", "message"), "x" * 10_000)
    assert len(answered(program, [event({"error": error})]).notes["error"]) < 200


def test_what_judges_an_engine_is_noted(program: Any) -> None:
    for parts in ([], [COMMENT], [COMMENT, DONE]):
        assert "empty" in answered(program, parts).notes
        assert "empty" not in answered(program, [*parts, ROLE]).notes
    assert "empty" not in answered(program, [b"\x1f\x8b"], coding=b"gzip").notes
    assert "empty" in answered(program, [], coding=b"identity").notes
    refusal = [b'{"error":{"message":"', "é no such rank".encode(), b'"}}']
    notes = answered(program, refusal, kind=JSON, status=b"400").notes
    assert notes["refusal"] == '{"error":{"message":"?? no such rank"}}'
    assert "refusal" not in answered(program, refusal, kind=JSON).notes


@given(st.lists(st.integers(0, 400), max_size=8))
def test_the_id_of_a_response_is_noted_and_none_that_a_text_names(
    program: Any, places: list[int]
) -> None:
    created = event({"type": "response.created", "response": {"id": "resp_1", "usage": None}})
    text = event({"type": "response.output_text.delta", "delta": '"response":{"id":"resp_2"'})
    for parts, expected in (([created, text], "resp_1"), ([text], None)):
        stream = cut(b"".join(parts), places)
        assert answered(program, stream, notes={"makes": "yes"}).notes.get("made") == expected
        assert "made" not in answered(program, stream).notes, "of other routes none is noted"
    odd = event({"response": {"id": "a b", "metadata": {"response": {"id": "resp_2"}}}})
    assert "made" not in answered(program, cut(odd, places), notes={"makes": "yes"}).notes
    whole = json.dumps({"id": "resp_1", "output": [{"id": "msg_1"}]}).encode()
    other = json.dumps({"output": [{"id": "msg_1"}], "id": "r" * 200}).encode()
    for body, expected in ((whole, "resp_1"), (other, None)):
        answer = answered(program, cut(body, places), kind=JSON, notes={"makes": "yes"})
        assert (answer.body, answer.notes.get("made")) == (body, expected)


def test_a_choice_is_explained_only_where_its_engine_serves(program: Any) -> None:
    fields = {"x-kvindex-rank": "a/0", "x-kvindex-held": "16", "x-kvindex-reason": "cache"}
    expected = {name.encode(): value.encode() for name, value in fields.items()}
    for engine, added in (("10.0.0.5:8000", expected), ("10.0.0.6:8000", {})):
        answer = answered(program, [TEXT, DONE], notes={"explains": engine, **fields})
        assert answer.fields == added
    assert answered(program, [TEXT, DONE]).fields == {}


def test_a_whole_answer_passes_and_its_usage_is_noted(program: Any) -> None:
    body = event({"choices": [{"message": {"content": "x" * 9_000}}], "usage": USAGE})[6:-2]
    for places in ([], [4_000], [len(body) - 20, len(body) - 40]):
        answer = answered(program, cut(body, places), kind=JSON)
        assert answer.body == body
        assert usage_noted(answer.notes) == Usage(10, 3, 8)


@pytest.mark.parametrize("odd", [b"\xff", b'"' + b"x" * 5_000 + b'"'])
def test_a_usage_that_the_access_log_cannot_carry_is_not_noted(program: Any, odd: bytes) -> None:
    report = b'data: {"choices": [], "usage": {"a": ' + odd + b"}}\n\n"
    answer = answered(program, [TEXT, report, DONE], hides=True)
    assert (answer.body, usage_noted(answer.notes)) == (TEXT + DONE, None)


@pytest.mark.parametrize(
    "unit",
    [
        *(b'"usage":{', b'"usage":{"a":1},', b'"choices":[],"usage":{'),
        *(b'"error":{', b'"error": ', b'"error":null,', b"data: ", b'\ndata: {"error"'),
        *(b'data:"response":', b'\nevent: response.failed\ndata:"error"'),
    ],
)
def test_what_has_no_end_costs_no_more_for_each_byte_the_more_there_are(
    program: Any, unit: bytes
) -> None:
    def taken(size: int) -> float:
        began = time.thread_time()
        stream = [b"data: {" + unit * (size // len(unit)) + b"\n\n"]
        answered(program, stream, hides=True, notes={"makes": "yes"})
        return (time.thread_time() - began) / size

    taken(1 << 16)
    least = [min(taken(size) for _ in range(3)) for size in (1 << 17, 1 << 20)]
    assert least[1] < 4 * least[0]


def test_an_event_without_an_end_costs_no_more_for_each_byte_the_longer_it_is(program: Any) -> None:
    def taken(size: int) -> float:
        began = time.thread_time()
        answered(program, [b"x" * 64] * (size // 64), hides=True)
        return (time.thread_time() - began) / size

    taken(1 << 16)
    least = [min(taken(size) for _ in range(5)) for size in (1 << 17, 1 << 20)]
    assert least[1] < 4 * least[0]
