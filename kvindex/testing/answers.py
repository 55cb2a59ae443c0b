"""The fake engine's answers: a request's cost, and the resident blocks."""

from __future__ import annotations

from typing import Any

import msgspec

from kvindex.wire import BlockHash

__all__ = ["CacheKey", "Lookup", "ResidentPrefix", "Served"]

CacheKey = tuple[BlockHash, str, int | None]
"""What events tell apart: (block_hash, medium, group_idx)."""


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
