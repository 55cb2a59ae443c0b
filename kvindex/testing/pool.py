"""Where the fake cache's blocks live: physical GPU blocks with a free queue, and a CPU tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from kvindex.testing.chain import Link
from kvindex.wire.errors import InvariantError

Held = tuple[int, Link]
"""The content of a physical block: (group number, block)."""


class BlockPool:
    """Physical blocks as vLLM keeps them.

    A block that nobody uses waits in the free queue, and can be hit until it leaves the
    queue's head for something else. One (group, block) may have several physical copies.
    """

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._held: list[Held | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._copies: dict[tuple[int, bytes], dict[int, Link]] = {}

    @property
    def free(self) -> int:
        """How many physical blocks nobody uses."""
        return len(self._free)

    def find(self, group: int, link: Link) -> int | None:
        """Return a physical block that holds this block, the one stored first."""
        return next(iter(self._copies.get((group, link.digest), ())), None)

    def is_free(self, block: int) -> bool:
        """Return whether nobody uses the physical block."""
        return block in self._free

    def allocate(self) -> tuple[int, Held | None]:
        """Return the block free for longest, and what it held until now."""
        block, _ = self._free.popitem(last=False)
        held = self._held[block]
        if held is not None:
            self._forget(block, held)
        self._references[block] = 1
        return block, held

    def next_evicted(self) -> Held | None:
        """Return what the next block to be allocated holds."""
        return self._held[next(iter(self._free))]

    def touch(self, block: int) -> None:
        """Add one user of a block that holds something."""
        self._free.pop(block, None)
        self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one user of each; blocks without users join the free queue's tail in this order."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def store(self, block: int, group: int, link: Link) -> None:
        """Let an allocated block hold this block, as one more copy."""
        self._held[block] = (group, link)
        self._copies.setdefault((group, link.digest), {})[block] = link

    def clear(self) -> None:
        """Forget what every block holds."""
        self._held = [None] * len(self._held)
        self._copies.clear()

    def contents(self) -> Iterator[tuple[int, Link, int]]:
        """Yield (group number, block, copies)."""
        for (group, _), copies in self._copies.items():
            yield group, next(iter(copies.values())), len(copies)

    def check(self, users: Mapping[int, int]) -> None:
        """Raise InvariantError unless references, free queue and copies agree with the users."""
        for block, held in enumerate(self._held):
            if self._references[block] != users.get(block, 0):
                raise InvariantError(
                    f"block {block} counts {self._references[block]} users of {users.get(block, 0)}"
                )
            if (block in self._free) != (self._references[block] == 0):
                raise InvariantError(f"block {block} is free and in use, or neither")
            if held is not None and block not in self._copies[held[0], held[1].digest]:
                raise InvariantError(f"block {block} is missing among the copies of what it holds")
        if sum(map(len, self._copies.values())) != sum(x is not None for x in self._held):
            raise InvariantError("more copies than physical blocks that hold something")

    def _forget(self, block: int, held: Held) -> None:
        group, link = held
        copies = self._copies[group, link.digest]
        del copies[block]
        if not copies:
            del self._copies[group, link.digest]
        self._held[block] = None


class CpuTier:
    """The second tier: at most so many blocks, the least recently used leaves first."""

    def __init__(self, num_blocks: int) -> None:
        self._size = num_blocks
        self._held: OrderedDict[tuple[int, bytes], Link] = OrderedDict()

    def __bool__(self) -> bool:
        return self._size > 0

    def has(self, group: int, link: Link) -> bool:
        """Return whether the block is here."""
        return (group, link.digest) in self._held

    def touch(self, group: int, link: Link) -> None:
        """Make the block the most recently used, if it is here."""
        if self.has(group, link):
            self._held.move_to_end((group, link.digest))

    def store(self, group: int, link: Link) -> Held | None:
        """Keep the block; return what had to leave for it."""
        evicted = None
        if len(self._held) >= self._size:
            (out_group, _), out = self._held.popitem(last=False)
            evicted = (out_group, out)
        self._held[group, link.digest] = link
        return evicted

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()

    def contents(self) -> Iterator[tuple[int, Link, int]]:
        """Yield (group number, block, 1)."""
        for (group, _), link in self._held.items():
            yield group, link, 1
