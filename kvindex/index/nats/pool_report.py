"""How a pool stands in NATS, for people and monitoring."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kvindex.index.nats.log import Log, NoStreamError, ask
from kvindex.index.nats.log_writer import SILENCE
from kvindex.index.nats.pool_snapshots import PoolSnapshots, position_and_epoch
from kvindex.wire.errors import UNREADABLE, KVIndexError, NatsError
from kvindex.wire.nats import NatsOptions, NatsPool, open_connection, parse_pool

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient
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
    parsed = parse_pool(url, pool, options)
    try:
        return asyncio.run(_report(parsed, timeout))
    except KVIndexError:  # some are ValueErrors, too
        raise
    except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
        raise NatsError(f"{parsed}: what it answers about the stream cannot be read") from error


async def _report(pool: NatsPool, timeout: float) -> dict[str, Any]:
    client = await open_connection(pool, "kvindex status", timeout=timeout)
    try:
        try:
            head = await Log(client, pool).head()
        except NoStreamError:
            raise NatsError(f"there is no pool at {pool}: no relay has written to it") from None
        info = await _info(client, pool, timeout)
        snapshots = await _snapshots(PoolSnapshots(client, pool), int(info["state"]["last_seq"]))
    finally:
        await client.close()
    state, config, cluster = info["state"], info["config"], info.get("cluster") or {}
    age = None
    if state["last_seq"]:  # nats-py leaves out the times
        now, last = (msgspec.convert(of, datetime) for of in (info["ts"], state["last_ts"]))
        age = (now - last).total_seconds()
    peers = cluster.get("replicas") or ()
    return {
        "pool": pool.name,
        "epoch": head.epoch,
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
            {
                "name": peer.get("name", ""),
                "current": peer.get("current", False),
                "offline": peer.get("offline", False),
                "lag": peer.get("lag", 0),
            }
            for peer in peers
        ],
        "snapshots": snapshots,
    }


async def _info(client: NatsClient, pool: NatsPool, timeout: float) -> dict[str, Any]:
    """Return what nats-server answers about the stream."""
    call = client.request(f"$JS.API.STREAM.INFO.{pool.stream}", b"", timeout=timeout)
    answer = await ask(pool, call)
    return cast("dict[str, Any]", msgspec.json.decode(answer.data, type=dict))


async def _snapshots(store: PoolSnapshots, head: int) -> list[dict[str, Any]]:
    rows = []
    try:
        for name in await store.newest():
            position, epoch = position_and_epoch(name) or (0, "")
            size = await store.size(name)
            behind = max(head - position + 1, 0)
            row = {"name": name, "epoch": epoch, "position": position, "bytes": size}
            rows.append({**row, "behind": behind})
    except NoStreamError:  # there is no bucket, or one was deleted just now
        pass
    return rows
