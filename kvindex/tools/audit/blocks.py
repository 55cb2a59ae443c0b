"""The blocks that one rank holds, by the engine's labels, and those that it evicted."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sortedcontainers import SortedDict

from kvindex import BlockHash
from kvindex.tools.audit.histogram import Histogram
from kvindex.tools.audit.prefixes import Prefix, PrefixTree

_MAX_MEDIA = 64  # on which one block may lie


class Block:
    """A block that a rank holds.

    Attributes:
        prefix: the block and all before it; None if events do not report what is before it.
        since: when it was stored, by the rank's clock.
        device: its copies on the device.
        tiers: its copies on each other medium; None for none.
    """

    __slots__ = ("device", "prefix", "since", "tiers")

    def __init__(self, prefix: Prefix | None, since: float) -> None:
        self.prefix = prefix
        self.since = since
        self.device = 0
        self.tiers: dict[str, int] | None = None


class Returned(NamedTuple):
    """An evicted block that is computed again.

    Attributes:
        at: when it was evicted, by the rank's clock, in seconds.
        distance: how many more blocks the cache would have needed to hold it still, if it evicts
            what was used least recently: the blocks evicted since that are still missing, and
            itself.
    """

    at: float
    distance: int


class Evicted:
    """The keys of evicted blocks, at most `limit` of them: the oldest are forgotten first.

    Complexity: O(log limit) a call.

    Attributes:
        forgotten: how many keys had to go for newer ones.
    """

    def __init__(self, limit: int) -> None:
        self.forgotten = 0
        self._limit = limit
        self._evictions: dict[bytes, tuple[int, float]] = {}  # number and time, by key
        self._keys: SortedDict = SortedDict()  # by number
        self._next = 0

    def __len__(self) -> int:
        return len(self._keys)

    def clear(self) -> None:
        """Forget all keys; they do not count as forgotten for newer ones."""
        self._evictions.clear()
        self._keys.clear()

    def add(self, key: bytes, at: float) -> None:
        """Note that a block was evicted."""
        self.discard(key)
        if len(self._keys) >= self._limit:
            self.discard(self._keys.peekitem(0)[1])
            self.forgotten += 1
        self._evictions[key] = (self._next, at)
        self._keys[self._next] = key
        self._next += 1

    def find(self, key: bytes) -> Returned | None:
        """Return when a block was evicted, and its distance; None if that is not known."""
        eviction = self._evictions.get(key)
        if eviction is None:
            return None
        number, at = eviction
        return Returned(at, len(self._keys) - self._keys.bisect_left(number))

    def discard(self, key: bytes) -> None:
        """Remember a block no longer: the rank holds it again."""
        eviction = self._evictions.pop(key, None)
        if eviction is not None:
            del self._keys[eviction[0]]


class HeldBlocks:
    """Holds and releases blocks in the fleet's tree, copy by copy.

    Attributes:
        labels: the held blocks by the engine's hashes.
        evicted: what was held and evicted.
        on_device: physical blocks in use on the device, copies included.
        lifetimes: blocks that left, by the seconds for which they were held, while `counted`.
    """

    def __init__(self, bit: int, tree: PrefixTree, max_blocks: int, max_evicted: int) -> None:
        self.bit = bit
        self.labels: dict[BlockHash, Block] = {}
        self.evicted = Evicted(max_evicted)
        self.on_device = 0
        self.lifetimes = Histogram()
        self._tree = tree
        self._max_blocks = max_blocks
        self._further: Counter[Prefix] = Counter()  # labels of a prefix beyond its first
        # What the batch at hand evicted, in order, and what it stored again.
        self._leaving: dict[bytes, tuple[int, float]] = {}
        self._returning: set[bytes] = set()
        self._left = 0
        self._doubtful: list[tuple[BlockHash, Block]] = []  # one label for two blocks

    def put(self, label: BlockHash, prefix: Prefix | None, now: float, tier: str | None) -> str:
        """Hold one more copy of a block, on the device or on another tier; return why not, else "".

        The caller that made the prefix must `PrefixTree.prune` it afterwards.
        """
        block = self.labels.get(label)
        if block is None:
            if len(self.labels) >= self._max_blocks:
                return "max_blocks_per_rank"
            block = self.labels[label] = Block(None, now)
            self._place(block, prefix)
        elif block.prefix is None:
            self._place(block, prefix)
        elif prefix is not None and prefix is not block.prefix:
            self._doubtful.append((label, block))
            return self._add(block, tier) or "label_ambiguous"
        return self._add(block, tier)

    def remove(
        self, label: BlockHash, tier: str | None, now: float, left: int | None, *, counted: bool
    ) -> bool:
        """Remove one copy of a block, or all but `left`; False if the rank holds none there."""
        block = self.labels.get(label)
        if block is None:
            return False
        if tier is None:
            if not block.device:
                return False
            rest = block.device - 1 if left is None else left
            self.on_device += rest - block.device
            block.device = rest
        else:
            if not block.tiers or tier not in block.tiers:
                return False
            block.tiers[tier] = block.tiers[tier] - 1 if left is None else left
            if not block.tiers[tier]:
                del block.tiers[tier]
        if not block.device and not block.tiers:
            self._evict(label, block, now)
            if counted:
                self.lifetimes.add(max(0.0, now - block.since), 1)
        return True

    def find_evicted(self, prefix: Prefix) -> Returned | None:
        """Return when the rank evicted a prefix; its distance is as of the batch's beginning."""
        if prefix.held & self.bit:
            return None
        leaving = self._leaving.get(prefix.key)
        if leaving is not None:
            return Returned(leaving[1], self._left - leaving[0])
        return self.evicted.find(prefix.key)

    def settle(self) -> None:
        """End a batch: its evicted blocks can return from now on."""
        for label, block in self._doubtful:
            if self.labels.get(label) is block and block.prefix is not None:
                self._release(
                    block.prefix
                )  # events will not distinguish which of its blocks is removed
                block.prefix = None
        self._doubtful.clear()
        for key in self._returning:
            self.evicted.discard(key)
        for key, (_, at) in self._leaving.items():
            self.evicted.add(key, at)
        self._returning.clear()
        self._leaving.clear()
        self._left = 0

    def drop(self) -> None:
        """Hold nothing any more, and remember nothing: none of it was evicted for room."""
        for block in self.labels.values():
            if block.prefix is not None and block.prefix.held & self.bit:
                self._tree.release(block.prefix, self.bit)
        self.labels.clear()
        self.evicted.clear()
        self._further.clear()
        self._returning.clear()
        self._leaving.clear()
        self._doubtful.clear()
        self.on_device = self._left = 0

    def _place(self, block: Block, prefix: Prefix | None) -> None:
        block.prefix = prefix
        if prefix is None:
            return
        if prefix.held & self.bit:
            self._further[prefix] += 1
        else:
            self._tree.hold(prefix, self.bit)
            self._leaving.pop(prefix.key, None)
            self._returning.add(prefix.key)

    def _add(self, block: Block, tier: str | None) -> str:
        if tier is None:
            block.device += 1
            self.on_device += 1
            return ""
        if block.tiers is None:
            block.tiers = {}
        if tier not in block.tiers and len(block.tiers) >= _MAX_MEDIA:
            return "too_many_media"
        block.tiers[tier] = block.tiers.get(tier, 0) + 1
        return ""

    def _evict(self, label: BlockHash, block: Block, now: float) -> None:
        del self.labels[label]
        if block.prefix is not None and self._release(block.prefix):
            self._leaving[block.prefix.key] = (self._left, now)
            self._left += 1

    def _release(self, prefix: Prefix) -> bool:
        """Remove a label of a prefix; return whether it was the last one."""
        further = self._further.get(prefix, 0)
        if further:
            self._further[prefix] = further - 1
            if further == 1:
                del self._further[prefix]
            return False
        self._tree.release(prefix, self.bit)
        return True
