"""Stored blocks whose place is not known yet.

Two kinds wait here, both bounded and never matched:

* an *orphan* has content and a parent nobody has stored (yet): it is placed when the parent is;
* an *unplaced* block is only a label at a place ("hash h is on the CPU too"), from events that
  carry no tokens: it joins the block when that is stored with its tokens.
"""

from __future__ import annotations

from collections import OrderedDict

from kvindex.index.keys import Namespace
from kvindex.index.tree import Owner
from kvindex.wire import BlockHash

__all__ = ["Orphan", "Orphans"]


class Orphan:
    """A held block: its copies by owner and, unless it is unplaced, its parent and content."""

    __slots__ = ("content", "copies", "namespace", "parent_hash")

    def __init__(self) -> None:
        self.parent_hash: BlockHash | None = None
        self.namespace: Namespace | None = None
        self.content = b""
        self.copies: dict[Owner, int] = {}


class Orphans:
    """A rank's held blocks, oldest first, at most `limit` of them.

    Attributes:
        dropped: how many were given up for newer ones.
    """

    __slots__ = ("_held", "_limit", "_waiting", "dropped")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[BlockHash, Orphan] = OrderedDict()
        self._waiting: dict[BlockHash, dict[BlockHash, None]] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._held

    def get(self, block_hash: BlockHash) -> Orphan | None:
        """Return the held block of this hash, if any."""
        return self._held.get(block_hash)

    def add(self, block_hash: BlockHash, owner: Owner) -> Orphan:
        """Hold one more copy of a block; the oldest held block goes when there is no room."""
        orphan = self._held.get(block_hash)
        if orphan is None:
            orphan = self._held[block_hash] = Orphan()
        orphan.copies[owner] = orphan.copies.get(owner, 0) + 1
        while len(self._held) > self._limit:
            oldest = next(iter(self._held))
            self.pop(oldest)
            self.dropped += 1
        return orphan

    def wait_for(self, parent_hash: BlockHash, block_hash: BlockHash) -> None:
        """Note that a held block can be placed once its parent is."""
        orphan = self._held.get(block_hash)
        if orphan is None:  # it was dropped at once: the limit is smaller than its chain
            return
        if orphan.parent_hash is not None:
            self._forget_wait(orphan.parent_hash, block_hash)
        orphan.parent_hash = parent_hash
        self._waiting.setdefault(parent_hash, {})[block_hash] = None

    def pop(self, block_hash: BlockHash) -> Orphan | None:
        """Hold a block no longer, and return it."""
        orphan = self._held.pop(block_hash, None)
        if orphan is not None and orphan.parent_hash is not None:
            self._forget_wait(orphan.parent_hash, block_hash)
        return orphan

    def pop_children(self, parent_hash: BlockHash) -> list[tuple[BlockHash, Orphan]]:
        """Hold the children of a block no longer, and return them in the order they came."""
        hashes = list(self._waiting.get(parent_hash, ()))
        return [(block_hash, self._pop_known(block_hash)) for block_hash in hashes]

    def _pop_known(self, block_hash: BlockHash) -> Orphan:
        orphan = self.pop(block_hash)
        assert orphan is not None
        return orphan

    def _forget_wait(self, parent_hash: BlockHash, block_hash: BlockHash) -> None:
        siblings = self._waiting[parent_hash]
        del siblings[block_hash]
        if not siblings:
            del self._waiting[parent_hash]

    def clear(self) -> None:
        """Drop everything held; nothing of it counts as dropped for room."""
        self._held.clear()
        self._waiting.clear()
