"""A gateway in one process: its settings, its engines and their routers, its server, its page."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from kvindex import Client, ConfigurationError, UnknownRankError
from kvindex.gateway.access import CONTENT_TYPE, Access, exposition
from kvindex.gateway.calls import error_reply
from kvindex.gateway.exchange import End, Exchange
from kvindex.gateway.front import Front, refusal_reply
from kvindex.gateway.routing import Models, Routing, Serving
from kvindex.gateway.settings import GatewaySettings
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.upstream import Upstream
from kvindex.replicas import Replica, nats
from kvindex.routing import Capacity, Router, SharedLoad
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.http import (
    Beside,
    Guard,
    HttpServer,
    Reply,
    Request,
    Route,
    Site,
    json_reply,
)
from kvindex.service.page import Page
from kvindex.service.traffic import Traffic
from kvindex.subscribe.discovery import (
    Discovery,
    DiscoveryOptions,
    Engine,
    Engines,
    split_engines,
)
from kvindex.wire.errors import how_to_install
from kvindex.wire.nats import NatsPool

if TYPE_CHECKING:
    from kvindex.gateway.local import LocalTokens


class Gateway:
    """OpenAI's API in front of engines; `run` serves until `stop`, and `close` takes it all down.

    It listens from the start. Engines are discovered, and followed as they come and go; requests
    never wait for an engine's events: until these are there, its rank counts as empty.

    Args:
        engines: URLs of engines, or sources of `kvindex.subscribe.discovery`.
        settings: how to serve.
        engine_token: returns the engines' API key.

    Attributes:
        routers: decide where requests go.
        port: where it listens.
        url: where it is reached from this machine.

    Raises:
        ConfigurationError: a setting cannot work, or no engine is named.
        OSError: it cannot listen, or a file cannot be read.

    Owner: the thread that makes it; `stop` from any, and from signal handlers.

    Examples:
        >>> from kvindex.service.http import Listening
        >>> gateway = Gateway(["http://127.0.0.1:1"], GatewaySettings(listening=Listening()))
        >>> gateway.close()
    """

    def __init__(
        self,
        engines: Engines,
        settings: GatewaySettings | None = None,
        *,
        engine_token: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.settings = settings = settings or GatewaySettings()
        with ExitStack() as opened:
            self._socket = settings.listening.listen()
            opened.callback(self._socket.close)
            self.port: int = self._socket.getsockname()[1]
            self.url = settings.listening.url(self.port)
            self.routers = opened.enter_context(Routers(engines, settings, engine_token))
            self._door = door_with_page(self.routers, settings, engine_token, opened)
            self._opened = opened.pop_all()

    def run(self) -> None:
        """Serve until `stop`."""
        self._door.run(self._socket)

    def stop(self) -> None:
        """Make `run` return once the open requests have ended, or the time to drain is over.

        Meanwhile /ready answers 503, and requests are still served.
        """
        self._door.stop()

    def close(self) -> None:
        """Stop following the engines. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def statistics(self) -> dict[str, Any]:
        """Return all counters as plain values: `Door.statistics`, and `Routers.statistics`."""
        return self.routers.statistics(self._door.statistics())


def door_with_page(
    routers: Routers,
    settings: GatewaySettings,
    engine_token: Callable[[], str | None],
    opened: ExitStack,
) -> Door:
    """Return the server of a process that routes by itself, so that it has a page.

    Args:
        routers: of the gateway.
        settings: how to serve.
        engine_token: returns the engines' API key.
        opened: closes the page.
    """
    shown = Shown(routers)
    page = Page(shown)
    opened.callback(page.close)
    door = Door(routers, settings, engine_token, routes=page.routes)
    door.access.on_end = shown.count
    return door


# Engines ------------------------------------------------------------------------------------------


_LOOK_EVERY: Final = 0.05  # seconds between two looks whether all engines are found
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
        until = time.monotonic() + timeout
        while (missing := self._discovery.missing()) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
        return missing

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


# Server -------------------------------------------------------------------------------------------


_LAST_SECONDS: Final = 0.1  # for connections to close, once the time for requests is over


class Door:
    """Serves OpenAI's API at a socket; `run` serves until `stop`.

    Args:
        routers: decide where requests go.
        settings: how to serve.
        engine_token: returns the engines' API key.
        routes: further ones.

    Attributes:
        access: counts and logs the requests.
        tokenizing: finds the tokens of prompts.

    Raises:
        ConfigurationError: a setting cannot work.
        OSError: a file cannot be read.

    Owner: the thread that makes it; `stop` from any, and from signal handlers.
    """

    def __init__(
        self,
        routers: Routers,
        settings: GatewaySettings,
        engine_token: Callable[[], str | None] = lambda: None,
        *,
        routes: Sequence[Route] = (),
    ) -> None:
        listening = settings.listening
        tokens = listening.tokens()
        self._routers = routers
        self._drain_seconds = settings.drain
        self._upstream = Upstream(engine_token)
        local = _local_tokens(settings.tokenizers)
        self.tokenizing = Tokenizing(self._upstream, settings.tokens_within, local)
        self.access = Access()
        self._front = Front(
            routers.routing,
            self._upstream,
            self.tokenizing,
            access=self.access,
            passes_keys=not tokens,
            queue_within=settings.queue_within,
            head_within=settings.head_within,
            silent_within=settings.silent_within,
        )
        self._guard = Guard(
            tokens=tokens,
            allowed_hosts=listening.allowed_hosts,
            limits=listening.limits,
            form=refusal_reply,
        )
        served = [*self._front.routes(), *self._own_routes(), *routes]
        site = Site(served, self._guard, otherwise=self._front.not_found)
        self._server = HttpServer(site, shutdown_within=settings.drain, tls=listening.tls)

    def run(self, listener: socket.socket, beside: Beside | None = None) -> None:
        """Serve until `stop`; both arguments as for `HttpServer.run`."""
        self._server.run(listener, beside)

    def stop(self) -> None:
        """Make `run` return once the open requests have ended, or the time to drain is over.

        Meanwhile /ready answers 503, and requests are still served.
        """
        if not self._front.is_draining:
            idle = threading.Event()
            self._front.drain(idle.set)
            threading.Thread(
                target=self._end, args=(idle,), name="kvindex-drain", daemon=True
            ).start()

    def _end(self, idle: threading.Event) -> None:
        until = time.monotonic() + self._drain_seconds
        idle.wait(self._drain_seconds)
        self._server.shutdown_within = max(_LAST_SECONDS, until - time.monotonic())
        self._server.stop()

    def statistics(self) -> dict[str, Any]:
        """Return counters as plain values.

        Those of `Access.statistics`, and `refused`: by the guard, by reason; `token_failures` and
        `engine_failures` by reason; `local_tokens` and `upstream`: as their parts say.
        """
        tokenizing, upstream = self.tokenizing.statistics(), self._upstream.statistics()
        return {
            **self.access.statistics(),
            "refused": self._guard.counters.copy(),
            "token_failures": tokenizing["failures"],
            "local_tokens": tokenizing["local"],
            "engine_failures": upstream["failures"],
            "upstream": upstream,
        }

    def _own_routes(self) -> list[Route]:
        return [
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/admin/statistics", self._statistics),
            Route("POST", "/admin/drain", lambda request: self._change(request, True)),
            Route("POST", "/admin/undrain", lambda request: self._change(request, False)),
        ]

    async def _metrics(self, _: Request) -> Reply:
        return Reply(200, await self._routers.metrics(self.statistics()), CONTENT_TYPE)

    async def _statistics(self, _: Request) -> Reply:
        return json_reply(200, self._routers.statistics(self.statistics()))

    async def _change(self, request: Request, is_drained: bool) -> Reply:
        worker = request.parameter("worker")
        try:
            self._routers.drain(worker, is_drained)
        except UnknownRankError as error:
            return error_reply(404, str(error)[:1_000], param="worker")
        return json_reply(200, {"worker": worker})


def _local_tokens(folders: Mapping[str, str]) -> dict[str, LocalTokens]:
    """Load the tokenizers; each folder once."""
    if not folders:
        return {}
    try:
        from kvindex.gateway.local import LocalTokens
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvindex"):
            raise
        raise ConfigurationError(
            f"a tokenizer needs the package {error.name}: {how_to_install('gateway')}"
        ) from error
    loaded = {folder: LocalTokens(folder) for folder in set(folders.values())}
    return {model: loaded[folder] for model, folder in folders.items()}


# Page ---------------------------------------------------------------------------------------------


class Shown:
    """What the page reads of a gateway.

    Args:
        routers: of the gateway.

    Attributes:
        source: the index and the states of its ranks.
        traffic: what was asked, by model.

    Owner: one event loop; `catalog` and `missing` also from the page's threads.
    """

    def __init__(self, routers: Routers) -> None:
        self.source = routers.source
        self.traffic = Traffic()
        self._routers = routers
        self._made: tuple[object, Catalog] = (None, Catalog())

    @property
    def catalog(self) -> Catalog:
        """The engines' ranks, by model."""
        servings = self._routers.models.servings()
        if servings is not self._made[0]:
            entries = [
                Registration(
                    instance_id=each.worker,
                    partition=Partition(each.models[0] if each.models else ""),
                    dp_rank=each.first_rank + number,
                    endpoint="",
                    source="discovery",
                    details={"engine": each.url},
                )
                for each in servings.values()
                for number in range(each.ranks)
            ]
            self._made = servings, Catalog(entries)
        return self._made[1]

    def missing(self) -> Mapping[str, str]:
        """Return the engines that were not found yet, and why."""
        return self._routers.missing()

    def count(self, exchange: Exchange) -> None:
        """Count a request that has ended. O(ranks)."""
        place = exchange.place
        if place is None or not place.serving.models:
            return
        partition = Partition(place.serving.models[0])
        asked, attainable = exchange.prompt_tokens, place.attainable
        self.traffic.query(partition, asked, attainable, int((exchange.waited or 0.0) * 1e9))
        if exchange.end is End.WHOLE:
            delivered = None if exchange.usage is None else exchange.usage.cached_tokens
            self.traffic.outcome(partition, asked, attainable, place.held, delivered)
