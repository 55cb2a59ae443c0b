"""The walk behind `Index.prefixes` over the Python tree: the readable specification.

A *node* is a chain of at most 8,192 blocks that has no branch and on which the same ranks hold the
same media. The walk starts with the first nodes of all prompts, and keeps those that it has looked
at in a queue. The walk removes the best one, shows it, and looks at the nodes that follow it,
until it has shown as many as are wanted. The best node is the one

1. that most ranks hold,
2. of equal ones, the longest,
3. of equal ones, the one that the walk looked at first.

So the walk shows every prefix that many ranks share before any that few hold, however large the
tree is. After a branch it looks at the oldest nodes first: those that engines stored first.

In all, the walk looks at no more than 256 nodes for each node that is wanted. After one branch it
spends no more than a quarter of the looks that are left, and counts the other nodes as left out.

Complexity: O(children of the nodes shown, and runs of the nodes looked at), and O(ranks) for each
distinct set of holders.
Thread safety: none; the index's lock owns the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Final, NamedTuple

from kvindex.index.keys import Namespace, lora_tag
from kvindex.index.prefixes import Holders, Prefixes, PrefixNode, made_node
from kvindex.index.reference.tree import Block, Owner, RadixTree
from kvindex.wire.rank import Rank

__all__ = ["PrefixWalk"]

LOOKS: Final = 256  # at children, for each node that is wanted
MOST_BLOCKS: Final = 8192  # of a node


class _Counts:
    """The counts of blocks behind a node, or at the beginning of all prompts."""

    def __init__(self) -> None:
        self.children = self.left_out = self.left_out_blocks = 0


class _Node(NamedTuple):
    """A node that the walk has looked at.

    Attributes:
        parent: row of the node before it.
        depth: blocks before it in its prompts.
        end: its last block.
        holders: which ranks hold it.
        counts: of what follows it.
    """

    parent: int
    depth: int
    end: Block
    holders: Holders
    counts: _Counts

    @property
    def blocks(self) -> int:
        return self.end.depth + 1 - self.depth

    def following(self) -> list[Block]:
        """Return the first blocks of the nodes that follow it, the oldest first."""
        run = self.end.run
        stop = self.end.depth + 1 - run.blocks[0].depth
        if stop < len(run.blocks):
            return [run.blocks[stop]]
        return [child.blocks[0] for child in run.children.values()]

    def shown(self) -> PrefixNode:
        run, counts = self.end.run, self.counts
        return made_node(
            (
                *(self.parent, self.depth, self.blocks, run.salted),
                *(counts.children, counts.left_out, counts.left_out_blocks),
            ),
            run.namespace,
            self.holders,
        )


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
        self._shown: list[_Node] = []
        self._queue: list[tuple[int, int, int, _Node]] = []  # the best first
        self._holders_of: dict[frozenset[Owner], Holders] = {}

    def run(self) -> Prefixes:
        """Return the walk's result."""
        start = _Counts()
        for namespace in sorted(self._tree.namespaces(), key=_order):
            root = self._tree.root(namespace)
            self._look(-1, start, [child.blocks[0] for child in root.children.values()])
        while self._queue and len(self._shown) < self._max_nodes:
            node = heappop(self._queue)[-1]
            before = start if node.parent < 0 else self._shown[node.parent].counts
            before.left_out -= 1
            before.left_out_blocks -= node.blocks
            self._shown.append(node)
            self._look(len(self._shown) - 1, node.counts, node.following())
        return Prefixes(
            nodes=tuple(node.shown() for node in self._shown),
            ranks=tuple(self._row_of),
            children=start.children,
            left_out=start.left_out,
            left_out_blocks=start.left_out_blocks,
            looked_at=self._looked_at,
            unique_blocks=self._tree.block_count,
        )

    def _look(self, row: int, counts: _Counts, following: list[Block]) -> None:
        """Look at what follows a row, and queue the nodes that may be shown."""
        counts.children += len(following)
        counts.left_out += len(following)
        looks = min(len(following), self._looks_left // 4)
        self._looks_left -= looks
        self._looked_at += looks
        number = self._looked_at - looks
        for first in following[:looks]:
            number += 1
            node = self._node(row, first)
            ranks = node.holders.ranks
            if self._only_rows and not ranks:  # held by other ranks only: not counted as left out
                counts.children -= 1
                counts.left_out -= 1
                continue
            counts.left_out_blocks += node.blocks
            if node.blocks >= self._min_blocks or node.following():
                heappush(self._queue, (-ranks, -node.blocks, number, node))

    def _node(self, row: int, first: Block) -> _Node:
        """Return the node that begins with a block: it ends where its holders or prompts part."""
        run = first.run
        holders = self._holders(run.owners)
        most = first.depth + MOST_BLOCKS
        while run.blocks[-1].depth + 1 < most and len(run.children) == 1:
            (child,) = run.children.values()
            if self._holders(child.owners) != holders:
                break
            run = child
        end = run.blocks[min(len(run.blocks), most - run.blocks[0].depth) - 1]
        return _Node(row, first.depth, end, holders, _Counts())

    def _holders(self, owners: frozenset[Owner]) -> Holders:
        """Return which ranks hold a node on which media, by its owners; groups are merged."""
        if owners not in self._holders_of:
            size = -(-len(self._row_of) // 8)
            bits: dict[str, int] = {}
            for owner in owners:
                if owner.rank in self._row_of:
                    bits[owner.medium] = bits.get(owner.medium, 0) | 1 << self._row_of[owner.rank]
            rows = {medium: bits[medium].to_bytes(size, "little") for medium in sorted(bits)}
            self._holders_of[owners] = Holders(_count(bits.values()), rows)
        return self._holders_of[owners]


def _count(rows: Iterable[int]) -> int:
    """Return how many ranks have a bit in any of these."""
    held = 0
    for bits in rows:
        held |= bits
    return held.bit_count()


def _order(space: Namespace) -> tuple[int, int, bytes]:
    return space.block_size, space.lookahead, lora_tag(space.lora)
