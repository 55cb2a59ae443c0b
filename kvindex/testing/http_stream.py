"""Streamed answers of the fake engine: server-sent events as vLLM and SGLang write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvindex.testing.http_requests import text_of
from kvindex.testing.values import Served

FaultKind = Literal[
    "",
    "503",
    "reset",
    "reset_after_head",
    "endless",
    "cut",
    "hang",
    "garbage",
    "half_head",
    "long_head",
    "error_event",
    "keep_alive",
    "two_usages",
]


class HttpFaults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong with answers of an `HttpEngine`, and how slow they are.

    A request's header `x-fake-faults` has the same fields as JSON, and replaces them.

    Attributes:
        kind: the fault; "" for none. "reset" is before the head, "reset_after_head" before the
            first event, "cut" after `after` tokens, "error_event" there too, under status 200, and
            "endless" an event without an end.
            "long_head" has 64 kB of fields, "keep_alive" has a comment before the first event.
        after: tokens that are sent before "cut", "error_event" or "endless".
        ttft: seconds from a stream's head to its first token.
        gap: seconds between tokens.
    """

    kind: FaultKind = ""
    after: int = 0
    ttft: float = 0.0
    gap: float = 0.0


class Streamed(msgspec.Struct, frozen=True):
    """A streamed answer: the prompts' results, and how they are written."""

    results: Sequence[tuple[Served, list[int]]]
    chat: bool
    model: str
    usage: bool
    reported: dict[str, Any]

    def first(self) -> list[bytes]:
        """Return the role events, which a chat begins with."""
        if not self.chat:
            return []
        role = {"role": "assistant", "content": ""}
        return [self._event(at, {"delta": role}, None) for at in range(len(self.results))]

    def tokens(self) -> Iterator[bytes]:
        """Yield an event for each token; the choices in turn."""
        longest = max((len(tokens) for _, tokens in self.results), default=0)
        for step in range(longest):
            for at, (_, tokens) in enumerate(self.results):
                if step < len(tokens):
                    text = text_of([tokens[step]])
                    part = {"delta": {"content": text}} if self.chat else {"text": text}
                    last = step == len(tokens) - 1
                    yield self._event(at, part, "length" if last else None)

    def end(self) -> list[bytes]:
        """Return the event of the usage, if it is wanted, and the end's."""
        usage = [_data({**self._head(), "choices": [], "usage": self.reported})]
        return [*(usage if self.usage else []), b"data: [DONE]\n\n"]

    def _head(self) -> dict[str, Any]:
        return {
            "id": "chatcmpl-fake" if self.chat else "cmpl-fake",
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": 0,
            "model": self.model,
        }

    def _event(self, at: int, part: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": at, **part, "logprobs": None, "finish_reason": reason}
        return _data({**self._head(), "choices": [choice]})


def error_event(message: str) -> bytes:
    """Return the event of an error under status 200."""
    detail = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return _data({"error": detail})


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
