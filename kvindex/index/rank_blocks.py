"""What one rank holds, as its events tell it: labels, copies, tiers, groups and orphans.

The engine's hashes are only labels here. A label finds the block it was stored as, so that later
events can name parents and removals; the tree holds the block under our own prefix key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from kvindex.errors import InvariantError
from kvindex.index.groups import GroupSpec
from kvindex.index.keys import Namespace, block_contents, stored_namespace
from kvindex.index.orphans import Orphans
from kvindex.index.tree import Block, Owner, RadixTree
from kvindex.rank import Rank
from kvindex.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch
from kvindex.wire.quirks import fold_hash, fold_medium, is_content_hash, is_root_parent

__all__ = ["Budget", "Group", "RankBlocks", "ResidentBlock"]

_MAX_TAGS = 64  # distinct unknown event tags counted by name


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


class Label:
    """An engine hash: the block it names and how many copies each owner has of it.

    Engines that hash only a block's own tokens (SGLang 0.4.8-0.5.5) use one hash for equal pages
    at several places of the tree; `other` then links to the label's other blocks.
    """

    __slots__ = ("block", "copies", "other")

    def __init__(self, block: Block, other: Label | None) -> None:
        self.block = block
        self.copies: dict[Owner, int] = {}
        self.other = other


class Group:
    """What is known of one KV cache group of a rank."""

    __slots__ = ("block_size", "configured", "spec")

    def __init__(self) -> None:
        self.spec = GroupSpec()
        self.configured = False
        self.block_size = 0


class Budget:
    """How many blocks may be resident over all the ranks of an index."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0

    def room(self) -> int | None:
        """Return how many more blocks fit, or None when there is no limit."""
        return None if self.limit is None else max(0, self.limit - self.used)


class RankBlocks:
    """Applies one rank's events to the shared tree.

    Owned by the index, under its lock.

    Attributes:
        counters: what was stored, removed, held, … in blocks.
        ignored: blocks (or events) left out, by reason.
        skipped: events nobody knows, by tag.
    """

    def __init__(self, rank: Rank, tree: RadixTree, budget: Budget, max_orphans: int) -> None:
        self.rank = rank
        self.groups: dict[int, Group] = {}
        self.counters: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._tree = tree
        self._budget = budget
        self._orphans = Orphans(max_orphans)
        self._labels: dict[BlockHash, Label] = {}
        self._owners: dict[tuple[str | None, int | None], Owner] = {}
        # Further labels of one owner on a block that it already holds under another label.
        self._shared: Counter[tuple[Block, Owner]] = Counter()
        self._size = 0
        self._reports_full = False
        self._positions_unknown = False

    def __len__(self) -> int:
        return self._size

    @property
    def orphan_count(self) -> int:
        """How many blocks are held without a place."""
        return len(self._orphans)

    @property
    def orphans_dropped(self) -> int:
        """How many held blocks were given up for newer ones."""
        return self._orphans.dropped

    @property
    def window_only(self) -> bool:
        """Whether no group needs all blocks before the cut, so that a match may skip a hole."""
        return bool(self.groups) and all(
            group.spec.needed_blocks(1) is not None for group in self.groups.values()
        )

    def check(self) -> None:
        """Assert that labels, copies and the tree's owners tell the same.

        Raises:
            InvariantError: they do not.
        """
        holdings = Counter(self.holdings())
        owned = Counter(owner for _, owner in holdings)
        for (block, owner), count in holdings.items():
            if owner not in block.run.owners:
                raise InvariantError(f"{owner!r} does not own block {block.depth} of a label")
            if count - 1 != self._shared.get((block, owner), 0):
                raise InvariantError(f"{count} labels of {owner!r} on block {block.depth}")
        for owner in set(self._owners.values()):
            if owned[owner] != owner.resident:
                raise InvariantError(f"{owner!r}: {owned[owner]} blocks have labels")
        size = sum(
            len({owner.group_idx for owner in label.copies}) for _, label in self._placements()
        )
        if size != self._size:
            raise InvariantError(f"{self.rank}: {size} blocks resident, counted {self._size}")

    def apply(self, batch: EventBatch) -> None:
        """Apply a batch's events in order."""
        for tag in batch.skipped:
            known = tag in self.skipped or len(self.skipped) < _MAX_TAGS
            self.skipped[tag if known else "(other)"] += 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.counters["cleared"] += 1
                self.clear()

    def clear(self) -> None:
        """Forget every resident and every held block; what was learned of the groups stays."""
        held: dict[Owner, dict[Block, None]] = {}
        for block, owner in self.holdings():
            held.setdefault(owner, {})[block] = None
        for owner, blocks in held.items():
            self._tree.disown(list(blocks), owner)
        self._resize(-self._size)
        self._labels.clear()
        self._shared.clear()
        self._orphans.clear()
        self._reports_full = False
        self._positions_unknown = False

    def configure(self, specs: dict[int, GroupSpec]) -> None:
        """Take the caller's word for the kinds of groups; the wire does not change them again."""
        for group_idx, spec in specs.items():
            group = self.groups.setdefault(group_idx, Group())
            group.spec = spec
            group.configured = True

    def walk(self) -> Iterator[ResidentBlock]:
        """Yield every resident block, once for each medium and group it is in."""
        for block_hash, label in self._placements():
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

    def holdings(self) -> Iterator[tuple[Block, Owner]]:
        """Yield each (block, owner) that the labels say is resident; for `check()`."""
        for _, label in self._placements():
            for owner in label.copies:
                yield label.block, owner

    def _placements(self) -> Iterator[tuple[BlockHash, Label]]:
        for block_hash, newest in self._labels.items():
            label: Label | None = newest
            while label is not None:
                yield block_hash, label
                label = label.other

    def _owner(self, medium: str | None, group_idx: int | None) -> Owner:
        owner = self._owners.get((medium, group_idx))
        if owner is None:
            name, group = fold_medium(medium), group_idx or 0
            same = (o for o in self._owners.values() if o.medium == name and o.group_idx == group)
            owner = next(same, None) or Owner(self.rank, name, group)
            self._owners[medium, group_idx] = owner
        return owner

    # Storing ---------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        hashes = [fold_hash(block_hash) for block_hash in event.block_hashes]
        owner = self._owner(event.medium, event.group_idx)
        if not event.token_ids:
            self._relocate(hashes, owner)
            return
        namespace = stored_namespace(event)
        fault = _shape_fault(event) or self._group_fault(event, owner.group_idx)
        if fault is not None:
            self.ignored[fault] += max(1, len(hashes))
            return
        parent_hash = event.parent_block_hash
        parent = None if parent_hash is None else self._labels.get(fold_hash(parent_hash))
        if parent is None and is_root_parent(parent_hash):
            self._store_at_root(event, namespace, hashes, owner)
        elif parent is not None:
            if parent.block.run.namespace != namespace:
                self.ignored["parent_namespace"] += len(hashes)
                return
            self._place(
                parent.block, namespace, hashes, block_contents(event, at_root=False), owner
            )
        else:
            assert parent_hash is not None
            contents = block_contents(event, at_root=False)
            self._store_detached(fold_hash(parent_hash), namespace, hashes, contents, owner)

    def _store_at_root(
        self, event: BlockStored, namespace: Namespace, hashes: list[BlockHash], owner: Owner
    ) -> None:
        if event.parent_block_hash is None and is_content_hash(
            hashes[0], event.token_ids[: event.block_size]
        ):
            # SGLang 0.5.1-0.5.5 names no parent for any node's first page, and its hashes do not
            # tell the position either: to place the page would be a guess.
            self._positions_unknown = True
            self.ignored["position_unknown"] += len(hashes)
        elif self._is_reannouncement(hashes, owner):
            self.counters["reannounced"] += len(hashes)
        else:
            self._place(None, namespace, hashes, block_contents(event, at_root=True), owner)

    def _is_reannouncement(self, hashes: list[BlockHash], owner: Owner) -> bool:
        """Whether vLLM's report mode "full" tells again what is counted already.

        A prompt's single first block may also be a further physical copy; it is taken for one
        until the rank has shown by a longer store that it re-announces.
        """
        labels = map(self._labels.get, hashes)
        if not all(label is not None and owner in label.copies for label in labels):
            return False
        self._reports_full = self._reports_full or len(hashes) > 1
        return self._reports_full

    def _store_detached(
        self,
        parent_hash: BlockHash,
        namespace: Namespace,
        hashes: list[BlockHash],
        contents: list[bytes],
        owner: Owner,
    ) -> None:
        """Store blocks whose parent is not resident: known ones need none, others wait."""
        first = self._labels.get(hashes[0])
        if first is not None and first.block.run.namespace == namespace:
            self._add_copy(hashes[0], first, owner)
            if len(hashes) > 1:
                self._place(first.block, namespace, hashes[1:], contents[1:], owner)
            return
        if self._positions_unknown:
            self.ignored["position_unknown"] += len(hashes)
            return
        for block_hash, content in zip(hashes, contents, strict=True):
            orphan = self._orphans.add(block_hash, owner)
            orphan.namespace = namespace
            orphan.content = content
            self._orphans.wait_for(parent_hash, block_hash)
            parent_hash = block_hash
        self.counters["orphaned"] += len(hashes)

    def _relocate(self, hashes: list[BlockHash], owner: Owner) -> None:
        """Note a further place of blocks that the event names without their tokens."""
        for block_hash in hashes:
            label = self._labels.get(block_hash)
            if label is not None:
                self._add_copy(block_hash, label, owner)
            else:
                self._orphans.add(block_hash, owner)
                self.counters["unplaced"] += 1

    def _place(
        self,
        parent: Block | None,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        contents: Sequence[bytes],
        owner: Owner,
    ) -> None:
        """Put a chain of blocks into the tree, then all held blocks that waited for them."""
        hashes, contents = self._within_budget(hashes, contents, owner)
        if not hashes:
            return
        chain = self._tree.extend(parent, namespace, contents)
        for block_hash, block in zip(hashes, chain, strict=True):
            self._count_copies(self._label(block_hash, block), owner, 1)
        self._tree.own(chain, owner)
        self.counters["stored"] += len(hashes)
        if len(self._orphans):
            self._attach(list(zip(hashes, chain, strict=True)))

    def _within_budget(
        self, hashes: Sequence[BlockHash], contents: Sequence[bytes], owner: Owner
    ) -> tuple[Sequence[BlockHash], Sequence[bytes]]:
        room = self._budget.room()
        if room is None or len(hashes) <= room:
            return hashes, contents
        new = (i for i, block_hash in enumerate(hashes) if not self._holds(block_hash, owner))
        cut = next(islice(new, room, None), len(hashes))
        self.ignored["max_blocks"] += len(hashes) - cut
        return hashes[:cut], contents[:cut]

    def _holds(self, block_hash: BlockHash, owner: Owner) -> bool:
        label = self._labels.get(block_hash)
        return label is not None and _in_group(label, owner.group_idx)

    def _attach(self, placed: list[tuple[BlockHash, Block]]) -> None:
        """Give held blocks the place that has become known, and so on down the chain."""
        while placed:
            block_hash, block = placed.pop()
            held = self._orphans.pop(block_hash)
            if held is not None:
                self._own_copies(self._labels[block_hash], held.copies)
            for child_hash, orphan in self._orphans.pop_children(block_hash):
                if orphan.namespace != block.run.namespace:
                    self.ignored["parent_namespace"] += 1
                    continue
                if self._budget.room() == 0:
                    self.ignored["max_blocks"] += 1
                    continue
                (child,) = self._tree.extend(block, orphan.namespace, [orphan.content])
                self._own_copies(self._label(child_hash, child), orphan.copies)
                self.counters["orphans_attached"] += 1
                placed.append((child_hash, child))

    def _label(self, block_hash: BlockHash, block: Block) -> Label:
        newest = label = self._labels.get(block_hash)
        while label is not None and label.block is not block:
            label = label.other
        if label is None:
            label = self._labels[block_hash] = Label(block, newest)
            self.counters["ambiguous"] += newest is not None
        return label

    def _add_copy(self, block_hash: BlockHash, label: Label, owner: Owner) -> None:
        self._count_copies(label, owner, 1)
        self._tree.own([label.block], owner)
        self.counters["stored"] += 1

    def _own_copies(self, label: Label, copies: dict[Owner, int]) -> None:
        for owner, count in copies.items():
            self._count_copies(label, owner, count)
            self._tree.own([label.block], owner)

    def _count_copies(self, label: Label, owner: Owner, count: int) -> None:
        """Count copies; must come before the owner is entered into the tree."""
        known = label.copies.get(owner, 0)
        if known:
            self.counters["duplicates"] += count
        else:
            self._resize(+(not _in_group(label, owner.group_idx)))
            if owner in label.block.run.owners:
                self._shared[label.block, owner] += 1
        label.copies[owner] = known + count

    def _resize(self, change: int) -> None:
        self._size += change
        self._budget.used += change

    # Removing --------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        owner = self._owner(event.medium, event.group_idx)
        gone: list[Block] = []
        for block_hash in map(fold_hash, event.block_hashes):
            labels = [label for label in self._named(block_hash) if owner in label.copies]
            if not labels:
                self._remove_held(block_hash, owner)
                continue
            self.counters["removed"] += 1
            # Which of several blocks of one hash is gone is not said: none may be answered for.
            self.counters["removed_ambiguous"] += len(labels) - 1
            for label in labels:
                if self._drop_copy(block_hash, label, owner):
                    gone.append(label.block)
        self._tree.disown(gone, owner)

    def _drop_copy(self, block_hash: BlockHash, label: Label, owner: Owner) -> bool:
        """Take one copy away; say whether the owner no longer holds the block at all."""
        label.copies[owner] -= 1
        if label.copies[owner]:
            return False
        del label.copies[owner]
        self._resize(-(not _in_group(label, owner.group_idx)))
        if not label.copies:
            self._unlabel(block_hash, label)
        key = (label.block, owner)
        if key in self._shared:
            self._shared[key] -= 1
            if not self._shared[key]:
                del self._shared[key]
            return False
        return True

    def _named(self, block_hash: BlockHash) -> Iterator[Label]:
        label = self._labels.get(block_hash)
        while label is not None:
            yield label
            label = label.other

    def _unlabel(self, block_hash: BlockHash, label: Label) -> None:
        newest = self._labels[block_hash]
        if newest is not label:
            while newest.other is not label:
                assert newest.other is not None
                newest = newest.other
            newest.other = label.other
        elif label.other is not None:
            self._labels[block_hash] = label.other
        else:
            del self._labels[block_hash]

    def _remove_held(self, block_hash: BlockHash, owner: Owner) -> None:
        orphan = self._orphans.get(block_hash)
        if orphan is None or owner not in orphan.copies:
            self.counters["removed_unknown"] += 1
            return
        self.counters["removed_orphans"] += 1
        orphan.copies[owner] -= 1
        if not orphan.copies[owner]:
            del orphan.copies[owner]
        if not orphan.copies:
            self._orphans.pop(block_hash)

    # Groups ----------------------------------------------------------------------------------

    def _group_fault(self, event: BlockStored, group_idx: int) -> str | None:
        """Learn the group's kind and block size; say why the event's blocks cannot count."""
        group = self.groups.setdefault(group_idx, Group())
        if event.kv_cache_spec_kind is not None and not group.configured:
            self._learn_kind(group, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        if event.block_size < group.block_size:
            return "partial_block"
        group.block_size = event.block_size
        return None

    def _learn_kind(self, group: Group, kind: str, window: int | None) -> None:
        if (group.spec.kind, group.spec.sliding_window) == (kind, window):
            return
        try:
            group.spec = GroupSpec(kind, window)
        except ValueError:
            self.ignored["group_kind"] += 1


def _in_group(label: Label, group_idx: int) -> bool:
    return any(owner.group_idx == group_idx for owner in label.copies)


def _shape_fault(event: BlockStored) -> str | None:
    """Say why an event's tokens cannot be mapped to its hashes, if they cannot."""
    count = len(event.block_hashes)
    if count == 0:
        return "no_blocks"
    if event.block_size <= 0:
        return "block_size"
    if len(event.token_ids) != count * event.block_size:
        return "token_count"
    if event.extra_keys is not None and len(event.extra_keys) != count:
        return "extra_keys_count"
    if event.lookahead_token_ids is not None:
        lengths = {len(tokens) for tokens in event.lookahead_token_ids}
        if len(event.lookahead_token_ids) != count or len(lengths) != 1:
            return "lookahead_count"
    return None
