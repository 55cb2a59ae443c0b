"""What an engine makes a prompt of: the chats of other APIs, and the fields that change a prompt.

The chats are those that vLLM 0.33 and SGLang 0.5.23 make, read off their released packages.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.gateway.calls import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, read_call
from kvindex.gateway.prompts import FIELDS, Cut, Effect, Prompt, prompt_of

pytestmark = pytest.mark.unit

FIELDS_OF = Path(__file__).parents[1] / "data" / "request-fields.json"

USER = {"role": "user", "content": "Once"}
SYSTEM = {"role": "system", "content": "Be kind"}


def prompt(path: str, *, is_sglang: bool = False, **fields: Any) -> Prompt:
    return prompt_of(read_call(path, json.dumps(fields).encode()), is_sglang=is_sglang)


def texts(*parts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": part} for part in parts]


def call(name: str, arguments: str, number: str | None = "c1") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}


TOOL = {"name": "f", "description": "d", "input_schema": {"properties": {}}}
FUNCTION = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"properties": {}, "type": "object"},
    },
}
TOOL_TURNS: list[Any] = [
    {
        "role": "assistant",
        "content": [
            *texts("Let me see"),
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": texts("one", "two")},
            {"type": "tool_result", "tool_use_id": "c2", "content": "three"},
        ],
    },
]
TOOL_CHAT: list[Any] = [
    {"role": "assistant", "tool_calls": [call("f", '{"a": 1}')], "content": "Let me see"},
    {"role": "tool", "tool_call_id": "c1", "content": "one\ntwo"},
    {"role": "tool", "tool_call_id": "c2", "content": "three"},
]


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        pytest.param({}, {"messages": [USER]}, id="text"),
        pytest.param({"system": "Be kind"}, {"messages": [SYSTEM, USER]}, id="system"),
        pytest.param(
            {"system": texts("x-anthropic-billing-header: 7", "Be ", "kind")},
            {"messages": [SYSTEM, USER]},
            id="system blocks, and a header that is left out",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": texts("Once")}]},
            {"messages": [USER]},
            id="one block",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": texts("a", "", "b")}]},
            {"messages": [{"role": "user", "content": texts("a", "b")}]},
            id="blocks",
        ),
        pytest.param({"messages": TOOL_TURNS}, {"messages": TOOL_CHAT}, id="tools were called"),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm", "signature": "s"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "thinking", "thinking": "so"},
                        ],
                    }
                ]
            },
            {"messages": [{"role": "assistant", "reasoning": "Hmso"}]},
            id="thoughts",
        ),
        pytest.param({"tools": [TOOL]}, {"messages": [USER], "tools": [FUNCTION]}, id="tools"),
        pytest.param(
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"messages": [USER]},
            id="thinking on",
        ),
        pytest.param(
            {"thinking": {"type": "disabled"}},
            {"messages": [USER], "reasoning_effort": "disabled"},
            id="thinking off",
        ),
        pytest.param(
            {"output_config": {"effort": "xhigh"}, "chat_template_kwargs": {"a": 1}},
            {
                "messages": [USER],
                "chat_template_kwargs": {"a": 1},
                "reasoning_effort": "xhigh",
            },
            id="effort and the template's options",
        ),
    ],
)
def test_a_request_of_messages_is_the_chat_that_vllm_makes_of_it(fields: Any, chat: Any) -> None:
    assert prompt(MESSAGES, **{"messages": [USER], **fields}).chat == chat


def test_system_messages_in_between_are_asked_for_in_their_place_then_in_front() -> None:
    reminder = {"role": "system", "content": "Now"}
    found = prompt(MESSAGES, system="Be kind", messages=[USER, reminder, USER])
    assert found.chat == {"messages": [SYSTEM, USER, reminder, USER]}
    assert found.merged == {"messages": [{"role": "system", "content": "Be kindNow"}, USER, USER]}
    assert prompt(MESSAGES, system="Be kind", messages=[USER]).merged is None


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        pytest.param(
            {"system": texts("Be", "kind")},
            {"messages": [{"role": "system", "content": "Be\nkind"}, USER]},
            id="system blocks",
        ),
        pytest.param({"messages": TOOL_TURNS}, {"messages": TOOL_CHAT}, id="tools were called"),
        pytest.param(
            {"output_config": {"effort": "xhigh"}},
            {"messages": [USER], "reasoning_effort": "max"},
            id="effort",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "content": []}]},
            {"messages": [{"role": "assistant", "content": ""}]},
            id="nothing said",
        ),
    ],
)
def test_a_request_of_messages_is_the_chat_that_sglang_makes_of_it(fields: Any, chat: Any) -> None:
    assert prompt(MESSAGES, is_sglang=True, **{"messages": [USER], **fields}).chat == chat


CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        pytest.param({"input": "Once"}, {"messages": [USER]}, id="text"),
        pytest.param(
            {"input": "Once", "instructions": "Be kind"},
            {"messages": [SYSTEM, USER]},
            id="instructions",
        ),
        pytest.param(
            {"input": [SYSTEM, {"type": "message", "role": "user", "content": "Once"}]},
            {"messages": [SYSTEM, USER]},
            id="messages",
        ),
        pytest.param(
            {"input": [{"role": "user", "content": texts("a", "b", kind="input_text")}]},
            {"messages": [{"role": "user", "content": texts("a", "b")}]},
            id="parts",
        ),
        pytest.param(
            {
                "input": [
                    USER,
                    {"type": "reasoning", "summary": texts("Hm"), "content": []},
                    CALLED,
                    {**CALLED, "call_id": "c2", "namespace": "n"},
                    {"type": "function_call_output", "call_id": "c1", "output": "one"},
                    {"role": "assistant", "content": texts("So", kind="output_text")},
                ]
            },
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "reasoning": "Hm",
                        "tool_calls": [call("f", '{"a":1}'), call("n__f", '{"a":1}', "c2")],
                    },
                    {"role": "tool", "content": "one", "tool_call_id": "c1"},
                    {"role": "assistant", "content": "So"},
                ]
            },
            id="what a model thought, called and said",
        ),
        pytest.param(
            {
                "input": [
                    {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "é"},
                    {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
                ]
            },
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [call("patch", '{"input": "é"}')]},
                    {"role": "tool", "content": "done", "tool_call_id": "c1"},
                ]
            },
            id="calls of a custom tool",
        ),
        pytest.param(
            {"input": [USER, {"role": "assistant", "content": "So", "status": "incomplete"}]},
            {
                "messages": [USER, {"role": "assistant", "content": "So"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            id="an answer that goes on",
        ),
        pytest.param(
            {
                "input": "Once",
                "tools": [
                    {"type": "function", "name": "f", "parameters": {}},
                    {"type": "web_search"},
                    {
                        "type": "namespace",
                        "name": "n",
                        "tools": [{"type": "function", "name": "g"}],
                    },
                ],
                "reasoning": {"effort": "low", "summary": "auto"},
            },
            {
                "messages": [USER],
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {}}},
                    {"type": "function", "function": {"name": "n__g"}},
                ],
                "reasoning_effort": "low",
            },
            id="tools and effort",
        ),
    ],
)
def test_a_request_of_responses_is_the_chat_that_vllm_makes_of_it(fields: Any, chat: Any) -> None:
    found = prompt(RESPONSES, **fields)
    assert found.chat == chat
    assert found.adds_special, "vLLM adds special tokens there"


def words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


NAMES = words(
    "type role content text thinking name input id call_id output summary arguments tools "
    "input_schema parameters effort status namespace tool_use_id"
)
TYPES = words(
    "text message user assistant system tool_use tool_result thinking function custom "
    "namespace function_call function_call_output reasoning input_text image incomplete"
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | TYPES | st.just("disabled"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
FIELD = words(
    "system tools thinking output_config instructions reasoning truncate_prompt_tokens "
    "truncation truncation_side chat_template_kwargs add_special_tokens"
)
OBJECTS = st.lists(st.dictionaries(NAMES, ANY, max_size=5), min_size=1, max_size=4)


@given(
    st.sampled_from([CHAT, MESSAGES, RESPONSES]),
    OBJECTS,
    st.dictionaries(FIELD, ANY, max_size=3),
    st.booleans(),
)
def test_whatever_a_client_sends_has_a_prompt_or_none(
    path: str, items: Any, fields: Any, is_sglang: bool
) -> None:
    body = {"input" if path == RESPONSES else "messages": items, **fields}
    found = prompt(path, is_sglang=is_sglang, **body)
    assert (found.chat is None) == bool(found.unknown)
    json.dumps([found.chat, found.merged])


IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b"}}
_UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [*texts("See"), IMAGE]}]}, "media"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "media"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "form"),
    (MESSAGES, {"messages": [{"role": "user"}]}, "form"),
    (
        MESSAGES,
        {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "w"}]},
        "form",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]},
        "form",
    ),
    (RESPONSES, {"input": "Once", "previous_response_id": "r"}, "previous_response_id"),
    (RESPONSES, {"input": "Once", "prompt": {"id": "p"}}, "prompt"),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "form"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "form"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "media",
    ),
    (COMPLETIONS, {"prompt": "Once", "suffix": "end"}, "suffix"),
    (CHAT, {"messages": [USER], "extra_key": "tenant"}, "extra_key"),
    (CHAT, {"messages": [USER], "lora_path": "sql"}, "lora_path"),
    (COMPLETIONS, {"prompt": "", "prompt_embeds": "AA=="}, "prompt_embeds"),
]


@pytest.mark.parametrize(("path", "fields", "reason"), _UNKNOWN)
def test_what_only_the_engine_knows_is_unknown(path: str, fields: Any, reason: str) -> None:
    found = prompt(path, **fields)
    assert (found.unknown, found.chat, found.text) == (reason, None, None)
    assert bool(found.media) == (reason == "media")


def shown(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def test_a_prompt_with_media_is_named_by_the_first_of_them() -> None:
    def name(*parts: Any, **fields: Any) -> bytes:
        turns = [{"role": "user", "content": list(parts)}]
        return prompt(CHAT, messages=[*turns, *fields.pop("later", ())], **fields).media

    first = name(*texts("See"), shown("a"))
    later = [{"role": "user", "content": [shown("b")]}]
    assert first == name(*texts("Look"), shown("a", cache_control={"type": "x"}), later=later)
    assert first != name(shown("b"), shown("a"))
    source = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [*texts("one"), source]}
    direct, in_result = (
        prompt(MESSAGES, messages=[{"role": "user", "content": [block]}]).media
        for block in (source, result)
    )
    assert direct == in_result != first


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"messages": [USER], "thinking": {"type": "enabled"}}),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [*texts("a"), *TOOL_TURNS[1]["content"]]}]},
        ),
        (RESPONSES, {"input": [USER]}),
        (RESPONSES, {"input": "Once", "tools": [{"type": "function", "name": "f"}]}),
    ],
)
def test_what_sglang_reads_in_its_own_way_is_unknown(path: str, fields: Any) -> None:
    assert prompt(path, **fields).chat is not None, "vLLM's way is known"
    assert prompt(path, is_sglang=True, **fields).unknown


def test_of_several_prompts_the_first_decides_and_the_others_are_load() -> None:
    assert prompt(COMPLETIONS, prompt=[[1, 2], [3]]) == Prompt(token_ids=[1, 2], others=[[3]])
    assert prompt(EMBEDDINGS, input=["a", "b"]) == Prompt(text="a", others=["b"])
    assert prompt(CHAT, messages=[USER], input_ids=[1, 2]) == Prompt(token_ids=[1, 2])


@pytest.mark.parametrize(
    ("cut", "room", "left"),
    [
        (Cut(2, "left"), None, [4, 5]),
        (Cut(2, "right"), None, [1, 2]),
        (Cut(9, ""), None, [1, 2, 3, 4, 5]),
        (Cut(2, ""), None, None),  # as the model's tokenizer does
        (Cut(-1, "left"), 100, [1, 2, 3, 4, 5]),
        (Cut(-1, "left"), 5, None),
        (Cut(-1, "left"), None, None),
    ],
)
def test_a_prompt_is_shortened_as_its_engine_does_or_is_unknown(
    cut: Cut, room: int | None, left: Any
) -> None:
    assert cut.applied([1, 2, 3, 4, 5], room) == left


def test_a_request_says_how_it_is_shortened() -> None:
    found = prompt(COMPLETIONS, prompt="Once", truncate_prompt_tokens=3, truncation_side="left")
    assert found.cut == Cut(3, "left")
    assert prompt(RESPONSES, input="Once", truncation="auto").cut == Cut(-1, "")
    assert prompt(RESPONSES, input="Once", truncation="disabled").cut is None


_MODELS = {
    CHAT: ("chat_completion.protocol", "ChatCompletionRequest"),
    COMPLETIONS: ("completion.protocol", "CompletionRequest"),
    RESPONSES: ("responses.protocol", "ResponsesRequest"),
}


@pytest.mark.parametrize("path", _MODELS)
def test_each_field_of_the_installed_vllm_is_in_the_table(path: str) -> None:
    module, name = _MODELS[path]
    protocol = pytest.importorskip(f"vllm.entrypoints.openai.{module}")
    _check(path, getattr(protocol, name).model_fields)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "ChatCompletionRequest"),
        (COMPLETIONS, "CompletionRequest"),
        (RESPONSES, "ResponsesRequest"),
        (EMBEDDINGS, "EmbeddingRequest"),
    ],
)
def test_each_field_of_the_installed_sglang_is_in_the_table(path: str, name: str) -> None:
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    _check(path, getattr(protocol, name).model_fields)


@pytest.mark.parametrize("engine", ["vllm.entrypoints", "sglang.srt.entrypoints"])
def test_each_field_of_the_installed_messages_api_is_in_the_table(engine: str) -> None:
    pytest.importorskip(engine)
    protocol = importlib.import_module(f"{engine}.anthropic.protocol")
    _check(MESSAGES, protocol.AnthropicMessagesRequest.model_fields)


def _check(path: str, fields: Any) -> None:
    missing = set(fields) - set(FIELDS[path])
    assert not missing, f"say in prompts.py what {missing} do to the prompt of {path}"


@pytest.mark.parametrize("release", json.loads(FIELDS_OF.read_text()))
def test_each_field_of_a_released_engine_is_in_the_table(release: Any) -> None:
    for path, fields in release["routes"].items():
        _check(path, fields)


def test_what_changes_no_prompt_is_not_what_changes_one() -> None:
    for effects in FIELDS.values():
        assert effects["cache_salt"] is Effect.CACHE
        assert effects["temperature"] is Effect.NONE
