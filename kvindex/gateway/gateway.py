"""A gateway in one process: its settings, its engines and their routers, its server, its page."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvindex import Client, ConfigurationError, UnknownRankError
from kvindex.gateway.access import CONTENT_TYPE, Access, exposition
from kvindex.gateway.calls import error_reply
from kvindex.gateway.front import Front, refusal_reply
from kvindex.gateway.request_life import End, Exchange
from kvindex.gateway.routing import Models, Routing, Serving
from kvindex.gateway.settings import GatewaySettings
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.tracing import new_tracer
from kvindex.gateway.upstream import Upstream
from kvindex.replicas import Replica, nats
from kvindex.routing import Capacity, Ejection, Filter, Router, SharedLoad
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
    read_tokens,
)
from kvindex.service.overview import Routed
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
            # First: a port that is taken must be an error before engines are subscribed to.
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
    """Return the server of a gateway, with the page, which `opened` closes."""
    fleet = GatewayFleet(routers)
    page = Page(fleet, routed=fleet.routed)
    opened.callback(page.close)
    door = Door(routers, settings, engine_token, routes=page.routes)
    door.access.on_end = fleet.count
    return door


# Engines ------------------------------------------------------------------------------------------


_ASK_SECONDS: Final = 5.0  # between such questions: clients send any names
_ANSWER_SECONDS: Final = 2.0
_NO_ENGINE: Final = "no engine is named: give the URL of one, http://HOST:PORT"


class Routers:
    """Follows engines, and routes requests to them with one router for each model.

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
        self._policy, self._pull_rate = settings.policy, settings.pull_rate
        limits = {"open_requests": settings.open_requests, "queued_tokens": settings.queued_tokens}
        has_limits = any(limit is not None for limit in limits.values())
        ejection = Ejection()
        self._filters: list[Filter] = [ejection]
        if has_limits:
            self._filters.append(Capacity(**limits))
        self._pool = settings.pool
        self._boards: dict[str, SharedLoad] = {}
        options = DiscoveryOptions(token=engine_token)
        self._news = threading.Event()  # what discovery misses may have changed
        self._asks_from = 0.0  # when engines may be asked again for a name that nobody knows
        with ExitStack() as opened:
            # The index and the states of its ranks: our own, or a replica of a pool's relay.
            self.source: Client | Replica
            if self._pool is None:
                client = opened.enter_context(Client(engines, discovery=options))
                if client.discovery is None:
                    raise ConfigurationError(_NO_ENGINE)
                self.source, self._discovery = client, client.discovery
                # An engine that is found adds ranks, whose states change until they are live. (One
                # whose events cannot be reached has no state after that: it costs the whole wait.)
                client.on_change(lambda _: self._news.set())
            else:
                _, sources = split_engines(engines)
                if not sources:
                    raise ConfigurationError(_NO_ENGINE)
                servers, name = ",".join(self._pool.servers), self._pool.name
                self.source = opened.enter_context(nats.follow(servers, name, **self._pool.options))

                def leave_to_the_relay(_: Engine) -> None:
                    """Ask engines over HTTP who they are, and subscribe to none."""

                self._discovery = opened.enter_context(
                    Discovery(
                        sources,
                        leave_to_the_relay,
                        leave_to_the_relay,
                        options,
                        on_change=self._news.set,
                    )
                )
            self.models = Models(self.source, self._discovery.engines, self._new_router)
            self.routing = Routing(
                self.models, settings.waiting, ejection, self._ask_again, settings.kv_source
            )
            self._opened = opened.pop_all()

    def _new_router(self, model: str) -> Router:
        pool, loads = self._pool, None
        if pool is not None:  # a board for each router: they differ in the ranks that they use
            loads = SharedLoad(",".join(pool.servers), pool.name, **pool.options)
            self._boards[model] = self._opened.enter_context(loads)
        return Router(
            self.source,
            model=model,
            policy=self._policy,
            filters=self._filters,
            loads=loads,
            pull_rate=self._pull_rate,
        )

    def close(self) -> None:
        """Stop following the engines. Idempotent."""
        self._opened.close()

    def found(self, timeout: float) -> dict[str, str]:
        """Wait until all engines are found, or for so long; return those that are missing, why."""
        until = time.monotonic() + timeout
        while missing := self._discovery.missing():
            self._discovery.check_open()
            left = until - time.monotonic()
            if left <= 0:
                break
            self._news.wait(left)
            # Before the next look: a change that comes after it sets it again.
            self._news.clear()
        return missing

    async def _ask_again(self, model: str) -> None:
        """Ask all engines what they serve, and wait a moment for this model; not often."""
        now = time.monotonic()
        if now < self._asks_from:
            return
        self._asks_from = now + _ASK_SECONDS
        self._news.clear()
        self._discovery.refresh()

        def wait() -> None:
            until = now + _ANSWER_SECONDS
            while model not in self.models.names() and (left := until - time.monotonic()) > 0:
                self._news.wait(left)
                self._news.clear()

        await asyncio.to_thread(wait)

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
        that found none, by reason; `ejections` and `ejected`: as `Ejection` says; `routers`: as
        each says; `shared_load`: of a pool, by model.
        """
        routing = self.routing.statistics()
        shed: Counter[str] = Counter()
        for waiting in routing["waiting"].values():
            shed.update(waiting["shed"])
        # One total for those who watch; by model it stands in each router's.
        return {
            **own,
            "waiting": sum(model["waiting"] for model in routing["waiting"].values()),
            "shed": dict(shed),
            "ejections": routing["ejections"],
            "ejected": routing["ejected"],
            "routers": routing["routers"],
            "shared_load": {model: board.statistics() for model, board in self._boards.items()},
        }


# Server -------------------------------------------------------------------------------------------


_LAST_SECONDS: Final = 0.1  # for connections to close, once the time for requests is over


class Door:
    """Serves OpenAI's API at a socket; `run` serves until `stop`.

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
        file = settings.admin_token_file
        operators = () if file is None else read_tokens(file)
        self._routers = routers
        self._drain_seconds = settings.drain
        self._upstream = Upstream(engine_token)
        local = _local_tokens(settings.tokenizers)
        self.tokenizing = Tokenizing(self._upstream, settings.tokens_within, local)
        self.access = Access(settings.tenant_header, new_tracer())
        self._front = Front(
            routers.routing,
            self._upstream,
            self.tokenizing,
            access=self.access,
            # A client that proves itself to the gateway sends the gateway's token, not an engine's.
            passes_keys=not (tokens or operators),
            trusts_clients=not tokens,
            queue_within=settings.queue_within,
            head_within=settings.head_within,
            head_hold=settings.head_hold,
            explains=settings.explain_headers,
            most_body=listening.limits.body_bytes,
            silent_within=settings.silent_within,
            local_tokens=settings.local_tokens,
        )
        self._guard = Guard(
            tokens=tokens,
            operator_tokens=operators,
            allowed_hosts=listening.allowed_hosts,
            allowed_origins=listening.allowed_origins,
            limits=listening.limits,
            form=refusal_reply,
        )
        own = [
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/admin/statistics", lambda _: json_reply(200, self._all())),
            Route("POST", "/admin/drain", partial(self._change, routers.routing.drain)),
            Route("POST", "/admin/undrain", partial(self._change, routers.routing.undrain)),
        ]
        # No client may drain engines, or ask what others have sent.
        operators_routes = [route._replace(is_operators=True) for route in (*own, *routes)]
        site = Site(
            [*self._front.routes(), *operators_routes],
            self._guard,
            otherwise=self._front.not_found,
        )
        self._server = HttpServer(site, shutdown_within=settings.drain, tls=listening.tls)

    def run(self, listener: socket.socket, beside: Beside | None = None) -> None:
        """Serve until `stop`; both arguments as for `HttpServer.run`."""
        self._server.run(listener, beside)

    def stop(self) -> None:
        """Make `run` return once the open requests have ended, or the time to drain is over.

        Meanwhile /ready answers 503, and requests are still served.
        """
        if self._front.is_draining:
            return
        idle = threading.Event()

        def end() -> None:
            until = time.monotonic() + self._drain_seconds
            idle.wait(self._drain_seconds)
            self._server.shutdown_within = max(_LAST_SECONDS, until - time.monotonic())
            self._server.stop()

        # Balancers see "not ready" from now on, while what is open ends.
        self._front.drain(idle.set)
        # A thread, since a signal handler must not wait.
        threading.Thread(target=end, name="kvindex-drain", daemon=True).start()

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

    async def _metrics(self, _: Request) -> Reply:
        routers = self._routers
        counters = self._all()
        # Of many ranks it takes a while: not on the event loop.
        text = await asyncio.to_thread(
            exposition,
            routers.source,
            list(routers.models.routers.values()),
            counters,
            routers.models.name_of,
        )
        return Reply(200, text, CONTENT_TYPE)

    def _all(self) -> dict[str, Any]:
        return self._routers.statistics(self.statistics())

    async def _change(self, change: Callable[[str], None], request: Request) -> Reply:
        worker = request.parameter("worker")
        try:
            change(worker)
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
        if (error.name or "").startswith("kvindex"):  # a broken installation, not a missing extra
            raise
        raise ConfigurationError(
            f"a tokenizer needs the package {error.name}: {how_to_install('gateway')}"
        ) from error
    # Each folder once: several names may stand for one model, and a tokenizer is large.
    loaded = {folder: LocalTokens(folder) for folder in set(folders.values())}
    return {model: loaded[folder] for model, folder in folders.items()}


# Page ---------------------------------------------------------------------------------------------


_LOAD: Final = ("open_requests", "queued_tokens", "drained")
_AWAY: Final = {"asleep": "it sleeps, by its /is_sleeping", "unwell": "its /health is 503"}


class GatewayFleet:
    """A gateway's engines and traffic, as the page reads them.

    Owner: one event loop; `catalog`, `missing` and `routed` also from the page's threads.
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
        if servings is not self._made[0]:  # another object once they have changed
            entries = [
                Registration(
                    instance_id=serving.worker,
                    partition=Partition(serving.models[0] if serving.models else ""),
                    dp_rank=serving.first_rank + number,
                    endpoint="",
                    source="discovery",
                    details={"engine": serving.url},
                )
                for serving in servings.values()
                for number in range(serving.ranks)
            ]
            self._made = servings, Catalog(entries)
        return self._made[1]

    def missing(self) -> Mapping[str, str]:
        """Return the engines that were not found yet, and why."""
        return self._routers.missing()

    def routed(self) -> dict[str, Routed]:
        """Return what is sent to each rank, by its text. O(ranks), for each model."""
        models = self._routers.models
        servings = models.servings()
        ejected = self._routers.routing.ejected()["ejected"]
        loads: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # The routers of all models know a rank; that of its own model has the load.
        for router in models.routers.values():
            for rank, load in router.statistics()["ranks"].items():
                loads[rank].update({name: load[name] for name in _LOAD})
        routed = {}
        for rank, load in loads.items():
            worker = rank.rpartition("/")[0]
            away = servings[worker].away if worker in servings else ""
            why: dict[str, Any] = {}
            if load["drained"]:
                why = {"left_out": "drained", "reason": "an operator drained it (/admin/drain)"}
            elif away:
                why = {"left_out": away, "reason": _AWAY[away]}
            elif worker in ejected:
                one = ejected[worker]
                reason = f"failures in a row: {one['failures']}, the last: {one['reason']}"
                why = {"left_out": "ejected", "reason": reason, "seconds": one["seconds"]}
            if worker in servings:
                why |= {"url": servings[worker].url, "role": servings[worker].role}
            opened, queued = load["open_requests"], load["queued_tokens"]
            routed[rank] = Routed(open_requests=opened, queued_tokens=queued, **why)
        return routed

    def count(self, exchange: Exchange) -> None:
        """Count a request that has ended. O(ranks)."""
        # By the model, not the name that was asked for: an adapter's traffic is its model's.
        reservation = exchange.prefiller
        if reservation is None or not reservation.serving.models:
            return
        partition = Partition(reservation.serving.models[0])
        asked, attainable = exchange.prompt_tokens, reservation.attainable
        self.traffic.query(partition, asked, attainable, int((exchange.waited or 0.0) * 1e9))
        if exchange.end is End.WHOLE:
            held, delivered = reservation.held, exchange.delivered
            self.traffic.outcome(partition, asked, attainable, held, delivered)
