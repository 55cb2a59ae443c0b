"""A follower's connection to a pool, and why its log or snapshots may be of no use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from kvindex.replicas.nats.log import Log
from kvindex.replicas.nats.pool_snapshots import PoolSnapshots
from kvindex.wire.errors import NatsError
from kvindex.wire.nats import NatsPool, open_connection


class NewEpochError(NatsError):
    """Another relay writes, or this one has begun anew: the copy is of an epoch that is over."""


class TrimmedError(NatsError):
    """The next message is not in the log any more."""


class NoSnapshotError(NatsError):
    """No snapshot of the present epoch can be used."""


class Connected(NamedTuple):
    """A connection's log and snapshots, and how it is closed."""

    log: Log
    snapshots: PoolSnapshots
    close: Callable[[], Awaitable[None]]


async def connect(pool: NatsPool, on_change: Callable[[str], None]) -> Connected:
    """Return a new connection; raises as `open_connection`."""
    client = await open_connection(pool, "kvindex replica", on_change=on_change)
    return Connected(Log(client, pool), PoolSnapshots(client, pool), client.close)


Connect = Callable[[NatsPool, Callable[[str], None]], Coroutine[Any, Any, Connected]]
