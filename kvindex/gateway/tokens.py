"""The tokens of a prompt: from the body, from the model's files, or as its engine counts them.

Each step is tried only if the one before has no answer:

- `ids`: the body has token ids;
- `local`: the model's own tokenizer, where one is given and its tokens equal the engines';
- `render`: vLLM's route that shows the request as its engine would see it; off by default since
  0.32;
- `tokenize`: the engine's /tokenize, for the text or the chat that the engine makes of the request.

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

from kvindex.gateway.calls import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOKENIZE, Call
from kvindex.gateway.prompts import DISABLED, FIELDS, Effect, Prompt, prompt_of, with_effort
from kvindex.gateway.routing import Serving, release_of
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
_LACKING: Final = frozenset({403, 404, 405, 501})

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Tokens = Annotated[list[_Token], msgspec.Meta(max_length=_MOST_TOKENS)]


class _Rendered(msgspec.Struct):
    token_ids: _Tokens


class _Tokenized(msgspec.Struct):
    tokens: Annotated[list[_Token | _Tokens], msgspec.Meta(max_length=_MOST_TOKENS)]
    max_model_len: int | None = None


_OneOrMore = Annotated[list[_Rendered], msgspec.Meta(min_length=1)]
_decode_rendered = msgspec.json.Decoder(_Rendered).decode
_decode_all_rendered = msgspec.json.Decoder(_OneOrMore).decode
_decode_tokenized = msgspec.json.Decoder(_Tokenized).decode
_encode = msgspec.json.Encoder().encode

_RENDERED: Final = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES})  # the routes with /render
# Reasons for which /render knows no more than we do: the engine has a part of it from elsewhere, or
# what decides about its blocks is no token.
_ELSEWHERE: Final = frozenset({"previous_response_id", "prompt_embeds", "media"})
# What vLLM's /tokenize reads of a chat.
_TOKENIZED: Final = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("media_io_kwargs", "mm_processor_kwargs"),
)
# vLLM from here on tries out which effort turns a model's thinking off.
_TRIES_EFFORTS: Final = (0, 33)
_EFFORTS: Final = ("none", "low", "medium", "high", "xhigh", "max")
_HELLO: Final = ({"role": "user", "content": "Hi"},)
_HARMONY: Final = (
    200_006  # with which the prompts of gpt-oss begin; /tokenize takes no effort there
)


class Tokens(NamedTuple):
    """A prompt's tokens."""

    token_ids: Sequence[int] | None  # None if they are not known
    reason: str  # where they are from, or why there are none
    others: int = 0  # tokens of further prompts of the same request, perhaps as an estimate
    media: bytes = b""  # a name of the first image or sound, if that is why there are none

    def length(self, call: Call) -> int:
        """Return how many there are in all, or an estimate by the request's bytes."""
        if self.token_ids is None:
            return len(call.body) // _BYTES_A_TOKEN
        return len(self.token_ids) + self.others


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
        self._disabled: dict[str, str] = {}  # by URL: the effort by which thinking is off
        self._counters: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def tokens(self, call: Call, engines: Sequence[Serving]) -> Tokens:
        """Return the tokens of a request's prompt; of several prompts those of the first.

        `engines` are those of its model, which are asked in turn.
        """
        prompt = prompt_of(call, is_sglang=_is_sglang(engines))
        if prompt.token_ids is not None:
            tokens = self._shortened(prompt, prompt.token_ids, "ids", None)
        else:
            until = asyncio.get_running_loop().time() + self._within
            local = await self._local_tokens(call, prompt, engines, until)
            tokens = local or await self._find_in_engines(call, prompt, engines, until)
            tokens = tokens._replace(media=prompt.media)
        self._counters[tokens.reason] += 1
        if tokens.token_ids is not None and prompt.others:
            # Texts count as if they had as many tokens for their length as the first one.
            per_character = len(tokens.token_ids) / max(1, len(prompt.text or ""))
            sizes = (len(p) * (per_character if isinstance(p, str) else 1) for p in prompt.others)
            return tokens._replace(others=int(sum(sizes)))
        return tokens

    def _shortened(
        self, prompt: Prompt, token_ids: Sequence[int], source: str, room: int | None
    ) -> Tokens:
        """Return a prompt's tokens as its engine shortens them."""
        if prompt.cut is None:
            return Tokens(token_ids, source)
        shortened = prompt.cut.applied(token_ids, room)
        return Tokens(shortened, "truncated" if shortened is None else source)

    async def _local_tokens(
        self, call: Call, prompt: Prompt, engines: Sequence[Serving], until: float
    ) -> Tokens | None:
        """Return tokens of the model's own files; None if the engines are to be asked instead."""
        if not self._local or prompt.unknown or prompt.cut is not None:
            return None
        names = (call.model, *(engines[0].models if engines else ()), "")
        local = next((self._local[name] for name in names if name in self._local), None)
        if local is None:
            return None
        # Here, since it needs packages that are wanted with tokenizers only.
        from kvindex.gateway.local import ChatError, form_of

        if engines:
            prompt = await self._with_effort(call, prompt, engines[0], until)
        chat, adds_special = prompt.chat, prompt.adds_special
        if chat is None and adds_special is False:
            return None
        form = frozenset({call.path, *(() if chat is None else form_of(chat))})
        trusts = local.trusts(form)
        if trusts is False:
            return None
        try:
            text = prompt.text or "" if chat is None else local.prompt(chat)
        except ChatError:
            self._failures["template"] += 1
            return None
        encode = partial(
            local.encode, text, is_chat=chat is not None and not adds_special, salt=call.salt
        )
        # A chat's earlier turns are remembered: only its last messages cost.
        if (len(text) if chat is None else local.cost(text, call.salt)) <= _QUICK_CHARACTERS:
            ids = encode()  # a thread would cost more
        elif len(text) > local.most_characters:
            return Tokens(None, "too_long")
        else:
            # What waits for a thread is dropped as its client leaves; nobody waits for ever.
            working = asyncio.get_running_loop().run_in_executor(self._threads, encode)
            try:
                within = until - asyncio.get_running_loop().time()
                ids = await asyncio.wait_for(working, within)
            except asyncio.TimeoutError:
                return Tokens(None, "slow")
        if trusts is None:
            tokens = await self._find_in_engines(call, prompt, engines, until)
            if tokens.token_ids is not None:
                local.compare(form, ids, tokens.token_ids)
                return tokens  # the engine's: only that they are equal makes ours good
        return Tokens(ids, "local")

    async def _find_in_engines(
        self, call: Call, given: Prompt, engines: Sequence[Serving], until: float
    ) -> Tokens:
        """Ask one engine after another, each time another one first."""
        loop = asyncio.get_running_loop()
        self._turn += 1
        start = self._turn % len(engines) if engines else 0
        reason = "no_source"
        for serving in (*engines[start:], *engines[:start]):
            # Engines of two kinds may read a request in two ways.
            is_sglang = _is_sglang([serving])
            same = is_sglang == _is_sglang(engines)
            prompt = given if same else prompt_of(call, is_sglang=is_sglang)
            prompt = await self._with_effort(call, prompt, serving, until)
            reason = prompt.unknown or reason
            for question in _questions(call, prompt, serving):
                now = loop.time()
                if now >= until:
                    return Tokens(None, "slow")
                # Each engine that hangs would cost each request the whole time that it may wait.
                if self._not_before.get((serving.url, question.path), 0.0) > now:
                    continue
                answer = await self._ask(serving, question, until - now)
                if answer is None:
                    reason = prompt.unknown or "refused"
                    continue
                token_ids, room = answer
                if question.source == "render":
                    return Tokens(token_ids, "render")
                has_effort = prompt.chat is not None and prompt.chat.get("reasoning_effort")
                if has_effort and token_ids[:1] == [_HARMONY]:
                    return Tokens(None, "reasoning_effort")
                return self._shortened(prompt, token_ids, question.source, room)
        return Tokens(None, reason)

    async def _with_effort(
        self, call: Call, prompt: Prompt, serving: Serving, until: float
    ) -> Prompt:
        """Return a prompt with the effort that its engine gives a chat whose thinking is off."""
        if prompt.chat is None or prompt.chat.get("reasoning_effort") != DISABLED:
            return prompt
        release = release_of(serving.version)
        effort = "none"
        if serving.kind != "sglang" and (not release or release >= _TRIES_EFFORTS):
            effort = self._disabled.get(serving.url) or await self._try_efforts(
                call, serving, until
            )
        return with_effort(prompt, effort)

    async def _try_efforts(self, call: Call, serving: Serving, until: float) -> str:
        # As vLLM does: "none" turns thinking off, unless the template refuses it or takes it for
        # another effort.
        seen: list[Sequence[int] | None] = []
        for effort in _EFFORTS:
            chat = {"messages": _HELLO, "reasoning_effort": effort}
            fields = {**_chat_question(chat, is_sglang=False), "model": call.model}
            question = _Question("tokenize", TOKENIZE, _encode(fields))
            left = until - asyncio.get_running_loop().time()
            answer = await self._ask(serving, question, max(0.0, left))
            seen.append(None if answer is None else answer[0])
        effort = "none" if seen[0] is not None and seen[0] not in seen[1:] else "low"
        if any(token_ids is not None for token_ids in seen):  # else it did not answer at all
            if len(self._disabled) > 4096:  # engines come and go
                self._disabled.clear()
            self._disabled[serving.url] = effort
        return effort

    async def _ask(
        self, serving: Serving, question: _Question, within: float
    ) -> tuple[Sequence[int], int | None] | None:
        """Ask one engine for tokens, and the model's length; None if it has no answer for now."""
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


def _is_sglang(engines: Sequence[Serving]) -> bool:
    return bool(engines) and engines[0].kind == "sglang"


def _questions(call: Call, prompt: Prompt, serving: Serving) -> list[_Question]:
    """Return what an engine can be asked for a prompt, the best first."""
    questions = []
    # It shows what the engine itself would see; only of a prompt that it has from elsewhere not.
    if serving.kind != "sglang" and call.path in _RENDERED and prompt.unknown not in _ELSEWHERE:
        questions.append(_Question("render", f"{call.path}/render", call.body))
    asked: list[Mapping[str, Any]] = []
    if prompt.text is not None:
        asked.append({"prompt": prompt.text})
    for chat in (prompt.chat, prompt.merged):
        if chat is not None:
            asked.append(_chat_question(chat, is_sglang=serving.kind == "sglang"))
    for fields in asked:
        if prompt.adds_special is not None:
            fields = {**fields, "add_special_tokens": prompt.adds_special}
        if call.model:
            fields = {"model": call.model, **fields}
        questions.append(_Question("tokenize", TOKENIZE, _encode(fields)))
    return questions


def _chat_question(chat: Mapping[str, Any], *, is_sglang: bool) -> Mapping[str, Any]:
    """Return the fields of a question for a chat's tokens."""
    if is_sglang:  # it reads all fields of a chat there
        left_out = (Effect.NONE, Effect.CACHE, Effect.CUT, None)
        return {k: v for k, v in chat.items() if FIELDS[CHAT].get(k) not in left_out}
    fields = {name: chat[name] for name in _TOKENIZED if chat.get(name) is not None}
    # What vLLM itself hands on to the template, beside the client's own.
    options = dict(chat.get("chat_template_kwargs") or {})
    effort = chat.get("reasoning_effort")
    if effort is not None:
        options.setdefault("enable_thinking", effort != "none")
        options["reasoning_effort"] = effort
    if chat.get("documents") is not None:
        options["documents"] = chat["documents"]
    return {**fields, "chat_template_kwargs": options} if options else fields


def _decode(source: str, body: bytes) -> tuple[Sequence[int], int | None]:
    """Return the tokens in an answer, and the model's length if it is there."""
    # Nothing in answers is trusted: what has another form is "content", and the next one is asked.
    if source == "tokenize":
        answer = _decode_tokenized(body)
        tokens: Any = answer.tokens  # SGLang: a list for each of several texts
        return tokens[0] if tokens and isinstance(tokens[0], list) else tokens, answer.max_model_len
    if body.lstrip().startswith(b"["):  # of completions: one for each prompt
        return _decode_all_rendered(body)[0].token_ids, None
    return _decode_rendered(body).token_ids, None
