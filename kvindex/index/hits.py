"""An answer as columns of numbers, one row for each rank of a list, for routers' calculations."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank


class Hits(NamedTuple):
    """How many tokens of a prompt ranks hold: columns with one row for each rank.

    In each row `device` ≤ `host` ≤ `tokens`; they are 0 where the rank holds nothing, is not known
    or is not in the question.

    Attributes:
        device: tokens that the engine's device holds by itself (`RankMatch.device_tokens`).
        host: those that the device and the host hold together (`RankMatch.host_tokens`).
        tokens: those that all tiers hold together (`RankMatch.tokens`).
        block_size: tokens per block of the rank, whether the question named it or not; 0 while it
            has stored nothing yet, or is not known.
    """

    device: array[int]
    host: array[int]
    tokens: array[int]
    block_size: array[int]


class RankRows(Sequence[Rank]):
    """Ranks in a fixed order: the rows of `Match.hits`.

    Keep it as long as the ranks stay the same. The first `Match.hits` finds each rank once; later
    ones of the same index go on from there, until the index's ranks change.

    Args:
        ranks: the rank of each row, each once; they need not be known.

    Raises:
        ConfigurationError: a rank has two rows.

    Thread safety: any thread may use it.

    Examples:
        >>> rows = RankRows([Rank("b"), Rank("a")])
        >>> len(rows), rows[0], rows.index(Rank("a"))
        (2, Rank(worker='b', dp_rank=0), 1)
    """

    __slots__ = ("_numbered", "_ranks", "_zeros")

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._ranks = tuple(ranks)
        if len(set(self._ranks)) != len(self._ranks):
            twice = next(rank for rank in self._ranks if self._ranks.count(rank) > 1)
            raise ConfigurationError(f"{twice} has two rows: name each rank once")
        self._zeros = array("q", bytes(8 * len(self._ranks)))
        # Of the native index: the directory of ranks it used, and the rows there.
        self._numbered: tuple[object, Any] | None = None

    def _columns(self) -> Hits:
        """Return columns of zeros."""
        zeros = self._zeros
        return Hits(zeros[:], zeros[:], zeros[:], zeros[:])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ranks)

    @overload
    def __getitem__(self, row: int) -> Rank: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Rank, ...]: ...
    def __getitem__(self, row: int | slice) -> Rank | tuple[Rank, ...]:
        """Return the rank of a row, or those of several."""
        return self._ranks[row]

    def __iter__(self) -> Iterator[Rank]:
        """Iterate over the ranks by row."""
        return iter(self._ranks)

    def __repr__(self) -> str:
        return f"RankRows({list(self._ranks)!r})"
