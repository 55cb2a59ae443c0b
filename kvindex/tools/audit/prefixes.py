"""The fleet's prefixes: one node for a block and everything before it, whichever ranks hold it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_KEY_BYTES = 16
_BEGINNING = 8  # tokens
_MAX_BEGINNINGS = 1 << 16


class Prefix:
    """A block and all blocks before it.

    Attributes:
        key: names it, in this process only.
        parent: the prefix that ends one block earlier; None for the start of all prompts.
        end: how many tokens it has.
        held: the ranks that hold its last block on some medium, as a set of bits.
        whole: those of them that hold all its blocks.
    """

    __slots__ = ("_child", "_more", "end", "held", "key", "parent", "whole")

    def __init__(self, key: bytes, parent: Prefix | None, end: int) -> None:
        self.key = key
        self.parent = parent
        self.end = end
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
        if prefix.parent.whole & rank and not prefix.whole & rank:
            prefix.whole |= rank
            if not prefix.is_leaf:
                _spread(prefix, rank)

    def release(self, prefix: Prefix, rank: int) -> None:
        """Note that a rank (one bit) holds the last block of a prefix no longer."""
        prefix.held &= ~rank
        if prefix.whole & rank:
            prefix.whole &= ~rank
            if not prefix.is_leaf:
                _cut(prefix, rank)
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


def _spread(prefix: Prefix, rank: int) -> None:
    """A hole was filled: what the rank holds behind it can be reached again."""
    waiting = [prefix]
    while waiting:
        for child in waiting.pop().children():
            if child.held & rank and not child.whole & rank:
                child.whole |= rank
                waiting.append(child)


def _cut(prefix: Prefix, rank: int) -> None:
    """There is a hole now: what the rank holds behind it cannot be reached."""
    waiting = [prefix]
    while waiting:
        for child in waiting.pop().children():
            if child.whole & rank:
                child.whole &= ~rank
                waiting.append(child)
