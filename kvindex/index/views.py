"""Live views of what one rank holds, and its resident blocks as values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec

from kvindex.index.keys import Lora
from kvindex.wire import BlockHash
from kvindex.wire.rank import Rank


class ResidentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One resident block of a rank, as `TreeView.walk` yields it.

    Attributes:
        block_hash: the engine's label (ints modulo 2**64).
        depth: blocks before it in its prompt.
        medium: where it is.
        group_idx: KV cache group (0 when the engine names none).
        copies: physical copies there.
        block_size: tokens per block.
        lora: LoRA name or id, or None.
    """

    block_hash: BlockHash
    depth: int
    medium: str
    group_idx: int
    copies: int
    block_size: int
    lora: str | int | None


class Viewed(ABC):
    """The part of an index that views use; each method raises UnknownRankError."""

    @abstractmethod
    def _view_size(self, rank: Rank) -> int: ...

    @abstractmethod
    def _view_clear(self, rank: Rank) -> None: ...

    @abstractmethod
    def _view_statistics(self, rank: Rank) -> dict[str, Any]: ...

    @abstractmethod
    def _view_origins(self, rank: Rank) -> tuple[list[Lora], list[tuple[Lora, bytes]]]:
        """Return the LoRAs of resident blocks, and the last salted starts of prompts."""

    @abstractmethod
    def _view_walk(self, rank: Rank) -> Iterator[ResidentBlock]: ...


class TreeView:
    """A live view of what one rank holds.

    Thread safety: as the index.

    Raises:
        UnknownRankError: by every method once the rank was removed from the index.
    """

    __slots__ = ("_index", "rank")

    def __init__(self, index: Viewed, rank: Rank) -> None:
        self._index = index
        self.rank = rank

    def __len__(self) -> int:
        """Return the number of resident blocks of the rank, each counted once. O(1)."""
        return self._index._view_size(self.rank)

    def clear(self) -> None:
        """Drop everything the rank holds and all that was learned from its events; it stays known.

        Settings of `Index.configure` stay. Complexity: O(blocks of the rank).
        """
        self._index._view_clear(self.rank)

    def statistics(self) -> dict[str, Any]:
        """Return the rank's part of `Index.statistics()["ranks"]`."""
        return self._index._view_statistics(self.rank)

    def walk(self) -> Iterator[ResidentBlock]:
        """Iterate over a snapshot of the resident blocks, once for each medium and group.

        Complexity: O(blocks of the rank).
        """
        return self._index._view_walk(self.rank)
