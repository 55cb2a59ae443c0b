"""Event streams that pass through the gateway, whatever the pieces they arrive in."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.gateway.events import MOST_KEPT, Events, Usage, usage_of

pytestmark = pytest.mark.unit

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def event(value: object, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(value)}{end}".encode()


def chunk(**delta: Any) -> dict[str, Any]:
    return {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


ROLE = event(chunk(role="assistant", content=""))
TEXT = event(chunk(content="Hel"))
LAST = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
REPORT = event({"choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes, hides_usage: bool = False) -> tuple[Events, bytes]:
    events = Events(hides_usage=hides_usage)
    forwarded = b"".join(map(events.feed, pieces))
    return events, forwarded + events.end()


def test_a_chat_is_forwarded_as_it_is() -> None:
    stream = [ROLE, b": keep-alive\n\n", TEXT, TEXT, LAST, REPORT, DONE]
    events, forwarded = read(*stream)
    assert forwarded == b"".join(stream)
    assert events.usage == Usage(10, 3, 8)
    assert (events.delivered, events.is_done, events.unread) == (2, True, 0)


SECOND = event({"choices": [], "usage": {**USAGE, "completion_tokens": 9}})
BESIDE_CHOICES = event(chunk(content="a") | {"usage": USAGE})
WITHOUT_A_HIT = event({"choices": [], "usage": {**USAGE, "prompt_tokens_details": None}})


@pytest.mark.parametrize(
    ("stream", "forwarded", "usage"),
    [
        ([ROLE + TEXT + REPORT + DONE], ROLE + TEXT + DONE, Usage(10, 3, 8)),
        ([BESIDE_CHOICES], BESIDE_CHOICES, Usage(10, 3, 8)),
        ([REPORT, SECOND, DONE], DONE, Usage(10, 9, 8)),
        ([WITHOUT_A_HIT], b"", Usage(10, 3, None)),
    ],
)
def test_the_usage_is_read_and_its_own_event_left_out_if_only_we_asked_for_it(
    stream: list[bytes], forwarded: bytes, usage: Usage
) -> None:
    events, passed = read(*stream, hides_usage=True)
    assert (passed, events.usage) == (forwarded, usage)


@pytest.mark.parametrize(
    "value",
    [
        chunk(content="a"),
        chunk(reasoning_content="a"),
        chunk(reasoning="a"),
        chunk(tool_calls=[{"index": 0}]),
        chunk(refusal="no"),
        {"choices": [{"index": 0, "text": "a"}]},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
    ],
)
def test_each_form_of_content_is_noticed(value: object) -> None:
    events, _ = read(event(value))
    assert (events.has_content, events.delivered) == (True, 1)


@pytest.mark.parametrize(
    "value",
    [
        chunk(role="assistant", content=""),
        chunk(content=None),
        {"choices": [{"index": 0, "text": ""}]},
        {"choices": [{"index": 0, "delta": None}]},
        {"type": "response.created", "response": {"usage": None}},
    ],
)
def test_an_event_without_content_is_no_first_token(value: object) -> None:
    events, _ = read(event(value))
    assert (events.has_event, events.has_content) == (True, False)


STAMPED = event({"choices": [], "usage": USAGE, "system_fingerprint": "fp"})


@pytest.mark.parametrize("pieces", [1, 7, 10_000])
def test_the_fingerprint_of_a_hidden_event_is_in_the_last_one_that_is_shown(pieces: int) -> None:
    stream = TEXT + LAST + STAMPED + DONE
    _, forwarded = read(
        *(stream[at : at + pieces] for at in range(0, len(stream), pieces)), hides_usage=True
    )
    shown = LAST[:-3] + b',"system_fingerprint":"fp"}\n\n'
    assert forwarded == TEXT + shown + DONE
    assert json.loads(shown[6:])["choices"][0]["finish_reason"] == "stop"
    assert read(stream)[1] == stream, "a client that asked for the usage has all as it is"


@pytest.mark.parametrize("after", [b": keep-alive\n\n", TEXT, REPORT + DONE, DONE, b""])
def test_an_event_that_waits_for_a_fingerprint_is_forwarded_without_one(after: bytes) -> None:
    assert read(TEXT, LAST, after, hides_usage=True)[1] == TEXT + LAST + after.replace(REPORT, b"")


def test_an_engine_that_reports_usage_to_all_clients_does_so_here() -> None:
    stream = [BESIDE_CHOICES, LAST, REPORT, DONE]
    assert read(*stream, hides_usage=True)[1] == b"".join(stream)


def test_an_error_is_shown_also_if_it_has_usage() -> None:
    error = event({"error": {"message": "no"}, "choices": [], "usage": USAGE})
    assert read(error, hides_usage=True)[1] == error


@pytest.mark.parametrize(
    ("number", "tokens"),
    [(-1, 0), (2**64 - 1, 2**32), (2**70, 2**32), (3.0, 3), ("3", None), (True, None), ([], None)],
)
def test_an_odd_number_of_an_engine_is_bounded_and_hides_nothing_else(
    number: Any, tokens: int | None
) -> None:
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": number}}
    events, forwarded = read(event({"choices": [], "usage": usage}), hides_usage=True)
    assert (events.usage, forwarded) == (Usage(10, 0, tokens), b"")


def test_comments_are_no_events() -> None:
    events, forwarded = read(b": keep-alive\n\n: again\n\n")
    assert (events.has_event, forwarded) == (False, b": keep-alive\n\n: again\n\n")


def failed_response(code: str) -> bytes:
    error = {"code": code, "message": "boom"}
    response = {"id": "resp_1", "metadata": {}, "error": error}
    return b"event: response.failed\n" + event({"response": response, "type": "response.failed"})


ERRORS = [  # each with whether it is the engine's fault
    (event({"error": "boom"}), True),
    (event({"error": {"message": "boom", "code": 500}}), True),
    (event({"error": {"message": "boom", "code": 400}}), False),
    (event({"error": {"message": "boom", "type": "NotFoundError", "code": None}}), False),
    (event({"error": {"message": "boom } in {} output", "code": 500}}), True),
    (event({"error": {"message": "boom" + "x" * 5_000, "code": 500}}), True),
    (event({"error": {"message": "boom" + "x" * 5_000, "code": 422}}), False),
    (event({"choices": [], "error": {"message": "boom", "code": 400}}), False),
    (event({"type": "error", "error": {"type": "overloaded_error", "message": "boom"}}), True),
    (event({"type": "error", "error": {"type": "invalid_request", "message": "boom"}}), False),
    (event({"type": "error", "message": "boom"}), True),
    (event({"code": "server_error", "message": "boom", "type": "error"}), True),
    (event({"code": "invalid_prompt", "message": "boom", "type": "error"}), False),
    (failed_response("server_error"), True),
    (failed_response("invalid_prompt"), False),
]


@pytest.mark.parametrize(("error", "has_failed"), ERRORS)
def test_an_error_event_is_noticed(error: bytes, has_failed: bool) -> None:
    events, _ = read(ROLE, error, DONE)
    assert (str(events.error)[:4], events.has_failed) == ("boom", has_failed)


def test_an_error_event_whose_words_cannot_be_read_is_one() -> None:
    events, _ = read(b'data: {"type": "error", "message": "\xff"}\n\n')
    assert (events.error, events.has_failed) == ("error", True)


def test_the_usage_of_the_responses_api_is_in_its_last_event() -> None:
    usage = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
    last = {"type": "response.completed", "response": {"usage": usage}}
    events, forwarded = read(b"event: response.completed\n" + event(last), hides_usage=True)
    assert (events.usage, events.is_done) == (Usage(5, 2, 4), True)
    assert forwarded


def test_the_usage_of_the_messages_api_is_in_two_events() -> None:
    usage = {"input_tokens": 2, "cache_read_input_tokens": 8, "output_tokens": 0}
    begin = {"type": "message_start", "message": {"role": "assistant", "usage": usage}}
    end = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}}
    events, _ = read(event(begin), event(end), event({"type": "message_stop"}), hides_usage=True)
    assert (events.usage, events.is_done) == (Usage(10, 7, 8), True)


@pytest.mark.parametrize(
    "data", [b"{", b"[1]", b"\xff", b"[" * 9999, b'{"choices": 7}', b'{"usage": "much"}']
)
def test_what_cannot_be_read_is_forwarded_and_counted(data: bytes) -> None:
    events, forwarded = read(b"data: " + data + b"\n\n" + TEXT)
    assert forwarded == b"data: " + data + b"\n\n" + TEXT
    assert (events.unread, events.delivered) == (1, 1)


def test_an_event_without_an_end_is_forwarded_unread() -> None:
    events = Events(hides_usage=True)
    endless = b"data: " + b"x" * MOST_KEPT
    forwarded = events.feed(endless)
    assert len(forwarded) > MOST_KEPT - 10
    forwarded += events.feed(b"more\n") + events.feed(b"\n" + TEXT + REPORT)
    assert forwarded == endless + b"more\n\n" + TEXT
    assert (events.unread, events.delivered, events.usage) == (1, 1, Usage(10, 3, 8))


def test_a_whole_answer_reports_its_usage() -> None:
    assert usage_of(json.dumps({"choices": [], "usage": USAGE}).encode()) == Usage(10, 3, 8)
    for other in (b"", b"[]", b"{}", b'{"usage": 7}', b"\xff", b"[" * 9999):
        assert usage_of(other) is None


PARTS = st.sampled_from(
    [
        *(ROLE, TEXT, LAST, REPORT, STAMPED, DONE),
        *(b": keep-alive\n\n", b"\n", b"\r\n", b"\r", b"event: ping\ndata: {}\n\n"),
        event(chunk(content="\u00e9\n\r")).replace(b"\n\n", b"\r\n\r\n"),
        event(chunk(content="a")).replace(b"\n\n", b"\r\r"),
        REPORT.replace(b"\n\n", b"\r\n\r\n"),
        REPORT.replace(b", ", b",\ndata: "),
        b"data: {broken\n\n",
        b"data:" + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n",
    ]
)


@given(st.lists(PARTS, max_size=8).map(b"".join), st.data(), st.booleans())
def test_any_pieces_have_the_same_result(stream: bytes, data: st.DataObject, hides: bool) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    bounds = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(bounds)]
    cut, forwarded = read(*pieces, hides_usage=hides)
    bytewise, slowly = read(*(stream[i : i + 1] for i in range(len(stream))), hides_usage=hides)
    assert forwarded == slowly
    noticed = ("has_event", "has_content", "delivered", "usage", "error", "is_done", "unread")
    for name in noticed:
        assert getattr(cut, name) == getattr(bytewise, name), name
    if not hides:
        assert forwarded == stream


def cost(size: int, step: int) -> float:
    """The least seconds of CPU for an event of a size that arrives in small pieces."""
    stream = b"data: " + b"x" * size
    least = float("inf")
    for _ in range(3):
        events = Events(hides_usage=True)
        began = time.thread_time()
        for at in range(0, size, step):
            events.feed(stream[at : at + step])
        least = min(least, time.thread_time() - began)
    return least


def test_what_a_long_event_costs_grows_with_its_bytes() -> None:
    small, large = cost(100_000, 10), cost(800_000, 10)
    assert large < 32 * small  # eight times the bytes; quadratic were 64
