"""A rank's table of labels: which block each engine hash names, and where copies of it are.

The engine's hashes are only labels here. A label leads to its stored block, so that later events
can name parents and removals; the tree holds the block under our own prefix key. A label is known
as long as some owner has a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from kvindex.index.guard import HOLD_BLOCKS, Hold
from kvindex.index.keys import Lora
from kvindex.index.rank_image import LabelImage, PlacementImage
from kvindex.index.tree import Block, Owner, RadixTree
from kvindex.wire import BlockHash
from kvindex.wire.errors import InvariantError, SnapshotError

__all__ = ["Budget", "Label", "Labels", "ResidentBlock", "cuts", "no_room"]

_Some = TypeVar("_Some")


class ResidentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One resident block of a rank, as `TreeView.walk` yields it.

    Attributes:
        block_hash: the engine's label (ints modulo 2**64).
        depth: blocks before it in its prompt.
        medium: where it is.
        group_idx: KV cache group (0 when the engine names none).
        copies: physical copies there.
        block_size: tokens per block.
        lora: LoRA name or id, or None.
    """

    block_hash: BlockHash
    depth: int
    medium: str
    group_idx: int
    copies: int
    block_size: int
    lora: str | int | None


class Budget:
    """How many blocks are resident over all the ranks of an index, and how many may be.

    Attributes:
        limit: over all ranks.
        rank_limit: of one rank.
        used: resident now.
    """

    __slots__ = ("limit", "rank_limit", "used")

    def __init__(self, limit: int | None, rank_limit: int | None) -> None:
        self.limit = limit
        self.rank_limit = rank_limit
        self.used = 0

    def spent(self) -> bool:
        """Whether no further block fits."""
        return self.limit is not None and self.used >= self.limit

    def check_room(self, wanted: int, leaving: int) -> None:
        """Reject so many blocks in the place of others if they do not fit.

        Raises:
            SnapshotError: they do not, and nothing is changed.
        """
        if self.rank_limit is not None and wanted > self.rank_limit:
            raise no_room(wanted, self.rank_limit, "max_blocks_per_rank")
        if self.limit is not None and self.used - leaving + wanted > self.limit:
            raise no_room(wanted, self.limit - self.used + leaving, "max_blocks")


def no_room(wanted: int, room: int, limit: str) -> SnapshotError:
    """Return the error for a section that is larger than a limit allows."""
    return SnapshotError(
        f"the section has {wanted} resident blocks, and {limit} leaves room for {max(room, 0)}:"
        f" give the index a higher {limit}, or synchronize the rank from its engine",
        reason="room",
    )


class Label:
    """An engine hash: the block it names and how many copies each owner has of it.

    Engines that hash only a block's own tokens (SGLang 0.4.8-0.5.5) use one hash for equal pages
    at several places of the tree; `other` then links to the label's next older block, and `newer`
    back.
    """

    __slots__ = ("block", "copies", "newer", "other")

    def __init__(self, block: Block, other: Label | None) -> None:
        self.block = block
        self.copies: dict[Owner, int] = {}
        self.newer: Label | None = None
        self.other = other
        if other is not None:
            other.newer = self

    def in_group(self, group_idx: int) -> bool:
        """Whether the block is resident in a group, on any medium."""
        return any(owner.group_idx == group_idx for owner in self.copies)


class _Several:
    """The blocks of a hash that names several, each found at once.

    Attributes:
        labels: by block.
        held: those that each owner has copies of.
    """

    __slots__ = ("held", "labels")

    def __init__(self) -> None:
        self.labels: dict[Block, Label] = {}
        self.held: dict[Owner, dict[Label, None]] = {}

    def add(self, label: Label) -> None:
        self.labels[label.block] = label
        for owner in label.copies:
            self.note(label, owner)

    def note(self, label: Label, owner: Owner) -> None:
        """Note that an owner now has copies of a block."""
        self.held.setdefault(owner, {})[label] = None


class Labels:
    """The labels of one rank; `len()` is its resident (block, group) pairs.

    Attributes:
        ambiguous: how often a label came to name a further block.
        duplicates: how many further physical copies of resident blocks were counted.
    """

    __slots__ = (
        *("_budget", "_newest", "_prompts", "_several", "_shared", "_size"),
        *("ambiguous", "duplicates"),
    )

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._newest: dict[BlockHash, Label] = {}
        self._several: dict[BlockHash, _Several] = {}
        # Further labels of one owner on a block that it already holds under another label.
        self._shared: Counter[tuple[Block, Owner]] = Counter()
        self._size = 0
        # The same by LoRA, and by whether the prompts start under a salt or other extra keys.
        self._prompts: Counter[tuple[Lora, bool]] = Counter()
        self.ambiguous = 0
        self.duplicates = 0

    def __len__(self) -> int:
        return self._size

    def full(self) -> bool:
        """Whether the rank has as many blocks as one rank may have."""
        limit = self._budget.rank_limit
        return limit is not None and self._size >= limit

    def get(self, block_hash: BlockHash) -> Label | None:
        """Return the newest block of this hash, if any is resident."""
        return self._newest.get(block_hash)

    def named(self, block_hash: BlockHash) -> Iterator[Label]:
        """Yield all the blocks of this hash, the newest first."""
        label = self._newest.get(block_hash)
        while label is not None:
            yield label
            label = label.other

    def held_in(self, block_hash: BlockHash, owner: Owner) -> list[Label]:
        """Return the blocks of this hash that an owner has copies of; costs what it returns."""
        several = self._several.get(block_hash)
        if several is not None:
            return list(several.held.get(owner, ()))
        label = self._newest.get(block_hash)
        return [label] if label is not None and owner in label.copies else []

    def placements(self) -> Iterator[tuple[BlockHash, Label]]:
        """Yield each (hash, block named so)."""
        for block_hash in self._newest:
            for label in self.named(block_hash):
                yield block_hash, label

    def holdings(self) -> Iterator[tuple[Block, Owner]]:
        """Yield each (block, owner) that is resident by some label."""
        for _, label in self.placements():
            for owner in label.copies:
                yield label.block, owner

    def add(self, block_hash: BlockHash, block: Block, owner: Owner, copies: int = 1) -> bool:
        """Count copies of a block; False, and nothing counted, if the budget has no room for it.

        Call it before the tree is given the owner.
        """
        newest = self._newest.get(block_hash)
        several = self._several.get(block_hash)
        label = newest if newest is None or newest.block is block else None
        if label is None and several is not None:
            label = several.labels.get(block)
        if (label is None or not label.in_group(owner.group_idx)) and not self._grow(block):
            return False
        if label is None:
            label, several = self._put(block_hash, block), self._several.get(block_hash)
            self.ambiguous += newest is not None
        known = label.copies.get(owner, 0)
        label.copies[owner] = known + copies
        if several is not None:
            several.note(label, owner)
        self.duplicates += copies if known else copies - 1
        if not known and owner in block.run.owners:
            self._shared[block, owner] += 1
        return True

    def drop(self, block_hash: BlockHash, label: Label, owner: Owner) -> bool:
        """Take one copy away; True if the owner now no longer holds the block at all."""
        label.copies[owner] -= 1
        if label.copies[owner]:
            return False
        del label.copies[owner]
        several = self._several.get(block_hash)
        if several is not None:
            del several.held[owner][label]
        if not label.in_group(owner.group_idx):
            self._size -= 1
            self._budget.used -= 1
            prompts = label.block.run.prompts
            self._prompts[prompts] -= 1
            if not self._prompts[prompts]:
                del self._prompts[prompts]  # names that a publisher invents must not pile up
        if not label.copies:
            self._forget(block_hash, label)
        shared = self._shared.get((label.block, owner))
        if shared is None:
            return True
        if shared > 1:
            self._shared[label.block, owner] = shared - 1
        else:
            del self._shared[label.block, owner]
        return False

    def drop_places(self, owners: Collection[Owner], tree: RadixTree, hold: Hold) -> None:
        """Remove all copies of these owners, also from the tree."""
        for owner in owners:
            held = [found for found in self.placements() if owner in found[1].copies]
            for some in cuts(held):
                for _, label in some:
                    label.copies[owner] = 1
                tree.disown([lb.block for h, lb in some if self.drop(h, lb, owner)], owner)
                hold.did(len(some))

    def clear(self, tree: RadixTree, hold: Hold) -> None:
        """Forget every label, also in the tree."""
        held: dict[Owner, dict[Block, None]] = {}
        for block, owner in self.holdings():
            held.setdefault(owner, {})[block] = None
            hold.did(1)
        for owner, blocks in held.items():
            for some in cuts(list(blocks)):
                tree.disown(some, owner)
                hold.did(len(some))
        self._newest.clear()
        self._several.clear()
        self._shared.clear()
        self._budget.used -= self._size
        self._size = 0
        self._prompts.clear()

    def image(
        self, positions: Mapping[Block, int], places: Mapping[Owner, int]
    ) -> list[LabelImage]:
        """Return all labels, given the numbers of blocks and owners."""
        return [
            (block_hash, [_placement(label, positions, places) for label in labels[::-1]])
            for block_hash in self._newest
            for labels in [list(self.named(block_hash))]
        ]

    def restore(
        self, image: Iterable[LabelImage], blocks: Sequence[Block], owners: Sequence[Owner]
    ) -> dict[Owner, list[Block]]:
        """Restore the labels of an image; return the blocks that each owner must get.

        There must be no labels yet, and room for all of them.
        """
        held: dict[Owner, Counter[int]] = {owner: Counter() for owner in owners}
        for block_hash, placements in image:
            for position, copies in placements:
                label = self._put(block_hash, blocks[position])
                label.copies = {owners[place]: count for place, count in copies}
                if block_hash in self._several:
                    self._several[block_hash].add(label)
                groups = len({owner.group_idx for owner in label.copies})
                self._size += groups
                self._prompts[label.block.run.prompts] += groups
                for owner in label.copies:
                    held[owner][position] += 1
        self._budget.used += self._size
        for owner, labels in held.items():
            further = {(blocks[p], owner): n - 1 for p, n in labels.items() if n > 1}
            self._shared.update(further)
        return {owner: [blocks[p] for p in sorted(labels)] for owner, labels in held.items()}

    def by_lora(self) -> dict[Lora, int]:
        """Return how many resident blocks each LoRA has."""
        counts: Counter[Lora] = Counter()
        for (lora, _), count in self._prompts.items():
            counts[lora] += count
        return counts

    def salted(self) -> int:
        """Return how many resident blocks are of prompts that start under extra keys."""
        return sum(count for (_, salted), count in self._prompts.items() if salted)

    def walk(self) -> Iterator[ResidentBlock]:
        """Yield every resident block, once for each medium and group it is in."""
        for block_hash, label in self.placements():
            namespace = label.block.run.namespace
            for owner, copies in label.copies.items():
                yield ResidentBlock(
                    block_hash=block_hash,
                    depth=label.block.depth,
                    medium=owner.medium,
                    group_idx=owner.group_idx,
                    copies=copies,
                    block_size=namespace.block_size,
                    lora=namespace.lora,
                )

    def check(self) -> Counter[Owner]:
        """Assert that labels and the tree's owners agree; return each owner's blocks.

        Raises:
            InvariantError: they do not agree.
        """
        holdings = Counter(self.holdings())
        for (block, owner), count in holdings.items():
            if owner not in block.run.owners:
                raise InvariantError(f"{owner!r} does not own block {block.depth} of a label")
            if count - 1 != self._shared.get((block, owner), 0):
                raise InvariantError(f"{count} labels of {owner!r} on block {block.depth}")
        prompts: Counter[tuple[Lora, bool]] = Counter()
        for _, label in self.placements():
            prompts[label.block.run.prompts] += len({owner.group_idx for owner in label.copies})
        if prompts != self._prompts or prompts.total() != self._size:
            raise InvariantError(f"{prompts} resident, counted {self._prompts}: {self._size}")
        return Counter(owner for _, owner in holdings)

    def _grow(self, block: Block) -> bool:
        if self.full() or self._budget.spent():
            return False
        self._size += 1
        self._prompts[block.run.prompts] += 1
        self._budget.used += 1
        return True

    def _put(self, block_hash: BlockHash, block: Block) -> Label:
        """Make a block the newest of a hash, without copies yet."""
        newest = self._newest.get(block_hash)
        label = self._newest[block_hash] = Label(block, newest)
        if newest is not None:
            several = self._several.get(block_hash)
            if several is None:
                several = self._several[block_hash] = _Several()
                several.add(newest)
            several.add(label)
        return label

    def _forget(self, block_hash: BlockHash, label: Label) -> None:
        older, newer = label.other, label.newer
        if older is not None:
            older.newer = newer
        if newer is not None:
            newer.other = older
        elif older is not None:
            self._newest[block_hash] = older
        else:
            del self._newest[block_hash]
        several = self._several.get(block_hash)
        if several is not None:
            del several.labels[label.block]
            if len(several.labels) == 1:
                del self._several[block_hash]


def cuts(blocks: Sequence[_Some]) -> Iterator[Sequence[_Some]]:
    """Yield the parts of a change between which the index's lock may be released."""
    for start in range(0, len(blocks), HOLD_BLOCKS):
        yield blocks[start : start + HOLD_BLOCKS]


def _placement(
    label: Label, positions: Mapping[Block, int], places: Mapping[Owner, int]
) -> PlacementImage:
    copies = [(places[owner], count) for owner, count in label.copies.items()]
    return positions[label.block], copies
