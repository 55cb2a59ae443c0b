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
from kvindex.gateway.prompts import prompt_of

pytestmark = pytest.mark.unit

AUDIO = "/v1/audio/transcriptions"
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
        (body_of().replace(b"Once", b"\\ud800"), None),
        (body_of().replace(b"Once", b"\xff"), None),
        (body_of().replace(b"Once", b"\xed\xa0\x80"), None),
        (b'{"messages": NaN}', "messages"),
        (body_of(seed=1).replace(b": 1}", b": " + b"1" * 5_000 + b"}"), None),
        (b'{"messages": ' + b"[" * 600 + b"]" * 600 + b"}", None),
        (b'{"messages": ' + b"[" * 100_000, None),
        (b'{"model": "a", "model": "b", "messages": [{}]}', "model"),
        (b'{"model": "a", "mod\\u0065l": "b", "messages": [{}]}', None),
        (body_of(model=7), "model"),
        (body_of(model="m" * 600), "model"),
        (body_of(messages="Once"), "messages"),
        (body_of(messages=[]), "messages"),
        (body_of(messages=["Once"]), "messages"),
        (body_of(messages=[{}] * 100_000), "messages"),
        (body_of(messages=[{}] * 1_000_000), None),
        (body_of(stream=2), "stream"),
        (body_of(stream="maybe"), "stream"),
        (body_of(stream=[1]), "stream"),
        (body_of(stream=True, stream_options=[]), "stream_options"),
        (body_of(n=10**10), "n"),
        (body_of(n=0), "n"),
        (body_of(n=1.5), "n"),
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


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [MESSAGE], "n": 2}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
    ],
)
def test_a_stream_of_several_answers_is_asked_for_nothing(
    path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps({**fields, "stream": True}).encode()
    call = read_call(path, body)
    assert (call.body, call.hides_usage) == (body, False)


@pytest.mark.parametrize(
    ("said", "is_stream"), [(1, True), ("True", True), (0.0, False), ("n", False)]
)
def test_flags_are_read_as_engines_read_them(said: object, is_stream: bool) -> None:
    call = read_call(CHAT, body_of(stream=said, n=1.0))
    assert (call.is_stream, call.hides_usage, call.choices) == (is_stream, is_stream, 1)
    options = {"include_usage": said}
    assert read_call(CHAT, body_of(stream=True, stream_options=options)).hides_usage != is_stream


@pytest.mark.parametrize(
    "body",
    [
        body_of(a=0).replace(b": 0}", b": %b}" % number)
        for number in (b"1e400", b"NaN", b"-Infinity")
    ],
)
def test_what_only_engines_readers_accept_passes_and_is_routed_by_load(body: bytes) -> None:
    call = read_call(CHAT, body)
    assert (call.body, call.model) == (body, "m")
    assert prompt_of(call).unknown == "form"


def test_a_byte_order_mark_changes_nothing() -> None:
    body = b"\xef\xbb\xbf" + body_of()
    call = read_call(CHAT, body)
    assert (call.body, call.is_odd, prompt_of(call).unknown) == (body, False, "")


LONG = "x" * (1 << 20)


@pytest.mark.parametrize(
    "body",
    [
        body_of(a=LONG, b=0).replace(b": 0}", b": NaN}"),
        body_of(a=LONG)[:-1],
        body_of(a=LONG, b=0).replace(b'"b"', b'"model"'),
        body_of(a=LONG, b=0).replace(b'"b"', b'"mod\\u0065l"'),
        body_of(a=LONG, b=0).replace(b'"b"', b'"\\u0042"'),
    ],
    ids=["NaN", "cut", "twice", "twice, hidden", "hidden"],
)
def test_pythons_own_reader_which_stops_all_threads_reads_no_long_body(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("kvindex.gateway.calls.json.loads")
    with pytest.raises(CallError):
        read_call(CHAT, body)


def test_what_stands_in_values_is_no_name_of_the_body() -> None:
    values = {"model": [{"model": "a", "mod\\u0065l": "model"}], "n": {"input": "input"}}
    body = body_of(tools=values, **{"\x7f": 1}).replace(b"\\\\u", b"\\u")
    assert read_call(CHAT, body).body == body


def test_no_python_is_told_to_a_client() -> None:
    with pytest.raises(CallError, match="4300 digits") as caught:
        read_call(CHAT, body_of(seed=1).replace(b": 1}", b": " + b"1" * 5_000 + b"}"))
    assert "sys." not in str(caught.value)


def test_a_deep_schema_and_a_long_number_pass() -> None:
    schema: Any = {"maximum": int("9" * 4_000)}
    for _ in range(500):
        schema = {"items": schema}
    assert not read_call(CHAT, body_of(response_format=schema)).is_odd


def form_of(*models: bytes) -> bytes:
    part = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
    return b"".join(part + model + b"\r\n" for model in models) + b"--x--\r\n"


def test_of_a_form_its_model_is_read_and_two_are_refused() -> None:
    assert read_call(AUDIO, form_of(b"whisper")).model == "whisper"
    assert read_call(AUDIO, form_of(b"whisper", b"whisper")).model == "whisper"
    with pytest.raises(CallError, match="twice"):
        read_call(AUDIO, form_of(b"whisper", b"other"))
    file = b'--x\r\nContent-Disposition: form-data; name="a"; filename="model"\r\n\r\nRIFF\r\n'
    assert read_call(AUDIO, file + form_of(b"whisper")).model == "whisper"


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
        lambda size: b"--x\r\n" + b"name=model\r\n" * (size // 12),
        lambda size: b'{"messages":[{}],"n":[' + b"1e400," * (size // 6) + b"1]}",
        lambda size: (
            b'{"messages":[{}],' + b"".join(b'"%d":0,' % n for n in range(size)) + b'"n":1,"n":1}'
        ),
    ],
    ids=[
        "levels",
        "messages",
        "a long name twice",
        "escapes",
        "names",
        "forms",
        "odd",
        "names, one twice",
    ],
)
def test_what_a_body_costs_grows_with_its_bytes(make: Any) -> None:
    small, large = costs(make, 20_000), costs(make, 160_000)
    assert large < 40 * max(small, 2e-4)  # eight times the bytes; quadratic were 64
