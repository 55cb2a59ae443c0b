"""The tokens of a prompt: from the body, from the model's files, or as its engine counts them.

Each step is tried only if the one before has no answer:

- `ids`: the body has token ids;
- `local`: the model's own tokenizer, where one is given and its tokens equal the engines';
- `render`: vLLM's route that shows the request as its engine would see it; off by default since
  0.32;
- `tokenize`: the engine's /tokenize, which vLLM answers for chats too, SGLang for text only.

A request without tokens is routed by load, and the reason is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from kvindex.gateway.calls import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, TOKENIZE, Call
from kvindex.gateway.routing import Serving
from kvindex.gateway.upstream import Upstream, UpstreamError
from kvindex.wire.errors import UNREADABLE

if TYPE_CHECKING:
    from kvindex.gateway.local import LocalTokens

_MOST_BYTES: Final = 16 << 20  # of an answer
_MOST_TOKENS: Final = 1 << 20
_RETRY_SECONDS: Final = 60.0  # until a route that an engine lacks is asked for again
_PAUSE_SECONDS: Final = 5.0  # until an engine that failed or was slow is asked again
_QUICK_CHARACTERS: Final = 4_000  # are encoded on the loop: about 1 ms
_BYTES_A_TOKEN: Final = 4  # of a prompt whose tokens are not known
_ENGINES_OWN: Final = ("add_special_tokens", "truncate_prompt_tokens")  # change a prompt's tokens
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


class Tokens(NamedTuple):
    """A prompt's tokens."""

    token_ids: Sequence[int] | None  # None if they are not known
    reason: str  # where they are from, or why there are none

    def length(self, call: Call) -> int:
        """Return how many there are, or an estimate by the request's bytes."""
        return len(call.body) // _BYTES_A_TOKEN if self.token_ids is None else len(self.token_ids)


class _Question(NamedTuple):
    """What an engine is asked."""

    source: str
    path: str
    body: bytes


class Tokenizing:
    """Finds the tokens of prompts. Owner: one event loop."""

    def __init__(
        self,
        upstream: Upstream,
        within: float = 2.0,
        local: Mapping[str, LocalTokens] | None = None,
    ) -> None:
        self._upstream = upstream
        self._within = within  # seconds that a request may wait for its tokens
        self._local = dict(local or {})  # by a name of the model; "": of any other
        self._threads = ThreadPoolExecutor(2, "kvindex-tokens")  # made as they are needed
        self._turn = 0
        self._not_before: dict[tuple[str, str], float] = {}  # by URL and path
        self._counters: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def tokens(self, call: Call, engines: Sequence[Serving]) -> Tokens:
        """Return the tokens of a request's prompt; of several prompts those of the first.

        `engines` are those of its model, which are asked in turn.
        """
        prompt = _prompt_of(call)
        if isinstance(prompt, list) and call.path in (COMPLETIONS, EMBEDDINGS):
            tokens = Tokens(prompt, "ids")
        elif prompt is None:
            tokens = Tokens(None, "not_text")
        else:
            until = asyncio.get_running_loop().time() + self._within
            local = await self._local_tokens(call, prompt, engines, until)
            tokens = local or await self._find_in_engines(call, prompt, engines, until)
        self._counters[tokens.reason] += 1
        return tokens

    async def _local_tokens(
        self, call: Call, prompt: str | list[Any], engines: Sequence[Serving], until: float
    ) -> Tokens | None:
        """Return tokens of the model's own files; None if the engines are to be asked instead."""
        if not self._local or any(call.fields.get(name) is not None for name in _ENGINES_OWN):
            return None
        names = (call.model, *(engines[0].models if engines else ()), "")
        local = next((self._local[name] for name in names if name in self._local), None)
        if local is None:
            return None
        # Here, since it needs packages that are wanted with tokenizers only.
        from kvindex.gateway.local import ChatError, form_of

        is_chat = not isinstance(prompt, str)
        chat = {**call.fields, "messages": prompt} if is_chat else {}
        form = frozenset({call.path, *(form_of(chat) if is_chat else ())})
        trusts = local.trusts(form)
        if trusts is False:
            return None
        try:
            text = local.prompt(chat) if isinstance(prompt, list) else prompt
        except ChatError:
            self._failures["template"] += 1
            return None
        # A chat's earlier turns are remembered: only its last messages cost.
        cost = local.cost(text) if is_chat else len(text)
        if cost <= _QUICK_CHARACTERS:  # a thread would cost more
            ids = local.encode(text, is_chat=is_chat)
        else:
            encode = partial(local.encode, text, is_chat=is_chat)
            ids = await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        if trusts is None:
            tokens = await self._find_in_engines(call, prompt, engines, until)
            if tokens.token_ids is not None:
                local.compare(form, ids, tokens.token_ids)
                return tokens  # the engine's: only that they are equal makes ours good
        return Tokens(ids, "local")

    async def _find_in_engines(
        self, call: Call, prompt: str | list[Any], engines: Sequence[Serving], until: float
    ) -> Tokens:
        """Ask one engine after another, each time another one first."""
        loop = asyncio.get_running_loop()
        self._turn += 1
        start = self._turn % len(engines) if engines else 0
        reason = "no_source"
        for serving in (*engines[start:], *engines[:start]):
            for question in _questions(call, prompt, serving):
                now = loop.time()
                if now >= until:
                    return Tokens(None, "slow")
                # Each engine that hangs would cost each request the whole time that it may wait.
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
                return _decode(question.source, body)
            failure = f"status_{status}"
            if status in _LACKING:
                pause = _RETRY_SECONDS
            elif status < 500:
                pause = 0.0  # it is the request: the engine may answer the next one
        except UpstreamError as error:
            failure = error.reason
        except UNREADABLE:
            failure = "content"
        self._failures[failure] += 1
        if pause:
            now = asyncio.get_running_loop().time()
            if len(self._not_before) > 4096:  # engines come and go
                self._not_before.clear()
            self._not_before[serving.url, question.path] = now + pause
        return None

    def statistics(self) -> dict[str, Any]:
        """Return counters.

        `sources`: how many prompts' tokens came from where; `failures` by reason: of engines, and
        "template": chats that the model's own template did not render; `local`: by model,
        `LocalTokens.statistics`.
        """
        return {
            "sources": dict(self._counters),
            "failures": dict(self._failures),
            "local": {name: local.statistics() for name, local in self._local.items()},
        }


def _prompt_of(call: Call) -> str | list[Any] | None:
    """Return a request's text, its token ids, or its chat messages; None for anything else."""
    fields = call.fields
    if call.path in (CHAT, MESSAGES):
        messages = fields["messages"]
        system = fields.get("system")
        # Engines make a message of it, the first one; a list of parts they may treat otherwise.
        if call.path == MESSAGES and isinstance(system, str):
            return [{"role": "system", "content": system}, *messages]
        return messages if isinstance(messages, list) else None
    if call.path == RESPONSES:
        text = fields.get("input")
        if fields.get("instructions") or fields.get("previous_response_id"):
            return None  # the engine puts texts before it that only the engine has
        return [{"role": "user", "content": text}] if isinstance(text, str) else None
    # Of several prompts the first one decides where all go: they are one request.
    prompt = fields.get("prompt" if call.path == COMPLETIONS else "input")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return prompt if isinstance(prompt, (str, list)) else None


def _questions(call: Call, prompt: str | list[Any], serving: Serving) -> list[_Question]:
    """Return what an engine can be asked for a prompt, the best first."""
    questions = []
    is_vllm = serving.kind != "sglang"
    if is_vllm and call.path in (CHAT, COMPLETIONS):  # shows what the engine itself would see
        questions.append(_Question("render", f"{call.path}/render", call.body))
    if isinstance(prompt, str):
        fields: Mapping[str, Any] = {"prompt": prompt}
    elif is_vllm:
        fields = {"messages": prompt, **{k: call.fields[k] for k in _KEPT if k in call.fields}}
    else:  # SGLang's /tokenize knows no chats
        return questions
    if call.model:
        fields = {"model": call.model, **fields}
    questions.append(_Question("tokenize", TOKENIZE, _encode(fields)))
    return questions


def _decode(source: str, body: bytes) -> Sequence[int]:
    # Nothing in answers is trusted: what has another form is "content", and the next one is asked.
    if source == "tokenize":
        tokens: Any = _decode_tokenized(body).tokens  # SGLang: a list for each of several texts
        return tokens[0] if tokens and isinstance(tokens[0], list) else tokens
    if body.lstrip().startswith(b"["):  # of completions: one for each prompt
        return _decode_all_rendered(body)[0].token_ids
    return _decode_rendered(body).token_ids
