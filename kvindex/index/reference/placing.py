"""Where one rank's blocks lie: in its prompts by their keys, or held until that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvindex.index.keys import Namespace
from kvindex.index.reference.blocks import Block, Blocks, Place
from kvindex.index.reference.orphans import Orphan, Orphans
from kvindex.wire import BlockHash
from kvindex.wire.quirks import fold_hash

_COUNTERS = (
    *("stored", "stored_text", "reannounced", "orphaned", "orphans_attached", "unplaced"),
    *("removed", "removed_unknown", "removed_orphans", "removed_ambiguous", "cleared"),
    *("proofs", "proofs_missed"),
)
_MAX_TORN: Final = 65_536  # labels remembered as torn; beyond it every parent counts as such


class Chain(NamedTuple):
    """Consecutive blocks that an event stores at one place, each of `scale` units."""

    namespace: Namespace
    hashes: Sequence[BlockHash]
    contents: Sequence[bytes]  # of each unit
    scale: int
    place: Place
    salted: bool = False  # of a chain that starts its prompts

    def after(self, start: int) -> Chain:
        """Return the chain without its first `start` blocks."""
        contents = self.contents[start * self.scale :]
        return self._replace(hashes=self.hashes[start:], contents=contents)


class Placing:
    """Puts one rank's blocks into its prompts and removes them from there.

    Owned by the rank's `RankBlocks`.

    Attributes:
        orphans: the held blocks, whose place is not known.
        counters: how many blocks were stored, removed, held, ….
        ignored: blocks left out, by reason.
    """

    def __init__(self, blocks: Blocks, max_orphans: int) -> None:
        self.blocks = blocks
        self.orphans = Orphans(max_orphans)
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.ignored: Counter[str] = Counter()
        # Labels of several blocks of which one was removed: which one is unknown.
        self._torn: set[BlockHash] = set()
        self.left_out = False

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks.clear()
        self.orphans.clear()
        self._torn.clear()
        self.left_out = False

    def place(
        self, parent: Block | None, chain: Chain, unnamed: Sequence[bytes] = ()
    ) -> Block | None:
        """Put a chain of blocks after a parent, then all held blocks that waited for it.

        Return its last block, or None if there was no room for all. `unnamed` units come before
        the chain.
        """
        contents = [*unnamed, *chain.contents]
        units = self.blocks.extend(parent, chain.namespace, contents, salted=chain.salted)
        blocks = units[len(unnamed) + chain.scale - 1 :: chain.scale]
        placed: list[tuple[BlockHash, Block]] = []
        for block_hash, block in zip(chain.hashes, blocks, strict=True):
            if not self.blocks.add(block_hash, block, chain.place):
                break
            placed.append((block_hash, block))
        self.counters["stored"] += len(placed)
        complete = len(placed) == len(blocks)
        if not complete:
            self.blocks.prune(blocks[-1])
        if len(self.orphans):
            self.attach(placed)
        if not complete:
            self.ignore(self.no_room(), len(blocks) - len(placed))
            return None
        return blocks[-1]

    def attach(self, placed: list[tuple[BlockHash, Block]]) -> None:
        """Place held blocks whose place has become known, and so on down the chain."""
        placed = list(placed)
        while placed:
            block_hash, block = placed.pop()
            held = self.orphans.pop(block_hash)
            if held is not None:
                self.add_copies(block_hash, block, held.copies)
            for child_hash, orphan in self.orphans.pop_children(block_hash):
                child = self._attach_child(child_hash, orphan, block)
                if child is not None:
                    placed.append((child_hash, child))

    def _attach_child(self, block_hash: BlockHash, orphan: Orphan, parent: Block) -> Block | None:
        if orphan.namespace != parent.namespace:
            self.ignore("parent_namespace", 1)
            return None
        (block,) = self.blocks.extend(parent, orphan.namespace, [orphan.content])
        if not self.add_copies(block_hash, block, orphan.copies):
            self.blocks.prune(block)
            return None
        self.counters["orphans_attached"] += 1
        return block

    def add_copies(self, block_hash: BlockHash, block: Block, copies: dict[Place, int]) -> bool:
        """Make a block resident at these places as far as there is room; return if it is at any."""
        added = False
        for place, count in copies.items():
            if self.blocks.add(block_hash, block, place, count):
                added = True
            else:
                self.ignore(self.no_room(), 1)
        return added

    def ignore(self, reason: str, blocks: int) -> None:
        """Count stored blocks that are left out, because of which hits may be longer."""
        if blocks:
            self.ignored[reason] += blocks
            self.left_out = True

    def no_room(self) -> str:
        """Return why there was no room for a block, by its counter's name."""
        return "max_blocks_per_rank" if self.blocks.full() else "max_blocks"

    def relocate(self, hashes: Sequence[BlockHash], place: Place) -> None:
        """Note a further place of blocks that the event names without their tokens."""
        for block_hash in hashes:
            block = self.blocks.get(block_hash)
            if block is None:
                self.orphans.hold_label(block_hash, place)
                self.counters["unplaced"] += 1
            elif self.add_copies(block_hash, block, {place: 1}):
                self.counters["stored"] += 1

    def names_one(self, block_hash: BlockHash) -> bool:
        """Whether a label stands for exactly one block, which is there."""
        torn = block_hash in self._torn or len(self._torn) >= _MAX_TORN
        return not torn and not self.blocks.is_ambiguous(block_hash)

    def remove(
        self,
        block_hashes: Sequence[BlockHash],
        copies_left: Iterable[int | None],
        places: Sequence[Place],
    ) -> None:
        """Drop copies of each block; see `CacheSettings.copies_left`.

        `places` are those of one medium and group: a removal does not show whether its labels are
        those of blocks or of chunks.
        """
        for block_hash, left in zip(map(fold_hash, block_hashes), copies_left, strict=True):
            held = [(p, block) for p in places for block in self.blocks.held_at(block_hash, p)]
            if not held:
                waited = [p for p in places if self.orphans.drop_copy(block_hash, p, left)]
                self.counters["removed_orphans" if waited else "removed_unknown"] += 1
                continue
            self.counters["removed"] += 1
            # Which of several blocks of one hash is gone is unknown, unless all: none may count.
            if len(held) > 1 and left != 0:
                left = None
                self.counters["removed_ambiguous"] += len(held) - 1
                if len({block for _, block in held}) > 1 and len(self._torn) < _MAX_TORN:
                    self._torn.add(block_hash)
            for place, block in held:
                self.blocks.drop(block_hash, block, place, left)
