"""A request router for any Ray Serve deployment whose replicas run LLM engines.

A deployment names it in its `RequestRouterConfig`; docs/how-to/ray.md says how. Ray sends a copy of
the class, with all that its methods name here, to each process: so this module has no state.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import logging
import weakref
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvindex.client import connect
from kvindex.integrations.ray_replicas import Replicas, keep, routers
from kvindex.log_rate import LogRate
from kvindex.rank import Rank
from kvindex.routing import Booking, Router, Stage

__all__ = ["KVIndexRouter", "routers", "token_ids_of"]

logger = logging.getLogger(__name__)


def token_ids_of(request: PendingRequest) -> Any:
    """Return the `token_ids` of a request: its keyword argument, or its first argument's.

    Examples:
        >>> from types import SimpleNamespace
        >>> token_ids_of(SimpleNamespace(args=[{"token_ids": [1, 2]}], kwargs={}))
        [1, 2]
    """
    if "token_ids" in request.kwargs or not request.args:
        return request.kwargs.get("token_ids")
    asked = request.args[0]
    named = asked.get if isinstance(asked, Mapping) else lambda name: getattr(asked, name, None)
    return named("token_ids")


_Sent = tuple[Booking, asyncio.TimerHandle]


class KVIndexRouter(RequestRouter):
    """Sends each request where `kvindex.routing` says, and books it until Ray calls it completed.

    A request without token ids, or with ones that cannot be read, goes to the shortest queue; so
    does every request while no replica has told where its events are. `statistics` counts them.

    Thread safety: Ray calls it in one event loop; `statistics` may be called from any thread.
    """

    def initialize_state(
        self,
        *,
        policy: str = "affinity",
        tokens_of: str = "kvindex.integrations.ray_serve:token_ids_of",
        workers: Sequence[Mapping[str, Any]] = (),
        rank_argument: str = "",
        prefill_rate: float = 16_000.0,
        predict: float | None = None,
        expires_after: float = 600.0,
    ) -> None:
        """Take what `RequestRouterConfig(request_router_kwargs=...)` says.

        Args:
            policy: the name of one of `kvindex.routing.POLICIES`.
            tokens_of: "module:function". It takes Ray's `PendingRequest`. It returns the token ids,
                or arguments of `Router.reserve` (`{"token_ids": ..., "lora": ...}`), or None. It
                may be a coroutine function.
            workers: arguments of `Worker` for engines that run outside of the replicas.
            rank_argument: the keyword argument that takes the chosen `dp_rank`; "" for none.
            prefill_rate: tokens per second of one rank. Ray shows a router no first token, so the
                prefill counts as done when its tokens, and those before it, have taken their time.
            predict: as for `Router`.
            expires_after: as for `Router`. Ray does not tell what became of a `choose_replica` that
                was never dispatched: only this ends its booking.
        """
        module, _, name = tokens_of.partition(":")
        self._tokens_of = getattr(importlib.import_module(module), name)
        self._rank_argument = rank_argument
        self._prefill_rate = prefill_rate
        self.client = connect()
        self.router = Router(
            self.client,
            policy=policy,
            predict=predict,
            expires_after=expires_after,
            model=str(self._deployment_id),
        )
        self.engines = Replicas(self.client, workers)
        self.unrouted: Counter[str] = Counter()
        self._chosen: dict[asyncio.Future[RunningReplica], Booking] = {}
        self._sent: dict[tuple[ReplicaID, str], deque[_Sent]] = {}
        self._log_rate = LogRate()
        # Adding and removing wait for kvindex's thread, which an event loop must not.
        self._changes = ThreadPoolExecutor(1, "kvindex-ray-serve")
        weakref.finalize(self, self.client.close)  # Ray does not say when a router is done
        keep(self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the engines of the replicas that there are now."""
        super().update_replicas(replicas)
        self._changes.submit(self.engines.follow, replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then all others, of which Ray takes the shortest queue."""
        if pending_request is None:
            return [candidate_replicas]
        try:
            asked = self._tokens_of(pending_request)
            if inspect.isawaitable(asked):
                asked = await asked
            arguments = dict(asked) if isinstance(asked, Mapping) else {"token_ids": asked}
            # A replica that is known to be full would refuse it, whatever it holds.
            free = self.select_available_replicas(candidate_replicas) or candidate_replicas
            by_rank = self.engines.by_rank(free)
            if not arguments["token_ids"] or not by_rank:
                self.unrouted["no engine is known" if arguments["token_ids"] else "no tokens"] += 1
                return [candidate_replicas]
            booking = self._book(pending_request, arguments, by_rank)
        except Exception as error:  # whatever is wrong with a prompt, its request can be served
            self.unrouted[type(error).__name__] += 1
            if self._log_rate.allows(type(error).__name__):
                logger.exception("a request goes to the shortest queue instead")
            return [candidate_replicas]
        chosen = by_rank[booking.rank]
        if self._rank_argument:
            pending_request.kwargs[self._rank_argument] = booking.rank.dp_rank
        return [[chosen], [one for one in candidate_replicas if one is not chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Give back what the request was to this replica."""
        # After what is scheduled: the loop may not yet have told us that the request was sent.
        asyncio.get_running_loop().call_soon(self._finish, (replica_id, internal_request_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Give back what all requests were to this replica."""
        super().on_replica_actor_died(replica_id)
        for key in [key for key in self._sent if key[0] == replica_id]:
            for booking, timer in self._sent.pop(key):
                timer.cancel()
                booking.cancel()

    def statistics(self) -> dict[str, Any]:
        """Return `Router.statistics`, and `unrouted`: requests by why no policy chose for them."""
        return {**self.router.statistics(), "unrouted": dict(self.unrouted)}

    def _book(
        self, request: PendingRequest, arguments: dict[str, Any], among: Collection[Rank]
    ) -> Booking:
        before = self._chosen.pop(request.future, None)
        if before is not None:  # Ray asks again, since no replica could take the request
            before.cancel()
        else:
            request_id = request.metadata.internal_request_id
            request.future.add_done_callback(
                lambda future: self._follow(future, arguments, request_id)
            )
        ranks = None if all(rank in among for rank in self.router.ranks) else among
        booking = self._chosen[request.future] = self.router.reserve(ranks=ranks, **arguments)
        return booking

    def _follow(
        self, future: asyncio.Future[RunningReplica], arguments: dict[str, Any], request_id: str
    ) -> None:
        """Keep the booking where Ray has sent the request."""
        booking = self._chosen.pop(future, None)
        if booking is None:
            return
        if future.cancelled():
            booking.cancel()
            return
        replica = future.result()
        ranks = self.engines.ranks_of(replica)
        if booking.rank not in ranks:
            booking.cancel()
            if not ranks:
                return
            booking = self.router.reserve(ranks=ranks, **arguments)
        seconds = booking.work_ahead / self._prefill_rate
        timer = future.get_loop().call_later(seconds, booking.first_token)
        # A chain of calls has one id, and a rejected request comes back: each has its booking.
        sent = self._sent.setdefault((replica.replica_id, request_id), deque())
        sent.append((booking, timer))
        self._forget_expired()

    def _finish(self, key: tuple[ReplicaID, str]) -> None:
        sent = self._sent.get(key)
        if sent:
            booking, timer = sent.popleft()
            timer.cancel()
            booking.finish()
            if not sent:
                del self._sent[key]

    def _forget_expired(self) -> None:
        """Forget bookings that Ray told nothing of, from the oldest on."""
        for key in list(itertools.islice(self._sent, 2)):
            if all(booking.stage is Stage.EXPIRED for booking, _ in self._sent[key]):
                del self._sent[key]
