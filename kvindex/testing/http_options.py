"""How the fake engine behaves over HTTP, and which faults it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

__all__ = ["HttpOptions", "SourcesShape"]

SourcesShape = Literal["ranks", "list", "sources"]
"""Of `/kv_event_sources`: an object by rank (vLLM 0.33), a list, or `{"sources": [...]}`."""


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An `HttpEngine`'s report about itself, and its faults.

    Attributes:
        version: what it says it is; None for the release of the engines' dialect.
        loras: LoRA adapters: `model` in a request may name one.
        max_model_len: tokens of the longest request.
        sources: shape of vLLM's `/kv_event_sources`; None for no such route (before 0.31).
        announce: fields to say otherwise in `/kv_event_sources`, or in SGLang's `kv_events`.
        prefix_caching: False caches nothing, and so publishes nothing.
        reads_cache: False computes every prompt anew, though what it stores is published.
        silent: True keeps back what it should publish.
        cached_tokens: whether `usage` tells how many tokens were cached.
        render: whether vLLM's routes that show how a request is tokenized answer, as with its
            --enable-scale-out; else they refuse.
        metrics: whether there is `/metrics`.
        drops_blocks: hit so many blocks less than are cached; EAGLE makes vLLM drop one.
        prepends: True puts a token before prompts that are token ids already.
        keeps_rank: False has the ranks take turns whatever rank a request asks for.
        salt: cache salt of requests that have none, as a gateway may add it.
        external_hits: tokens hit, as metrics say, in a cache elsewhere that publishes nothing.
        role: SGLang's `disaggregation_mode`: "null", "prefill" or "decode".
        api_key: if not empty, what `Authorization: Bearer` must have: with vLLM for routes under
            `/v1`, with SGLang for all but `/health`.
    """

    version: str | None = None
    loras: tuple[str, ...] = ()
    max_model_len: int = 2_048
    sources: SourcesShape | None = "ranks"
    announce: Mapping[str, Any] = {}
    prefix_caching: bool = True
    reads_cache: bool = True
    silent: bool = False
    cached_tokens: bool = True
    render: bool = False
    metrics: bool = True
    drops_blocks: int = 0
    prepends: bool = False
    keeps_rank: bool = True
    salt: str = ""
    external_hits: int = 0
    role: str = "null"
    api_key: str = ""
