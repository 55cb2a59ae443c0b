"""The blocks of one rank: an object for each position of its prompts, and the labels that name it.

A *block* is one position of one prompt prefix; its key names the whole prefix. Each block points at
the block before it:

```
   0 ─ 1 ─ 2 ─ 3        places of 3: {GPU, group 0}
        └─ 2'           places of 2: none; this hole shows where 3 stands
```

A *place* is a medium and a KV cache group. The engine's hashes are only *labels*: later events name
parents and removals by them. A label exists as long as some place has a copy. A block without a
place is dropped as soon as no block follows it, so nothing leaks.

Complexity: O(1) for each block and label. Thread safety: none; the index's lock owns the blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvindex.index.reference.keys import Key, KeyMaker
from kvindex.index.tokens import Lora, Namespace
from kvindex.index.views import ResidentBlock
from kvindex.wire import BlockHash
from kvindex.wire.errors import InvariantError
from kvindex.wire.quirks import fold_hash


class Budget:
    """How many blocks are resident over all the ranks of an index (`used`), and how many may be."""

    def __init__(self, limit: int | None, rank_limit: int | None) -> None:
        self.used = 0
        self._limit = limit
        self._rank_limit = rank_limit

    def lets_rank_grow(self, size: int) -> bool:
        """Whether a rank of so many blocks may have more."""
        return self._rank_limit is None or size < self._rank_limit

    def lets_grow(self) -> bool:
        """Whether all ranks together may have more."""
        return self._limit is None or self.used < self._limit


class Place(NamedTuple):
    """Where copies of blocks lie.

    Off the device a label may stand for a *chunk* of several of the group's blocks, which ends
    with the block that the label names: chunks of each size have a place of their own.
    """

    medium: str
    group_idx: int
    chunk: int = 0  # tokens; 0: the blocks are the group's


class Block:
    """One position of one prefix."""

    __slots__ = ("children", "depth", "key", "namespace", "parent", "places", "salted")

    def __init__(self, key: Key, namespace: Namespace, parent: Block | None, salted: bool) -> None:
        self.key = key
        self.namespace = namespace
        self.parent = parent  # the block before it; None at a prompt's start
        self.depth: int = 0 if parent is None else parent.depth + 1
        # Whether its prompts start under a salt, or other extra keys.
        self.salted: bool = salted if parent is None else parent.salted
        self.children = 0  # how many blocks follow it directly
        # Where it is resident, and under how many labels; nearly always it is one.
        self.places: dict[Place, int] = {}

    def ancestors(self) -> Iterator[Block]:
        """Yield the blocks before it, the nearest first."""
        block = self.parent
        while block is not None:
            yield block
            block = block.parent


class _Label:
    """The blocks of one engine hash, the newest last, and their physical copies at each place."""

    __slots__ = ("blocks", "copies")

    def __init__(self) -> None:
        # Nearly always one. Engines that hash only a block's own tokens (SGLang 0.4.8-0.5.5) use
        # one hash for equal pages at several positions.
        self.blocks: dict[Block, None] = {}
        self.copies: dict[Place, dict[Block, int]] = {}

    def groups_of(self, block: Block) -> set[int]:
        """Return the groups in which a block is resident, on any medium."""
        return {place.group_idx for place, held in self.copies.items() if block in held}


class Blocks:
    """The blocks of one rank; `len()` is its resident (label, block, group) triples."""

    def __init__(self, keys: KeyMaker, budget: Budget) -> None:
        self._maker = keys
        self._budget = budget
        self._blocks: dict[Key, Block] = {}
        self._labels: dict[BlockHash, _Label] = {}
        # The size by namespace, and by whether the prompts start under a salt or other extra keys.
        self._prompts: Counter[tuple[Namespace, bool]] = Counter()
        self._size = 0
        self.resident: dict[Place, int] = {}  # blocks at each place that the rank has ever named
        self.ambiguous = 0  # how often a label came to name a further block
        self.duplicates = 0  # further physical copies of resident blocks

    def __len__(self) -> int:
        return self._size

    def full(self) -> bool:
        """Whether the rank has as many blocks as one rank may have."""
        return not self._budget.lets_rank_grow(self._size)

    def block_keys(self) -> Collection[Key]:
        """Return the keys of all blocks, holes included."""
        return self._blocks.keys()

    def find(self, key: Key) -> Block | None:
        """Return the block of this key."""
        return self._blocks.get(key)

    def get(self, block_hash: BlockHash) -> Block | None:
        """Return the newest block of this label, if any is resident."""
        label = self._labels.get(block_hash)
        return None if label is None else next(reversed(label.blocks))

    def is_ambiguous(self, block_hash: BlockHash) -> bool:
        """Whether a label names several blocks."""
        label = self._labels.get(block_hash)
        return label is not None and len(label.blocks) > 1

    def held_at(self, block_hash: BlockHash, place: Place) -> Collection[Block]:
        """Return the blocks of this label that a place has copies of."""
        label = self._labels.get(block_hash)
        return () if label is None else label.copies.get(place, {}).keys()

    def extend(
        self,
        parent: Block | None,
        namespace: Namespace,
        contents: Sequence[bytes],
        *,
        salted: bool = False,
    ) -> list[Block]:
        """Return the chain of blocks with these contents after a parent, made where missing.

        `salted` is for a chain without a parent; others inherit it. New blocks have no copy yet:
        the caller must `add` the last of them, or `prune` it, before anything else.
        """
        key = self._maker.root(namespace) if parent is None else parent.key
        chain: list[Block] = []
        for content in contents:
            key = self._maker.child(key, content)
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = Block(key, namespace, parent, salted)
                if parent is not None:
                    parent.children += 1
            chain.append(block)
            parent = block
        return chain

    def prune(self, block: Block) -> None:
        """Drop a block and those before it, as far as they have no copy and no block after them."""
        last: Block | None = block
        while last is not None and not last.places and not last.children:
            del self._blocks[last.key]
            last = last.parent
            if last is not None:
                last.children -= 1

    def add(self, block_hash: BlockHash, block: Block, place: Place, copies: int = 1) -> bool:
        """Count copies of a block; False, and nothing counted, if the budget has no room for it."""
        label = self._labels.get(block_hash) or _Label()
        # On a further medium it takes no room: counted are labels, blocks and groups.
        if place.group_idx not in label.groups_of(block):
            if self.full() or not self._budget.lets_grow():
                return False
            self._count(block, 1)
        if block not in label.blocks:
            self.ambiguous += bool(label.blocks)
            label.blocks[block] = None
        self._labels[block_hash] = label
        held = label.copies.setdefault(place, {})
        self.duplicates += copies - (block not in held)
        if block not in held:
            self.resident[place] = self.resident.get(place, 0) + (place not in block.places)
            block.places[place] = block.places.get(place, 0) + 1
        held[block] = held.get(block, 0) + copies
        return True

    def drop(
        self, block_hash: BlockHash, block: Block, place: Place, left: int | None = None
    ) -> None:
        """Drop one copy; with `left`, there are so many afterwards."""
        label = self._labels[block_hash]
        held = label.copies[place]
        held[block] = held[block] - 1 if left is None else left
        if held[block]:
            return
        del held[block]
        if not held:
            del label.copies[place]
        groups = label.groups_of(block)
        if place.group_idx not in groups:
            self._count(block, -1)
        if not groups:
            del label.blocks[block]
        if not label.blocks:
            del self._labels[block_hash]
        block.places[place] -= 1
        if not block.places[place]:
            del block.places[place]
            self.resident[place] -= 1
            self.prune(block)

    def drop_places(self, places: Collection[Place]) -> None:
        """Drop all copies at these places."""
        held = [
            (block_hash, block, place)
            for block_hash, label in self._labels.items()
            for place in places
            for block in label.copies.get(place, ())
        ]
        for block_hash, block, place in held:
            self.drop(block_hash, block, place, left=0)

    def clear(self) -> None:
        """Drop everything."""
        self._blocks.clear()
        self._labels.clear()
        self._prompts.clear()
        self._budget.used -= self._size
        self._size = 0
        # Places stay known: the bound on their number is on all that a rank has ever named.
        self.resident = dict.fromkeys(self.resident, 0)

    def namespaces(self) -> set[Namespace]:
        """Return every namespace that has a block."""
        return {namespace for namespace, _ in self._prompts}

    def by_lora(self) -> dict[Lora, int]:
        """Return how many resident blocks each LoRA has."""
        counts: Counter[Lora] = Counter()
        for (namespace, _), count in self._prompts.items():
            counts[namespace.lora] += count
        return counts

    def salted(self) -> int:
        """Return how many resident blocks are of prompts that start under extra keys."""
        return sum(count for (_, salted), count in self._prompts.items() if salted)

    def walk(self) -> Iterator[ResidentBlock]:
        """Yield every resident block, once for each medium and group it is in."""
        for block_hash, label in self._labels.items():
            for place, held in label.copies.items():
                for block, copies in held.items():
                    yield ResidentBlock(
                        block_hash=block_hash,
                        depth=block.depth,
                        medium=place.medium,
                        group_idx=place.group_idx,
                        copies=copies,
                        block_size=block.namespace.block_size,
                        lora=block.namespace.lora,
                    )

    def check(self) -> None:
        """Assert that blocks, labels and counters agree; raises InvariantError."""
        prompts: Counter[tuple[Namespace, bool]] = Counter()
        names: dict[Block, Counter[Place]] = defaultdict(Counter)
        for label in self._labels.values():
            for block in label.blocks:
                prompts[block.namespace, block.salted] += len(label.groups_of(block))
            for place, held in label.copies.items():
                for block in held:
                    names[block][place] += 1
        counted = f"{prompts} resident, counted {self._prompts}: {self._size}"
        _require(prompts == self._prompts and prompts.total() == self._size, counted)
        children: Counter[Block | None] = Counter(block.parent for block in self._blocks.values())
        for key, block in self._blocks.items():
            before = block.parent
            _require(block.key == key, f"block {block.depth} stands under another key")
            _require(bool(block.places or block.children), "a hole that no block follows was kept")
            if before is not None:
                _require(self._blocks.get(before.key) is before, "the block before was dropped")
            depth = 0 if before is None else before.depth + 1
            _require(block.depth == depth, f"block {block.depth} stands at depth {depth}")
            _require(block.children == children[block], f"{children[block]} blocks follow a block")
            places = names.pop(block, Counter())
            _require(block.places == places, f"a block at {block.places}, by its labels {places}")
        _require(not names, f"{len(names)} blocks of labels were dropped")
        resident = Counter(place for block in self._blocks.values() for place in block.places)
        for place, count in self.resident.items():
            _require(resident[place] == count, f"{resident[place]} blocks at {place}, not {count}")

    def _count(self, block: Block, change: int) -> None:
        self._size += change
        self._budget.used += change
        prompts = block.namespace, block.salted
        self._prompts[prompts] += change
        if not self._prompts[prompts]:
            del self._prompts[prompts]  # names that a publisher invents must not pile up


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise InvariantError(message)


# Held blocks ------------------------------------------------------------------------------------

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
    """A rank's held blocks, oldest first, at most `limit` of them."""

    def __init__(self, limit: int, *, max_bytes: int = _MAX_CONTENT_BYTES) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._held: dict[BlockHash, Orphan] = {}
        self._waiting: dict[BlockHash, dict[BlockHash, None]] = {}  # children by their parent
        self.dropped = 0  # for newer ones
        self.forgot = False  # whether dropped blocks may still be resident

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


# Placing ----------------------------------------------------------------------------------------

_COUNTERS = (
    *("stored", "stored_text", "reannounced", "orphaned", "orphans_attached", "unplaced"),
    *("removed", "removed_unknown", "removed_orphans", "removed_ambiguous", "cleared"),
    *("proofs", "proofs_missed"),
)
_MAX_TORN: Final = 65_536  # labels remembered as torn; beyond it every parent counts as such


class StoredChain(NamedTuple):
    """Consecutive blocks that an event stores at one place, each of `scale` units."""

    namespace: Namespace
    hashes: Sequence[BlockHash]
    contents: Sequence[bytes]  # of each unit
    scale: int
    place: Place
    salted: bool = False  # of a chain that starts its prompts

    def after(self, start: int) -> StoredChain:
        """Return the chain without its first `start` blocks."""
        contents = self.contents[start * self.scale :]
        return self._replace(hashes=self.hashes[start:], contents=contents)


class Placing:
    """Puts one rank's blocks into its prompts and removes them from there.

    Owned by the rank's `RankBlocks`.
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
        self, parent: Block | None, chain: StoredChain, unnamed: Sequence[bytes] = ()
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
            # `extend` made the whole chain: what has no copy must not stay.
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
                if orphan.namespace != block.namespace:
                    self.ignore("parent_namespace", 1)
                    continue
                (child,) = self.blocks.extend(block, orphan.namespace, [orphan.content])
                if not self.add_copies(child_hash, child, orphan.copies):
                    self.blocks.prune(child)
                    continue
                self.counters["orphans_attached"] += 1
                placed.append((child_hash, child))

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
