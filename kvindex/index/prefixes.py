"""Which ranks hold which prefixes: the result of `Index.prefixes`, and checks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvindex.index.keys import Namespace
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that follow one another: no prompt leaves in between, and the same ranks hold all.

    Attributes:
        parent: row of the node before it in `Prefixes.nodes`, always a smaller one; -1 where
            prompts begin.
        depth: blocks before it in its prompts.
        blocks: blocks of its own, at most 8,192: a longer chain continues in its only child.
        block_size: tokens per block. Of ranks whose groups have several block sizes, this is
            what divides all of them, and a block is held where an engine's block ends.
        lora: LoRA name or id, or None.
        lookahead: tokens after a block that its identity covers too (EAGLE), 0 for most engines.
        salted: whether its prompts start under a salt, or other extra keys.
        ranks: how many ranks hold it, on any medium; 0 is a hole, which keeps the place of later
            nodes.
        by_medium: how many ranks hold it on each medium. A rank may hold it on several.
        rows: which ranks, on each medium: bit `r % 8` of byte `r // 8` stands for
            `Prefixes.ranks[r]`. `Prefixes.holders` reads it.
        children: nodes that follow it directly.
        left_out: how many of these are not in `Prefixes.nodes`.
        left_out_blocks: their own blocks, as far as they were looked at, without later nodes.
    """

    parent: int
    depth: int
    blocks: int
    block_size: int
    lora: str | int | None
    lookahead: int
    salted: bool
    ranks: int
    by_medium: Mapping[str, int]
    rows: Mapping[str, bytes]
    children: int
    left_out: int
    left_out_blocks: int


class Prefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranks hold which prefixes, the most widely held first; `Index.prefixes` makes it.

    Attributes:
        nodes: in the order of the walk, each after its parent.
        ranks: the ranks that the nodes' `rows` stand for.
        children: nodes that begin prompts, in all namespaces that were looked at.
        left_out: how many of these are not in `nodes`.
        left_out_blocks: their own blocks, as far as they were looked at.
        looked_at: nodes that were looked at, shown or not: the cost of the walk.
        unique_blocks: blocks in the whole tree, each counted once however many ranks hold it.

    Thread safety: immutable.
    """

    nodes: tuple[PrefixNode, ...]
    ranks: tuple[Rank, ...]
    children: int
    left_out: int
    left_out_blocks: int
    looked_at: int
    unique_blocks: int

    def holders(self, node: PrefixNode, medium: str | None = None) -> tuple[Rank, ...]:
        """Return the ranks that hold a node, on one medium ("GPU") or on any. O(ranks)."""
        held = 0
        for name, rows in node.rows.items():
            if medium in (None, name):
                held |= int.from_bytes(rows, "little")
        return tuple(rank for row, rank in enumerate(self.ranks) if held >> row & 1)


def prefix_node(
    numbers: Sequence[Any], namespace: Namespace, holders: tuple[int, Mapping[str, bytes]]
) -> PrefixNode:
    """Return a node from the core's numbers, its namespace, and its ranks: how many, and which."""
    parent, depth, blocks, _, _, salted, children, left_out, left_out_blocks = numbers
    ranks, rows = holders
    return PrefixNode(
        parent=parent,
        depth=depth,
        blocks=blocks,
        block_size=namespace.block_size,
        lora=namespace.lora,
        lookahead=namespace.lookahead,
        salted=salted,
        ranks=ranks,
        by_medium={name: int.from_bytes(bits, "little").bit_count() for name, bits in rows.items()},
        rows=rows,
        children=children,
        left_out=left_out,
        left_out_blocks=left_out_blocks,
    )


def walk_limit(name: str, value: object) -> int:
    """Return a limit of a walk, capped; reject one that could show nothing."""
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be an int from 1 on, not {value!r}")
    return min(value, 2**32 - 1)  # more than any index has
