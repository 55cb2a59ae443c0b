"""How a client's subscriber fills its index, and what a tap receives of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from kvindex.index import Fingerprints, Index, read_batch
from kvindex.subscribe import (
    RankAdded,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    StreamItem,
    Tap,
)
from kvindex.subscribe.watch import Lanes
from kvindex.wire.rank import Rank


def follow_item(index: Index, item: StreamItem) -> None:
    """Apply an item that is not a batch to an index: a rank that came, went, lost or restarted."""
    if isinstance(item, RankAdded):
        index.add(item.rank)
        index.configure(item.rank, item.cache)
    elif isinstance(item, RankRemoved):
        index.remove(item.rank)
    elif isinstance(item, RanksRenamed):
        index.rename(dict(item.names))
    elif isinstance(item, RankRestarted) or (isinstance(item, RankLost) and item.reset):
        index.tree(item.rank).clear()


class _Kept(msgspec.Struct, frozen=True, gc=False):
    """A decoded batch with its payload."""

    payload: bytes
    batch: Any
    ts: float
    data_parallel_rank: int | None


def _keep(payload: bytes) -> _Kept:
    batch = read_batch(payload)
    return _Kept(payload, batch, batch.ts, batch.data_parallel_rank)


def settings_of(index: Index, expire: Callable[[], None], tap: Tap | None) -> dict[str, Any]:
    """Return the settings of a subscriber that fills an index, and notifies a tap of each item."""
    if tap is None:
        return {
            "sink": partial(follow_item, index),
            "on_batch": index.apply,
            "decode": read_batch,
            "on_statuses": lambda _: expire(),
        }

    def on_item(item: StreamItem) -> None:
        follow_item(index, item)
        tap.item(item)

    def on_batch(rank: Rank, kept: _Kept) -> None:
        index.apply(rank, kept.batch)
        tap.batch(rank, kept.payload)

    def on_statuses(statuses: Sequence[RankStatus]) -> None:
        expire()
        tap.statuses(statuses)

    return {"sink": on_item, "on_batch": on_batch, "decode": _keep, "on_statuses": on_statuses}


def lanes_of(index: Index, fingerprints: Fingerprints, tap: Tap | None) -> Lanes | None:
    """Return lanes into an index; None if it is not the native one, or a user's own kind of it."""
    if fingerprints.core is None or index.backend != "native" or type(index) is not Index:
        return None
    core, number = index.lane_target()
    if tap is None:
        return Lanes(core, number, fingerprints.core)
    return Lanes(core, number, fingerprints.core, tap.batch, tap.patience)
