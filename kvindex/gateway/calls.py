"""Clients' requests: what is read of a body, which are refused, and what passes through."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvindex.routing import reads_cache
from kvindex.service.http import Headers, Reply, json_reply
from kvindex.wire.errors import UNREADABLE, KVIndexError

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
EMBEDDINGS: Final = "/v1/embeddings"
TOKENIZE: Final = "/tokenize"

ROUTES: Final = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS)
"""The paths whose requests are routed by their prompts."""

BY_LOAD: Final = (
    *("/v1/messages/count_tokens", "/detokenize", "/pooling", "/classify"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
)
"""The paths whose requests are routed by load alone."""

_MOST_LEVELS: Final = 512  # of nesting: engines' own readers give up at some 900
# Bound what parsing costs, in time and memory; those in texts count, too.
_MOST_BRACKETS: Final = 1 << 19
_MOST_QUOTES: Final = 1 << 21
_MOST_COMMAS: Final = 1 << 23
_LONG: Final = 1 << 20  # bytes: a longer body is read by a thread
_MOST_ITEMS: Final = 1 << 16  # messages, or prompts
_MOST_TOKENS: Final = 1 << 22  # ids of a prompt
_MOST_NAME: Final = 512  # characters of a model's name, or of a salt
# The fields that are read here: a body that has one twice would be read in two ways.
_READ: Final = tuple(
    b'"%b"' % name
    for name in (
        *(b"model", b"messages", b"prompt", b"input", b"stream", b"n", b"cache_salt"),
        *(b"kv_transfer_params", b"kv_hints"),
    )
)
_KV_FIELDS: Final = frozenset({"kv_transfer_params", "kv_hints"})  # of vLLM, of SGLang
# Letters are escaped by nobody who means well: it would hide a name.
# Behind "z" there is one that Python's writer escapes.
_HIDDEN: Final = tuple(
    rb"\u00%b" % digits for digits in b"4 5 6 70 71 72 73 74 75 76 77 78 79 7a 7A".split()
)
_HIDES: Final = re.compile(b"|".join(map(re.escape, _HIDDEN)))
# As engines read a flag: pydantic's way.
_FLAGS: Final = {
    **dict.fromkeys((1, "1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys((0, "0", "false", "f", "no", "n", "off"), False),
}
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class CallError(KVIndexError):
    """A request that is refused: with an HTTP status, the wrong field, and OpenAI's code."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, as far as the gateway reads it."""

    path: str
    model: str  # "" if it names none
    body: bytes  # that the engine receives
    fields: Mapping[str, Any]
    is_stream: bool = False
    hides_usage: bool = False  # only the gateway has asked for the usage event
    salt: str | None = None
    reads_cache: bool = True  # whether the engine does, for this request
    choices: int = 1
    has_kv_fields: bool = False  # it says by itself what its engine is to do with KV
    is_odd: bool = False  # it has what is no JSON, and what engines' readers accept: NaN, 1e400

    @property
    def may_pull(self) -> bool:
        """Whether its engine may be told of a source of KV: it has one prompt, and no other."""
        return self.is_single and self.path != EMBEDDINGS and not self.has_kv_fields

    @property
    def is_single(self) -> bool:
        """Whether it has one prompt and one answer, so that a report of its hit is about these."""
        prompts = self.fields.get("prompt" if self.path == COMPLETIONS else "input")
        if self.path not in (COMPLETIONS, EMBEDDINGS) or not isinstance(prompts, list):
            return self.choices == 1
        return self.choices == 1 and (len(prompts) < 2 or isinstance(prompts[0], int))


def read_call(path: str, body: bytes, *, is_trusted: bool = True) -> Call:
    """Return the request in a body.

    `kv_transfer_params` and `kv_hints`, by which an engine connects to others, are left out unless
    the client `is_trusted`.

    A stream of chat or text completions is asked to report its usage, since the engine's hit is
    in there; the rest of the body is passed on byte for byte.

    Raises:
        CallError: the body is no JSON object, too deeply nested, or a field has a wrong form.

    Complexity: O(bytes).

    Examples:
        >>> call = read_call("/v1/completions", b'{"prompt": "Once", "stream": true}')
        >>> call.hides_usage, call.body
        (True, b'{"prompt": "Once", "stream": true,"stream_options":{"include_usage":true}}')
    """
    is_form = body.startswith(b"--")
    fields, is_odd = (_read_form(body), False) if is_form else _read_object(body)
    kv_fields = _KV_FIELDS & fields.keys()
    if kv_fields and not is_trusted:
        fields = {name: value for name, value in fields.items() if name not in kv_fields}
        body, kv_fields = json.dumps(fields, ensure_ascii=False).encode(), frozenset()
    is_stream = _flag(fields, "stream", "stream")
    for name, check in _CHECKS.get(path, {}).items():
        check(fields, name)
    choices = fields.get("n", 1)
    if choices is None:
        choices = 1
    if isinstance(choices, float) and choices.is_integer():
        choices = int(choices)
    is_number = isinstance(choices, int) and not isinstance(choices, bool)
    if not is_number or not 1 <= choices < 1 << 31:  # engines have limits of their own
        raise _wrong("n", "a number from 1", choices)
    call = Call(
        path=path,
        model=_name(fields, "model") or "",
        body=body,
        fields=fields,
        is_stream=is_stream,
        salt=_name(fields, "cache_salt"),
        reads_cache=reads_cache(fields),
        choices=choices,
        has_kv_fields=any(fields[name] is not None for name in kv_fields),
        is_odd=is_odd,
    )
    if not is_stream or path not in (CHAT, COMPLETIONS):  # the others report their usage unasked
        return call
    # Of several answers the usage tells no hit, and vLLM would leave out each one's fingerprint.
    if not call.is_single:
        return call
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", "an object", options)
    if options and _flag(options, "include_usage", "stream_options.include_usage"):
        return call
    # The funnel needs what the engine found cached, and that stands in the usage only.
    asked = {**(options or {}), "include_usage": True}
    if asked.get("continuous_usage_stats"):  # has no effect without the other one
        asked["continuous_usage_stats"] = False
    wanted = {"stream_options": asked}
    return msgspec.structs.replace(call, body=with_fields(body, wanted), hides_usage=True)


def inflated(body: bytes, most: int) -> bytes:
    """Return what a gzip body has in it, at most so many bytes; raises CallError. O(`most`)."""
    reader = zlib.decompressobj(wbits=31)
    try:
        text = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise CallError(400, f"the body is no gzip: {error}") from None
    if len(text) > most:
        raise CallError(
            413, f"the body has more than {most} bytes once it is inflated", code="body"
        )
    if not reader.eof or reader.unused_data:
        raise CallError(400, "the body is not one whole gzip")
    return text


def reads_long(body: bytes) -> bool:
    """Return whether reading a body takes some milliseconds: worth a thread."""
    return len(body) > _LONG


def error_reply(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Headers = (),
) -> Reply:
    """Return an error in OpenAI's form."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json_reply(status, {"error": error})._replace(headers=headers)


# Bodies ------------------------------------------------------------------------------------------


def _read_object(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return the fields of a body, and whether it is odd, as `Call.is_odd` says."""
    # Before it is parsed, since that is what it bounds: a million objects take seconds.
    brackets = body.count(b"[") + body.count(b"{")
    if len(body) > _MOST_BRACKETS:  # else it has no more of anything
        for name, number, most in (
            ("brackets", brackets, _MOST_BRACKETS),
            ("quotes", body.count(b'"'), _MOST_QUOTES),
            ("commas", body.count(b","), _MOST_COMMAS),
        ):
            if number > most:
                raise CallError(400, f"the body has {number:,} {name}, over {most:,}")
    text = body.removeprefix(codecs.BOM_UTF8)
    is_odd = False
    try:
        try:
            fields = msgspec.json.decode(text)
        except UNREADABLE:
            # What follows takes seconds for some bodies, and no other thread runs meanwhile.
            if reads_long(body):
                raise
            fields, is_odd = json.loads(text.decode(), object_pairs_hook=_without_twice), True
            json.dumps(fields, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except UNREADABLE as error:
        why = str(error).partition(";")[0]  # behind it Python advises its programmers
        raise CallError(400, f"the body is no JSON: {why}") from None
    if not isinstance(fields, dict):
        raise CallError(400, "the body must be a JSON object")
    if brackets > _MOST_LEVELS:  # else it cannot be that deep
        _check_levels(fields)
    if not is_odd:
        _check_names(text)
    return fields, is_odd


# Bounded, or a form of many such lines would take a time that is quadratic in their number.
_FORM_MODEL: Final = re.compile(
    rb'(?<!file)name="?model"?\r\n(?:[^\r\n]{1,512}\r\n){0,8}\r\n([^\r\n]{1,512})\r\n'
)


def _read_form(body: bytes) -> dict[str, Any]:
    """Return what is read of a form with an audio file: its model."""
    found = {model.decode("utf-8", "replace") for model in _FORM_MODEL.findall(body)}
    if len(found) > 1:  # readers differ in which of them counts
        raise CallError(400, "the form has 'model' twice", param="model")
    return {"model": found.pop()} if found else {}


def _check_levels(fields: object) -> None:
    """Refuse a value that engines' parsers, which recurse, may fail on."""
    level: list[Any] = [fields]
    for _ in range(_MOST_LEVELS):
        inner: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            inner += [value for value in values if isinstance(value, (dict, list))]
        if not inner:
            return
        level = inner
    raise CallError(400, f"the body is nested over {_MOST_LEVELS} levels deep")


def _check_names(text: bytes) -> None:
    """Refuse a field that is there twice, or hidden: readers differ in which of the two counts."""
    found = {name: number for name in _READ if (number := text.count(name)) > 1}
    if _HIDES.search(text):
        found |= {letters: number for letters in _HIDDEN if (number := text.count(letters))}
    if not found:
        return
    # They may stand in values, too; what does not stand there is the names.
    values = b"\n".join(msgspec.json.decode(text, type=dict[str, msgspec.Raw]).values())
    for mark, number in found.items():
        outside = number - values.count(mark)
        if mark in _HIDDEN and outside:
            raise CallError(400, "the body has a field whose name has escaped letters")
        if outside > 1:
            name = mark.decode()[1:-1]
            raise CallError(400, f"the body has {name!r} twice", param=name)


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object, unless it has a name twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise CallError(400, "the body has a name twice")
    return fields


# Fields ------------------------------------------------------------------------------------------


def _wrong(name: str, wanted: str, value: object) -> CallError:
    kinds = {dict: "an object", list: "an array", str: "text", type(None): "null"}
    kind = kinds.get(type(value), repr(value)[:40])
    return CallError(400, f"{name} must be {wanted}, not {kind}", param=name)


def _flag(fields: Mapping[str, Any], key: str, name: str) -> bool:
    value = fields.get(key)
    if value is None:
        return False
    read = value.lower() if isinstance(value, str) else value
    if not isinstance(read, (str, int, float)) or read not in _FLAGS:
        raise _wrong(name, "true or false", value)
    return _FLAGS[read]


def _name(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(name, "text", value)
    if value is not None and len(value) > _MOST_NAME:
        raise CallError(400, f"{name} is longer than {_MOST_NAME} characters", param=name)
    return value


def _check_messages(fields: Mapping[str, Any], name: str) -> None:
    messages = fields.get(name)
    if name == "input" and isinstance(messages, str):  # of the responses API
        return
    if not isinstance(messages, list):
        raise _wrong(name, "an array of messages", messages)
    _check_count(messages, name)
    if not all(isinstance(message, dict) for message in messages):
        raise CallError(400, f"each of {name} must be an object", param=name)


def _check_prompt(fields: Mapping[str, Any], name: str) -> None:
    """Accept text, token ids, or a list of either, and what engines accept instead."""
    prompt = fields.get(name)
    if isinstance(prompt, str) or (prompt is None and fields.get("prompt_embeds")):
        return
    if prompt is None and name == "input" and "messages" in fields:
        _check_messages(fields, "messages")
        return
    # Whether it is ids or texts shows in the first item only; an engine would fail on a mixture.
    wanted = "text, token ids, or an array of either"
    if not isinstance(prompt, list):
        raise _wrong(name, wanted, prompt)
    if all(isinstance(item, int) for item in prompt):
        _check_tokens(prompt, name)
        return
    _check_count(prompt, name)
    for item in prompt:
        if isinstance(item, list):
            _check_tokens(item, name)
        elif not isinstance(item, (str, dict)):
            raise _wrong(name, wanted, item)


def _check_count(items: Sequence[Any], name: str) -> None:
    if not 1 <= len(items) <= _MOST_ITEMS:
        text = f"{name} has {len(items):,} items: from 1 to {_MOST_ITEMS:,} are accepted"
        raise CallError(400, text, param=name)


def _check_tokens(ids: Sequence[Any], name: str) -> None:
    if not 1 <= len(ids) <= _MOST_TOKENS:
        text = f"{name} has {len(ids):,} tokens: from 1 to {_MOST_TOKENS:,} are accepted"
        raise CallError(400, text, param=name)
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in ids):  # True is an int
        raise CallError(400, f"{name} has an id that is no number below 2**32", param=name)


_CHECKS: Final[Mapping[str, Mapping[str, Callable[[Mapping[str, Any], str], None]]]] = {
    CHAT: {"messages": _check_messages},
    MESSAGES: {"messages": _check_messages},
    COMPLETIONS: {"prompt": _check_prompt},
    EMBEDDINGS: {"input": _check_prompt},
    RESPONSES: {"input": _check_messages},
}


# What passes --------------------------------------------------------------------------------------


# RFC 9110, 7.6.1: they belong to one connection; and those that are written anew.
_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"content-length", b"x-request-id"}
)
# `accept-encoding`: usage and events are read from the answer, so engines must not compress it.
_FROM_CLIENTS: Final = _HOP | {b"host", b"expect", b"accept-encoding", b"proxy-authorization"}
_FROM_ENGINES: Final = _HOP | {b"date", b"server", b"proxy-authenticate"}
_CORS: Final = b"access-control-"  # pages ask the gateway: its own list decides
# Where clients' tools put a key: it is the gateway's own, and no engine's.
_KEYS: Final = frozenset({b"authorization", b"x-api-key", b"cookie"})
# Only a gateway may name ranks and destinations.
FORGED: Final = (
    *(b"x-gateway-", b"x-kvindex-", b"x-data-parallel-", b"x-routed-dp-rank"),
    *(b"x-prefiller-host", b"x-encoder-hosts", b"x-kv-cache-source"),
)


def request_headers(headers: Headers, *, passes_keys: bool) -> list[tuple[bytes, bytes]]:
    """Return the fields of a client's request that its engine receives; names in lower case."""
    named: list[bytes] = []  # fields that belong to this connection as well
    for name, value in headers:
        if name == b"connection":
            named += [part.strip().lower() for part in value.split(b",")]
    return [
        (name, value)
        for name, value in headers
        if name not in _FROM_CLIENTS
        and not name.startswith(FORGED)
        and (passes_keys or name not in _KEYS)
        and name not in named
    ]


def answer_headers(headers: Headers) -> tuple[list[tuple[bytes, bytes]], int | None]:
    """Return the fields of an engine's answer that the client receives, and the body's length."""
    # A length is told only where the body goes out as it came: in a stream events may be left out.
    length = next((value for name, value in headers if name == b"content-length"), None)
    passed = [
        field
        for field in headers
        if field[0] not in _FROM_ENGINES and not field[0].startswith(_CORS)
    ]
    return passed, int(length) if length is not None and length.isdigit() else None


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object with further fields; they stand last, so they win over the client's."""
    if not fields:
        return body
    # The rest stays as it came, byte for byte: engines may read fields that we do not know.
    begun = body.rstrip(b" \t\r\n")[:-1].rstrip(b" \t\r\n")
    comma = b"" if begun.endswith(b"{") else b","
    return begun + comma + msgspec.json.encode(fields)[1:]
