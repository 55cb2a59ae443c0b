"""The ranks that a router chooses among: their rows, and their streams' states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

from kvindex.index import Index, RankRows
from kvindex.wire.errors import UnknownRankError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, RankNames

__all__ = ["Fleet", "Followed", "Source", "Standing"]


class Followed(Protocol):
    """An index whose ranks are followed: a `Client` or a `Replica`."""

    @property
    def index(self) -> Index:
        """The index that the events fill."""

    def check_open(self) -> None:
        """Raise ClosedError once it was closed."""

    def live_ranks(self) -> frozenset[Rank]:
        """Return the ranks that are live; the same object until they change."""

    def connected_ranks(self) -> frozenset[Rank]:
        """Return the ranks whose publisher is connected; the same object until they change."""


Source: TypeAlias = Index | Followed
"""What a router asks. All ranks of a bare index count as live."""


class Standing(NamedTuple):
    """The states of the ranks' streams at one moment.

    Attributes:
        live: the ranks that are live.
        connected: those whose publisher is connected.
    """

    live: frozenset[Rank]
    connected: frozenset[Rank]


class Fleet:
    """The ranks of a source in their order, each a row.

    Args:
        source: an index, or a follower with one.

    Attributes:
        ranks: the ranks by row, sorted.
        rows: the same, for `Match.hits`.
        live: a byte for each row: 0 if the rank is not live.
        connected: a byte for each row: 0 if its publisher is not connected; None if all are.

    Thread safety: a router calls it under its lock, but `standing` from any thread.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._followed = None if isinstance(source, Index) else source
        self._shown: Standing | None = None
        self.ranks: tuple[Rank, ...] = ()
        self.rows = RankRows(())
        self._row: dict[Rank, int] = {}
        self._names = RankNames(())
        self._named: tuple[Rank, ...] = ()  # of which these are the names
        self.live = b""
        self.connected: bytes | None = None

    @property
    def index(self) -> Index:
        """The present index; a replica has another index after each joining."""
        source = self._source
        return source if isinstance(source, Index) else source.index

    def check_open(self) -> None:
        """Raise ClosedError if the source was closed: its index is no longer updated."""
        if self._followed is not None:
            self._followed.check_open()

    def standing(self) -> Standing | None:
        """Return the streams' states now; None where they are not followed. O(1)."""
        if self._followed is None:
            return None
        return Standing(self._followed.live_ranks(), self._followed.connected_ranks())

    def follow(self, standing: Standing | None) -> None:
        """Update ranks and states; all of it or, interrupted, nothing.

        Complexity: O(1) while nothing has changed, since changed sets and tuples are made anew.
        """
        ranks = self.index.ranks
        if ranks is not self.ranks or not _same(standing, self._shown):
            self._show(ranks, standing)

    def _show(self, ranks: tuple[Rank, ...], standing: Standing | None) -> None:
        rows, row_of = self.rows, self._row
        if ranks is not self.ranks:
            rows, row_of = RankRows(ranks), {rank: row for row, rank in enumerate(ranks)}
        live, connected = bytes([1]) * len(ranks), None
        if standing is not None:
            live = bytes(rank in standing.live for rank in ranks)
            if not standing.connected.issuperset(ranks):
                connected = bytes(rank in standing.connected for rank in ranks)
        # No call from here on, so that no signal handler sees, or leaves, half of it.
        self.ranks, self.rows, self._row = ranks, rows, row_of
        self.live, self.connected, self._shown = live, connected, standing

    def named(self, names: Iterable[RankName] | RankName) -> set[Rank]:
        """Return the ranks that names stand for: "a/0" for one, "a" for all of worker a.

        Raises:
            UnknownRankError: one of them is not known.

        Complexity: O(names + ranks found), and O(ranks) once when the ranks have changed.
        """
        ranks = self.index.ranks
        if ranks is not self._named:
            self._names, self._named = RankNames(ranks), ranks
        find = self._names.find
        return {rank for name in _each(names) for rank in find(name)}

    def row(self, name: RankName) -> int:
        """Return the row of the one rank that a name stands for. O(1), as `named`.

        Raises:
            UnknownRankError: it is not known, or the name stands for several.
        """
        found = self.named([name])
        rank = next(iter(found))
        if len(found) > 1:
            raise UnknownRankError(name, sorted(found), ambiguous=True)
        if rank not in self._row:  # a rank that came a moment ago has no row yet
            raise UnknownRankError(name, self.ranks)
        return self._row[rank]

    def mask(self, names: Iterable[RankName] | RankName) -> bytearray:
        """Return a byte for each row: 1 if a name stands for its rank; else as `named`."""
        mask = bytearray(len(self.ranks))
        for rank in self.named(names):
            row = self._row.get(rank)  # a rank that came a moment ago has none yet
            if row is not None:
                mask[row] = 1
        return mask


def _each(names: Iterable[RankName] | RankName) -> Iterable[RankName]:
    return [names] if isinstance(names, (str, Rank)) else names  # a Rank is a tuple, too


def _same(one: Standing | None, other: Standing | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.live is other.live and one.connected is other.connected
