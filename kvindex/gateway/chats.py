"""Renders a chat as its engine does: by the model's own template, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvindex import ConfigurationError
from kvindex.wire.errors import UNREADABLE

_MOST_BYTES: Final = 4 << 20  # of a file
_PROBE: Final = "kvindex"


class ChatError(Exception):
    """A chat that is not rendered here: its engine may refuse it, or render it otherwise."""


class _Generation(Extension):
    """`{% generation %}`: marks what the model wrote, for training. It renders its inside."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class ChatTemplate:
    """The template of a model's folder.

    What it is given and how it is read is what Hugging Face's `apply_chat_template` documents.

    Args:
        folder: has `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`.

    Attributes:
        wants_parts: whether it reads a message's content as a list of parts; else as text.

    Raises:
        ConfigurationError: there is no template, or it cannot be read.

    Thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        try:
            self._templates = {
                name: environment.from_string(text)
                for name, text in _sources(folder, config).items()
            }
        except TemplateError as error:
            raise ConfigurationError(f"{folder}: the chat template is none: {error}") from error
        self.wants_parts = self._reads_parts()

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return the prompt of a chat request.

        Args:
            fields: of its body: `messages`, and perhaps `tools`, `chat_template_kwargs`, …

        Raises:
            ChatError: it has images or the like, brings its own template, or is against the
                template's rules.
        """
        if fields.get("chat_template") or fields.get("continue_final_message"):
            raise ChatError("it brings its own template, or continues a message")
        options = fields.get("chat_template_kwargs")
        given = {
            **self._special,
            "documents": fields.get("documents"),
            "add_generation_prompt": fields.get("add_generation_prompt", True),
            **(options if isinstance(options, dict) else {}),
            "messages": [_message(each, self.wants_parts) for each in fields["messages"]],
            "tools": fields.get("tools") or None,
        }
        try:
            prompt: str = self._template(bool(given["tools"])).render(given)
            return prompt
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatError(f"the template refuses it: {error}"[:200]) from None
        except (RecursionError, OverflowError, MemoryError, ArithmeticError) as error:
            raise ChatError(f"the template fails: {error!r}"[:200]) from None

    def _template(self, has_tools: bool) -> Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _reads_parts(self) -> bool:
        """Return whether the template renders a list of one text as it renders that text."""
        given: dict[str, Any] = {**self._special, "add_generation_prompt": True, "tools": None}
        rendered = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            messages = [{"role": "user", "content": content}]
            try:
                rendered.append(self._template(False).render({**given, "messages": messages}))
            except Exception:
                return False
        return _PROBE in rendered[0] and rendered[0] == rendered[1]


def _message(message: Any, wants_parts: bool) -> dict[str, Any]:
    """Return a message as templates expect it."""
    if not isinstance(message, dict):
        raise ChatError("a message is no object")
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_text_of(part) for part in content]
        if not wants_parts:
            changed["content"] = "\n".join(texts)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_tool_call(call) for call in calls]
    return changed


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise ChatError("a message has more than text")
    return text


def _tool_call(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object: templates write them as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        read = msgspec.json.decode(arguments or "{}")
    except UNREADABLE:
        raise ChatError("a tool's arguments are no JSON") from None
    return {**call, "function": {**function, "arguments": read}}


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a folder's templates, by name."""
    path = folder / "chat_template.jinja"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigurationError(f"{path} is longer than {_MOST_BYTES >> 20} MiB")
        return {"default": path.read_text("utf-8")}
    except FileNotFoundError:
        found = config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if isinstance(found, str):
        return {"default": found}
    named: Sequence[Any] = found if isinstance(found, list) else ()
    texts = {
        each["name"]: each["template"]
        for each in named
        if isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and isinstance(each.get("template"), str)
    }
    if not texts:
        raise ConfigurationError(
            f"{folder} has no chat template: expected chat_template.jinja, or chat_template in "
            "tokenizer_config.json"
        )
    return texts


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigurationError(f"{path} is longer than {_MOST_BYTES >> 20} MiB")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """The filter `tojson`: not that of jinja2, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
