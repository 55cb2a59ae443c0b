"""A fleet of ranks that serve requests: what each rank holds, and what it publishes of that."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.workload.requests import Request
from benchmarks.workload.segments import BLOCK_SIZE, Node, Segment, segment_tokens


class Change(NamedTuple):
    """A node that a rank has stored, or removed."""

    rank: int
    node: Node
    stored: bool


class Prompt(NamedTuple):
    """A query, and the answer that is right.

    Attributes:
        tokens: the prompt's tokens.
        depths: for each rank that holds any of it, the leading blocks that are resident there.
    """

    tokens: npt.NDArray[np.uint32]
    depths: dict[int, int]


class Fleet:
    """Ranks with prefix caches behind a router.

    The router sends a request to a rank that holds its conversation, or else to any: a beginning
    that is shared by all conversations says nothing of where to go.

    Args:
        ranks: how many.
        seed: of the router.
        sticky: how often a conversation stays where it was, 0 … 1 (0: a random router).
        capacity: blocks that each rank can hold; the least recently used go first. None: no limit.

    Attributes:
        entries: resident (rank, block) pairs.
        unique_blocks: different blocks among them.
    """

    def __init__(
        self, ranks: int, *, seed: int, sticky: float = 0.8, capacity: int | None = None
    ) -> None:
        self.ranks = ranks
        self.entries = 0
        self.unique_blocks = 0
        self._rng = random.Random(seed)
        self._sticky = sticky
        self._capacity = capacity
        self._nodes: dict[tuple[Node | None, Segment], Node] = {}
        # For each rank its nodes, least recently used first: a node's ancestors come after it.
        self._resident: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(ranks)]
        self._blocks = [0] * ranks

    def serve(self, request: Request) -> Iterator[Change]:
        """Serve a request on some rank and yield what that changes there, in order."""
        answer = () if request.answer is None else (request.answer,)
        path = self._path((*request.prompt, *answer))
        yield from self.place(self._route(path), path)

    def place(self, rank: int, path: list[Node]) -> Iterator[Change]:
        """Make a path resident on a rank and yield what that changes there, in order."""
        missing = [node for node in path if rank not in node.holders]
        resident = self._resident[rank]
        for node in reversed(path):
            resident[node] = None
            resident.move_to_end(node)
        for node in missing:
            self._count(rank, node, 1)
            yield Change(rank, node, stored=True)
        while self._capacity is not None and self._blocks[rank] > self._capacity:
            node, _ = resident.popitem(last=False)
            self._count(rank, node, -1)
            yield Change(rank, node, stored=False)

    def place_segments(self, rank: int, segments: tuple[Segment, ...]) -> Iterator[Change]:
        """Make segments resident on a rank."""
        yield from self.place(rank, self._path(segments))

    def place_everywhere(self, segments: tuple[Segment, ...]) -> Iterator[Change]:
        """Make segments resident on every rank."""
        for rank in range(self.ranks):
            yield from self.place_segments(rank, segments)

    def empty(self) -> Iterator[Change]:
        """Remove everything, rank by rank, least recently used first."""
        for rank, resident in enumerate(self._resident):
            while resident:
                node, _ = resident.popitem(last=False)
                self._count(rank, node, -1)
                yield Change(rank, node, stored=False)

    def prompt(self, segments: tuple[Segment, ...], *, cut: int | None = None) -> Prompt:
        """Return segments as a query, cut to at most `cut` tokens."""
        tokens = np.concatenate([segment_tokens(segment) for segment in segments])[:cut]
        longest = len(tokens) // BLOCK_SIZE
        depths: dict[int, int] = {}
        holders = set(range(self.ranks))
        for node in self._known(segments):
            holders &= node.holders
            depth = min(node.depth + node.segment.blocks, longest)
            depths.update(dict.fromkeys(holders, depth))
        return Prompt(tokens, depths)

    def _known(self, segments: tuple[Segment, ...]) -> Iterator[Node]:
        """The nodes of a prompt, as far as any rank has ever had them."""
        node: Node | None = None
        for segment in segments:
            node = self._nodes.get((node, segment))
            if node is None:
                return
            yield node

    def _path(self, segments: tuple[Segment, ...]) -> list[Node]:
        path: list[Node] = []
        node: Node | None = None
        for segment in segments:
            key = (node, segment)
            child = self._nodes.get(key)
            if child is None:
                child = self._nodes[key] = Node(segment, node)
            path.append(child)
            node = child
        return path

    def _route(self, path: list[Node]) -> int:
        held = [node for node in path[1:] if node.holders]
        if held and self._rng.random() < self._sticky:
            return self._rng.choice(sorted(held[-1].holders))
        return self._rng.randrange(self.ranks)

    def _count(self, rank: int, node: Node, sign: int) -> None:
        if sign > 0:
            self.unique_blocks += 0 if node.holders else node.segment.blocks
            node.holders.add(rank)
        else:
            node.holders.remove(rank)
            self.unique_blocks -= 0 if node.holders else node.segment.blocks
        self.entries += sign * node.segment.blocks
        self._blocks[rank] += sign * node.segment.blocks
