"""The engines of a Ray Serve deployment's replicas, and the requests that are booked there."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from kvindex.client import Client
from kvindex.routing import Booking, Router, Stage
from kvindex.subscribe import Worker
from kvindex.wire.errors import KVIndexError
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica


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
        # Before any is added: an engine that has moved leaves its name to its new address.
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


# Bookings -----------------------------------------------------------------------------------------


_Sent: TypeAlias = tuple[Booking, asyncio.TimerHandle]


class RequestBookings:
    """Keeps each request's booking where Ray sends it, until Ray reports its end.

    A request is booked when a replica is chosen. Its future then shows which replica Ray chose, or
    that the request was abandoned. From there on, Ray names a request by its replica and its id.

    Args:
        router: books.
        prefill_rate: tokens per second that a rank prefills. Ray shows no first token: the prefill
            counts as done when its tokens, and those before it, have taken their time.
        ranks_of: returns the ranks behind a replica.

    Thread safety: of Ray's event loop for the router.
    """

    def __init__(
        self,
        router: Router,
        prefill_rate: float,
        ranks_of: Callable[[RunningReplica], Collection[Rank]],
    ) -> None:
        self.prefill_rate = prefill_rate
        self._router = router
        self._ranks_of = ranks_of
        self._chosen: dict[asyncio.Future[RunningReplica], Booking] = {}
        self._sent: dict[tuple[ReplicaID, str], deque[_Sent]] = {}

    def book(
        self, request: PendingRequest, prompt: Mapping[str, Any], among: Collection[Rank]
    ) -> Booking:
        """Choose among known ranks for a request of Ray, and book it there.

        Raises: as `Router.reserve`, whose arguments `prompt` has.
        """
        before = self._chosen.pop(request.future, None)
        if before is not None:  # Ray asks again, since no replica could take the request
            before.cancel()
        else:
            request_id = request.metadata.internal_request_id
            request.future.add_done_callback(lambda done: self._place(done, prompt, request_id))
        # None spares the router a mask over all ranks.
        ranks = None if all(rank in among for rank in self._router.ranks) else among
        booking = self._chosen[request.future] = self._router.reserve(ranks=ranks, **prompt)
        return booking

    def end(self, replica_id: ReplicaID, request_id: str) -> None:
        """Release the oldest booking that a request has with a replica, if it has one."""
        sent = self._sent.get((replica_id, request_id))
        if sent:
            booking, timer = sent.popleft()
            timer.cancel()
            booking.finish()
            if not sent:
                del self._sent[replica_id, request_id]

    def end_all(self, replica_id: ReplicaID) -> None:
        """Release all bookings with a replica, which died."""
        for key in [key for key in self._sent if key[0] == replica_id]:
            for booking, timer in self._sent.pop(key):
                timer.cancel()
                booking.cancel()

    def _place(
        self, future: asyncio.Future[RunningReplica], prompt: Mapping[str, Any], request_id: str
    ) -> None:
        if (booking := self._chosen.pop(future, None)) is None:
            return
        if future.cancelled():
            booking.cancel()
            return
        replica = future.result()
        ranks = self._ranks_of(replica)
        if booking.rank not in ranks:  # Ray took another replica
            booking.cancel()
            if not ranks:
                return
            booking = self._router.reserve(ranks=ranks, **prompt)
        seconds = booking.decision.work_ahead / self.prefill_rate
        timer = future.get_loop().call_later(seconds, booking.first_token)
        # A chain of calls has one id, and a request that was refused may come back to its replica.
        sent = self._sent.setdefault((replica.replica_id, request_id), deque())
        sent.append((booking, timer))
        # Of some requests Ray reports no end. Two for each new one: they never get ahead.
        for key in list(islice(self._sent, 2)):
            if all(booking.stage is Stage.EXPIRED for booking, _ in self._sent[key]):
                del self._sent[key]
