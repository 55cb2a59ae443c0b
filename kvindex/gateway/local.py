"""Tokens from the model's own files, without asking an engine; trusted as far as engines agree.

`ChatTemplate` renders a chat as its engine does: by the model's own template, in a sandbox.

`Segments` encodes text piece by piece between special tokens, and remembers the pieces. A chat is
encoded again at each turn, and only its last messages are new. Special tokens end whatever a
tokenizer looks at, so the pieces between them can be encoded by themselves. Tokenizers whose
normalizer treats the beginning of a text in its own way are an exception: `Segments` compares
itself with the whole encoding, and is switched off where they differ.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from sys import getsizeof
from threading import Lock
from typing import Any, Final

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvindex import ConfigurationError
from kvindex.wire.errors import UNREADABLE

logger = logging.getLogger(__name__)

_CHECKS: Final = 3  # of a form, before it is trusted
_CHECK_EVERY: Final = 1_000  # requests of a form that is trusted, or texts
_MOST_FORMS: Final = 256
_MOST_TOKENS: Final = 1 << 20  # of a prompt: more fit no model
_LONGEST_TOKEN: Final = 8  # characters: those of a long text are shorter, on the average
_FREE: Final = frozenset({"role", "content", "name", "tool_call_id", "id", "type", "text"})

Form = frozenset[str]


class LocalTokens:
    """The tokenizer and the chat template of one model.

    What an engine makes of tools, thinking or names depends on its version and options. So the
    first requests of each form are compared with the engine's own tokens, and one in a thousand
    later; a form that differs once is left to the engines.

    Raises:
        ConfigurationError: a file is missing in the folder, or cannot be read.

    Owner: one event loop, but for `encode`, which is thread-safe.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        path = self._folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            self._segments = Segments(self._tokenizer, str(folder))
        except Exception as error:  # tokenizers raises no type of its own
            raise ConfigurationError(f"{path} cannot be loaded: {error}") from error
        self._template = ChatTemplate(self._folder)
        # Requests of each that was compared, the last used at the end; -1: they differ.
        self._forms: OrderedDict[Form, int] = OrderedDict()
        self._counters = {"compared": 0, "differing": 0}
        # A longer text fits no model: it is the engine's to refuse, and not worth the time here.
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.most_characters = min(longest, _LONGEST_TOKEN) * _MOST_TOKENS

    def prompt(self, chat: Mapping[str, Any]) -> str:
        """Return the prompt of a chat request. Raises ChatError."""
        return self._template.render(chat)

    def cost(self, prompt: str, salt: str | None = None) -> int:
        """Return how many characters of a chat's prompt have to be encoded."""
        return self._segments.new_characters(prompt, salt)

    def encode(self, prompt: str, *, is_chat: bool, salt: str | None = None) -> Sequence[int]:
        """Return the ids of a prompt; those of a text begin and end as its model wants."""
        if is_chat:  # its template has written the tokens with which it begins
            return self._segments.encode(prompt, salt)
        ids: list[int] = self._tokenizer.encode(prompt).ids
        return ids

    # Trust --------------------------------------------------------------------------------------

    def trusts(self, form: Form) -> bool | None:
        """Return whether tokens of this form are used; None: an engine is to be asked as well."""
        seen = self._forms.pop(form, 0)
        self._forms[form] = seen
        if len(self._forms) > _MOST_FORMS:  # clients make up forms without end
            self._forms.popitem(last=False)
        if seen < 0:
            return False
        # Until then `compare` counts: a request whose engine did not answer proves nothing.
        self._forms[form] = seen + (seen >= _CHECKS)
        return None if seen < _CHECKS or seen % _CHECK_EVERY == 0 else True

    def compare(self, form: Form, own: Sequence[int], engines: Sequence[int]) -> None:
        """Compare the tokens of one request with those of its engine."""
        self._counters["compared"] += 1
        if list(own) == list(engines):
            # Another request may have differed meanwhile, or the form be forgotten.
            if self._forms.get(form, 0) >= 0:
                self._forms[form] = self._forms.get(form, 0) + 1
            return
        self._forms[form] = -1
        self._counters["differing"] += 1
        at = next(
            (at for at, pair in enumerate(zip(own, engines, strict=False)) if pair[0] != pair[1]),
            min(len(own), len(engines)),
        )
        logger.warning(
            "%s: a request with %s has %d tokens here and %d in its engine, which differ from "
            "token %d on: tokens of such requests come from the engines from now on",
            *(self._folder, ", ".join(sorted(form)), len(own), len(engines), at),
        )

    def statistics(self) -> dict[str, Any]:
        """Return counters: requests `compared` with engines, `differing`; `segments`."""
        return {**self._counters, "segments": self._segments.statistics()}


def form_of(fields: Mapping[str, Any]) -> Form:
    """Return what decides how a chat is rendered, besides its texts.

    Examples:
        >>> sorted(form_of({"messages": [{"role": "user", "content": "Hi"}], "tools": [{}]}))
        ['content: str', 'role: user', 'tools']
    """
    form = {
        name
        for name in ("tools", "documents", "add_generation_prompt", "reasoning_effort")
        if fields.get(name) is not None
    }
    options = fields.get("chat_template_kwargs")
    if isinstance(options, dict):
        form.update(f"{name}={value}"[:64] for name, value in list(options.items())[:8])
    for message in fields["messages"]:
        role = message.get("role")
        form.add(f"role: {role}"[:64])
        form.add(f"content: {type(message.get('content')).__name__}")
        form.update(name[:64] for name in message if name not in _FREE)
        if len(form) > 32:  # whatever clients put into messages, what is remembered is bounded
            return frozenset({"many"})
    return frozenset(form)


# Chats --------------------------------------------------------------------------------------------


_MOST_BYTES: Final = 4 << 20  # of a file
_PROBE: Final = "kvindex"


class ChatError(Exception):
    """A chat that is not rendered here: its engine may refuse it, or render it otherwise."""


class _Generation(Extension):
    """`{% generation %}`: marks what the model wrote, for training, and renders it."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class ChatTemplate:
    """The template of a model's folder, or ConfigurationError. Thread-safe.

    What it receives and how it is read is what Hugging Face's `apply_chat_template` documents.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "tokenizer_config.json")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )

        def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent, **options)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def strftime_now(form: str) -> str:
            return datetime.datetime.now().astimezone().strftime(form)

        environment.filters["tojson"] = to_json  # jinja2's own escapes for HTML
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = strftime_now
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
        # Some templates read a message's content as a list of parts, others as text only.
        self.wants_parts = self._reads_parts()

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return the prompt of a chat request, given the fields of its body; raises ChatError."""
        # Engines refuse or treat these by their own options.
        if fields.get("chat_template") or fields.get("continue_final_message"):
            raise ChatError("it brings its own template, or continues a message")
        options = fields.get("chat_template_kwargs")
        effort = fields.get("reasoning_effort")
        # As in vLLM: an effort turns thinking on or off, unless the request says so itself.
        thinking = {} if effort is None else {"enable_thinking": effort != "none"}
        context = {
            **self._special,
            "documents": fields.get("documents"),
            "add_generation_prompt": fields.get("add_generation_prompt", True),
            **thinking,
            **(options if isinstance(options, dict) else {}),
            **({} if effort is None else {"reasoning_effort": effort}),
            "messages": [_message(message, self.wants_parts) for message in fields["messages"]],
            "tools": fields.get("tools") or None,
        }
        try:
            prompt: str = self._template(bool(context["tools"])).render(context)
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
        context: dict[str, Any] = {**self._special, "add_generation_prompt": True, "tools": None}
        rendered = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            messages = [{"role": "user", "content": content}]
            try:
                rendered.append(self._template(False).render({**context, "messages": messages}))
            except Exception:  # a template may fail in any way on what it does not know
                return False
        return _PROBE in rendered[0] and rendered[0] == rendered[1]


def _message(message: Any, wants_parts: bool) -> dict[str, Any]:
    """Return a message as templates expect it."""
    if not isinstance(message, dict):
        raise ChatError("a message is no object")
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
            for part in content
        ]
        lines = [text for text in texts if isinstance(text, str)]
        if len(lines) < len(texts):  # images have tokens of their own
            raise ChatError("a message has more than text")
        if not wants_parts:
            changed["content"] = "\n".join(lines)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_tool_call(call) for call in calls]
    return changed


def _tool_call(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object."""
    # Templates write them as JSON by themselves: text would be quoted once more.
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
    except FileNotFoundError:  # models before 2025 have it in their configuration
        templates = config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if isinstance(templates, str):
        return {"default": templates}
    listed: Sequence[Any] = templates if isinstance(templates, list) else ()
    texts = {
        entry["name"]: entry["template"]
        for entry in listed
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
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


# Segments -----------------------------------------------------------------------------------------


_MOST_REMEMBERED: Final = 512 << 20  # bytes of the pieces that are remembered
# What tokenizers are known to treat in their own ways where a text begins or ends.
_EDGES: Final = ("a", " a", "a ", "\n\na", "  \n", "'s", "é", "\u4f60\u597d", "1234", "\u2581a")


class Segments:
    """One tokenizer with the pieces that it has encoded.

    Thread-safe. Complexity: O(characters), of which those of new pieces count about a hundred
    times; 512 MiB are remembered at most, the last used ones.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        # Files of trained models may say so; an engine does neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.is_on = False  # whether texts are encoded by pieces; else as a whole
        self._tokenizer = tokenizer
        self._name = name
        # Where any text is split. Tokens that take the space beside them along, or are found only
        # as a word of their own or after normalization, are left to the tokenizer.
        self._ids: dict[str, int] = {
            token.content: number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.content
            and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        }
        # Where two begin at one place the longer one counts, as in the tokenizer.
        longest = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest))})")
        # By text and salt: else the time that a request takes would show what others have sent.
        self._pieces: OrderedDict[tuple[str, str | None], array[int]] = OrderedDict()
        self._bytes = 0
        self._counters: Counter[str] = Counter()
        self._lock = Lock()
        if self._ids:
            self.is_on = True
            # After each of them a text begins anew, for some tokenizers in a way of its own.
            for special in longest[:16]:
                self._check("".join(f"{special}{edge}" for edge in _EDGES) + special)

    def encode(self, text: str, salt: str | None = None) -> Sequence[int]:
        """Return the ids of a text in which special tokens may stand; none are added."""
        with self._lock:
            self._counters["texts"] += 1
            # Now and then a whole one: no check at the start can try all texts.
            is_due = self._counters["texts"] % _CHECK_EVERY == 0
        if not self.is_on:
            return self._whole(text)
        return self._check(text) if is_due else self._by_pieces(text, salt)

    def new_characters(self, text: str, salt: str | None = None) -> int:
        """Return how much of a text is not remembered: what it costs to encode it."""
        if not self.is_on:
            return len(text)
        pieces = self._pattern.split(text)[::2]
        return sum(len(piece) for piece in pieces if (piece, salt) not in self._pieces)

    def statistics(self) -> dict[str, Any]:
        """Return counters: `texts`, `checked` and `differing` ones; `pieces`, `remembered` ones."""
        counted = {name: self._counters[name] for name in _COUNTERS}
        return {**counted, "is_on": self.is_on, "bytes": self._bytes}

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _by_pieces(self, text: str, salt: str | None = None) -> array[int]:
        tokens = array("I")
        remembered = 0
        split = self._pattern.split(text)
        for at, piece in enumerate(split):
            if at % 2:  # between two pieces stands the special token that ends the first
                tokens.append(self._ids[piece])
            elif piece:
                with self._lock:
                    ids = self._pieces.get((piece, salt))
                    if ids is not None:
                        self._pieces.move_to_end((piece, salt))
                remembered += ids is not None
                tokens += self._encoded(piece, salt) if ids is None else ids
        with self._lock:
            self._counters["pieces"] += (len(split) + 1) // 2
            self._counters["remembered"] += remembered
        return tokens

    def _check(self, text: str) -> Sequence[int]:
        """Encode a text in both ways; return its ids as a whole."""
        whole = self._whole(text)
        self._counters["checked"] += 1
        if self.is_on and list(self._by_pieces(text)) != whole:
            self.is_on = False
            self._counters["differing"] += 1
            logger.warning(
                "%s: its pieces between special tokens have other tokens than the whole text: "
                "from now on each prompt is encoded as a whole, which takes longer",
                self._name,
            )
            with self._lock:
                self._pieces.clear()
                self._bytes = 0
        return whole

    def _encoded(self, piece: str, salt: str | None) -> array[int]:
        ids = array("I", self._whole(piece))  # without the lock: it may take seconds
        size = _bytes_of(piece, ids)
        with self._lock:
            if (piece, salt) not in self._pieces and size <= _MOST_REMEMBERED:
                self._pieces[piece, salt] = ids
                self._bytes += size
            while self._bytes > _MOST_REMEMBERED:
                (oldest, _), its_ids = self._pieces.popitem(last=False)
                self._bytes -= _bytes_of(oldest, its_ids)
        return ids


def _bytes_of(piece: str, ids: array[int]) -> int:
    return getsizeof(piece) + len(ids) * ids.itemsize + 256  # of the table


_COUNTERS: Final = ("texts", "pieces", "remembered", "checked", "differing")
