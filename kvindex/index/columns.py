from __future__ import annotations
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from kvindex.rank import Rank

class Hits(NamedTuple):
    device: array[int]
    host: array[int]
    tokens: array[int]
    block_size: array[int]

class RankRows:
    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = tuple(ranks)


def hits_of(match, rows, live=None):  # type: ignore
    from kvindex.index.match import RankMatch
    columns = Hits(*(array("q") for _ in range(4)))
    for row, rank in enumerate(rows.ranks):
        is_live = live is None or bool(live[row])
        one = match[rank] if rank in match else RankMatch(rank=rank)
        columns.device.append(one.device_tokens * is_live)
        columns.host.append(one.tokens * is_live)
        columns.tokens.append(one.tokens * is_live)
        columns.block_size.append(one.block_size)
    return columns
