"""What ranks hold: prefixes of the fleet, each rank's blocks by their labels, what it evicted."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from sortedcontainers import SortedDict

from kvindex import BlockHash

_KEY_BYTES = 16
_BEGINNING = 8  # tokens
_MAX_BEGINNINGS = 1 << 16


class Prefix:
    """A block and all blocks before it, back to the start of all prompts (whose parent is None)."""

    __slots__ = ("_child", "_more", "end", "held", "key", "parent", "whole")

    def __init__(self, key: bytes, parent: Prefix | None, end: int) -> None:
        self.key = key  # in this process only
        self.parent = parent
        self.end = end  # in tokens
        # The ranks that hold its last block on some medium, and those that hold all its blocks.
        self.held = 0
        self.whole = 0
        # Most prefixes have one continuation or none: a set for each would cost more than the rest.
        self._child: Prefix | None = None
        self._more: set[Prefix] | None = None

    @property
    def size(self) -> int:
        """Tokens of its last block."""
        return self.end if self.parent is None else self.end - self.parent.end

    @property
    def is_leaf(self) -> bool:
        """Whether nothing that is known continues it."""
        return self._child is None

    def children(self) -> Iterator[Prefix]:
        """Yield the prefixes that are one block longer."""
        if self._child is not None:
            yield self._child
        if self._more:
            yield from self._more

    def adopt(self, child: Prefix) -> None:
        """Add a continuation."""
        if self._child is None:
            self._child = child
        elif self._more is None:
            self._more = {child}
        else:
            self._more.add(child)

    def disown(self, child: Prefix) -> None:
        """Remove a continuation."""
        if self._child is not child:
            assert self._more is not None
            self._more.discard(child)
        else:
            self._child = self._more.pop() if self._more else None


class PrefixTree:
    """Every prefix that some rank holds, with those before it.

    A prefix is named by a hash, chained over its blocks, under a random seed: nobody can aim at a
    collision, and with 128 bits nobody meets one. Of a prompt's tokens the first few are kept.

    `Prefix.whole` is kept true at each change. A block that leaves from the middle of what a rank
    holds costs as much as the rank holds behind it, and again as it returns; engines evict from
    the end.
    """

    def __init__(self, seed: bytes | None = None) -> None:
        self._salt = secrets.token_bytes(16) if seed is None else seed
        self._prefixes: dict[bytes, Prefix] = {}
        self._starts: dict[bytes, Prefix] = {}
        self._beginnings: dict[bytes, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes.values())

    def is_held(self, key: bytes) -> bool:
        """Whether some rank holds a prefix of this key."""
        prefix = self._prefixes.get(key)
        return prefix is not None and bool(prefix.held)

    def start(self, model: bytes) -> Prefix:
        """Return the start of all prompts of a model: every rank holds it."""
        start = self._starts.get(model)
        if start is None:
            start = self._starts[model] = Prefix(self._name(model), None, 0)
            start.held = start.whole = -1
        return start

    def after(self, parent: Prefix, content: bytes, size: int) -> Prefix:
        """Return the prefix that continues another one by a block; hold it or `prune` it."""
        key = self._name(parent.key + content)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = Prefix(key, parent, parent.end + size)
            parent.adopt(prefix)
        return prefix

    def note_beginning(self, prefix: Prefix, token_ids: Sequence[int]) -> None:
        """Remember how a prefix of one block begins, so that people can recognize it."""
        if prefix.key not in self._beginnings and len(self._beginnings) < _MAX_BEGINNINGS:
            self._beginnings[prefix.key] = tuple(token_ids[:_BEGINNING])

    def beginning(self, prefix: Prefix) -> tuple[int, ...]:
        """Return the first tokens of a prefix; none if they are not remembered."""
        while prefix.parent is not None and prefix.parent.parent is not None:
            prefix = prefix.parent
        return self._beginnings.get(prefix.key, ())

    def hold(self, prefix: Prefix, rank: int) -> None:
        """Note that a rank (one bit) holds the last block of a prefix."""
        prefix.held |= rank
        assert prefix.parent is not None
        if not prefix.parent.whole & rank or prefix.whole & rank:
            return
        prefix.whole |= rank
        # A hole was filled: what the rank holds behind it can be reached again.
        waiting = [] if prefix.is_leaf else [prefix]
        while waiting:
            for child in waiting.pop().children():
                if child.held & rank and not child.whole & rank:
                    child.whole |= rank
                    waiting.append(child)

    def release(self, prefix: Prefix, rank: int) -> None:
        """Note that a rank (one bit) holds the last block of a prefix no longer."""
        prefix.held &= ~rank
        if prefix.whole & rank:
            prefix.whole &= ~rank
            # There is a hole now: what the rank holds behind it cannot be reached.
            waiting = [] if prefix.is_leaf else [prefix]
            while waiting:
                for child in waiting.pop().children():
                    if child.whole & rank:
                        child.whole &= ~rank
                        waiting.append(child)
        self.prune(prefix)

    def prune(self, prefix: Prefix) -> None:
        """Forget a prefix that no rank holds and no block continues, and so on upwards."""
        while not prefix.held and prefix.is_leaf and prefix.parent is not None:
            parent = prefix.parent
            if self._prefixes.get(prefix.key) is not prefix:
                return  # it is gone already
            del self._prefixes[prefix.key]
            self._beginnings.pop(prefix.key, None)
            parent.disown(prefix)
            prefix = parent

    def _name(self, what: bytes) -> bytes:
        return blake2b(what, digest_size=_KEY_BYTES, salt=self._salt).digest()


# Figures by size and by time ----------------------------------------------------------------------


_PER_OCTAVE = 8
_LEAST = 2.0**-10


class Histogram:
    """Weights by value: each bucket reaches 9 % further than the one before it.

    Bounded: values below a thousandth share a bucket, and so do those above 2**63.

    Examples:
        >>> ages = Histogram()
        >>> ages.add(3.0, 16)
        >>> ages.add(100.0, 32)
        >>> ages.total, ages.up_to(10.0)
        (48, 16)
    """

    def __init__(self) -> None:
        self._weights: dict[int, int] = {}
        self.total = 0

    def add(self, value: float, weight: int) -> None:
        """Count a weight at a value; values that are no number count as 0."""
        inside = min(max(value, _LEAST), 2.0**63) if value == value else _LEAST
        # Rounded up, so that a bucket's end is below none of its values: `up_to` goes by ends.
        bucket = math.ceil(math.log2(inside) * _PER_OCTAVE - 1e-9)
        self._weights[bucket] = self._weights.get(bucket, 0) + weight
        self.total += weight

    def merge(self, other: Histogram) -> None:
        """Count all that another histogram has, too."""
        for bucket, weight in other._weights.items():
            self._weights[bucket] = self._weights.get(bucket, 0) + weight
        self.total += other.total

    def up_to(self, value: float) -> int:
        """Return the weight of all buckets that end at this value or before: never too much."""
        return sum(w for bucket, w in self._weights.items() if _end(bucket) <= value)

    def bars(self) -> Iterator[tuple[float, int]]:
        """Yield (end, weight) of each bucket that has a weight, the smallest first."""
        for bucket, weight in sorted(self._weights.items()):
            yield _end(bucket), weight


def _end(bucket: int) -> float:
    return round(math.pow(2.0, bucket / _PER_OCTAVE), 9)


class Series:
    """Sums over time in an even number of buckets at most, which double their width with time."""

    def __init__(self, fields: int, limit: int = 240) -> None:
        self.width = 1.0
        self._fields = fields
        self._limit = limit
        self._buckets: list[list[int]] = []

    def add(self, seconds: float, numbers: tuple[int, ...]) -> None:
        """Count numbers so many seconds after the beginning (before it: at the beginning)."""
        # A recording's clock is its publisher's, and may show anything.
        place = max(0.0, seconds) if math.isfinite(seconds) else 0.0
        while place >= self.width * self._limit:
            self.width *= 2
            # The last of an odd number has no neighbour to be joined with: an empty one.
            halves = [*self._buckets, [0] * self._fields]
            self._buckets = [
                [a + b for a, b in zip(halves[i], halves[i + 1], strict=True)]
                for i in range(0, len(self._buckets), 2)
            ]
        index = int(place / self.width)
        while len(self._buckets) <= index:
            self._buckets.append([0] * self._fields)
        bucket = self._buckets[index]
        for i, number in enumerate(numbers):
            bucket[i] += number

    def rows(self) -> list[tuple[int, ...]]:
        """Return the numbers of each bucket, from the beginning on."""
        return [tuple(bucket) for bucket in self._buckets]


# Blocks of a rank ---------------------------------------------------------------------------------


_MAX_MEDIA = 64  # on which one block may lie


class RankBlock:
    """A block that a rank holds."""

    __slots__ = ("device", "prefix", "since", "tiers")

    def __init__(self, prefix: Prefix | None, since: float) -> None:
        self.prefix = prefix  # None if events do not report what is before it
        self.since = since  # by the rank's clock
        # Copies on the device, and on each other medium. Most blocks have none there.
        self.device = 0
        self.tiers: dict[str, int] | None = None


class Returned(NamedTuple):
    """An evicted block that is computed again: when it was evicted, and its distance."""

    at: float
    # How many more blocks the cache would have needed to hold it still, if it evicts what was used
    # least recently: the blocks evicted since that are still missing, and itself.
    distance: int


class Evicted:
    """The keys of evicted blocks, at most `limit` of them: the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.forgotten = 0
        # Number and time, by key. A distance is a place in the order, so that is kept sorted:
        # O(log limit) a call.
        self._evictions: dict[bytes, tuple[int, float]] = {}
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
        if len(self._keys) >= self.limit:
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


class FleetCache:
    """One cache that all ranks of a model would share, as large as theirs together.

    It holds what any rank holds, each prefix once. In the room that copies and free blocks leave it
    keeps what was evicted last. So it has whatever a router could have found, and more.
    """

    def __init__(self) -> None:
        # In blocks: the room of all ranks, what is in it, and of that what is there once more.
        self.size = 0
        self.used = 0
        self.copies = 0
        self.block_size = 0  # tokens; of the rank that was heard last
        self.evicted = Evicted(0)  # held by no rank any more; each rank raises the limit
        # Computed tokens, by how many times as large it must be to hold them.
        self.needs = Histogram()

    @property
    def room(self) -> int:
        """Blocks that it can keep of what no rank holds."""
        return self.size - self.used + self.copies


class HeldBlocks:
    """Holds and releases a rank's blocks in the fleet's tree, copy by copy."""

    def __init__(
        self, bit: int, tree: PrefixTree, fleet: FleetCache, max_blocks: int, max_evicted: int
    ) -> None:
        self.bit = bit
        self.fleet = fleet
        fleet.evicted.limit += max_evicted
        self.labels: dict[BlockHash, RankBlock] = {}
        self.evicted = Evicted(max_evicted)
        self.on_device = 0  # physical blocks, copies included
        self._most = 0  # blocks at a time: how much room the rank was seen to have
        self.lifetimes = Histogram()  # of blocks that left in the window, in seconds
        self._tree = tree
        self._max_blocks = max_blocks
        self._further: Counter[Prefix] = Counter()  # labels of a prefix beyond its first
        # What the batch at hand evicted, in order, and what it stored again.
        self._leaving: dict[bytes, tuple[int, float]] = {}
        self._returning: set[bytes] = set()
        self._left = 0
        self._doubtful: list[tuple[BlockHash, RankBlock]] = []  # one label for two blocks

    def put(self, label: BlockHash, prefix: Prefix | None, now: float, tier: str | None) -> str:
        """Hold one more copy of a block, on the device or on another tier; return why not, else "".

        The caller that made the prefix must `PrefixTree.prune` it afterwards.
        """
        block = self.labels.get(label)
        if block is None:
            if len(self.labels) >= self._max_blocks:
                return "max_blocks_per_rank"
            block = self.labels[label] = RankBlock(None, now)
            self.fleet.used += 1
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
            del self.labels[label]
            self.fleet.used -= 1
            if block.prefix is not None and self._release(block.prefix):
                self._leaving[block.prefix.key] = (self._left, now)
                self._left += 1
            if counted:
                self.lifetimes.add(max(0.0, now - block.since), 1)
        return True

    def find_evicted(self, prefix: Prefix) -> Returned | None:
        """Return when the rank evicted a prefix; its distance is as of the batch's beginning."""
        return None if prefix.held & self.bit else self._find_evicted(prefix, self.evicted)

    def need(self, prefix: Prefix, ranks: int, room: int) -> float:
        """Return how many times as large `fleet` must be to hold what none of these ranks holds.

        `room` is that of the batch's beginning. Infinite if nobody is known to have held it.
        """
        if prefix.held & ranks:
            return 0.0
        evicted = self._find_evicted(prefix, self.fleet.evicted)
        if evicted is None:
            return math.inf
        return 1.0 + (evicted.distance - room) / max(1, self.fleet.size)

    def _find_evicted(self, prefix: Prefix, memory: Evicted) -> Returned | None:
        # A batch's order is not that of time: what it evicted is looked up apart until its end.
        leaving = self._leaving.get(prefix.key)
        if leaving is not None:
            return Returned(leaving[1], self._left - leaving[0])
        return memory.find(prefix.key)

    def settle(self) -> None:
        """End a batch: its evicted blocks can return from now on."""
        for label, block in self._doubtful:
            if self.labels.get(label) is block and block.prefix is not None:
                # Events will not distinguish which of the label's two blocks is removed.
                self._release(block.prefix)
                block.prefix = None
        self._doubtful.clear()
        # First what returned: a block that returned and left within the batch is evicted.
        for key in self._returning:
            self.evicted.discard(key)
            self.fleet.evicted.discard(key)
        for key, (_, at) in self._leaving.items():
            self.evicted.add(key, at)
            if not self._tree.is_held(key):
                self.fleet.evicted.add(key, at)
        most = max(self._most, self.on_device, len(self.labels))
        self.fleet.size += most - self._most
        self._most = most
        self._returning.clear()
        self._leaving.clear()
        self._left = 0

    def drop(self) -> None:
        """Hold nothing any more, and remember nothing: none of it was evicted for room."""
        for block in self.labels.values():
            if block.prefix is not None:
                self._release(block.prefix)
        self.fleet.used -= len(self.labels)
        self.labels.clear()
        self.evicted.clear()
        self._further.clear()
        self._returning.clear()
        self._leaving.clear()
        self._doubtful.clear()
        self.on_device = self._left = 0

    def leave(self) -> None:
        """Be no part of the fleet any more, once nothing is held: another rank may get the bit."""
        self.fleet.size -= self._most
        self.fleet.evicted.limit -= self.evicted.limit
        self.bit = self._most = 0

    def _place(self, block: RankBlock, prefix: Prefix | None) -> None:
        block.prefix = prefix
        if prefix is None:
            return
        self.fleet.copies += bool(prefix.held)
        if prefix.held & self.bit:
            self._further[prefix] += 1
        else:
            self._tree.hold(prefix, self.bit)
            self._leaving.pop(prefix.key, None)
            self._returning.add(prefix.key)

    def _add(self, block: RankBlock, tier: str | None) -> str:
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

    def _release(self, prefix: Prefix) -> bool:
        """Remove a label of a prefix; return whether it was the last one."""
        further = self._further.get(prefix, 0)
        if further:
            self._further[prefix] = further - 1
            if further == 1:
                del self._further[prefix]
        else:
            self._tree.release(prefix, self.bit)
        self.fleet.copies -= bool(prefix.held)
        return not further
