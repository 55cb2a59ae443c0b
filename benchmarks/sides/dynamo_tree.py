"""NVIDIA Dynamo's RadixTree, of the PyPI package ai-dynamo-runtime."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.workload import BLOCK_SIZE, DynamoEncoder


class DynamoTree:
    """A RadixTree, fed with JSON events, asked with hashes of the prompt's blocks."""

    answers = True
    batches = False

    def __init__(self) -> None:
        self._core: Any = importlib.import_module("dynamo._core")
        self._tree = self._core.RadixTree()

    def encoder(self) -> DynamoEncoder:
        """Return what writes JSON events; it hashes the tokens, which the clock never sees."""
        return DynamoEncoder(self._core.compute_block_hash_for_seq)

    def reset(self) -> None:
        """Begin again with an empty tree."""
        self._tree = self._core.RadixTree()

    def rank(self, number: int) -> int:
        """Return a worker id; every worker has the one dp_rank 0."""
        return number

    def applier(self) -> Callable[[Any, bytes], object]:
        """Return `RadixTree.apply_event`."""
        apply: Callable[[Any, bytes], object] = self._tree.apply_event
        return apply

    def matcher(self) -> Callable[[Any], Any]:
        """Return hash and find, as one call."""
        find, hashed = self._tree.find_matches, self._core.compute_block_hash_for_seq
        return lambda tokens: find(hashed(tokens, BLOCK_SIZE))

    def hasher(self) -> Callable[[Any], Any]:
        """Return the hash alone."""
        hashed = self._core.compute_block_hash_for_seq
        return lambda tokens: hashed(tokens, BLOCK_SIZE)

    def drain(self) -> None:
        """Ask once: the tree's own thread answers after all that it was given before."""
        self._tree.find_matches([0])

    def best(self, answer: Any) -> int:
        """Return the blocks of the best worker."""
        return max(answer.scores.values(), default=0)

    def depths(self, answer: Any) -> dict[int, int]:
        """Return the blocks by worker id."""
        return {worker: blocks for (worker, _), blocks in answer.scores.items()}
