"""What the tasks need of an index, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.workload import Encoder


class Fed(Protocol):
    """What takes the events of a workload."""

    def encoder(self) -> Encoder:
        """Return what makes the bytes that `apply` takes."""

    def rank(self, number: int) -> Any:
        """Return what `apply` calls a rank."""

    def applier(self) -> Callable[[Any, bytes], object]:
        """Return the call that takes a rank and its bytes; it is timed where applying is."""


class Adapter(Fed, Protocol):
    """One index under measurement.

    Attributes:
        answers: whether it can be asked with tokens.
        batches: whether one call of `apply` takes several events.
    """

    answers: bool
    batches: bool

    def reset(self) -> None:
        """Begin again with an empty index."""

    def matcher(self) -> Callable[[Any], Any]:
        """Return the call that is timed: a prompt to an answer."""

    def drain(self) -> None:
        """Return when everything given to `apply` is in the index."""

    def best(self, answer: Any) -> int:
        """Return the blocks of the rank that holds most."""

    def depths(self, answer: Any) -> dict[int, int]:
        """Return the blocks of each rank that holds any."""


def create(name: str) -> Adapter:
    """Return the index of this name; only what it needs is imported."""
    if name == "kvindex":
        from benchmarks.sides.kvindex_index import KVIndex

        return KVIndex()
    if name == "dynamo":
        from benchmarks.sides.dynamo_tree import DynamoTree

        return DynamoTree()
    if name == "dict":
        from benchmarks.sides.plain_dict import PlainDict

        return PlainDict()
    if name == "dict by hash":
        from benchmarks.sides.hash_dict import HashDict

        return HashDict()
    raise ValueError(f"no side is called {name!r}")
