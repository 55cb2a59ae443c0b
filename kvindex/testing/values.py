"""The options of the fake engine's cache, and its answers: a request's cost, resident blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import msgspec

from kvindex.wire import BlockHash
from kvindex.wire.errors import ConfigurationError

CacheKey = tuple[BlockHash, str, int | None]
"""The identity of a block in events: (block_hash, medium, group_idx)."""


class PromptKeys(TypedDict, total=False):
    """The keys under which the blocks of a prompt are cached, besides its tokens.

    Attributes:
        lora: LoRA adapter name.
        salt: cache salt.
        extra_keys: for each leading block what else it covers (images, …), or None.
    """

    lora: str | None
    salt: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None


class Group(msgspec.Struct, frozen=True):
    """One KV cache group of a hybrid model.

    Attributes:
        kind: kind of attention, in vLLM's words.
        sliding_window: its window in tokens; None for full attention.
    """

    kind: str = "full_attention"
    sliding_window: int | None = None

    @classmethod
    def window(cls, tokens: int) -> Group:
        """Return a sliding-window group of this many tokens."""
        return cls("sliding_window", tokens)

    def reach(self, block_size: int) -> int | None:
        """Return how many blocks before a cut a hit needs; None for all of them."""
        if self.sliding_window is None:
            return None
        return -(-(self.sliding_window - 1) // block_size)


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The rarer properties of a `PagedCache`.

    Attributes:
        groups: KV cache groups; the first has full attention, others may have windows.
        lookahead: how many tokens after a block its hash covers (vLLM 0.33; 1 for EAGLE bigrams).
        offload: when blocks go to the CPU tier: as they are stored on the GPU, or only when
            their last GPU copy is evicted.
        placeholders: CPU stores carry the hash only (`token_ids=[]`), as vLLM's connectors do by
            default; otherwise the whole payload.
        engine: whose habits to follow. "vllm": group_idx and kinds on events, salt in extra_keys,
            several physical copies of a block, medium "CPU". "sglang": none of the former, salt in
            `cache_salt`, one copy, medium "CPU_PINNED", removals of one step in one event.
        single_hashes: each event names one block (SGLang before 0.5.18).
    """

    groups: tuple[Group, ...] = (Group(),)
    lookahead: int = 0
    offload: Literal["store", "evict"] = "store"
    placeholders: bool = True
    engine: Literal["vllm", "sglang"] = "vllm"
    single_hashes: bool = False

    def __post_init__(self) -> None:
        if not self.groups or self.groups[0].sliding_window is not None:
            raise ConfigurationError("the first of `groups` must have full attention")
        if any(g.sliding_window is not None and g.sliding_window < 1 for g in self.groups):
            raise ConfigurationError("sliding_window is at least 1 token")
        if self.lookahead < 0:
            raise ConfigurationError(f"lookahead is {self.lookahead}, below 0")
        if self.engine == "sglang" and len(self.groups) > 1:
            raise ConfigurationError("SGLang's events have no groups: use one")


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one request.

    Attributes:
        prompt_tokens: length of the prompt.
        hit_tokens: how many of them were cached.
        loaded_tokens: how many of those came from the CPU tier.
        new_tokens: how many tokens were generated.
    """

    prompt_tokens: int
    hit_tokens: int
    loaded_tokens: int = 0
    new_tokens: int = 0


class Lookup(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is resident.

    Attributes:
        blocks: leading blocks resident on any medium, by the engine's own rule for its groups.
        tokens: the same in tokens.
        by_medium: of those blocks, how many of the first group are on each medium.
    """

    blocks: int
    tokens: int
    by_medium: dict[str, int]


class ResidentPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """One block that the cache holds, with its whole prefix.

    Attributes:
        block_hash: as on the wire.
        medium: where it lives.
        group_idx: as on the wire.
        copies: physical copies there.
        prefix: all tokens from the start of the prompt through this block.
        lookahead: the tokens after it that the hash covers.
        lora: LoRA adapter name.
        salt: cache salt.
        extra_keys: what else the blocks of the prompt cover.
    """

    block_hash: BlockHash
    medium: str
    group_idx: int | None
    copies: int
    prefix: list[int]
    lookahead: list[int]
    lora: str | None
    salt: str | None
    extra_keys: list[tuple[Any, ...] | None]
