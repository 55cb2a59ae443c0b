"""The tokens of a request's prompt: of the body, or as an engine of the model counts them.

Each step is tried only if the one before has no answer:

- `ids`: the body has token ids;
- `render`: vLLM's route that shows the request as its engine would see it; off by default since
  0.32;
- `tokenize`: the engine's /tokenize, which vLLM answers for chats too, SGLang for text only.

A request without tokens is routed by load, and the reason is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec

from kvindex.gateway.calls import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Call
from kvindex.gateway.models import Serving
from kvindex.gateway.wires import UpstreamError
from kvindex.service.http import Headers

_MOST_BYTES: Final = 16 << 20  # of an answer
_MOST_TOKENS: Final = 1 << 20
_RETRY_SECONDS: Final = 60.0  # until a route that an engine lacks is asked for again
_PAUSE_SECONDS: Final = 5.0  # until an engine that failed or was slow is asked again
_LACKING: Final = frozenset({403, 404, 405, 501})

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Tokens = Annotated[list[_Token], msgspec.Meta(max_length=_MOST_TOKENS)]


class _Rendered(msgspec.Struct):
    token_ids: _Tokens


class _Tokenized(msgspec.Struct):
    tokens: Annotated[list[_Token | _Tokens], msgspec.Meta(max_length=_MOST_TOKENS)]


_decode_rendered = msgspec.json.Decoder(_Rendered).decode
_decode_all_rendered = msgspec.json.Decoder(list[_Rendered]).decode
_decode_tokenized = msgspec.json.Decoder(_Tokenized).decode
_encode = msgspec.json.Encoder().encode
_KEPT: Final = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")


class Asks(Protocol):
    """What asks engines: an `Upstream`."""

    async def ask(
        self,
        url: str,
        path: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        within: float,
        most: int,
    ) -> tuple[int, bytes]:
        """Return status and body of an answer; raises UpstreamError."""


class Tokens(NamedTuple):
    """A prompt's tokens.

    Attributes:
        token_ids: None if they are not known.
        reason: where they are from, or why there are none.
    """

    token_ids: Sequence[int] | None
    reason: str


class _Question(NamedTuple):
    """What an engine is asked."""

    source: str
    path: str
    body: bytes


class Tokenizing:
    """Finds the tokens of prompts.

    Args:
        upstream: asks the engines.
        within: seconds that a request may wait for its tokens.

    Owner: one event loop.
    """

    def __init__(self, upstream: Asks, within: float = 2.0) -> None:
        self._upstream = upstream
        self._within = within
        self._turn = 0
        self._not_before: dict[tuple[str, str], float] = {}  # by URL and path
        self._counters: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def tokens(self, call: Call, engines: Sequence[Serving]) -> Tokens:
        """Return the tokens of a request's prompt; of several prompts those of the first.

        Args:
            call: the request.
            engines: those of its model; they are asked in turn.
        """
        found = await self._find(call, engines)
        self._counters[found.reason] += 1
        return found

    async def _find(self, call: Call, engines: Sequence[Serving]) -> Tokens:
        prompt = _prompt_of(call)
        if isinstance(prompt, list) and call.path in (COMPLETIONS, EMBEDDINGS):
            return Tokens(prompt, "ids")
        if prompt is None:
            return Tokens(None, "not_text")
        loop = asyncio.get_running_loop()
        until = loop.time() + self._within
        self._turn += 1
        start = self._turn % len(engines) if engines else 0
        reason = "no_source"
        for serving in (*engines[start:], *engines[:start]):
            for question in _questions(call, prompt, serving):
                now = loop.time()
                if now >= until:
                    return Tokens(None, "slow")
                if self._not_before.get((serving.url, question.path), 0.0) > now:
                    continue
                token_ids = await self._ask(serving, question, until - now)
                if token_ids is not None:
                    return Tokens(token_ids, question.source)
                reason = "refused"
        return Tokens(None, reason)

    async def _ask(
        self, serving: Serving, question: _Question, within: float
    ) -> Sequence[int] | None:
        """Ask one engine; None if it has no answer, and is not to be asked for a while."""
        pause = _PAUSE_SECONDS
        try:
            status, body = await self._upstream.ask(
                serving.url,
                question.path,
                question.body,
                ((b"content-type", b"application/json"),),
                within=within,
                most=_MOST_BYTES,
            )
            if status == 200:
                return _read(question.source, body)
            failure = f"status_{status}"
            if status in _LACKING:
                pause = _RETRY_SECONDS
            elif status < 500:
                pause = 0.0  # it is the request
        except UpstreamError as error:
            failure = error.reason
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            failure = "content"
        self._failures[failure] += 1
        if pause:
            now = asyncio.get_running_loop().time()
            if len(self._not_before) > 4096:  # engines come and go
                self._not_before.clear()
            self._not_before[serving.url, question.path] = now + pause
        return None

    def statistics(self) -> dict[str, Any]:
        """Return how many prompts' tokens came from where, and `failures` of engines by reason."""
        return {"sources": dict(self._counters), "failures": dict(self._failures)}


def _prompt_of(call: Call) -> str | list[Any] | None:
    """Return a request's text, its token ids, or its chat messages; None for anything else."""
    fields = call.fields
    if call.path in (CHAT, MESSAGES):
        messages = fields["messages"]
        system = fields.get("system")
        if call.path == MESSAGES and isinstance(system, str):
            return [{"role": "system", "content": system}, *messages]
        return messages if isinstance(messages, list) else None
    if call.path == RESPONSES:
        given = fields.get("input")
        if fields.get("instructions") or fields.get("previous_response_id"):
            return None
        return [{"role": "user", "content": given}] if isinstance(given, str) else None
    prompt = fields.get("prompt" if call.path == COMPLETIONS else "input")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, (str, list)) else None


def _questions(call: Call, prompt: str | list[Any], serving: Serving) -> list[_Question]:
    """Return what an engine can be asked for a prompt, the best first."""
    questions = []
    is_vllm = serving.kind != "sglang"
    if is_vllm and call.path in (CHAT, COMPLETIONS):
        questions.append(_Question("render", f"{call.path}/render", call.body))
    if isinstance(prompt, str):
        fields: Mapping[str, Any] = {"prompt": prompt}
    elif is_vllm:
        fields = {"messages": prompt, **{k: call.fields[k] for k in _KEPT if k in call.fields}}
    else:
        return questions
    if call.model:
        fields = {"model": call.model, **fields}
    questions.append(_Question("tokenize", "/tokenize", _encode(fields)))
    return questions


def _read(source: str, body: bytes) -> Sequence[int]:
    if source == "tokenize":
        tokens: Any = _decode_tokenized(body).tokens  # SGLang: a list for each of several texts
        return tokens[0] if tokens and isinstance(tokens[0], list) else tokens
    if body.lstrip().startswith(b"["):  # of completions: one for each prompt
        return _decode_all_rendered(body)[0].token_ids
    return _decode_rendered(body).token_ids
