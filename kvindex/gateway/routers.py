"""The engines of a gateway and the routers of their models: what decides where requests go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from kvindex import Client, ConfigurationError
from kvindex.gateway.choosing import Routing
from kvindex.gateway.metrics import exposition
from kvindex.gateway.models import Models, Serving
from kvindex.gateway.settings import GatewaySettings
from kvindex.replicas import Replica, nats
from kvindex.routing import Capacity, Router, SharedLoad
from kvindex.subscribe.discovery import (
    Discovery,
    DiscoveryOptions,
    Engine,
    Engines,
    split_engines,
)
from kvindex.wire.nats import NatsPool

_NO_ENGINE: Final = "no engine is named: give the URL of one, http://HOST:PORT"


class Routers:
    """Follows engines, and routes requests to them with one router for each model.

    Args:
        engines: URLs of engines, or sources of `kvindex.subscribe.discovery`.
        settings: limits and the policy of the routers.
        engine_token: returns the engines' API key.

    Attributes:
        source: the index and the states of its ranks: a client, or a replica of a pool's relay.
        models: which engines serve which model.
        routing: reserves ranks.

    Raises:
        ConfigurationError: a setting cannot work, or no engine is named.

    Owner: one event loop; `found` and `close`: the thread that made it.
    """

    def __init__(
        self,
        engines: Engines,
        settings: GatewaySettings,
        engine_token: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._policy = settings.policy
        limits = {"open_requests": settings.open_requests, "queued_tokens": settings.queued_tokens}
        has_limits = any(limit is not None for limit in limits.values())
        self._filters = [Capacity(**limits)] if has_limits else []
        self._pool = settings.pool
        self._boards: dict[str, SharedLoad] = {}
        options = DiscoveryOptions(token=engine_token)
        with ExitStack() as opened:
            self.source, self._discovery = (
                self._subscribed(engines, options, opened)
                if self._pool is None
                else self._followed(self._pool, engines, options, opened)
            )
            self.models = Models(self.source, self._discovery.engines, self._new_router)
            self.routing = Routing(self.models, settings.waiting)
            self._opened = opened.pop_all()

    def _subscribed(
        self, engines: Engines, options: DiscoveryOptions, opened: ExitStack
    ) -> tuple[Client | Replica, Discovery]:
        """Subscribe to the engines."""
        client = opened.enter_context(Client(engines, discovery=options))
        if client.discovery is None:
            raise ConfigurationError(_NO_ENGINE)
        return client, client.discovery

    def _followed(
        self, pool: NatsPool, engines: Engines, options: DiscoveryOptions, opened: ExitStack
    ) -> tuple[Client | Replica, Discovery]:
        """Follow a pool's relay; of the engines only their HTTP servers are asked."""
        _, sources = split_engines(engines)
        if not sources:
            raise ConfigurationError(_NO_ENGINE)
        replica = nats.follow(",".join(pool.servers), pool.name, **pool.options)
        opened.enter_context(replica)
        discovery = Discovery(sources, _leave_to_the_relay, _leave_to_the_relay, options)
        return replica, opened.enter_context(discovery)

    def _new_router(self, model: str) -> Router:
        pool, loads = self._pool, None
        if pool is not None:  # a board for each router: they differ in the ranks that they use
            loads = SharedLoad(",".join(pool.servers), pool.name, **pool.options)
            self._boards[model] = self._opened.enter_context(loads)
        return Router(
            self.source, model=model, policy=self._policy, filters=self._filters, loads=loads
        )

    def close(self) -> None:
        """Stop following the engines. Idempotent."""
        self._opened.close()

    def found(self, timeout: float) -> dict[str, str]:
        """Wait until all engines are found, or for so long; return those that are missing, why."""
        return self._discovery.wait_found(timeout)

    def missing(self) -> dict[str, str]:
        """Return the engines that are not found yet, and why."""
        return self._discovery.missing()

    def servings(self) -> list[Serving]:
        """Return the engines that are found."""
        return list(self.models.servings().values())

    def __enter__(self) -> Routers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def statistics(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return all counters.

        Those of `own`, and `waiting` and `shed`: requests that wait for a rank with room, and those
        that found none, by reason; `routers`: as each says; `shared_load`: of a pool, by model.
        """
        routing = self.routing.statistics()
        shed: Counter[str] = Counter()
        for waiting in routing["waiting"].values():
            shed.update(waiting["shed"])
        return {
            **own,
            "waiting": sum(model["waiting"] for model in routing["waiting"].values()),
            "shed": dict(shed),
            "routers": routing["routers"],
            "shared_load": {model: board.statistics() for model, board in self._boards.items()},
        }

    async def metrics(self, own: Mapping[str, Any]) -> bytes:
        """Return counters as Prometheus series, and those of ranks and routers."""
        routers = list(self.models.routers.values())
        return await asyncio.to_thread(exposition, self.source, routers, self.statistics(own))

    def drain(self, worker: str, is_drained: bool) -> None:
        """Send an engine no more requests, or again. Raises UnknownRankError."""
        if is_drained:
            self.routing.drain(worker)
        else:
            self.routing.undrain(worker)


def _leave_to_the_relay(_: Engine) -> None:
    """Do not subscribe."""
