"""Tokens from the model's own files, without asking an engine; trusted as far as engines agree."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from kvindex import ConfigurationError
from kvindex.gateway.chats import ChatError, ChatTemplate
from kvindex.gateway.segments import Segments

logger = logging.getLogger(__name__)

_CHECKS: Final = 3  # of a form, before it is trusted
_CHECK_EVERY: Final = 1_000  # requests of a form that is trusted
_MOST_FORMS: Final = 256
_FREE: Final = frozenset({"role", "content", "name", "tool_call_id", "id", "type", "text"})

Form = frozenset[str]


class LocalTokens:
    """The tokenizer and the chat template of one model.

    What an engine makes of tools, thinking or names depends on its version and options. So the
    first requests of each form are compared with the engine's own tokens, and one in a thousand
    later; a form that differs once is left to the engines.

    Args:
        folder: as Hugging Face lays it out: `tokenizer.json`, and a chat template.

    Raises:
        ConfigurationError: a file is missing or cannot be read.

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
        self._forms: dict[Form, int] = {}  # requests of each that was compared; -1: they differ
        self._counters = {"compared": 0, "differing": 0}

    def prompt(self, chat: Mapping[str, Any]) -> str:
        """Return the prompt of a chat request. Raises ChatError."""
        return self._template.render(chat)

    def cost(self, prompt: str) -> int:
        """Return how many characters of a chat's prompt have to be encoded."""
        return self._segments.new_characters(prompt)

    def encode(self, prompt: str, *, is_chat: bool) -> Sequence[int]:
        """Return the ids of a prompt; those of a text begin and end as its model wants."""
        if is_chat:
            return self._segments.encode(prompt)
        ids: list[int] = self._tokenizer.encode(prompt).ids
        return ids

    # Trust --------------------------------------------------------------------------------------

    def trusts(self, form: Form) -> bool | None:
        """Return whether tokens of this form are used; None: an engine is to be asked as well."""
        seen = self._forms.get(form, 0)
        if seen < 0:
            return False
        if form not in self._forms and len(self._forms) >= _MOST_FORMS:
            return False
        self._forms[form] = seen + (seen >= _CHECKS)
        return None if seen < _CHECKS or seen % _CHECK_EVERY == 0 else True

    def compare(self, form: Form, own: Sequence[int], engines: Sequence[int]) -> None:
        """Compare the tokens of one request with those of its engine."""
        self._counters["compared"] += 1
        if list(own) == list(engines):
            if self._forms[form] >= 0:  # another request may have differed meanwhile
                self._forms[form] += 1
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
    found = {
        name
        for name in ("tools", "documents", "add_generation_prompt", "reasoning_effort")
        if fields.get(name) is not None
    }
    options = fields.get("chat_template_kwargs")
    if isinstance(options, dict):
        found.update(f"{name}={value}"[:64] for name, value in list(options.items())[:8])
    for message in fields["messages"]:
        role = message.get("role")
        found.add(f"role: {role}"[:64])
        found.add(f"content: {type(message.get('content')).__name__}")
        found.update(name[:64] for name in message if name not in _FREE)
        if len(found) > 32:
            return frozenset({"many"})
    return frozenset(found)


__all__ = ["ChatError", "Form", "LocalTokens", "form_of"]
