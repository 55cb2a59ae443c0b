"""Finds the engines of a Ray Serve deployment's replicas, as the replicas report them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvindex.client import Client
from kvindex.subscribe import Worker
from kvindex.wire.errors import KVIndexError
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from ray.serve.request_router import ReplicaID, RunningReplica

logger = logging.getLogger(__name__)

routers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The `KVIndexRouter`s of this process, one for each handle that has sent a request."""


def keep(router: object) -> None:
    """List a router in `routers` for as long as Ray uses it."""
    routers.add(router)


class Replicas:
    """Follows the engines behind a deployment's replicas.

    A replica reports its engine in `record_routing_stats` or `record_replica_metadata`:
    `{"kvindex": {"endpoint": ..., "replay": ..., "dp_size": ...}}`, arguments of `Worker`, whose
    name is the replica's id. A replica whose engine runs elsewhere reports its rank instead:
    `{"kvindex": {"worker": "vllm-0", "dp_rank": 1}}`, or all ranks without a `dp_rank`. The report
    of Ray's own LLM servers (`kv_event_metadata`) is accepted as well.

    Args:
        client: subscribes to the engines.
        workers: arguments of `Worker`, for engines that replicas call by name.

    Thread safety: one thread calls `follow`, any thread the rest.
    """

    def __init__(self, client: Client, workers: Iterable[Mapping[str, Any]] = ()) -> None:
        self._client = client
        self._named = {options["name"]: Worker(**options) for options in workers}
        self._followed: dict[str, Worker] = {}
        self._ranks: dict[ReplicaID, frozenset[Rank]] = {}  # replaced, never changed

    def ranks_of(self, replica: RunningReplica) -> frozenset[Rank]:
        """Return the followed ranks behind a replica; none before it reports."""
        return self._ranks.get(replica.replica_id, frozenset())

    def by_rank(self, replicas: Iterable[RunningReplica]) -> dict[Rank, RunningReplica]:
        """Return which replica leads to each rank."""
        return {rank: replica for replica in replicas for rank in self.ranks_of(replica)}

    def follow(self, replicas: Iterable[RunningReplica]) -> None:
        """Subscribe to these replicas' engines, and to no others. Waits for kvindex's thread.

        Errors are logged: a replica whose engine cannot be followed gets requests by queue length.
        """
        wanted: dict[str, Worker] = {}
        ranks: dict[ReplicaID, frozenset[Rank]] = {}
        for replica in replicas:
            try:
                worker, dp_rank = self._engine_of(replica)
            except (KVIndexError, LookupError, TypeError, ValueError) as error:
                logger.error("%s reports no engine to follow: %r", replica.replica_id, error)
                continue
            if worker is not None:
                wanted[worker.name] = worker
                every = [publisher.dp_rank for publisher in worker.publishers()]
                numbers = every if dp_rank is None else [dp_rank]
                ranks[replica.replica_id] = frozenset(Rank(worker.name, n) for n in numbers)
        for name in [name for name, worker in self._followed.items() if wanted.get(name) != worker]:
            del self._followed[name]
            self._client.remove(name)
        for name in wanted.keys() - self._followed.keys():
            try:
                self._client.add(wanted[name])
                self._followed[name] = wanted[name]
            except KVIndexError:
                logger.exception("the engine %r cannot be followed", name)
        self._ranks = ranks

    def _engine_of(self, replica: RunningReplica) -> tuple[Worker | None, int | None]:
        """Return the worker behind a replica, and the rank that it leads to, None for all."""
        report = {**replica.replica_metadata, **replica.routing_stats}
        name = replica.replica_id.unique_id
        if ray := report.get("kv_event_metadata"):
            dp_rank, replay = ray["dp_rank"], ray.get("replay_endpoint")
            live = {dp_rank: ray["endpoint"]}
            return Worker(name, live, {dp_rank: replay} if replay else None), dp_rank
        engine = report.get("kvindex") or {}
        if not engine:
            return None, None
        if "worker" in engine:
            return self._named[engine["worker"]], engine.get("dp_rank")
        return Worker(name, **engine), None
