"""Ranks by what people write for them: `Rank("a", 0)`, "a/0", or "a" for worker a's ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from kvindex.wire.errors import UnknownRankError
from kvindex.wire.rank import Rank

RankName: TypeAlias = Rank | str
"""A `Rank`, or its text as `str(rank)` gives it, or the name of its worker."""


def find_ranks(name: object, known: Collection[Rank]) -> list[Rank]:
    """Return the known ranks that a name stands for, at least one, sorted.

    Raises:
        UnknownRankError: there is none, or the name is both a rank's text and a worker's name.

    Examples:
        >>> find_ranks("a", [Rank("a", 0), Rank("a", 1)])
        [Rank(worker='a', dp_rank=0), Rank(worker='a', dp_rank=1)]
    """
    if isinstance(name, tuple) and name in known:
        return [Rank(*name)]
    if not isinstance(name, str):
        raise UnknownRankError(name, known)
    # A worker may be called "a/1": then that text could also mean rank 1 of a.
    itself = [rank for rank in known if str(rank) == name]
    of_worker = sorted(rank for rank in known if rank.worker == name)
    if bool(itself) is bool(of_worker):
        raise UnknownRankError(name, itself + of_worker or known, ambiguous=bool(itself))
    return itself or of_worker


def find_rank(name: object, known: Collection[Rank]) -> Rank:
    """Return the known rank that a name stands for.

    Raises:
        UnknownRankError: there is none, or there are several.
    """
    ranks = find_ranks(name, known)
    if len(ranks) > 1:
        raise UnknownRankError(name, ranks, ambiguous=True)
    return ranks[0]


class RankNames:
    """The ranks that every name stands for: `find_ranks` for many names, each in O(1).

    Complexity: O(ranks × log ranks) to make. Thread safety: immutable.
    """

    def __init__(self, known: Collection[Rank]) -> None:
        self._known = known
        self._ranks: dict[object, list[Rank]] = {}
        for rank in sorted(known):
            self._ranks.setdefault(rank.worker, []).append(rank)
        for rank in known:
            self._ranks[rank] = [rank]
            text = str(rank)
            if self._ranks.setdefault(text, [rank]) != [rank]:
                del self._ranks[text]  # a worker has that name too: `find_ranks` reports it

    def find(self, name: RankName) -> list[Rank]:
        """Return the ranks that a name stands for, and raise, as `find_ranks` does."""
        ranks = self._ranks.get(name) if isinstance(name, (str, tuple)) else None
        return ranks or find_ranks(name, self._known)
