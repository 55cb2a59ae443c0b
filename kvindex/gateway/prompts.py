"""What engines make a prompt of: token ids, a text, or a chat.

Engines turn requests of `/v1/messages` and `/v1/responses` into chats, and only of chats or texts
can they be asked for the tokens. The conversions here are those of vLLM 0.33
(entrypoints/anthropic/serving.py, entrypoints/openai/responses/utils.py) and SGLang 0.5.23
(entrypoints/anthropic/serving.py). What they read in a way that is not reproduced here makes a
prompt unknown: its request is routed by load.

`FIELDS` says of each field of their requests what it does to the prompt.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

from kvindex.gateway.calls import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, Call

_Fields = Mapping[str, Any]


class Effect(enum.Enum):
    """What a field of a request does to the prompt."""

    NONE = "nothing: it decides how the request is answered"
    PROMPT = "it is the prompt, or a part of it"
    ASKED = "it is passed on to /tokenize"
    CUT = "it shortens the prompt"
    CACHE = "it names the cache"
    MEDIA = "it changes the tokens of media"
    UNKNOWN = "only the engine knows"


def _effects(**names: str) -> dict[str, Effect]:
    return {name: Effect[effect] for effect, listed in names.items() for name in listed.split()}


_SHARED: Final = _effects(
    NONE="""
        frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n seed
        presence_penalty response_format stop stream stream_options temperature top_p user top_k
        min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens prompt_logprobs logprob_token_ids
        bad_words allowed_token_ids echo structured_outputs priority request_id session_id rid
        watermark watermarking use_beam_search length_penalty return_tokens_as_token_ids
        return_token_ids
        return_weight_versions routed_experts_prompt_start return_token_offsets return_prompt_text
        mm_payload return_mm_kwargs kv_transfer_params ec_transfer_params vllm_xargs
        repetition_detection stream_interval thinking_token_budget include_reasoning
        parallel_tool_calls metadata background include max_output_tokens max_tool_calls
        service_tier store text prompt_cache_key prompt_cache_options prompt_cache_retention
        safety_identifier enable_response_messages stop_sequences betas best_of
        bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank
        data_parallel_rank return_hidden_states return_routed_experts routed_experts_start_len
        return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids
        return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext
        return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs
        return_flat_raw_top_logprobs_b64 regex ebnf json_schema stop_regex no_stop_trim
        separate_reasoning stream_reasoning custom_logit_processor custom_params custom_labels
        encoding_format dimensions""",
    CACHE="model cache_salt",
    ASKED="tools tool_choice chat_template_kwargs reasoning_effort documents",
    CUT="truncate_prompt_tokens truncation_side",
    MEDIA="""
        media_io_kwargs mm_processor_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video
        images_config video_config""",
    UNKNOWN="""
        prompt_embeds session_params suffix task embed_override_token_id embed_overrides extra_key
        lora_path""",
)

FIELDS: Final[Mapping[str, Mapping[str, Effect]]] = {
    CHAT: {
        **_SHARED,
        **_effects(
            PROMPT="messages input_ids",
            ASKED="""
                add_generation_prompt continue_final_message add_special_tokens chat_template
                thinking""",
        ),
    },
    COMPLETIONS: {**_SHARED, **_effects(PROMPT="prompt", ASKED="add_special_tokens")},
    MESSAGES: {**_SHARED, **_effects(PROMPT="messages system", ASKED="thinking output_config")},
    RESPONSES: {
        **_SHARED,
        **_effects(
            PROMPT="input instructions",
            ASKED="reasoning",
            CUT="truncation",
            UNKNOWN="previous_response_id previous_input_messages prompt",
        ),
    },
    EMBEDDINGS: {
        **_SHARED,
        **_effects(
            PROMPT="input messages",
            NONE="embed_dtype endianness use_activation",
            ASKED="add_special_tokens add_generation_prompt continue_final_message chat_template",
            UNKNOWN="padding",
        ),
    },
}
"""The fields of the requests of vLLM 0.33 and SGLang 0.5.23, by route."""


class Cut(NamedTuple):
    """How an engine shortens a prompt."""

    most: int  # tokens; -1: as many as fit the model
    side: str  # "left": the last tokens stay; "right": the first; "": as its tokenizer does

    def applied(self, token_ids: Sequence[int], room: int | None) -> Sequence[int] | None:
        """Return the tokens that stay; None if that is not known. `room` is the model's length."""
        most = self.most
        if most < 0:
            # One token is left for the answer, by some versions more: near the end it is not known.
            return token_ids if room is not None and len(token_ids) < room // 2 else None
        if most >= len(token_ids):
            return token_ids
        if self.side == "left":
            return token_ids[len(token_ids) - most :]
        return token_ids[:most] if self.side == "right" else None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a request: one of `token_ids`, `text` and `chat`, or why it is `unknown`."""

    token_ids: Sequence[int] | None = None
    text: str | None = None
    chat: _Fields | None = None  # the fields of a chat request
    # The same chat with all system messages in front: for templates that refuse others.
    merged: _Fields | None = None
    unknown: str = ""
    cut: Cut | None = None
    # Whether tokens such as BOS are added, if that differs from what its route does of itself.
    adds_special: bool | None = None
    others: Sequence[Any] = ()  # further prompts of the same request
    media: bytes = b""  # a name of the first image or sound in it


def prompt_of(call: Call, *, is_sglang: bool = False) -> Prompt:
    """Return the prompt of a request, as an engine reads it. O(bytes of the body).

    Examples:
        >>> from kvindex.gateway.calls import read_call
        >>> prompt_of(read_call("/v1/responses", b'{"input": "Hi", "instructions": "Rhyme."}')).chat
        {'messages': [{'role': 'system', 'content': 'Rhyme.'}, {'role': 'user', 'content': 'Hi'}]}
    """
    fields, effects = call.fields, FIELDS.get(call.path)
    if effects is None:
        return Prompt(unknown="route")
    if call.is_odd:  # it cannot be written as JSON, to ask for its tokens
        return Prompt(unknown="form")
    for name, value in fields.items():
        if effects.get(name) is Effect.UNKNOWN and value not in (None, [], {}, ""):
            return Prompt(unknown=name)
    try:
        if call.path == CHAT:
            prompt = _of_chat(fields)
        elif call.path == MESSAGES:
            prompt = _of_messages(fields, is_sglang=is_sglang)
        elif call.path == RESPONSES:
            prompt = _of_responses(fields, is_sglang=is_sglang)
        else:
            prompt = _of_texts(fields, "prompt" if call.path == COMPLETIONS else "input")
    except _UnreadError as error:
        is_media = str(error) == "media"
        return Prompt(unknown=str(error), media=_first_media(fields) if is_media else b"")
    except msgspec.ValidationError:
        return Prompt(unknown="form")
    most, side = fields.get("truncate_prompt_tokens"), fields.get("truncation_side")
    if call.path == RESPONSES and fields.get("truncation") == "auto":
        most = -1
    if not isinstance(most, int):
        return prompt
    return msgspec.structs.replace(prompt, cut=Cut(most, side if isinstance(side, str) else ""))


def _of_texts(fields: _Fields, name: str) -> Prompt:
    prompt, special = fields.get(name), fields.get("add_special_tokens")
    others: Sequence[Any] = ()
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        # Of several prompts the first one decides where all go: they are one request.
        prompt, *others = prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt, adds_special=special, others=others)
    if isinstance(prompt, list) and prompt:
        return Prompt(token_ids=prompt, others=others)
    return Prompt(unknown="not_text")  # also chats that are embedded


def _of_chat(fields: _Fields) -> Prompt:
    token_ids = fields.get("input_ids")
    if isinstance(token_ids, list) and token_ids:  # of SGLang
        return Prompt(token_ids=token_ids)
    if any(_has_media(message) for message in fields["messages"]):
        raise _UnreadError("media")
    return Prompt(chat=fields, adds_special=fields.get("add_special_tokens"))


_TEXTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_NO_MEDIA: Final = _TEXTS | {
    *("message", "redacted_thinking", "reasoning", "tool_use", "tool_result", "tool_reference"),
    *("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
}


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and not all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXTS)
        for part in content
    )


def _first_media(fields: _Fields) -> bytes:
    """Return a name of the first image or sound in a request, in whichever API's form."""
    items = fields.get("messages") or fields.get("input")
    waiting = list(reversed(items)) if isinstance(items, list) else []
    while waiting:
        item = waiting.pop()
        if not isinstance(item, dict):
            continue
        inner = item.get("content") or item.get("output")
        if isinstance(inner, list):  # a message, or the result of a tool
            waiting += reversed(inner)
        elif item.get("type", "message") not in _NO_MEDIA and "role" not in item:
            # What is beside it, such as marks for a cache, does not make it another one.
            own = {k: v for k, v in item.items() if k not in ("cache_control", "detail", "id")}
            return blake2b(msgspec.json.encode(own, order="deterministic"), digest_size=16).digest()
    return b""


def with_effort(prompt: Prompt, effort: str) -> Prompt:
    """Return the prompt of a chat with another effort."""
    changed = {"reasoning_effort": effort}
    merged = prompt.merged
    return msgspec.structs.replace(
        prompt,
        chat={**(prompt.chat or {}), **changed},
        merged=None if merged is None else {**merged, **changed},
    )


# What is read of a request; what has another form is unknown: its engine may refuse it, or read it
# in a way of its own.


class _Block(msgspec.Struct):
    """A block of Anthropic's messages, or a part of a response's items."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]  # a server's own tool has none
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Thinking(msgspec.Struct):
    type: str


class _Output(msgspec.Struct):
    effort: str | None = None


class _Messages(msgspec.Struct):
    """A request of /v1/messages."""

    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Item(msgspec.Struct):
    """An item of a response's input: a message, a call of a tool, its output, a thought."""

    type: str = "message"
    role: str | None = None
    content: str | list[_Block] | None = None
    summary: list[_Block] | None = None
    encrypted_content: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    call_id: str | None = None
    output: str | None = None  # a list has media in it


class _Responses(msgspec.Struct):
    """A request of /v1/responses."""

    input: str | list[_Item]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    reasoning: _Output | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _UnreadError(Exception):
    """A part of a request is read by engines in a way of their own; its text is the reason."""


# Anthropic's messages -----------------------------------------------------------------------------


# Claude Code's header has a hash of each request. vLLM leaves it out, for the cache's sake.
_BILLING: Final = "x-anthropic-billing-header"

DISABLED: Final = "disabled"
"""The effort of a chat whose thinking is off: each engine finds out how its template names it."""


def _of_messages(fields: _Fields, *, is_sglang: bool) -> Prompt:
    request = msgspec.convert(fields, _Messages)
    options: dict[str, Any] = {}
    if request.tools is not None and (request.tools or not is_sglang):
        options["tools"] = [_function_of(tool, is_sglang=is_sglang) for tool in request.tools]
    if request.chat_template_kwargs is not None:
        options["chat_template_kwargs"] = request.chat_template_kwargs
    effort = None if request.output_config is None else request.output_config.effort
    if request.thinking is not None and is_sglang:
        raise _UnreadError("thinking")  # it depends on the parser of the model's reasoning
    if request.thinking is not None and request.thinking.type == "disabled":
        effort = DISABLED
    if effort is not None:
        options["reasoning_effort"] = "max" if is_sglang and effort == "xhigh" else effort
    chat, merged = (
        {**options, "messages": _messages(request, is_sglang=is_sglang, merges=merges)}
        for merges in (False, True)
    )
    return Prompt(chat=chat, merged=None if merged == chat else merged)


def _messages(request: _Messages, *, is_sglang: bool, merges: bool) -> list[dict[str, Any]]:
    """Return a chat's messages; with `merges`, the texts of all system messages are the first."""
    system = _system_texts(request.system or "", is_sglang=is_sglang)
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        if message.role != "system":
            messages += _turn(message, is_sglang=is_sglang)
            continue
        texts = _system_texts(message.content, is_sglang=is_sglang)
        if merges:
            system += [text.strip() if is_sglang else text for text in texts]
        elif is_sglang:
            messages += _turn(message, is_sglang=is_sglang)
        elif texts:
            messages.append({"role": "system", "content": "".join(texts)})
    joined = ("\n" if is_sglang else "").join(system)
    return [{"role": "system", "content": joined}, *messages] if system else messages


def _system_texts(content: str | list[_Block], *, is_sglang: bool) -> list[str]:
    if isinstance(content, str):
        texts = [content] if content.strip() or not is_sglang else []
    else:
        if any(block.type != "text" for block in content):
            raise _UnreadError("form")  # of vLLM: they change the tools
        texts = [block.text for block in content if block.text]
    if is_sglang:
        return texts
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _turn(message: _Message, *, is_sglang: bool) -> list[dict[str, Any]]:
    """Return the messages of a message: the results of tools become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    results: list[dict[str, Any]] = []
    for block in message.content:
        if block.type == "text":
            if block.text or (is_sglang and block.text is not None):
                parts.append({"type": "text", "text": block.text})
        elif block.type == "thinking" and not is_sglang:
            thoughts += [] if block.thinking is None else [block.thinking]
        elif block.type == "tool_use":
            # With spaces of their own, whatever the client wrote.
            arguments = json.dumps(block.input or {})
            function = {"name": block.name or "", "arguments": arguments}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result" and message.role == "user":
            results.append(_result_of(block))
        elif block.type not in ("redacted_thinking", "tool_reference") or is_sglang:
            raise _UnreadError("media" if block.type == "image" else "form")
    if is_sglang and results and parts:
        raise _UnreadError("form")  # it keeps their order, which is lost here
    turn: dict[str, Any] = {"role": message.role}
    if thoughts:
        turn["reasoning"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    if parts:
        turn["content"] = parts[0]["text"] if len(parts) == 1 else parts
    elif message.role == "user":
        return results
    elif is_sglang and not calls:
        turn["content"] = ""
    return [*results, turn]


def _result_of(block: _Block) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        if any(part.type != "text" for part in content):
            raise _UnreadError("media")
        content = "\n".join(part.text or "" for part in content)
    return {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content}


def _function_of(tool: _Tool, *, is_sglang: bool) -> dict[str, Any]:
    schema = tool.input_schema
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description or "" if is_sglang else tool.description,
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    if tool.defer_loading is not None:
        function["defer_loading"] = tool.defer_loading
    return {"type": "function", "function": function}


# OpenAI's responses -------------------------------------------------------------------------------


def _of_responses(fields: _Fields, *, is_sglang: bool) -> Prompt:
    request = msgspec.convert(fields, _Responses)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    chat: dict[str, Any] = {"messages": messages}
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    elif is_sglang or not request.input:
        raise _UnreadError("form")  # SGLang joins its messages in ways of its own
    else:
        for item in request.input:
            _add_item(messages, item)
        last = request.input[-1]
        # What the model has begun to say goes on.
        if last.type in ("message", "reasoning") and last.status in ("in_progress", "incomplete"):
            chat.update(add_generation_prompt=False, continue_final_message=True)
    functions = [function for tool in request.tools or () for function in _functions(tool)]
    if functions and is_sglang:
        raise _UnreadError("form")
    if functions:
        chat["tools"] = functions
    if request.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = request.chat_template_kwargs
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    # vLLM adds special tokens to what the template has written, as it does to a text.
    return Prompt(chat=chat, adds_special=None if is_sglang else True)


def _add_item(messages: list[dict[str, Any]], item: _Item) -> None:
    """Add an item to a chat; what the model thought, said and called in one turn is one message."""
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if item.type in ("function_call", "custom_tool_call"):
        call = {"id": item.call_id, "type": "function", "function": _called(item)}
        if before is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            before.setdefault("tool_calls", []).append(call)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
    elif item.type == "reasoning" or (item.type == "message" and item.role == "assistant"):
        name = "reasoning" if item.type == "reasoning" else "content"
        said = item.content or item.summary
        if item.encrypted_content or not said:
            raise _UnreadError("form")
        text = said if isinstance(said, str) else said[0].text  # engines read the first part only
        if before is None or before.get(name) is not None:
            messages.append({"role": "assistant", name: text})
        else:
            before[name] = text
    elif item.type == "message" and item.role is not None and item.content is not None:
        content: Any = item.content
        if not isinstance(content, str):
            if any(part.type not in _TEXTS for part in content):
                raise _UnreadError("media")
            content = [{"type": "text", "text": part.text} for part in content]
        messages.append({"role": item.role, "content": content})
    else:
        raise _UnreadError("form")


def _called(item: _Item) -> dict[str, Any]:
    if item.type == "custom_tool_call":  # is shown to the model as a function with one text
        arguments = json.dumps({"input": item.input or ""}, ensure_ascii=False)
        return {"name": item.name, "arguments": arguments}
    name = f"{item.namespace}__{item.name}" if item.namespace else item.name
    return {"name": name, "arguments": item.arguments}


# vLLM's own words: they stand in the prompt.
_CUSTOM: Final = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}


def _functions(tool: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the functions as which a tool is shown to the model; some tools are not."""
    kind = tool.get("type")
    if kind == "function":
        yield {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    elif kind == "custom":
        shown = {"name": tool.get("name"), "description": tool.get("description")}
        yield {"type": "function", "function": {**shown, "parameters": _CUSTOM}}
    elif kind == "namespace":
        for inner in msgspec.convert(tool.get("tools", []), list[dict[str, Any]]):
            if inner.get("type") == "function":
                yield from _functions({**inner, "name": f"{tool.get('name')}__{inner.get('name')}"})
