"""Requests to the fake engine over HTTP: bodies, and its tokenizer with one token for each byte."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvindex.testing.handoffs import Handoff
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.quirks import field_against_cache

_DEFAULT_MAX_TOKENS: Final = 16
_SPECIAL: Final = ("<begin>", "<end>", "<system>", "<user>", "<assistant>", "<tool>", "<image>")
_ID: Final = {name: 256 + number for number, name in enumerate(_SPECIAL)}


class RequestError(Exception):
    """A request that gets no answer but this HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a request, and how it is to be served.

    Attributes:
        dp_rank: the rank that the request insists on.
        images: by the place of its placeholder, a digest of each image.
        reads_cache: False if the engine must compute the whole prompt (`prompt_logprobs`, `echo`
            with `logprobs`, `echo` in a chat).
        source: "host:port" of the P2P tier to pull from, as vLLM's `kv_transfer_params` name it.
        hands_over: True if another engine is to decode (`do_remote_decode`).
        handoff: what was computed elsewhere (`do_remote_prefill`).
    """

    token_ids: list[int]
    max_tokens: int
    model: str
    salt: str | None = None
    dp_rank: int | None = None
    images: dict[int, str] = {}
    reads_cache: bool = True
    source: str = ""
    hands_over: bool = False
    handoff: Handoff | None = None


def read_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, or raise RequestError."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the body is a {type(value).__name__}, not an object")
    return value


def completions(
    body: Mapping[str, Any], *, default_model: str, header_rank: str
) -> list[Completion]:
    """Return the prompts of a body with `prompt` or `messages`, or raise RequestError."""
    limit = body.get("max_completion_tokens", body.get("max_tokens", _DEFAULT_MAX_TOKENS))
    if not isinstance(limit, int) or limit < 0:
        raise RequestError(400, f"max_tokens is {limit!r}, not a number from 0")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(400, "cache_salt must be text that is not empty")
    # vLLM, and SGLang from 0.5.10 on, read the header; the fields are SGLang's, older and newer.
    rank = header_rank or body.get("data_parallel_rank", body.get("routed_dp_rank"))
    if rank is not None:
        try:
            rank = int(str(rank))
        except ValueError:
            raise RequestError(400, f"{rank!r} is no data-parallel rank") from None
    token_lists = _token_lists(body)
    given = body.get("kv_transfer_params")
    params = given if isinstance(given, dict) else {}
    images = chat_images(body["messages"]) if "messages" in body else {}
    return [
        Completion(
            token_ids=tokens,
            max_tokens=limit,
            model=str(body.get("model") or default_model),
            salt=salt,
            dp_rank=rank,
            images=images,
            reads_cache=not field_against_cache(body),
            source=_source(params),
            hands_over=params.get("do_remote_decode") is True,
            handoff=_handoff(params),
        )
        for tokens in token_lists
    ]


def _handoff(params: Mapping[str, Any]) -> Handoff | None:
    # vLLM logs what is no handoff, and computes; here a router's author learns of it.
    try:
        return msgspec.convert(params, Handoff) if params.get("do_remote_prefill") else None
    except msgspec.ValidationError as error:
        raise RequestError(400, f"kv_transfer_params are not what P told: {error}") from None


def _source(params: Mapping[str, Any]) -> str:
    """Return where vLLM pulls from by these `kv_transfer_params`; "" if it does not."""
    source = params.get("remote_kv_source")
    if not isinstance(source, dict) or not source.get("kv_request_id"):
        return ""
    return f"{source.get('remote_host')}:{source.get('remote_port')}"


def tokenized(body: Mapping[str, Any]) -> list[int]:
    """Return the token ids that a body of `/tokenize` asks for, or raise RequestError."""
    lists = _token_lists(body)
    if len(lists) != 1:
        raise RequestError(400, f"/tokenize needs one prompt, not {len(lists)}")
    return lists[0]


def new_tokens(prompt: Completion) -> list[int]:
    """Return what is generated: lower-case letters that the prompt alone decides."""
    # The same in each process: Python's own hash of a text would not be.
    seed = zlib.crc32(repr(prompt.token_ids).encode())
    return [ord("a") + (seed + 7 * step) % 26 for step in range(prompt.max_tokens)]


def _token_lists(body: Mapping[str, Any]) -> list[list[int]]:
    if "messages" in body:
        messages = body["messages"]
        if not isinstance(messages, list):
            raise RequestError(400, "messages is not a list")
        try:
            return [chat_tokens(messages, answer=bool(body.get("add_generation_prompt", True)))]
        except ConfigurationError as error:
            raise RequestError(400, str(error)) from None
    # A list of ints is one prompt, a list of anything else several, as in OpenAI's protocol.
    prompt = body.get("prompt")
    many = prompt if isinstance(prompt, list) and not _are_tokens(prompt) else [prompt]
    return [_tokens(item, begin=bool(body.get("add_special_tokens", True))) for item in many]


def _tokens(prompt: object, *, begin: bool) -> list[int]:
    if isinstance(prompt, str) and prompt:
        return text_tokens(prompt, begin=begin)
    if isinstance(prompt, list) and prompt and _are_tokens(prompt):
        return prompt
    raise RequestError(400, "prompt must be text, token ids, or a list of either; not empty")


def _are_tokens(values: Sequence[object]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 31 for value in values)


# Tokens ------------------------------------------------------------------------------------------


def text_tokens(text: str, *, begin: bool = True) -> list[int]:
    """Return a text's token ids: 256 (the beginning), then each byte of its UTF-8.

    Examples:
        >>> text_tokens("hi")
        [256, 104, 105]
    """
    return [_ID["<begin>"]] * begin + list(text.encode("utf-8", "surrogatepass"))


def chat_tokens(messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> list[int]:
    """Return a chat's token ids: each message between its role's token and the end's.

    An image is one placeholder token, whatever it shows.

    Raises:
        ConfigurationError: a message has no role that is known, or no content.

    Examples:
        >>> chat_tokens([{"role": "user", "content": "hi"}])
        [256, 259, 104, 105, 257, 260]
    """
    tokens = [_ID["<begin>"]]
    for message in messages:
        role = f"<{message.get('role')}>" if isinstance(message, Mapping) else ""
        if role not in ("<system>", "<user>", "<assistant>", "<tool>"):
            raise ConfigurationError(f"a message needs a role that is known, not {message!r:.80}")
        content = message.get("content")
        # In the history of an agent the assistant's message may be its calls alone.
        if content is None and message.get("tool_calls"):
            content = ""
        tokens += [_ID[role], *_content(content), _ID["<end>"]]
    return tokens + [_ID["<assistant>"]] * answer


def chat_images(messages: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return, for each image of a chat, where its placeholder stands and a digest of the image.

    Examples:
        >>> list(chat_images([{"role": "user", "content": [{"type": "image_url"}]}]))
        [2]
    """
    places = [at for at, token in enumerate(chat_tokens(messages)) if token == _ID["<image>"]]
    images = (
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if not _is_text(part)
    )
    digests = (f"{zlib.crc32(repr(image).encode()):08x}" for image in images)
    return dict(zip(places, digests, strict=True))


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of token ids; special tokens by their names.

    Examples:
        >>> text_of([256, 259, 104, 105, 257])
        '<begin><user>hi<end>'
    """
    pieces = (
        bytes([token])
        if 0 <= token < 256
        else (_SPECIAL[token - 256] if 256 <= token < 256 + len(_SPECIAL) else "<unknown>").encode()
        for token in token_ids
    )
    return b"".join(pieces).decode("utf-8", "replace")


def _content(content: object) -> list[int]:
    if isinstance(content, str):
        return text_tokens(content, begin=False)
    if not isinstance(content, list):
        raise ConfigurationError(f"a message's content is text or a list, not {content!r:.80}")
    tokens: list[int] = []
    for part in content:
        if _is_text(part):
            tokens += text_tokens(part["text"], begin=False)
        else:
            tokens.append(_ID["<image>"])
    return tokens


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)
