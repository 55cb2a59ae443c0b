"""A request router for any Ray Serve deployment whose replicas run LLM engines.

A deployment names it in its `RequestRouterConfig`; docs/how-to/ray.md says how. Ray sends a copy of
the class, with all that its methods name here, to each process: so this module has no state.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvindex.client import connect
from kvindex.routing import Router, reads_cache
from kvindex.routing.adapters.ray_replicas import Replicas, RequestBookings, keep, routers
from kvindex.wire.log_rate import LogRate

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
    body = request.args[0]
    default = body.get("token_ids") if isinstance(body, Mapping) else None
    return getattr(body, "token_ids", default)


class KVIndexRouter(RequestRouter):
    """Sends each request where `kvindex.routing` chooses, and books it until Ray completes it.

    A request without token ids, or with ones that cannot be read, goes to the shortest queue; so
    does every request while no replica has reported its engine. `statistics` counts them.

    Thread safety: Ray calls it in one event loop; `statistics` may be called from any thread.
    """

    def initialize_state(
        self,
        *,
        policy: str = "kvindex",
        tokens_of: str = "kvindex.routing.adapters.ray_serve:token_ids_of",
        workers: Sequence[Mapping[str, Any]] = (),
        rank_argument: str = "",
        prefill_rate: float = 16_000.0,
        predict: float | None = None,
        expires_after: float = 600.0,
    ) -> None:
        """Apply the settings of `RequestRouterConfig(request_router_kwargs=...)`.

        Args:
            policy: the name of one of `kvindex.routing.POLICIES`.
            tokens_of: "module:function", which receives Ray's `PendingRequest` and returns the
                token ids, or arguments of `Router.reserve` (`{"token_ids": ..., "lora": ...}`), or
                None, or an awaitable of them.
            workers: arguments of `Worker` for engines that run outside of the replicas.
            rank_argument: the keyword argument for the chosen `dp_rank`; "" for none.
            prefill_rate: tokens per second of one rank: see `RequestBookings`.
            predict: as for `Router`.
            expires_after: as for `Router`. Ray does not report the end of a `choose_replica` that
                was never dispatched: only the expiry ends its booking.
        """
        module, _, name = tokens_of.partition(":")
        self._tokens_of = getattr(importlib.import_module(module), name)
        self._rank_argument = rank_argument
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
        self._bookings = RequestBookings(self.router, prefill_rate, self.engines.ranks_of)
        self._log_rate = LogRate()
        # Adding and removing wait for kvindex's thread, which an event loop must not.
        self._changes = ThreadPoolExecutor(1, "kvindex-ray-serve")
        weakref.finalize(self, self.client.close)  # Ray does not report the end of a router
        keep(self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the engines of these replicas."""
        super().update_replicas(replicas)
        self._changes.submit(self.engines.follow, replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then all others, of which Ray chooses the shortest queue."""
        if pending_request is None:
            return [candidate_replicas]
        try:
            prompt = self._tokens_of(pending_request)
            if inspect.isawaitable(prompt):
                prompt = await prompt
            arguments = dict(prompt) if isinstance(prompt, Mapping) else {"token_ids": prompt}
            # They lie in the request's body; a call without one has them by name.
            body = pending_request.args[0] if pending_request.args else None
            options = body if isinstance(body, Mapping) else pending_request.kwargs
            arguments.setdefault("reads_cache", reads_cache(options))
            # A replica that is known to be full would refuse it, whatever its blocks.
            free = self.select_available_replicas(candidate_replicas) or candidate_replicas
            by_rank = self.engines.by_rank(free)
            if arguments["token_ids"] is None or not by_rank:
                why = "no tokens" if arguments["token_ids"] is None else "no engine is known"
                self.unrouted[why] += 1
                return [candidate_replicas]
            rank = self._bookings.book(pending_request, arguments, by_rank).rank
            chosen = by_rank[rank]
        except Exception as error:  # on any error in a prompt its request can be served
            self.unrouted[type(error).__name__] += 1
            if self._log_rate.allows(type(error).__name__):
                logger.exception("a request goes to the shortest queue instead")
            return [candidate_replicas]
        if self._rank_argument:
            pending_request.kwargs[self._rank_argument] = rank.dp_rank
        return [[chosen], [replica for replica in candidate_replicas if replica is not chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Release the request's load on this replica."""
        # After scheduled calls: the loop may not have reported yet which replica the request got.
        asyncio.get_running_loop().call_soon(self._bookings.end, replica_id, internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Release all requests' load on this replica."""
        super().on_replica_actor_died(replica_id)
        self._bookings.end_all(replica_id)

    def statistics(self) -> dict[str, Any]:
        """Return `Router.statistics`, and `unrouted`: requests that no policy routed, by reason."""
        return {**self.router.statistics(), "unrouted": dict(self.unrouted)}
