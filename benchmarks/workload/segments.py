"""Stretches of text: what a prompt is made of, and the blocks they become in it.

Everything follows from ids by a mixing function, so that ten million blocks need no storage:
equal ids are equal text, and a block's hash names the whole prefix, as the engines' hashes do.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

BLOCK_SIZE: Final = 16
VOCABULARY: Final = 128_256
"""Token ids are uniform below this; text of real tokenisers has more of the small ids."""

_U64: TypeAlias = npt.NDArray[np.uint64]
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


class Segment(NamedTuple):
    """A stretch of text: a system prompt, a document, a turn or an answer."""

    id: int
    blocks: int


class Node:
    """A segment at its place in a prompt: after its parent, whatever follows.

    Attributes:
        segment: the text.
        parent: the node before it, None at the start of a prompt.
        depth: blocks before it.
        holders: the ranks on which it is resident.
    """

    __slots__ = ("_chain", "depth", "holders", "parent", "segment")

    def __init__(self, segment: Segment, parent: Node | None) -> None:
        self.segment = segment
        self.parent = parent
        self.depth: int = parent.depth + parent.segment.blocks if parent else 0
        self.holders: set[int] = set()
        self._chain: int = chain_hash(parent._chain if parent else 0, segment.id)

    def hashes(self) -> list[int]:
        """Return the engine's hash of each block: unsigned 64-bit ints."""
        hashes: list[int] = _mixed(self._chain, self.segment.blocks).tolist()
        return hashes

    def parent_hash(self) -> int | None:
        """Return the hash of the block before this node, None at the start of a prompt."""
        if self.parent is None:
            return None
        last = self.parent.segment.blocks
        return int(_mixed(self.parent._chain, 1, start=last - 1)[0])

    def tokens(self) -> npt.NDArray[np.uint32]:
        """Return the tokens of its blocks."""
        return segment_tokens(self.segment)


def segment_tokens(segment: Segment) -> npt.NDArray[np.uint32]:
    """Return the text of a segment as token ids."""
    mixed = _mixed(chain_hash(1, segment.id), segment.blocks * BLOCK_SIZE)
    tokens: npt.NDArray[np.uint32] = (mixed % np.uint64(VOCABULARY)).astype(np.uint32)
    return tokens


def chain_hash(before: int, segment_id: int) -> int:
    """Return a 64-bit number that names a segment and all before it."""
    mixed = (before * 0xD6E8FEB86659FD93 + segment_id * _GOLDEN + 0x632BE59BD9B4E019) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    return mixed ^ (mixed >> 32)


def _mixed(seed: int, count: int, *, start: int = 0) -> _U64:
    """The numbers `start` … of the sequence that splitmix64 makes of a seed."""
    steps = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
    z: _U64 = steps * np.uint64(_GOLDEN) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _U64 = z ^ (z >> np.uint64(31))
    return mixed
