"""The facts in a request's body that a router needs beside its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvindex.wire.requests import field_against_cache

__all__ = ["reads_cache"]


def reads_cache(body: Mapping[str, Any]) -> bool:
    """Return whether the engine reads its cache for an OpenAI request, by the request's body.

    vLLM does not where it must return the log probabilities of the prompt's own tokens: with
    `prompt_logprobs`, with `echo` and `logprobs` in a completion, with `echo` in a chat (unless its
    `top_logprobs` is null). Nor does SGLang, with `echo` and `logprobs`.

    Examples:
        >>> reads_cache({"prompt": "Once upon a time", "logprobs": 1})
        True
        >>> reads_cache({"prompt": "Once upon a time", "echo": True, "logprobs": 1})
        False
        >>> reads_cache({"prompt": "Once upon a time", "prompt_logprobs": 0})
        False
    """
    return not field_against_cache(body)
