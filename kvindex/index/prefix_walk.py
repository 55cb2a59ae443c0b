"""The walk behind `Index.prefixes` over the Python tree: the readable specification.

A *node* is a chain of at most 8,192 blocks that has no branch and on which the same ranks hold the
same media. The walk starts with the first nodes of all prompts, and keeps those that it has looked
at in a queue. It takes the best one out, shows it, looks at the nodes that follow it, and goes on
until it has shown as many as are wanted. The best node is the one

1. that most ranks hold,
2. of equal ones, the longest,
3. of equal ones, the one that the walk looked at first.

So the walk shows every prefix that many ranks share before any that few hold, however large the
tree is. After a branch it looks at the oldest nodes first: those that engines stored first.

In all, the walk looks at no more than 256 nodes for each node that is wanted. After one branch it
spends no more than a quarter of the looks that are left, and counts the other nodes as left out.

The walk releases the lock every 1,024 looks. It skips a block that was dropped meanwhile, and
what followed that block. A node that was shown stays as it was when the walk looked at it.

Complexity: O(nodes looked at × runs of each), and O(ranks) for each distinct set of holders.
Thread safety: a walk is one thread's own; it reads the tree only where `ask` lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from kvindex.index.keys import Namespace, lora_tag
from kvindex.index.prefixes import Holders, Prefixes, PrefixNode, made_node
from kvindex.index.tree import Block, Owner, RadixTree, Run
from kvindex.wire.rank import Rank

__all__ = ["PrefixWalk"]

LOOKS: Final = 256  # at children, for each node that is wanted
MOST_BLOCKS: Final = 8192  # of a node
_PIECE = 1024  # looks while the lock is held

_Told = TypeVar("_Told")
Ask = Callable[[Callable[[], _Told]], _Told]


class _Chain(NamedTuple):
    end: Block
    blocks: int
    holders: Holders
    salted: bool
    goes_on: bool


class _Counts:
    """The counts of blocks behind a node, or at the beginning of all prompts."""

    def __init__(self) -> None:
        self.children = self.left_out = self.left_out_blocks = 0


class _Found(NamedTuple):
    parent: int
    depth: int
    space: Namespace
    chain: _Chain
    counts: _Counts

    def node(self) -> PrefixNode:
        _, blocks, holders, salted, _ = self.chain
        after = self.counts.children, self.counts.left_out, self.counts.left_out_blocks
        return made_node((self.parent, self.depth, blocks, salted, *after), self.space, holders)


class PrefixWalk:
    """One walk.

    Args:
        tree: the tree to walk.
        rows: the ranks that count, each with its row.
        only_rows: leave out nodes that none of them holds, and all nodes below.
        max_nodes: how many nodes are wanted.
        min_blocks: leave out shorter nodes that nothing follows.
    """

    def __init__(
        self,
        tree: RadixTree,
        rows: Mapping[Rank, int],
        *,
        only_rows: bool,
        max_nodes: int,
        min_blocks: int,
    ) -> None:
        self._tree = tree
        self._row_of = rows
        self._only_rows = only_rows
        self._max_nodes = max_nodes
        self._min_blocks = min_blocks
        self._looks_left = LOOKS * max_nodes
        self._looked_at = 0
        self._start = _Counts()
        self._shown: list[_Found] = []
        self._waiting: list[tuple[int, int, int, _Found]] = []
        self._holders_of: dict[frozenset[Owner], Holders] = {}

    def run(self, ask: Ask[Any]) -> Prefixes:
        """Return the walk's result; `ask` runs a step while nothing changes."""
        for space in sorted(ask(self._tree.all_namespaces), key=_order):
            self._look(ask, -1, 0, space, ask(partial(self._beginnings, space)))
        while self._waiting and len(self._shown) < self._max_nodes:
            shown = heappop(self._waiting)[-1]
            parent = self._counts(shown.parent)
            parent.left_out -= 1
            parent.left_out_blocks -= shown.chain.blocks
            self._shown.append(shown)
            after = ask(partial(self._after, shown.chain.end))
            depth = shown.depth + shown.chain.blocks
            self._look(ask, len(self._shown) - 1, depth, shown.space, after)
        return Prefixes(
            nodes=tuple(found.node() for found in self._shown),
            ranks=tuple(self._row_of),
            children=self._start.children,
            left_out=self._start.left_out,
            left_out_blocks=self._start.left_out_blocks,
            looked_at=self._looked_at,
            unique_blocks=ask(lambda: self._tree.block_count),
        )

    def _counts(self, row: int) -> _Counts:
        return self._start if row < 0 else self._shown[row].counts

    def _beginnings(self, space: Namespace) -> tuple[int, list[Block]]:
        root = self._tree.find_root(space)
        return (0, []) if root is None else self._first_blocks(root)

    def _after(self, block: Block) -> tuple[int, list[Block]]:
        """Return how many blocks follow a block directly, and those that may be looked at."""
        if not _is_there(block):
            return 0, []
        following = block.depth - block.run.blocks[0].depth + 1
        if following == len(block.run.blocks):
            return self._first_blocks(block.run)
        return 1, block.run.blocks[following : following + min(1, self._looks_left // 4)]

    def _first_blocks(self, run: Run) -> tuple[int, list[Block]]:
        seen = islice(run.children.values(), self._looks_left // 4)
        return len(run.children), [child.blocks[0] for child in seen]

    def _look(
        self,
        ask: Ask[Any],
        row: int,
        depth: int,
        space: Namespace,
        following: tuple[int, list[Block]],
    ) -> None:
        """Look at the children of a row, and let those wait that may be shown."""
        count, blocks = following
        parent = self._counts(row)
        parent.children += count
        parent.left_out += count
        self._looks_left -= len(blocks)
        for start in range(0, len(blocks), _PIECE):
            for chain in ask(partial(self._follow_all, blocks[start : start + _PIECE])):
                self._looked_at += 1
                ranks = chain.holders.ranks
                if (
                    self._only_rows and not ranks
                ):  # held by other ranks only: not counted as left out
                    parent.children -= 1
                    parent.left_out -= 1
                    continue
                parent.left_out_blocks += chain.blocks
                if chain.goes_on or chain.blocks >= self._min_blocks:
                    child = _Found(row, depth, space, chain, _Counts())
                    heappush(self._waiting, (-ranks, -chain.blocks, self._looked_at, child))

    def _follow_all(self, blocks: Sequence[Block]) -> list[_Chain]:
        return [self._follow(block) for block in blocks if _is_there(block)]

    def _follow(self, first: Block) -> _Chain:
        """Return the blocks of one node, from its first on."""
        run, start, blocks = first.run, first.depth - first.run.blocks[0].depth, 0
        holders = self._holders(run.owners)
        while True:
            taken = min(len(run.blocks) - start, MOST_BLOCKS - blocks)
            blocks += taken
            end = run.blocks[start + taken - 1]
            if blocks == MOST_BLOCKS or len(run.children) != 1:
                break
            (child,) = run.children.values()
            if self._holders(child.owners) != holders:
                break
            run, start = child, 0
        goes_on = end is not run.blocks[-1] or bool(run.children)
        return _Chain(end, blocks, holders, run.salted, goes_on)

    def _holders(self, owners: frozenset[Owner]) -> Holders:
        """Return which ranks hold a node on which media, by its owners; groups are merged."""
        found = self._holders_of.get(owners)
        if found is None:
            rows: dict[str, int] = {}
            for owner in owners:
                row = self._row_of.get(owner.rank)
                if row is not None:
                    rows[owner.medium] = rows.get(owner.medium, 0) | 1 << row
            held, size = 0, -(-len(self._row_of) // 8)
            for bits in rows.values():
                held |= bits
            as_bytes = {medium: rows[medium].to_bytes(size, "little") for medium in sorted(rows)}
            found = self._holders_of[owners] = Holders(held.bit_count(), as_bytes)
        return found


def _order(space: Namespace) -> tuple[int, int, bytes]:
    return space.block_size, space.lookahead, lora_tag(space.lora)


def _is_there(block: Block) -> bool:
    """Whether a block that was found earlier is still in the tree."""
    parent = block.run.parent
    return parent is not None and parent.children.get(block.run.blocks[0].key) is block.run
