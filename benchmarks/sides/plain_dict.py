"""The index that router teams write first: dicts of sets, nothing else.

Two dicts: from the key of a block (a hash of its tokens and of the key before it) to the set of
ranks that hold it, and per rank from the engine's hash to that key, which finds parents and
removals. Duplicates, orphans, media, LoRA and gaps are not thought of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.workload import BLOCK_SIZE, MsgpackEncoder


class BlockStored(msgspec.Struct, tag=True):
    """The fields that matter, as vLLM sends them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that are gone."""

    block_hashes: list[int]


class Batch(msgspec.Struct, array_like=True):
    """One message of an engine."""

    ts: float
    events: list[BlockStored | BlockRemoved]


class PlainDict:
    """A dict from block key to the ranks that hold the block."""

    answers = True
    batches = True

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(Batch).decode
        self.reset()

    def encoder(self) -> MsgpackEncoder:
        """Return what writes engines' payloads."""
        return MsgpackEncoder()

    def reset(self) -> None:
        """Begin again with an empty index."""
        self._holders: dict[int, set[int]] = {}
        self._keys: dict[int, dict[int, int]] = {}

    def rank(self, number: int) -> int:
        """Return the number itself."""
        return number

    def applier(self) -> Callable[[Any, bytes], object]:
        """Return `apply`."""
        return self.apply

    def matcher(self) -> Callable[[Any], dict[int, int]]:
        """Return `match`."""
        return self.match

    def drain(self) -> None:
        """Nothing is ever queued."""

    def best(self, answer: dict[int, int]) -> int:
        """Return the blocks of the best rank."""
        return max(answer.values(), default=0)

    def depths(self, answer: dict[int, int]) -> dict[int, int]:
        """Return the answer as it is."""
        return answer

    def apply(self, rank: int, payload: bytes) -> None:
        """Apply one batch of a rank."""
        keys = self._keys.get(rank)
        if keys is None:
            keys = self._keys[rank] = {}
        for event in self._decode(payload).events:
            if isinstance(event, BlockStored):
                self._store(rank, keys, event)
            else:
                self._remove(rank, keys, event)

    def match(self, tokens: list[int]) -> dict[int, int]:
        """Return the leading blocks of the prompt that each rank holds."""
        depths: dict[int, int] = {}
        key, alive = 0, None
        for depth, start in enumerate(range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)):
            key = hash((key, *tokens[start : start + BLOCK_SIZE]))
            holders = self._holders.get(key)
            if not holders:
                break
            if alive is None:
                alive = set(holders)
            elif not alive <= holders:
                depths.update(dict.fromkeys(alive - holders, depth))
                alive &= holders
                if not alive:
                    break
        else:
            depth = len(tokens) // BLOCK_SIZE
        depths.update(dict.fromkeys(alive or (), depth))
        return depths

    def _store(self, rank: int, keys: dict[int, int], event: BlockStored) -> None:
        parent = event.parent_block_hash
        key = 0 if parent is None else keys.get(parent)
        if key is None:
            return
        tokens, size = event.token_ids, event.block_size
        start = 0
        for block_hash in event.block_hashes:
            key = hash((key, *tokens[start : start + size]))
            start += size
            keys[block_hash] = key
            holders = self._holders.get(key)
            if holders is None:
                self._holders[key] = {rank}
            else:
                holders.add(rank)

    def _remove(self, rank: int, keys: dict[int, int], event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            key = keys.pop(block_hash, None)
            if key is None:
                continue
            holders = self._holders[key]
            holders.discard(rank)
            if not holders:
                del self._holders[key]
