"""A rank's table of labels: which blocks each engine hash names, and where copies of them are.

The engine's hashes are only labels here. A label leads to its stored block, so that later events
can name parents and removals; the tree holds the block under our own prefix key. A label exists as
long as some owner has a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from kvindex.index.api import ResidentBlock
from kvindex.index.keys import Lora
from kvindex.index.reference.tree import Block, Owner, RadixTree
from kvindex.wire import BlockHash
from kvindex.wire.errors import InvariantError

__all__ = ["Budget", "Labels"]


class Budget:
    """How many blocks are resident over all the ranks of an index, and how many may be.

    Attributes:
        limit: over all ranks.
        rank_limit: of one rank.
        used: resident now.
    """

    def __init__(self, limit: int | None, rank_limit: int | None) -> None:
        self.limit = limit
        self.rank_limit = rank_limit
        self.used = 0


class _Label:
    """The blocks of one engine hash, the newest last, and each owner's copies of them.

    Nearly always it is one block. Engines that hash only a block's own tokens (SGLang 0.4.8-0.5.5)
    use one hash for equal pages at several places of the tree.
    """

    __slots__ = ("blocks", "copies")

    def __init__(self) -> None:
        self.blocks: dict[Block, None] = {}
        self.copies: dict[Owner, dict[Block, int]] = {}

    def groups_of(self, block: Block) -> set[int]:
        """Return the groups in which a block is resident, on any medium."""
        return {owner.group_idx for owner, held in self.copies.items() if block in held}


class Labels:
    """The labels of one rank; `len()` is its resident (label, block, group) triples.

    Attributes:
        ambiguous: how often a label came to name a further block.
        duplicates: how many further physical copies of resident blocks were counted.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._labels: dict[BlockHash, _Label] = {}
        # By how many labels an owner holds a block.
        self._names: Counter[tuple[Block, Owner]] = Counter()
        # The size by LoRA, and by whether the prompts start under a salt or other extra keys.
        self._prompts: Counter[tuple[Lora, bool]] = Counter()
        self._size = 0
        self.ambiguous = 0
        self.duplicates = 0

    def __len__(self) -> int:
        return self._size

    def full(self) -> bool:
        """Whether the rank has as many blocks as one rank may have."""
        limit = self._budget.rank_limit
        return limit is not None and self._size >= limit

    def get(self, block_hash: BlockHash) -> Block | None:
        """Return the newest block of this hash, if any is resident."""
        label = self._labels.get(block_hash)
        return None if label is None else next(reversed(label.blocks))

    def is_ambiguous(self, block_hash: BlockHash) -> bool:
        """Whether a hash names several blocks."""
        label = self._labels.get(block_hash)
        return label is not None and len(label.blocks) > 1

    def held_in(self, block_hash: BlockHash, owner: Owner) -> Collection[Block]:
        """Return the blocks of this hash that an owner has copies of."""
        label = self._labels.get(block_hash)
        return () if label is None else label.copies.get(owner, {}).keys()

    def add(self, block_hash: BlockHash, block: Block, owner: Owner, copies: int = 1) -> bool:
        """Count copies of a block; False, and nothing counted, if the budget has no room for it."""
        label = self._labels.get(block_hash) or _Label()
        if owner.group_idx not in label.groups_of(block) and not self._grow(block):
            return False
        if block not in label.blocks:
            self.ambiguous += bool(label.blocks)
            label.blocks[block] = None
        self._labels[block_hash] = label
        held = label.copies.setdefault(owner, {})
        if block in held:
            self.duplicates += copies
        else:
            self.duplicates += copies - 1
            self._names[block, owner] += 1
        held[block] = held.get(block, 0) + copies
        return True

    def drop(
        self, block_hash: BlockHash, block: Block, owner: Owner, *, every: bool = False
    ) -> bool:
        """Drop one copy, or every one; True if the owner now no longer holds the block at all."""
        label = self._labels[block_hash]
        held = label.copies[owner]
        held[block] -= 1
        if held[block] and not every:
            return False
        del held[block]
        if not held:
            del label.copies[owner]
        groups = label.groups_of(block)
        if owner.group_idx not in groups:
            self._shrink(block)
        if not groups:
            del label.blocks[block]
        if not label.blocks:
            del self._labels[block_hash]
        self._names[block, owner] -= 1
        if self._names[block, owner]:
            return False
        del self._names[block, owner]
        return True

    def drop_places(self, owners: Collection[Owner], tree: RadixTree) -> None:
        """Remove all copies of these owners, also from the tree."""
        for owner in owners:
            held = [
                (block_hash, block)
                for block_hash, label in self._labels.items()
                for block in label.copies.get(owner, ())
            ]
            gone = [block for h, block in held if self.drop(h, block, owner, every=True)]
            tree.disown(gone, owner)

    def clear(self, tree: RadixTree) -> None:
        """Forget every label, also in the tree."""
        held: dict[Owner, list[Block]] = {}
        for block, owner in self._names:
            held.setdefault(owner, []).append(block)
        for owner, blocks in held.items():
            tree.disown(blocks, owner)
        self._labels.clear()
        self._names.clear()
        self._prompts.clear()
        self._budget.used -= self._size
        self._size = 0

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
        for block_hash, label in self._labels.items():
            for owner, held in label.copies.items():
                for block, copies in held.items():
                    yield ResidentBlock(
                        block_hash=block_hash,
                        depth=block.depth,
                        medium=owner.medium,
                        group_idx=owner.group_idx,
                        copies=copies,
                        block_size=block.run.namespace.block_size,
                        lora=block.run.namespace.lora,
                    )

    def check(self) -> Counter[Owner]:
        """Assert that labels and the tree's owners agree; return how many blocks each owner has.

        Raises:
            InvariantError: they do not agree.
        """
        names: Counter[tuple[Block, Owner]] = Counter()
        prompts: Counter[tuple[Lora, bool]] = Counter()
        for label in self._labels.values():
            names.update((block, owner) for owner, held in label.copies.items() for block in held)
            for block in label.blocks:
                prompts[_prompts(block)] += len(label.groups_of(block))
        for block, owner in names:
            if owner not in block.run.owners:
                raise InvariantError(f"{owner!r} does not own block {block.depth} of a label")
        if names != self._names:
            raise InvariantError(f"{len(names)} blocks have labels, counted {len(self._names)}")
        if prompts != self._prompts or prompts.total() != self._size:
            raise InvariantError(f"{prompts} resident, counted {self._prompts}: {self._size}")
        return Counter(owner for _, owner in names)

    def _grow(self, block: Block) -> bool:
        budget = self._budget
        if self.full() or (budget.limit is not None and budget.used >= budget.limit):
            return False
        self._size += 1
        budget.used += 1
        self._prompts[_prompts(block)] += 1
        return True

    def _shrink(self, block: Block) -> None:
        self._size -= 1
        self._budget.used -= 1
        prompts = _prompts(block)
        self._prompts[prompts] -= 1
        if not self._prompts[prompts]:
            del self._prompts[prompts]  # names that a publisher invents must not pile up


def _prompts(block: Block) -> tuple[Lora, bool]:
    return block.run.namespace.lora, block.run.salted
