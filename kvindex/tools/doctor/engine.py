"""An engine over HTTP: its metrics, its tokenizer, and what a prompt cost."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvindex.wire.errors import DiscoveryError
from kvindex.wire.web import Web

_SAMPLE: Final = re.compile(
    r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|NaN|Inf))"
)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MAX_SAMPLES: Final = 100_000


class EngineMetrics:
    r"""Samples of Prometheus' text format; lines that are no samples are left out.

    Examples:
        >>> metrics = EngineMetrics('hits_total{engine="0"} 3.0\nhits_total{engine="1"} 4')
        >>> metrics.total("hits"), metrics.total("queries")
        (7.0, None)
    """

    def __init__(self, text: str = "") -> None:
        self._samples = list(_samples(text))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def total(self, *names: str) -> float | None:
        """Return the sum of a series over its labels, by the first of its names; None if absent.

        A counter's name may have the suffix `_total`, which is left out here.
        """
        for name in names:
            values = [v for n, _, v in self._samples if n in (name, f"{name}_total")]
            if values:
                return sum(values)
        return None

    def by_label(self, name: str, label: str) -> Mapping[str, float]:
        """Return the sums of a counter's samples by the values of a label; empty if absent."""
        sums: dict[str, float] = {}
        for n, labels, value in self._samples:
            if n in (name, f"{name}_total"):
                sums[labels.get(label, "")] = sums.get(labels.get(label, ""), 0.0) + value
        return sums

    def labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a series' first sample."""
        return next((labels for n, labels, _ in self._samples if n == name), {})


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    # Nothing bounds what a server calls its metrics but this.
    for line in text.splitlines()[:_MAX_SAMPLES]:
        sample = _SAMPLE.match(line)
        if sample is not None and math.isfinite(value := float(sample[3])):
            yield sample[1], dict(_LABEL.findall(sample[2] or "")), value


class Usage(msgspec.Struct, frozen=True):
    """An engine's report of a prompt's tokens and how many of them were cached; None if unknown."""

    prompt_tokens: int | None
    cached_tokens: int | None


class EngineHttp:
    """One engine's HTTP server. Immutable: may be asked from any thread.

    `timeout` seconds are for an answer, `completion` seconds for the answer to a prompt.
    """

    def __init__(self, web: Web, *, timeout: float, completion: float) -> None:
        self._web = web
        self._timeout = timeout
        self._completion = completion

    def metrics(self) -> EngineMetrics:
        """Return the engine's metrics; none if it does not provide them."""
        try:
            answer = self._web.get("/metrics", self._timeout)
        except DiscoveryError:
            return EngineMetrics()
        return EngineMetrics(answer.body.decode("utf-8", "replace") if answer.status == 200 else "")

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of a prompt or chat as the engine sees them; None if unknown."""
        tokens = _token_ids(body, "prompt")  # they are tokens already
        return _token_ids(self._post("/tokenize", body), "tokens") if tokens is None else tokens

    def render(self, body: Mapping[str, Any]) -> tuple[list[int] | None, list[int]]:
        """Return tokens as `tokenize`, and where in them images and other media begin.

        Only a chat with media is rendered: vLLM does so with --enable-scale-out alone, and
        `/tokenize` has the same template.
        """
        # A text has no placeholders: asking for them would need an option of the engine.
        if _has_media(body):
            rendered = self._post("/v1/chat/completions/render", body)
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
        # vLLM's header; SGLang reads a field of the body.
        headers = {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}
        answer = self._web.post(path, json.dumps(body).encode(), self._completion, headers=headers)
        if answer.status != 200:
            reply = answer.body[:300].decode("utf-8", "replace")
            text = f"{path} answers {answer.status}: {reply}"
            raise DiscoveryError(text, url=self._web.url, reason="status")
        try:
            usage = answer.json().get("usage") or {}
            details = usage.get("prompt_tokens_details") or {}
            return Usage(_count(usage.get("prompt_tokens")), _count(details.get("cached_tokens")))
        except (ValueError, AttributeError) as error:
            text = f"{path} answers what cannot be read: {error}"
            raise DiscoveryError(text, url=self._web.url, reason="content") from None

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer at a path; None if nothing useful."""
        try:
            answer = self._web.post(path, json.dumps(body).encode(), self._timeout)
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
    """Where placeholders of media begin by vLLM's report, sorted."""
    features = rendered.get("features") if isinstance(rendered, Mapping) else None
    placed = features.get("mm_placeholders") if isinstance(features, Mapping) else None
    ranges = placed.values() if isinstance(placed, Mapping) else ()
    return sorted(
        place["offset"]
        for places in ranges
        if isinstance(places, Sequence)
        for place in places
        if isinstance(place, Mapping) and isinstance(place.get("offset"), int)
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
