"""The native core's answer, in the form that `Match` needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvindex.index.hits import Hits, RankRows
from kvindex.index.match import RankMatch
from kvindex.wire._native import Answer
from kvindex.wire._native import RankRows as CoreRows
from kvindex.wire.rank import Rank


class Directory(NamedTuple):
    """The ranks by name and by number, and in order."""

    ids: Mapping[Rank, int]
    ranks: Mapping[int, Rank]
    order: tuple[Rank, ...]


class NativeContents:
    """The core's answer, with the ranks' names at the time of the question; see `Contents`."""

    __slots__ = ("_answer", "_directory")

    def __init__(self, answer: Answer, directory: Directory) -> None:
        self._answer = answer
        self._directory = directory

    def get(self, rank: Rank) -> RankMatch | None:
        rank_id = self._directory.ids.get(rank)
        values = None if rank_id is None else self._answer.get(rank_id)
        return None if values is None else _rank_match(rank, values)

    def nothing(self, rank: Rank) -> RankMatch:
        rank_id = self._directory.ids.get(rank)
        if rank_id is None:
            return RankMatch(rank=rank)
        block_size, lower_bound = self._answer.nothing(rank_id)
        return RankMatch(rank=rank, block_size=block_size, lower_bound=lower_bound)

    def first(self) -> RankMatch | None:
        values = self._answer.best
        if values is None:
            return None
        rank = self._directory.ranks.get(values[0])
        if rank is not None:
            return _rank_match(rank, values)
        return next(map(self.get, self.longest()), None)

    def longest(self) -> list[Rank]:
        # Missing: the rank became known while the core answered.
        names = map(self._directory.ranks.get, self._answer.longest())
        return [rank for rank in names if rank is not None]

    def hits(self, rows: RankRows, live: bytes | bytearray | None) -> Hits:
        ids = self._directory.ids
        numbered = rows._numbered
        if numbered is None or numbered[0] is not ids:
            numbered = rows._numbered = ids, CoreRows([ids.get(rank) for rank in rows])
        columns = rows._columns()
        self._answer.hits(numbered[1], live, *columns)
        return columns


_RankValues = tuple[int, int, int, int, dict[str, int], int, int, bool, bool]


def _rank_match(rank: Rank, values: _RankValues) -> RankMatch:
    _, blocks, tokens, block_size, by_medium, device_tokens, host_tokens, *bounds = values
    return RankMatch(
        rank=rank,
        blocks=blocks,
        tokens=tokens,
        block_size=block_size,
        by_medium=by_medium,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        upper_bound=bounds[0],
        lower_bound=bounds[1],
    )
