"""Typed events to the native form, for the native index.

The common way is from the payload, inside C++. This module serves batches that a program made
itself, and payloads that the native decoder leaves to `kvindex.wire.decode_batch`.
"""

from __future__ import annotations

from kvindex.index.keys import Lora, event_lora, lora_tag, pack_extra
from kvindex.index.tokens import pack_tokens
from kvindex.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch
from kvindex.wire._native import PackedBatch
from kvindex.wire.decode import copy_counts, informational_int
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.quirks import fold_hash, fold_medium, is_content_hash

_MAX_UNSIGNED = 2**32 - 1


def pack_batch(batch: EventBatch) -> PackedBatch:
    """Return a batch in native form.

    Raises:
        TokenError: a token is no int of 64 bits.
        ConfigurationError: a group_idx is not 0 … 2**32 - 1, or a block hash has 0 bytes.
        DecodeError: the copies that are left are not one count for each removed block.
    """
    packed = PackedBatch()
    for tag in batch.skipped:
        packed.skipped(pack_text(tag))
    for event in batch.events:
        if isinstance(event, BlockStored):
            _pack_stored(packed, event)
        elif isinstance(event, BlockRemoved):
            packed.removed(
                _hashes(event.block_hashes),
                pack_text(fold_medium(event.medium)),
                group_number(event.group_idx),
                copy_counts(event.remaining_copy_counts, len(event.block_hashes)),
            )
        elif isinstance(event, AllBlocksCleared):
            packed.cleared()
    return packed


def _pack_stored(packed: PackedBatch, event: BlockStored) -> None:
    lora = event_lora(event)
    extras, salted_first = _extras(event, lora)
    kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
    parent = event.parent_block_hash
    packed.stored(
        _hashes(event.block_hashes),
        None if parent is None else _hash(parent),
        pack_tokens(event.token_ids),
        min(max(event.block_size, 0), _MAX_UNSIGNED),
        lora_tag(lora),
        pack_text(fold_medium(event.medium)),
        None if event.group_idx is None else group_number(event.group_idx),
        None if kind is None else pack_text(kind),
        informational_int(window),
        None
        if event.lookahead_token_ids is None
        else [pack_tokens(after) for after in event.lookahead_token_ids],
        extras,
        salted_first,
        bool(event.block_hashes)
        and is_content_hash(event.block_hashes[0], event.token_ids[: event.block_size]),
    )


def _extras(event: BlockStored, lora: Lora) -> tuple[list[bytes] | None, bytes | None]:
    """Return each block's canonical extra keys, and the first one's with the salt."""
    keys = event.extra_keys
    salt = event.cache_salt
    extras = None
    if keys is not None:
        extras = [pack_extra(items, lora=lora) if items else b"" for items in keys]
    return extras, pack_extra(keys[0] if keys else None, lora=lora, salt=salt) if salt else None


def _hash(block_hash: BlockHash) -> BlockHash:
    if block_hash == b"":
        raise ConfigurationError("a block hash of 0 bytes names no block")
    return fold_hash(block_hash)


def _hashes(hashes: list[BlockHash]) -> list[BlockHash]:
    return [_hash(block_hash) for block_hash in hashes]


def group_number(group_idx: int | None) -> int:
    """Return a group's native number.

    Raises:
        ConfigurationError: it is not 0 … 2**32 - 1.
    """
    if group_idx is None:
        return 0
    if not 0 <= group_idx <= _MAX_UNSIGNED:
        raise ConfigurationError(f"group_idx must be 0 … {_MAX_UNSIGNED}, not {group_idx}")
    return group_idx


def pack_text(text: str) -> bytes:
    """Return the bytes of a text, whatever code points it holds."""
    return text.encode("utf-8", "surrogatepass")
