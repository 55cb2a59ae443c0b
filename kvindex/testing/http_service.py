"""The fake engine behind its HTTP routes: options, ranks at one port, counters. No HTTP here."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from kvindex.testing.engine import FakeEngine
from kvindex.testing.http_requests import Completion, RequestError, new_tokens
from kvindex.testing.values import Served
from kvindex.wire.errors import ConfigurationError, TokenError

EngineKind = Literal["vllm", "sglang"]

SourcesShape = Literal["ranks", "list", "sources"]
"""Of `/kv_event_sources`: an object by rank (vLLM 0.33), a list, or `{"sources": [...]}`."""


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An `HttpEngine`'s report about itself, and its faults.

    Attributes:
        version: its release; None for the release of the engines' dialect.
        loras: LoRA adapters: `model` in a request may name one.
        max_model_len: tokens of the longest request.
        sources: shape of vLLM's `/kv_event_sources`; None for no such route (before 0.31).
        announce: fields to replace in `/kv_event_sources`, or in SGLang's `kv_events`.
        prefix_caching: False caches nothing, and so publishes nothing.
        reads_cache: False computes every prompt anew, though what it stores is published.
        silent: True keeps back what it should publish.
        cached_tokens: whether `usage` has how many tokens were cached.
        render: whether vLLM's routes that show how a request is tokenized answer, as with its
            --enable-scale-out; else they refuse.
        metrics: whether there is `/metrics`.
        drops_blocks: hit so many blocks less than are cached; EAGLE makes vLLM drop one.
        prepends: True puts a token before prompts that are token ids already.
        keeps_rank: False lets the ranks serve in turn, whatever rank a request asks for.
        salt: cache salt of requests that have none, as a gateway may add it.
        external_hits: tokens hit, by its metrics, in a cache elsewhere that publishes nothing.
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


class EngineService:
    """Serve prompts on the ranks in turn, count, and report what the engine reports of itself.

    Thread safety: all methods.
    """

    def __init__(
        self, ranks: Sequence[FakeEngine], *, kind: EngineKind, model: str, options: HttpOptions
    ) -> None:
        self.ranks: Final = {engine.rank.dp_rank: engine for engine in ranks}
        self.kind: Final[EngineKind] = kind
        self.model: Final = model
        self.options: Final = options
        dialect = next(iter(self.ranks.values())).dialect.name
        self.version: Final = options.version or dialect.split("-")[1]
        self._lock = threading.Lock()
        self._turns = itertools.cycle(sorted(self.ranks))
        self.counters: dict[int, Counter[str]] = {rank: Counter() for rank in self.ranks}

    def serve(self, prompt: Completion) -> tuple[Served, list[int]]:
        """Serve one prompt and return what it cost and what was generated.

        Raises:
            RequestError: it names what is not there, or does not fit.
        """
        lora = None if prompt.model == self.model else prompt.model
        if lora is not None and lora not in self.options.loras:
            raise RequestError(404, f"The model `{prompt.model}` does not exist.")
        if self.options.prepends:
            prompt = msgspec.structs.replace(prompt, token_ids=[0, *prompt.token_ids])
        length = len(prompt.token_ids) + prompt.max_tokens
        if length > self.options.max_model_len:
            raise RequestError(
                400, f"{length} tokens are more than max_model_len, {self.options.max_model_len}"
            )
        with self._lock:
            named = prompt.dp_rank if self.options.keeps_rank else None
            rank = next(self._turns) if named is None else named
            if rank not in self.ranks:
                raise RequestError(400, f"there is no data-parallel rank {rank}")
            tokens = new_tokens(prompt)
            served = self._served(self.ranks[rank], prompt, lora, tokens)
            self._count(rank, served, looked_up=prompt.reads_cache)
        return served, tokens

    def sources(self) -> dict[int, dict[str, Any]]:
        """Return vLLM's configuration of each rank's publisher, with the announced changes."""
        return {
            rank: {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": engine.endpoint,
                "replay_endpoint": engine.replay_endpoint,
                "buffer_steps": engine.buffer_steps,
                "hwm": engine.hwm,
                "max_queue_size": 100_000,
                "topic": engine.topic,
                **self.options.announce,
            }
            for rank, engine in sorted(self.ranks.items())
            if engine.publishes
        }

    def server_info(self) -> dict[str, Any]:
        """Return SGLang's server info."""
        first = self.ranks[min(self.ranks)]
        info: dict[str, Any] = {
            "model_path": self.model,
            "served_model_name": self.model,
            "version": self.version,
            "page_size": first.block_size,
            "dp_size": len(self.ranks),
            "max_total_num_tokens": first.num_blocks * first.block_size,
            "max_req_input_len": self.options.max_model_len,
            "disable_radix_cache": not self.options.prefix_caching,
            "enable_cache_report": self.options.cached_tokens,
            "enable_metrics": self.options.metrics,
            "disaggregation_mode": self.options.role,
            "speculative_algorithm": "EAGLE" if first.dialect.bigrams else None,
        }
        if first.publishes:
            info["kv_events"] = self._kv_events(first)
        return info

    def models(self) -> list[dict[str, Any]]:
        """Return what `/v1/models` lists: the model, then its adapters."""
        base = {"object": "model", "created": 0, "owned_by": self.kind}
        length = {"max_model_len": self.options.max_model_len}
        return [
            {"id": self.model, **base, "root": self.model, "parent": None, **length},
            *({"id": x, **base, "root": x, "parent": self.model} for x in self.options.loras),
        ]

    def _served(
        self, engine: FakeEngine, prompt: Completion, lora: str | None, tokens: list[int]
    ) -> Served:
        length = len(prompt.token_ids)
        if not self.options.prefix_caching:
            return Served(prompt_tokens=length, hit_tokens=0, new_tokens=len(tokens))
        try:
            served = engine.serve(
                prompt.token_ids,
                lora=lora,
                salt=prompt.salt or self.options.salt or None,
                extra_keys=_extra_keys(prompt, engine.block_size),
                new_tokens=tokens,
                flush=not self.options.silent,
            )
        except (ConfigurationError, TokenError) as error:
            raise RequestError(400, str(error)) from None
        hit = max(0, served.hit_tokens - self.options.drops_blocks * engine.block_size)
        if not (self.options.reads_cache and prompt.reads_cache):
            hit = 0
        return Served(prompt_tokens=length, hit_tokens=hit, new_tokens=len(tokens))

    def _count(self, rank: int, served: Served, *, looked_up: bool) -> None:
        counters = self.counters[rank]
        counters["requests"] += 1
        counters["prompt_tokens"] += served.prompt_tokens
        counters["generation_tokens"] += served.new_tokens
        counters["hits"] += served.hit_tokens
        if looked_up and self.options.prefix_caching:
            counters["queries"] += served.prompt_tokens

    def _kv_events(self, first: FakeEngine) -> Mapping[str, Any]:
        """SGLang's description of its publishers: rank 0's ports, from which others follow."""
        host, port = _host_and_port(first.endpoint)
        described = {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": port - first.rank.dp_rank,
            "topic": first.topic,
            "block_size": first.block_size,
            "dp_size": len(self.ranks),
        }
        if first.replay_endpoint is not None:
            replay_port = _host_and_port(first.replay_endpoint)[1]
            described["replay_endpoint_port_base"] = replay_port - first.rank.dp_rank
        return {**described, **self.options.announce}


def _extra_keys(prompt: Completion, block_size: int) -> list[tuple[Any, ...] | None] | None:
    """The extra keys of blocks with images: as in vLLM, (digest, offset) pairs."""
    if not prompt.images:
        return None
    keys: list[tuple[Any, ...] | None] = [None] * (max(prompt.images) // block_size + 1)
    for position, digest in sorted(prompt.images.items()):
        block, offset = divmod(position, block_size)
        keys[block] = (*(keys[block] or ()), (digest, offset))
    return keys


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
