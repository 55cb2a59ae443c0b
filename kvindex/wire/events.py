"""Typed events, as engines mean them, whatever dialect they came in, and what events leave out.

Field names are vLLM's own (vllm/distributed/kv_events.py); fields that only SGLang or
TensorRT-LLM send are marked. A decoded event is normalised: see `kvindex.wire.decode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any, Literal, TypeAlias

import msgspec

from kvindex.wire.errors import ConfigurationError

_WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
_NO_PREFIX_KINDS = frozenset({"encoder_only_attention", "cross_attention"})
_CHUNKED = "chunked_local_attention"
_MAMBA = "mamba"

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


# What events leave out ------------------------------------------------------------------------


class GroupSpec(msgspec.Struct, frozen=True):
    """The kind of attention that a KV cache group serves.

    Attributes:
        kind: vLLM's `kv_cache_spec_kind`; unknown kinds are treated like
            "full_attention", which never overestimates.
        sliding_window: the window in tokens, for the sliding-window kinds.
        attention_chunk_size: tokens in a chunk, for "chunked_local_attention". No engine reports
            it; without it the group counts as full attention, which never overestimates.

    Raises:
        ConfigurationError: a sliding-window kind without a positive window, a window or chunk size
            beyond 64 bits, or a chunk size below one token.
    """

    kind: str = "full_attention"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.has_window and (self.sliding_window or 0) < 1:
            raise ConfigurationError(
                f"a {self.kind} group needs sliding_window >= 1 token, not {self.sliding_window}"
            )
        if self.attention_chunk_size is not None and self.attention_chunk_size < 1:
            raise ConfigurationError(
                f"attention_chunk_size is at least 1 token, not {self.attention_chunk_size}"
            )
        for tokens in (self.sliding_window, self.attention_chunk_size):
            if tokens is not None and not (type(tokens) is int and -(2**63) <= tokens < 2**63):
                raise ConfigurationError(f"{tokens} tokens of a window or chunk exceed 64 bits")

    @property
    def takes_part(self) -> bool:
        """Whether prefix caching concerns the group at all."""
        return self.kind not in _NO_PREFIX_KINDS

    @property
    def has_window(self) -> bool:
        """Whether a hit needs only the blocks of a window before the cut."""
        return self.kind in _WINDOW_KINDS

    @property
    def is_mamba(self) -> bool:
        """Whether a hit needs only the state at the cut."""
        return self.kind == _MAMBA

    @property
    def is_chunked(self) -> bool:
        """Whether a hit needs only the blocks of the chunk that the cut is in."""
        return self.kind == _CHUNKED and self.attention_chunk_size is not None

    @property
    def needs_all(self) -> bool:
        """Whether a hit needs every block before the cut."""
        return not (self.has_window or self.is_mamba or self.is_chunked)

    def window_blocks(self, block_size: int) -> int:
        """Return how many blocks before its end a hit needs of a group with a sliding window."""
        assert self.sliding_window is not None
        # The window of the next token has that token itself, too: one less of what is before.
        return -(-(self.sliding_window - 1) // block_size)

    def needed_from(self, cut: int, block_size: int) -> int:
        """Return the token from which on a hit of `cut` tokens needs the group's blocks."""
        if self.has_window:
            return max(0, cut - self.window_blocks(block_size) * block_size)
        if self.is_mamba:
            return max(0, cut - block_size)
        if self.is_chunked:
            assert self.attention_chunk_size is not None
            return cut // self.attention_chunk_size * self.attention_chunk_size
        return 0


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a rank's cache that its events leave out; the engine's operator sets them.

    Attributes:
        groups: kinds of the KV cache groups of a hybrid model, by group_idx. vLLM reports them from
            0.22 on, except for chunk sizes.
        removals: what one BlockRemoved takes of a block that has several copies: "each" removal
            takes one, as every release of every engine sends them; or there is one for the "last"
            copy only (vLLM's proposal #55092), which ends the block.
        report_mode: vLLM's `kv_cache_report_mode`. "full" means that requests announce blocks
            again that they found cached; such announcements are then not counted as further
            copies. Some look like copies, so that answers are upper bounds. Under
            "incremental", the engine's own default, every store is a copy.
        eagle: whether vLLM speculates with EAGLE or MTP, and so drops the last block of each hit;
            or the group_idx of the groups that drop, where it is not all of them (the draft
            model's). Lookahead hashing (vLLM 0.33) and SGLang drop none.
        hash_block_size: tokens per hash where that is less than every group's block size (vLLM's
            `prefix_match_unit`); otherwise it is learned.
        offload_chunk: tokens that the engine offloads and loads together, where that is more than
            a block: vLLM's `block_size` of the OffloadingConnector (or `blocks_per_chunk` times the
            block size). Off the device then only whole chunks count, where they add at least one
            to the device's tokens, and an event without tokens and size names the chunk that ends
            with its block. It must be a multiple of the block
            size, or has no effect. Events with their chunks' tokens (LMCache's) need no setting.
        upper_bound: whether the engine's events report only part of what limits a hit, so that
            answers are upper bounds: SGLang's hybrid caches (sliding window, Mamba), and SGLang
            when requests carry an `extra_key`.
        resets_connector: whether vLLM's prefix cache is reset together with its connector: with
            `reset_connector=True` (`reset_external=true` over HTTP), by `sleep`, or by a pause that
            clears caches. Then AllBlocksCleared takes away what the connector holds in the host's
            memory, too. vLLM's own default keeps it.

    Raises:
        ConfigurationError: a value is none of these.
    """

    groups: dict[int, GroupSpec] = {}
    removals: Literal["each", "last"] = "each"
    report_mode: Literal["incremental", "full"] = "incremental"
    eagle: bool | tuple[int, ...] = False
    hash_block_size: int | None = None
    offload_chunk: int | None = None
    upper_bound: bool = False
    resets_connector: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping):
            raise ConfigurationError(
                f"groups must map group_idx to GroupSpec, not {type(self.groups).__name__}"
            )
        for group_idx, spec in self.groups.items():
            if group_idx < 0 or not isinstance(spec, GroupSpec):
                raise ConfigurationError(
                    f"groups must map group_idx >= 0 to GroupSpec, not {group_idx!r} to {spec!r}"
                )
        if self.removals not in ("each", "last"):
            raise ConfigurationError(f'removals is "each" or "last", not {self.removals!r}')
        if self.report_mode not in ("incremental", "full"):
            raise ConfigurationError(
                f'report_mode is "incremental" or "full", not {self.report_mode!r}'
            )
        if not isinstance(self.eagle, bool) and not all(
            isinstance(group_idx, int) and group_idx >= 0 for group_idx in self.eagle
        ):
            raise ConfigurationError(f"eagle is a bool, or group_idx >= 0, not {self.eagle!r}")
        for name in ("hash_block_size", "offload_chunk"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ConfigurationError(f"{name} is at least 1 token, not {tokens}")

    def copies_left(self, event: BlockRemoved) -> Iterable[int | None]:
        """Return for each removed block how many copies are left; None: one less than before."""
        return event.remaining_copy_counts or repeat(
            0 if self.removals == "last" else None, len(event.block_hashes)
        )
