"""Text to tokens, by the engine that serves the model: its own `/tokenize`, nobody else's."""

from __future__ import annotations

from typing import Final

import msgspec

from kvindex.subscribe.discovery.web import Web
from kvindex.wire.errors import ConfigurationError, DiscoveryError, KVIndexError

__all__ = ["TokenizerError", "tokenize"]

_MOST_BYTES: Final = 32 << 20  # of an answer: some million tokens
_WORDS_OF_ERROR: Final = 300


class TokenizerError(KVIndexError):
    """An engine did not turn text into tokens.

    Attributes:
        url: what was asked.
        reason: what is wrong.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url} did not give the text's tokens: {reason}")
        self.url = url
        self.reason = reason


class _Tokens(msgspec.Struct):
    tokens: list[int]


def tokenize(engine: str, model: str, text: str, *, timeout: float = 10.0) -> list[int]:
    """Return the tokens of a prompt's text as an engine (vLLM, SGLang) makes them.

    It blocks: call it in a thread.

    Args:
        engine: base URL of the engine's HTTP server.
        model: as the engine knows it.
        text: the prompt, with the chat template applied if there is one.
        timeout: seconds for all of it.

    Raises:
        TokenizerError: it cannot be reached, took too long, or answers something else.
    """
    url = engine.rstrip("/") + "/tokenize"
    body = msgspec.json.encode({"model": model, "prompt": text})
    try:
        answer = Web(engine).post("/tokenize", body, timeout, limit=_MOST_BYTES)
    except (ConfigurationError, DiscoveryError) as error:
        raise TokenizerError(url, str(error)) from None
    if answer.status != 200:
        said = answer.body[:_WORDS_OF_ERROR].decode(errors="replace")
        raise TokenizerError(url, f"it answers {answer.status}: {said}")
    try:
        return msgspec.json.decode(answer.body, type=_Tokens).tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TokenizerError(url, f"its answer is no list of tokens ({error})") from None
