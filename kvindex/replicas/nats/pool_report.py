"""How a pool stands in NATS, for people and monitoring."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from kvindex.replicas.nats.log import Log, NoStreamError, ask
from kvindex.replicas.nats.log_writer import SILENCE
from kvindex.replicas.nats.snapshots import PoolSnapshots, position_and_epoch
from kvindex.wire.errors import UNREADABLE, NatsError
from kvindex.wire.nats import NatsOptions, NatsPool, open_connection, parse_pool

if TYPE_CHECKING:
    from typing_extensions import Unpack


def pool_report(
    url: str, *, pool: str | None = None, timeout: float = 5.0, **options: Unpack[NatsOptions]
) -> dict[str, Any]:
    """Return how a pool stands, as plain JSON-ready values; a replica's rights are enough.

    `epoch`: of the last message. `is_written`: whether it is less than 3 s old. `age`: seconds, by
    the server's clock; None if the log is empty. `head`, `first`, `messages`, `bytes`: of the log.
    `consumers`: that read it. `replicas`, `storage`, `max_bytes`: of the stream. `leader`, `peers`:
    of a cluster; `lag` counts what a peer has not stored yet. `snapshots`: the newest first;
    `behind`: messages that a replica which joins now has to read.

    Args:
        url: "nats://HOST[:PORT][,HOST…][/POOL]".
        pool: the pool's name, unless the URL has it.
        timeout: seconds until a server must accept the connection.
        options: `NatsOptions`.

    Raises:
        ConfigurationError: it is no such URL, or options cannot be used.
        NatsError: NATS does not answer, or there is no such pool.
    """
    return asyncio.run(_report(parse_pool(url, pool, options), timeout))


async def _report(pool: NatsPool, timeout: float) -> dict[str, Any]:
    client = await open_connection(pool, "kvindex status", timeout=timeout)
    try:
        try:
            head = await Log(client, pool).head()
        except NoStreamError:
            raise NatsError(f"there is no pool at {pool}: no relay has written to it") from None
        # Asked by hand: nats-py leaves out the times, and what its release does not know.
        call = client.request(f"$JS.API.STREAM.INFO.{pool.stream}", b"", timeout=timeout)
        answer = await ask(pool, call)
        try:
            stream = _stream(msgspec.json.decode(answer.data))
        except (*UNREADABLE, LookupError, TypeError, AttributeError) as error:
            raise NatsError(f"{pool}: what it answers about the stream cannot be read") from error
        store, snapshots = PoolSnapshots(client, pool), []
        with suppress(NoStreamError):  # there is no bucket, or one was deleted just now
            for name in await store.newest():
                position, epoch = position_and_epoch(name) or (0, "")
                size = await store.size(name)
                behind = max(stream["head"] - position + 1, 0)
                row = {"name": name, "epoch": epoch, "position": position, "bytes": size}
                snapshots.append({**row, "behind": behind})
    finally:
        await client.close()
    return {"pool": pool.name, "epoch": head.epoch, **stream, "snapshots": snapshots}


def _stream(info: Any) -> dict[str, Any]:
    """Return the report's lines on the stream, of what nats-server answers about it."""
    state, config, cluster = info["state"], info["config"], info.get("cluster") or {}
    age, now, last = None, info.get("ts"), state.get("last_ts")
    if state["last_seq"] and now and last:
        age = (msgspec.convert(now, datetime) - msgspec.convert(last, datetime)).total_seconds()
    peer_defaults = {"name": "", "current": False, "offline": False, "lag": 0}
    return {
        "is_written": age is not None and age < SILENCE,
        "age": age,
        "head": state["last_seq"],
        "first": state["first_seq"],
        "messages": state["messages"],
        "bytes": state["bytes"],
        "consumers": state["consumer_count"],
        "replicas": config["num_replicas"],
        "storage": config["storage"],
        "max_bytes": config["max_bytes"],
        "leader": cluster.get("leader", ""),
        "peers": [
            {name: peer.get(name, default) for name, default in peer_defaults.items()}
            for peer in cluster.get("replicas") or ()
        ],
    }
