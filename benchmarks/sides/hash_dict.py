"""The least that an index can be: a dict from the engine's hash to the ranks that hold the block.

It serves routers that compute the engine's own hashes. It never reads the tokens, so it can only
be compared where events are applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.sides.plain_dict import Batch, BlockStored
from benchmarks.workload import MsgpackEncoder


class HashDict:
    """A dict from engine hash to the ranks that hold the block."""

    answers = False
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

    def rank(self, number: int) -> int:
        """Return the number itself."""
        return number

    def applier(self) -> Callable[[Any, bytes], object]:
        """Return `apply`."""
        return self.apply

    def apply(self, rank: int, payload: bytes) -> None:
        """Apply one batch of a rank."""
        all_holders = self._holders
        for event in self._decode(payload).events:
            stored = isinstance(event, BlockStored)
            for block_hash in event.block_hashes:
                holders = all_holders.get(block_hash)
                if not stored:
                    if holders is not None:
                        holders.discard(rank)
                        if not holders:
                            del all_holders[block_hash]
                elif holders is None:
                    all_holders[block_hash] = {rank}
                else:
                    holders.add(rank)

    def matcher(self) -> Callable[[Any], Any]:
        """It cannot be asked with tokens."""
        raise NotImplementedError("a dict by engine hash cannot be asked with tokens")

    def drain(self) -> None:
        """Nothing is ever queued."""

    def best(self, answer: Any) -> int:
        """It has no answers."""
        raise NotImplementedError("a dict by engine hash has no answers")

    def depths(self, answer: Any) -> dict[int, int]:
        """It has no answers."""
        raise NotImplementedError("a dict by engine hash has no answers")
