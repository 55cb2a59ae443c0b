"""Clients' bodies: what is read of them, and what is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.gateway.calls import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    CallError,
    error_reply,
    read_call,
)

pytestmark = pytest.mark.unit

MESSAGE = {"role": "user", "content": "Once"}


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [MESSAGE], **fields}).encode()


def test_a_chat_is_read() -> None:
    call = read_call(CHAT, body_of(n=2, cache_salt="s", prompt_logprobs=1))
    assert (call.model, call.choices, call.salt, call.reads_cache) == ("m", 2, "s", False)
    assert (call.is_stream, call.hides_usage) == (False, False)
    assert call.body == body_of(n=2, cache_salt="s", prompt_logprobs=1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "Once"}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": ["Once", "Twice"]}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
        (RESPONSES, {"input": "Once"}),
        (RESPONSES, {"input": [MESSAGE]}),
        (MESSAGES, {"messages": [MESSAGE], "max_tokens": 5}),
        (EMBEDDINGS, {"input": ["Once", "Twice"]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Once"}]}]}),
    ],
)
def test_each_form_of_a_prompt_is_accepted(path: str, fields: dict[str, Any]) -> None:
    call = read_call(path, json.dumps(fields).encode())
    assert (call.model, call.fields) == ("", fields)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b'"text"', None),
        (b"Once", None),
        (b"\xff{}", None),
        (b'{"messages": NaN}', None),
        (body_of(temperature=1.0).replace(b"1.0", b"Infinity"), None),
        (body_of(temperature=1.0).replace(b"1.0", b"1e999"), None),
        (body_of().replace(b"Once", b"\\ud800"), None),
        (body_of().replace(b"Once", b"\xff"), None),
        (body_of().replace(b"Once", b"\xed\xa0\x80"), None),
        (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", None),
        (b'{"messages": ' + b"[" * 100_000, None),
        (b'{"model": "a", "model": "b", "messages": [{}]}', "model"),
        (body_of(model=7), "model"),
        (body_of(model="m" * 600), "model"),
        (body_of(messages="Once"), "messages"),
        (body_of(messages=[]), "messages"),
        (body_of(messages=["Once"]), "messages"),
        (body_of(messages=[{}] * 100_000), "messages"),
        (body_of(messages=[{}] * 1_000_000), None),
        (body_of(stream="yes"), "stream"),
        (body_of(stream=1), "stream"),
        (body_of(stream=True, stream_options=[]), "stream_options"),
        (body_of(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (body_of(n=10**10), "n"),
        (body_of(n=0), "n"),
        (body_of(n=True), "n"),
        (body_of(cache_salt=["s"]), "cache_salt"),
    ],
)
def test_a_chat_that_is_none_is_refused_with_what_is_wrong(body: bytes, param: str | None) -> None:
    with pytest.raises(CallError) as caught:
        read_call(CHAT, body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "prompt", [None, 7, {}, [], [[]], [1, "Once"], [1.5], [-1], [1 << 32], [True, 1], [[1], None]]
)
def test_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(CallError) as caught:
        read_call(COMPLETIONS, json.dumps({"prompt": prompt}).encode())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt_embeds": "AA=="}),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": ["AA=="]}),
        (COMPLETIONS, {"prompt": "a", "n": 4096}),
        (EMBEDDINGS, {"messages": [MESSAGE]}),
    ],
)
def test_what_engines_accept_instead_of_a_prompt_is_passed_on(path: str, fields: Any) -> None:
    body = json.dumps(fields).encode()
    assert read_call(path, body).body == body


@pytest.mark.parametrize(("mark", "most"), [(b"[]", 1 << 19), (b'""', 1 << 20), (b"1", 1 << 23)])
def test_a_body_with_more_than_can_be_read_in_a_moment_is_refused(mark: bytes, most: int) -> None:
    body = b'{"prompt":[' + b",".join([mark] * (most + 2)) + b"]}"
    with pytest.raises(CallError, match="the body has"):
        read_call(COMPLETIONS, body)


def test_an_error_has_the_form_of_openai() -> None:
    reply = error_reply(400, "no", param="n", code="bad", headers=[(b"a", b"b")])
    error = {"message": "no", "type": "invalid_request_error", "param": "n", "code": "bad"}
    assert (reply.status, json.loads(reply.body)) == (400, {"error": error})
    assert reply.headers == [(b"a", b"b")]
    assert json.loads(error_reply(503, "no").body)["error"]["type"] == "server_error"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
LOOKALIKES = st.sampled_from(["}", '"stream_options":{"include_usage":true}', "{,", "\\"])


@given(
    st.dictionaries(st.text(max_size=8) | LOOKALIKES, JSON | LOOKALIKES, max_size=4),
    st.sampled_from(
        [
            *(None, {}, {"include_usage": False}, {"include_usage": True}, {"a": [1]}),
            {"continuous_usage_stats": True},
            {"continuous_usage_stats": True, "include_usage": True},
        ]
    ),
    st.sampled_from([None, 1, 2]),
    st.sampled_from(["", " ", "\n\t"]),
)
def test_a_stream_reports_its_usage_and_else_nothing_is_changed(
    others: dict[str, Any], options: dict[str, Any] | None, indent: int | None, after: str
) -> None:
    fields = {**others, "messages": [MESSAGE], "stream": True, "model": "m"}
    fields = {key: fields[key] for key in fields if key not in ("n", "cache_salt")}
    if options is not None:
        fields["stream_options"] = options
    body = (json.dumps(fields, indent=indent) + after).encode()
    call = read_call(CHAT, body)
    wanted = {**(options or {}), "include_usage": True}
    if options and "continuous_usage_stats" in options and not options.get("include_usage"):
        wanted["continuous_usage_stats"] = False  # as if we had not asked
    assert json.loads(call.body) == {**fields, "stream_options": wanted}
    assert call.hides_usage == ((options or {}).get("include_usage") is not True)
    if call.hides_usage:
        assert call.body.startswith(body.rstrip()[:-1].rstrip())
    else:
        assert call.body == body


def test_numbers_keep_their_text() -> None:
    body = b'{"messages": [{}], "stream": true, "temperature": 1.0, "seed": 1234567890123456789012}'
    assert read_call(CHAT, body).body.startswith(body[:-1])


@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda b: b'{"messages":[' + b))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES):
        try:
            read_call(path, body)
        except CallError as error:
            msgspec.json.decode(error_reply(error.status, str(error)).body)


def costs(make: Any, size: int) -> float:
    """The least seconds of CPU that it takes to read or refuse a body of a size."""
    body = make(size)
    least = float("inf")
    for _ in range(5):
        began = time.thread_time()
        try:
            read_call(CHAT, body)
        except CallError:
            pass
        least = min(least, time.thread_time() - began)
    return least


@pytest.mark.parametrize(
    "make",
    [
        lambda size: b'{"messages":' + b"[" * size,
        lambda size: b'{"messages":[' + b"{}," * size + b"{}]}",
        lambda size: b'{"messages":[{}],"model":"a","model":"' + b"b" * size + b'"}',
        lambda size: b'{"messages":[{"a":"' + b"\\u00e9" * size + b'"}]}',
        lambda size: b"{" + b",".join(b'"%d":0' % n for n in range(size)) + b"}",
        lambda size: (
            b'{"messages":[{}],' + b"".join(b'"%d":0,' % n for n in range(size)) + b'"n":1,"n":1}'
        ),
    ],
    ids=["levels", "messages", "a long name twice", "escapes", "names", "names, one twice"],
)
def test_what_a_body_costs_grows_with_its_bytes(make: Any) -> None:
    small, large = costs(make, 20_000), costs(make, 160_000)
    assert large < 40 * max(small, 2e-4)  # eight times the bytes; quadratic were 64
