"""Stored blocks whose place is not known yet.

Two kinds wait here, both bounded and never matched:

* an *orphan* has content and a parent that is not stored (yet): it is placed when the parent is;
* an *unplaced* block is only a label at a place ("hash h is on the CPU too"), from events that
  carry no tokens: it joins the block when that is stored with its tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from kvindex.index.keys import Namespace
from kvindex.index.reference.blocks import Place
from kvindex.wire import BlockHash

_MAX_CONTENT_BYTES = 64 * 2**20  # a publisher chooses its block size: the count alone is no bound


class Orphan:
    """A held block: its copies by place and, unless it is unplaced, its parent and content."""

    __slots__ = ("content", "copies", "namespace", "parent_hash")

    def __init__(self) -> None:
        self.parent_hash: BlockHash | None = None
        self.namespace: Namespace | None = None
        self.content = b""
        self.copies: dict[Place, int] = {}


class Orphans:
    """A rank's held blocks, oldest first, at most `limit` of them.

    Attributes:
        dropped: how many were dropped for newer ones.
        forgot: whether dropped blocks may still be resident.
    """

    def __init__(self, limit: int, *, max_bytes: int = _MAX_CONTENT_BYTES) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: dict[BlockHash, Orphan] = {}
        self._waiting: dict[BlockHash, dict[BlockHash, None]] = {}  # children by their parent
        self.dropped = 0
        self.forgot = False

    def __len__(self) -> int:
        return len(self._held)

    def hold_label(self, block_hash: BlockHash, place: Place) -> None:
        """Hold one copy of a block whose label alone is known."""
        self._add(block_hash, place)
        self._make_room()

    def hold(
        self,
        block_hash: BlockHash,
        parent_hash: BlockHash,
        namespace: Namespace,
        content: bytes,
        place: Place,
    ) -> None:
        """Hold one copy of a block that can be placed once its parent is."""
        orphan = self._add(block_hash, place)
        self._stop_waiting(block_hash, orphan)
        self._bytes += len(content) - len(orphan.content)
        orphan.parent_hash, orphan.namespace, orphan.content = parent_hash, namespace, content
        self._waiting.setdefault(parent_hash, {})[block_hash] = None
        self._make_room()

    def pop(self, block_hash: BlockHash) -> Orphan | None:
        """Remove a held block, and return it."""
        orphan = self._held.pop(block_hash, None)
        if orphan is not None:
            self._bytes -= len(orphan.content)
            self._stop_waiting(block_hash, orphan)
        return orphan

    def pop_children(self, parent_hash: BlockHash) -> list[tuple[BlockHash, Orphan]]:
        """Remove the held children of a block, and return them, the oldest first."""
        hashes = list(self._waiting.get(parent_hash, ()))
        return [(h, orphan) for h in hashes if (orphan := self.pop(h)) is not None]

    def drop_copy(self, block_hash: BlockHash, place: Place, left: int | None = None) -> bool:
        """As `Blocks.drop`, of a held block; False if the place has no copy."""
        orphan = self._held.get(block_hash)
        if orphan is None or place not in orphan.copies:
            return False
        orphan.copies[place] = orphan.copies[place] - 1 if left is None else left
        if not orphan.copies[place]:
            del orphan.copies[place]
        if not orphan.copies:
            self.pop(block_hash)
        return True

    def drop_places(self, places: Collection[Place]) -> None:
        """Drop all copies at these places."""
        for block_hash, orphan in list(self._held.items()):
            orphan.copies = {p: count for p, count in orphan.copies.items() if p not in places}
            if not orphan.copies:
                self.pop(block_hash)

    def clear(self) -> None:
        """Drop everything held; nothing of it counts as dropped for room."""
        self._held.clear()
        self._waiting.clear()
        self._bytes = 0
        self.forgot = False

    def _add(self, block_hash: BlockHash, place: Place) -> Orphan:
        orphan = self._held.setdefault(block_hash, Orphan())
        orphan.copies[place] = orphan.copies.get(place, 0) + 1
        return orphan

    def _make_room(self) -> None:
        while len(self._held) > self._limit or self._bytes > self._max_bytes:
            self.pop(next(iter(self._held)))
            self.dropped += 1
            self.forgot = True

    def _stop_waiting(self, block_hash: BlockHash, orphan: Orphan) -> None:
        if orphan.parent_hash is not None:
            siblings = self._waiting[orphan.parent_hash]
            del siblings[block_hash]
            if not siblings:
                del self._waiting[orphan.parent_hash]
