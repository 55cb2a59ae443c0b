"""Where one rank's blocks lie: in the tree by their labels, or held until their place is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvindex.index.guard import HOLD_BLOCKS, Hold
from kvindex.index.keys import Namespace
from kvindex.index.labels import Budget, Labels, cuts
from kvindex.index.orphans import Orphan, Orphans
from kvindex.index.rank_image import MAX_TORN
from kvindex.index.tree import Block, Owner, RadixTree
from kvindex.wire import BlockHash
from kvindex.wire.quirks import fold_hash

__all__ = ["Chain", "Placing"]

_COUNTERS = (
    *("stored", "stored_text", "reannounced", "orphaned", "orphans_attached", "unplaced"),
    *("removed", "removed_unknown", "removed_orphans", "removed_ambiguous", "cleared"),
    *("proofs", "proofs_missed"),
)


class Chain(NamedTuple):
    """Consecutive blocks that an event stores at one place, each of `scale` units of the tree."""

    namespace: Namespace
    hashes: Sequence[BlockHash]
    contents: Sequence[bytes]  # of each unit
    scale: int
    owner: Owner
    salted: bool = False  # of a chain that starts its prompts

    def cut(self, start: int, stop: int) -> Chain:
        """Return blocks `start` … `stop - 1` of the chain, as far as there are so many."""
        contents = self.contents[start * self.scale : stop * self.scale]
        return self._replace(hashes=self.hashes[start:stop], contents=contents)

    def after(self, start: int) -> Chain:
        """Return the chain without its first `start` blocks."""
        contents = self.contents[start * self.scale :]
        return self._replace(hashes=self.hashes[start:], contents=contents)


class Placing:
    """Puts one rank's blocks into the shared tree and takes them away.

    Owned by the rank's `RankBlocks`.

    Attributes:
        labels: the resident blocks by the engine's hashes.
        orphans: the held blocks, whose place is not known.
        torn: labels of several blocks of which one was removed: which one is unknown.
        counters: how many blocks were stored, removed, held, ….
        ignored: blocks left out, by reason.
    """

    def __init__(self, tree: RadixTree, budget: Budget, max_orphans: int) -> None:
        self.labels = Labels(budget)
        self.orphans = Orphans(max_orphans)
        self.torn: set[BlockHash] = set()
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.ignored: Counter[str] = Counter()
        self._tree = tree

    def clear(self, hold: Hold) -> None:
        """Hold nothing."""
        self.labels.clear(self._tree, hold)
        self.orphans.clear()
        self.torn.clear()

    def place(
        self, parent: Block | None, chain: Chain, hold: Hold, unnamed: Sequence[bytes] = ()
    ) -> Block | None:
        """Put a chain of blocks into the tree, cut by cut, then all held blocks that waited for it.

        The last block of a cut stays while others go first: this rank holds it. Return the last
        of all, or None if there was no room for all. `unnamed` units come before the chain.
        """
        most = max(1, HOLD_BLOCKS // chain.scale)
        for start in range(0, len(chain.hashes), most):
            cut = chain.cut(start, start + most)
            placed = self._place_some(parent, cut, hold, () if start else unnamed)
            if len(placed) < len(cut.hashes):
                self.ignored[self.no_room()] += len(chain.hashes) - start - len(placed)
                return None
            parent = placed[-1]
            hold.did(len(placed) * chain.scale)
        return parent

    def _place_some(
        self, parent: Block | None, chain: Chain, hold: Hold, unnamed: Sequence[bytes]
    ) -> list[Block]:
        """Place as many blocks as there is room for, and return them."""
        contents = [*unnamed, *chain.contents] if unnamed else chain.contents
        units = self._tree.extend(parent, chain.namespace, contents, salted=chain.salted)
        blocks = units[len(unnamed) + chain.scale - 1 :: chain.scale]
        count = 0
        for block_hash, block in zip(chain.hashes, blocks, strict=True):
            if not self.labels.add(block_hash, block, chain.owner):
                break
            count += 1
        self._tree.own(blocks[:count], chain.owner)
        if count < len(blocks):
            self._tree.prune(blocks[-1])
        self.counters["stored"] += count
        if len(self.orphans):
            self.attach(list(zip(chain.hashes, blocks[:count], strict=False)), hold)
        return blocks[:count]

    def attach(self, placed: list[tuple[BlockHash, Block]], hold: Hold) -> None:
        """Place held blocks whose place has become known, and so on down the chain."""
        while placed:
            block_hash, block = placed.pop()
            held = self.orphans.pop(block_hash)
            if held is not None:
                self.add_copies(block_hash, block, held.copies)
            for child_hash, orphan in self.orphans.pop_children(block_hash):
                child = self._attach_one(child_hash, orphan, block)
                if child is not None:
                    placed.append((child_hash, child))
            hold.did(1)

    def _attach_one(self, block_hash: BlockHash, orphan: Orphan, parent: Block) -> Block | None:
        if orphan.namespace != parent.run.namespace:
            self.ignored["parent_namespace"] += 1
            return None
        (block,) = self._tree.extend(parent, orphan.namespace, [orphan.content])
        if not self.add_copies(block_hash, block, orphan.copies):
            self._tree.prune(block)
            return None
        self.counters["orphans_attached"] += 1
        return block

    def add_copies(self, block_hash: BlockHash, block: Block, copies: dict[Owner, int]) -> bool:
        """Make a block resident in these owners as far as there is room; return if it is in any."""
        added = 0
        for owner, count in copies.items():
            if self.labels.add(block_hash, block, owner, count):
                self._tree.own([block], owner)
                added += 1
            else:
                self.ignored[self.no_room()] += 1
        return added > 0

    def no_room(self) -> str:
        """Return why there was no room for a block, by its counter's name."""
        return "max_blocks_per_rank" if self.labels.full() else "max_blocks"

    def relocate(self, hashes: Sequence[BlockHash], owner: Owner, hold: Hold) -> None:
        """Note a further place of blocks that the event names without their tokens."""
        for block_hash in hashes:
            label = self.labels.get(block_hash)
            if label is None:
                self.orphans.hold_label(block_hash, owner)
                self.counters["unplaced"] += 1
            elif self.add_copies(block_hash, label.block, {owner: 1}):
                self.counters["stored"] += 1
            hold.did(1)

    def is_torn(self, block_hash: BlockHash) -> bool:
        """Whether a label may stand for a block that is gone."""
        return block_hash in self.torn or len(self.torn) >= MAX_TORN

    def remove(self, block_hashes: Sequence[BlockHash], owner: Owner, hold: Hold) -> None:
        """Take one copy of each block away from an owner."""
        for hashes in cuts(block_hashes):
            gone: list[Block] = []
            for block_hash in map(fold_hash, hashes):
                gone = self._remove_one(block_hash, owner, gone, hold)
            self._tree.disown(gone, owner)
            hold.did(len(hashes))

    def _remove_one(
        self, block_hash: BlockHash, owner: Owner, gone: list[Block], hold: Hold
    ) -> list[Block]:
        """Take one copy away; return the blocks that the tree has still to disown."""
        labels = self.labels.held_in(block_hash, owner)
        if not labels:
            held = self.orphans.drop_copy(block_hash, owner)
            self.counters["removed_orphans" if held else "removed_unknown"] += 1
            return gone
        self.counters["removed"] += 1
        # The event does not say which of several blocks of one hash is gone: none may count.
        if len(labels) > 1:
            self.counters["removed_ambiguous"] += len(labels) - 1
            if len(self.torn) < MAX_TORN:
                self.torn.add(block_hash)
        for label in labels:
            if self.labels.drop(block_hash, label, owner):
                gone.append(label.block)
            if len(gone) >= HOLD_BLOCKS:
                self._tree.disown(gone, owner)
                hold.did(len(gone))
                gone = []
        return gone
