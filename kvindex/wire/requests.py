"""Whether a request's body lets the engine read its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def field_against_cache(body: Mapping[str, Any]) -> str:
    """Return the field of an OpenAI request for which the engine reads no cache; "" without one.

    That is where the engine must return the log probabilities of the prompt's own tokens: it has
    to compute them.

    Examples:
        >>> field_against_cache({"prompt": "Once upon a time", "prompt_logprobs": 0})
        'prompt_logprobs'
    """
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if not body.get("echo"):
        return ""
    # vLLM takes the number for the prompt from the answer's, which for a chat is 0 by default:
    # only a chat that asks for `null` reads the cache.
    if "messages" in body:
        return "echo" if body.get("top_logprobs", 0) is not None else ""
    return "echo with logprobs" if body.get("logprobs") is not None else ""


def reads_cache(body: Mapping[str, Any]) -> bool:
    """Return whether the engine reads its cache for an OpenAI request, by the request's body.

    vLLM does not with `prompt_logprobs`, with `echo` and `logprobs` in a completion, with `echo` in
    a chat (unless its `top_logprobs` is null); SGLang not with `echo` and `logprobs`.

    Examples:
        >>> reads_cache({"prompt": "Once upon a time", "prompt_logprobs": 0})
        False
    """
    return not field_against_cache(body)
