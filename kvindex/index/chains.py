"""The part of the tree that one rank needs, as chains of keys, and back.

A rank needs the blocks that it holds and all blocks before them, whoever holds those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from kvindex.index.keys import Namespace
from kvindex.index.rank_image import KEY_BYTES
from kvindex.index.tree import Block, RadixTree, Run

__all__ = ["ChainImage", "chain_images", "needed_runs", "restored_blocks"]

ChainImage: TypeAlias = "tuple[int, bytes]"
"""The position of the block before it (or -1 - the number of its namespace), and its keys."""


def needed_runs(blocks: Iterable[Block]) -> dict[Run, int]:
    """Return the runs that lead to these blocks, parents first, and how many blocks of each."""
    needed: dict[Run, int] = {}
    for block in blocks:
        run, count = block.run, block.depth - block.run.blocks[0].depth + 1
        while needed.get(run, 0) < count:
            needed[run] = count
            above = run.parent
            assert above is not None
            run, count = above, len(above.blocks)
    return dict(sorted(needed.items(), key=lambda item: item[0].blocks[0].depth))


def chain_images(
    runs: Mapping[Run, int], namespaces: Mapping[Namespace, int]
) -> tuple[list[ChainImage], dict[Block, int]]:
    """Return a chain for each run, and the position of each block."""
    chains: list[ChainImage] = []
    positions: dict[Block, int] = {}
    for run, count in runs.items():
        above = run.parent
        assert above is not None
        before = positions[above.blocks[-1]] if above.blocks else -1 - namespaces[run.namespace]
        blocks = run.blocks[:count]
        chains.append((before, b"".join(block.key for block in blocks)))
        positions.update(zip(blocks, range(len(positions), len(positions) + count), strict=True))
    return chains, positions


def restored_blocks(
    tree: RadixTree,
    chains: Iterable[ChainImage],
    salted: Collection[int],
    namespaces: Sequence[Namespace],
) -> list[Block]:
    """Put chains into a tree where they are missing; return their blocks by position.

    The caller must own the blocks that it needs, and then `settle` the tree.
    """
    blocks: list[Block] = []
    for number, (before, packed) in enumerate(chains):
        keys = [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]
        parent = blocks[before] if before >= 0 else None
        namespace = namespaces[-1 - before] if parent is None else parent.run.namespace
        blocks += tree.extend_keys(parent, namespace, keys, salted=number in salted)
    return blocks
