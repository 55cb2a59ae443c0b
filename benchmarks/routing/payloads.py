"""What a simulated engine publishes: batches in the engines' own msgpack."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from benchmarks.routing.engine import Progress, Stored
from benchmarks.routing.traffic import BLOCK

_ENCODER: Final = msgspec.msgpack.Encoder()


def payload(progress: Progress, now: float) -> bytes | None:
    """Return the batch of a step's changes of the cache; None if it changed nothing."""
    events: list[dict[str, Any]] = [_stored(one) for one in progress.stored]
    if progress.removed:
        events.insert(0, {"type": "BlockRemoved", "block_hashes": progress.removed})
    return _ENCODER.encode([now, events]) if events else None


def _stored(stored: Stored) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": stored.names,
        "parent_block_hash": stored.parent,
        "token_ids": _tokens(stored.names),
        "block_size": BLOCK,
    }


def _tokens(names: list[int]) -> msgspec.Raw:
    """Write an array of 32-bit numbers by hand: a list of 512 ints for each block takes long."""
    blocks = [(b"\xce" + name.to_bytes(4, "big")) * BLOCK for name in names]
    head = b"\xdd" + (BLOCK * len(names)).to_bytes(4, "big")
    return msgspec.Raw(head + b"".join(blocks))
