"""Questions to an engine over HTTP, beyond where it publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvindex.subscribe.discovery.web import Web
from kvindex.tools.doctor.limits import Limits
from kvindex.tools.doctor.metrics_text import EngineMetrics
from kvindex.wire.errors import DiscoveryError

__all__ = ["EngineHttp", "Usage"]


class Usage(msgspec.Struct, frozen=True):
    """An engine's report of a prompt's cost.

    Attributes:
        prompt_tokens: tokens of the prompt, or None.
        cached_tokens: how many of them were cached, or None if it does not say.
    """

    prompt_tokens: int | None
    cached_tokens: int | None


class EngineHttp:
    """One engine's HTTP server. Immutable: may be asked from any thread.

    Args:
        url: of the server.
        token: its API key, or "".
        limits: how long to wait.

    Raises:
        ConfigurationError: the URL cannot be one.
    """

    def __init__(self, url: str, token: str, limits: Limits) -> None:
        self._web = Web(url, token=token or None)
        self._limits = limits

    def metrics(self) -> EngineMetrics:
        """Return the engine's metrics; none if it does not provide them."""
        try:
            answer = self._web.get("/metrics", self._limits.http)
        except DiscoveryError:
            return EngineMetrics()
        return EngineMetrics(answer.body.decode("utf-8", "replace") if answer.status == 200 else "")

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of a prompt or chat as the engine sees them; None if unsaid."""
        tokens = _token_ids(body, "prompt")  # they are tokens already
        return _token_ids(self._asked("/tokenize", body), "tokens") if tokens is None else tokens

    def render(self, body: Mapping[str, Any]) -> tuple[list[int] | None, list[int]]:
        """Return tokens as `tokenize`, and where in them images and other media begin.

        Only a chat with media is rendered: vLLM does so with --enable-scale-out alone, and
        `/tokenize` has the same template.
        """
        if _has_media(body):
            rendered = self._asked("/v1/chat/completions/render", body)
            tokens = _token_ids(rendered, "token_ids")
            if tokens is not None:
                return tokens, _media(rendered)
        return self.tokenize(body), []

    def complete(self, body: Mapping[str, Any], dp_rank: int | None) -> Usage:
        """Send the engine a prompt, and return its report of the cost.

        Raises:
            DiscoveryError: it does not answer, or with an error.
        """
        chat = "messages" in body
        path = "/v1/chat/completions" if chat else "/v1/completions"
        headers = {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}
        answer = self._web.post(
            path, json.dumps(body).encode(), self._limits.completion, headers=headers
        )
        if answer.status != 200:
            said = answer.body[:300].decode("utf-8", "replace")
            text = f"{path} answers {answer.status}: {said}"
            raise DiscoveryError(text, url=self._web.url, reason="status")
        try:
            usage = answer.json().get("usage") or {}
            details = usage.get("prompt_tokens_details") or {}
            return Usage(_count(usage.get("prompt_tokens")), _count(details.get("cached_tokens")))
        except (ValueError, AttributeError) as error:
            text = f"{path} answers what cannot be read: {error}"
            raise DiscoveryError(text, url=self._web.url, reason="content") from None

    def _asked(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer at a path; None if nothing useful."""
        try:
            answer = self._web.post(path, json.dumps(body).encode(), self._limits.http)
            return answer.json() if answer.status == 200 else None
        except (DiscoveryError, ValueError):
            return None


def _token_ids(answer: Any, key: str) -> list[int] | None:
    tokens = answer.get(key) if isinstance(answer, Mapping) else None
    if not isinstance(tokens, list) or not all(type(x) is int and 0 <= x < 1 << 32 for x in tokens):
        return None
    return tokens


def _has_media(body: Mapping[str, Any]) -> bool:
    messages = body.get("messages")
    contents = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, Mapping)
    ]
    return any(
        isinstance(part, Mapping) and part.get("type") != "text"
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _media(rendered: Any) -> list[int]:
    """Where vLLM says that placeholders of media begin, sorted."""
    features = rendered.get("features") if isinstance(rendered, Mapping) else None
    placed = features.get("mm_placeholders") if isinstance(features, Mapping) else None
    ranges = placed.values() if isinstance(placed, Mapping) else ()
    return sorted(
        one["offset"]
        for many in ranges
        if isinstance(many, Sequence)
        for one in many
        if isinstance(one, Mapping) and isinstance(one.get("offset"), int)
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
