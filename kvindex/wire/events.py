"""Typed events, as engines mean them, whatever dialect they came in.

Field names are vLLM's own (vllm/distributed/kv_events.py); fields that only SGLang or
TensorRT-LLM send are marked. A decoded event is normalised: see `kvindex.wire.decode`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes
"""An engine's label for a block: a 64-bit int (signed or unsigned) or raw digest bytes."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that became resident: a chain of `len(block_hashes)` blocks after a parent.

    Attributes:
        block_hashes: the engine's label of each block, in prompt order.
        parent_block_hash: label of the block before the first one; None at the start of a prompt.
        token_ids: the tokens of all the blocks, `len(block_hashes) * block_size` of them;
            empty when the event only reports a new place of known blocks.
        block_size: tokens per block.
        lora_id: numeric LoRA id (engines before lora_name).
        medium: where the blocks live: "GPU", "CPU", "DISK", …; None means the engine's GPU.
        lora_name: LoRA adapter name.
        extra_keys: for each block, what its identity covers besides tokens (multimodal digests,
            cache salt, …), or None.
        group_idx: KV cache group of a hybrid model.
        kv_cache_spec_kind: that group's attention, e.g. "full_attention", "sliding_window".
        kv_cache_spec_sliding_window: its window in tokens.
        locality: "LOCAL" or "REMOTE" (vLLM 0.26).
        ownership: id of a secondary offload tier (vLLM 0.29).
        session_id: the request context that caused the event.
        lookahead_token_ids: for each block, the tokens after it that its identity covers too
            (vLLM 0.33 lookahead hashing; SGLang's EAGLE bigrams are decoded into this form).
        cache_salt: salt of the whole prefix (SGLang; vLLM puts it into extra_keys).
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that each lost one physical copy (or the last one: `CacheSettings.removals`).

    Attributes:
        block_hashes: the engine's labels, in any order.
        medium: where they lived; None means the engine's GPU.
        group_idx: KV cache group of a hybrid model.
        locality: "LOCAL" or "REMOTE" (vLLM 0.26).
        ownership: id of a secondary offload tier (vLLM 0.29).
        remaining_copy_counts: for each block, how many copies are left there (vLLM's proposal
            #48933); None where the engine does not tell.
    """

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    remaining_copy_counts: list[int] | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Everything that the rank held is gone."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""One change of a cache."""


class EventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of one engine step to its cache, in causal order.

    Attributes:
        ts: the engine's wall clock when the batch was made, in seconds since 1970.
        events: the events, in causal order.
        data_parallel_rank: the publisher's DP rank, if it is sent (SGLang: `attn_dp_rank`).
        skipped: tags of events that decoding left out because they are unknown.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    skipped: tuple[str, ...] = ()

    @property
    def dp_rank(self) -> int | None:
        """The publisher's DP rank, if it is sent."""
        return self.data_parallel_rank

    @property
    def attn_dp_rank(self) -> int | None:
        """SGLang's name for `data_parallel_rank`."""
        return self.data_parallel_rank
