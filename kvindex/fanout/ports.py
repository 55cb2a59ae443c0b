"""Under which name each port's rank goes; the server and its replicas keep this alike."""

from __future__ import annotations

from kvindex.fanout.entries import Entry
from kvindex.rank import Rank
from kvindex.subscribe import RankAdded, RankRemoved, RanksRenamed, StreamItem

__all__ = ["follow_names"]


def follow_names(names: dict[Rank, Rank], item: StreamItem | Entry) -> None:
    """Update `names`, from the rank that a port tells to the one it is, by what happened."""
    if isinstance(item, RankAdded):
        names.setdefault(item.rank, item.rank)
    elif isinstance(item, RanksRenamed):
        renamed = dict(item.names)
        for port, rank in names.items():
            names[port] = renamed.get(rank, rank)
    elif isinstance(item, RankRemoved):
        for port in [port for port in names if port.worker == item.rank.worker]:
            del names[port]
