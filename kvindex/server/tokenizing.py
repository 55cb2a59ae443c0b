"""Text to tokens, by the engine that serves the model: its own `/tokenize`, nobody else's."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvindex.errors import KVIndexError

__all__ = ["TokenizerError", "tokenize"]

_MOST_BYTES: Final = 32 << 20  # of an answer: some million tokens
_PIECE = 1 << 16
_WORDS_OF_ERROR = 300


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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An engine that answers elsewhere is not the one that was configured."""

    def redirect_request(self, *_: Any) -> None:
        return None


# No proxies of the environment either.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects()).open


def tokenize(
    engine: str,
    model: str,
    text: str,
    *,
    timeout: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> list[int]:
    """Return the tokens of a prompt's text as an engine (vLLM, SGLang) makes them.

    It blocks: call it in a thread.

    Args:
        engine: base URL of the engine's HTTP server.
        model: as the engine knows it.
        text: the prompt, with the chat template applied if there is one.
        timeout: seconds for all of it.
        clock: monotonic seconds.

    Raises:
        TokenizerError: it cannot be reached, took too long, or answers something else.
    """
    url = engine.rstrip("/") + "/tokenize"
    deadline = clock() + timeout
    body = msgspec.json.encode({"model": model, "prompt": text})
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with _open(request, timeout=timeout) as answer:
            return msgspec.json.decode(_read(answer, deadline, clock), type=_Tokens).tokens
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(_WORDS_OF_ERROR).decode(errors="replace")
        raise TokenizerError(url, f"it answers {error.code}: {said}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise TokenizerError(url, f"its answer is no list of tokens ({error})") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TokenizerError(url, str(error) or type(error).__name__) from None


def _read(answer: Any, deadline: float, clock: Callable[[], float]) -> bytes:
    """Return the body; TimeoutError when it is not there in time."""
    pieces = bytearray()
    while piece := answer.read1(_PIECE):
        pieces += piece
        if len(pieces) > _MOST_BYTES:
            raise ValueError(f"its answer is longer than {_MOST_BYTES} bytes")
        if clock() > deadline:
            raise TimeoutError("its answer took too long")
    return bytes(pieces)
