"""What a request's body tells a router beside its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["reads_cache"]


def reads_cache(body: Mapping[str, Any]) -> bool:
    """Return whether the engine looks into its cache for an OpenAI request, by the request's body.

    vLLM does not where it must return the log probabilities of the prompt's own tokens: with
    `prompt_logprobs`, with `echo` and `logprobs` in a completion, with `echo` in a chat. Nor does
    SGLang, with `echo` and `logprobs`.

    Examples:
        >>> reads_cache({"prompt": "Once upon a time", "logprobs": 1})
        True
        >>> reads_cache({"prompt": "Once upon a time", "echo": True, "logprobs": 1})
        False
        >>> reads_cache({"prompt": "Once upon a time", "prompt_logprobs": 0})
        False
    """
    if body.get("prompt_logprobs") is not None:
        return False
    if not body.get("echo"):
        return True
    # vLLM takes the number for the prompt from the answer's, which for a chat is 0 by default.
    asked = body.get("top_logprobs", 0) if "messages" in body else body.get("logprobs")
    return asked is None
