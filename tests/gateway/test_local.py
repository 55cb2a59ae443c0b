"""Chats that are rendered and encoded here, and whether their tokens are trusted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from kvindex import ConfigurationError
from kvindex.gateway import local as local_module
from kvindex.gateway.local import ChatError, ChatTemplate, LocalTokens, form_of
from tests.gateway.models import TEMPLATE, folder

pytestmark = pytest.mark.unit

HI = {"role": "user", "content": "Hi"}


def template(path: Path, text: str) -> ChatTemplate:
    (path / "chat_template.jinja").write_text(text)
    return ChatTemplate(path)


def test_a_chat_is_rendered_with_its_tools_and_options(tmp_path: Path) -> None:
    chats = template(tmp_path, TEMPLATE)
    assert chats.render({"messages": [HI]}) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tools = [{"type": "function", "function": {"name": "<ü>"}}]
    shown = chats.render({"messages": [HI], "tools": tools, "add_generation_prompt": False})
    assert shown.startswith(
        f"<|im_start|>system\n{json.dumps(tools, ensure_ascii=False)}<|im_end|>"
    )
    assert shown.endswith("Hi<|im_end|>\n")


def test_texts_in_parts_are_joined_unless_the_template_reads_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "One"}, "Two"]
    chats = template(tmp_path, "{{ messages[0].content }}")
    assert (chats.render({"messages": [{"content": parts}]}), chats.wants_parts) == (
        "One\nTwo",
        False,
    )
    text = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    text += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    chats = template(tmp_path, text)
    both = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    assert (chats.render({"messages": [{"content": both}]}), chats.wants_parts) == ("OneTwo", True)


def test_arguments_of_tools_are_objects(tmp_path: Path) -> None:
    chats = template(tmp_path, "{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    message = {"tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]}
    assert chats.render({"messages": [message]}) == '{"a": 1}'


def test_what_templates_of_models_use_is_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "x": 1}')
    text = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    )
    text += "{% break %}{% endfor %}{{ thinking }}{{ strftime_now('%Y')|length }}"
    chats = template(tmp_path, text)
    given = {"messages": [HI, HI], "chat_template_kwargs": {"thinking": "on"}}
    assert chats.render(given) == "<s>Hion4"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"content": [{"type": "image_url"}]}]},
        {"messages": [HI], "chat_template": "{{ messages }}"},
        {"messages": [HI], "continue_final_message": True},
        {"messages": ["Hi"]},
        {"messages": [{"role": "refused"}]},
        {"messages": [{"tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [{"role": "attack"}]},
    ],
)
def test_what_cannot_be_rendered_here_is_reported(tmp_path: Path, fields: dict[str, Any]) -> None:
    text = "{% if messages[0].role == 'refused' %}{{ raise_exception('no') }}{% endif %}"
    text += "{% if messages[0].role == 'attack' %}{{ ''.__class__.__mro__ }}{% endif %}"
    chats = template(tmp_path, text + "{{ messages[0].content }}")
    with pytest.raises(ChatError):
        chats.render(fields)


def test_named_templates_are_found(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chats = ChatTemplate(tmp_path)
    assert chats.render({"messages": []}) == "plain"
    assert chats.render({"messages": [], "tools": [{}]}) == "tools"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("chat_template.jinja", "{% if", "the chat template is none"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "has no chat template"),
        ("chat_template.jinja", " " * (5 << 20), "longer than 4 MiB"),
        ("other", "", "has no chat template"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        ChatTemplate(tmp_path)


def test_without_a_tokenizer_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        LocalTokens(tmp_path)


def test_a_form_is_trusted_after_three_requests_and_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "_CHECK_EVERY", 10)
    local = LocalTokens(folder(tmp_path))
    form = form_of({"messages": [HI]})
    for _ in range(3):
        assert local.trusts(form) is None
        local.compare(form, [1, 2], [1, 2])
    asked = [local.trusts(form) for _ in range(20)]
    assert asked.count(None) == 2
    assert set(asked) == {None, True}
    assert local.trusts(form_of({"messages": [HI], "tools": [{}]})) is None, "another form"


def test_a_form_that_differs_is_left_to_the_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvindex")
    local = LocalTokens(folder(tmp_path))
    form = form_of({"messages": [HI]})
    assert local.trusts(form) is None
    local.compare(form, [1, 2, 3], [1, 2])
    assert "role: user has 3 tokens here and 2 in its engine, which differ from" in caplog.text
    assert "from token 2 on" in caplog.text
    local.compare(form, [1], [1])  # of a request that was under way
    assert local.trusts(form) is False
    assert local.statistics()["differing"] == 1


def test_forms_are_bounded_and_the_last_used_are_remembered(tmp_path: Path) -> None:
    local = LocalTokens(folder(tmp_path))
    used = frozenset({"used"})
    for _ in range(3):
        assert local.trusts(used) is None
        local.compare(used, [1], [1])
    for number in range(400):
        assert local.trusts(frozenset({str(number)})) is None, "a new form is compared"
        assert local.trusts(used), "however many forms a client makes up"
    assert local.trusts(frozenset({"0"})) is None
    roles = [{"role": str(number)} for number in range(100)]
    assert form_of({"messages": roles}) == {"many"}


def test_a_text_is_encoded_as_its_model_wants(tmp_path: Path) -> None:
    local = LocalTokens(folder(tmp_path))
    text = local.prompt({"messages": [HI]})
    assert local.cost(text) > 0
    assert len(local.encode(text, is_chat=True)) == len(local.encode(text, is_chat=False))
    assert local.cost(text) == 0
