"""A gateway: engines, routers, connections, and the server in front, and their order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from kvindex import Client, ConfigurationError, UnknownRankError
from kvindex.gateway.access import Access
from kvindex.gateway.calls import error_reply
from kvindex.gateway.choosing import LocalRouting
from kvindex.gateway.front import Front, refusal_reply
from kvindex.gateway.metrics import CONTENT_TYPE, exposition
from kvindex.gateway.models import Models, Serving
from kvindex.gateway.settings import GatewaySettings
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.upstream import Upstream
from kvindex.routing import Capacity, Router
from kvindex.service.http import Guard, HttpServer, Reply, Request, Route, Site, json_reply
from kvindex.subscribe.discovery import DiscoveryOptions, Engines

if TYPE_CHECKING:
    from kvindex.gateway.local import LocalTokens

_LAST_SECONDS: Final = 0.1  # for connections to close, once the time for requests is over


class Gateway:
    """OpenAI's API in front of engines; `run` serves until `stop`, and `close` takes it all down.

    It listens from the start. Engines are discovered, and followed as they come and go; requests
    never wait for an engine's events: until these are there, its rank counts as empty.

    Args:
        engines: URLs of engines, or sources of `kvindex.subscribe.discovery`.
        settings: how to serve.
        engine_token: returns the engines' API key.

    Attributes:
        client: follows the engines.
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
        listening = settings.listening
        tokens = listening.tokens()
        self._make_capacity()
        with ExitStack() as opened:
            self._socket = listening.listen()
            opened.callback(self._socket.close)
            self.port: int = self._socket.getsockname()[1]
            self.url = listening.url(self.port)
            options = DiscoveryOptions(token=engine_token)
            self.client = opened.enter_context(Client(engines, discovery=options))
            if self.client.discovery is None:
                raise ConfigurationError(
                    "no engine is named: give the URL of one, http://HOST:PORT"
                )
            self._models = Models(self.client, self.client.discovery.engines, self._new_router)
            self._routing = LocalRouting(self._models, settings.waiting)
            self._upstream = Upstream(engine_token)
            local = _local_tokens(settings.tokenizers)
            self._tokenizing = Tokenizing(self._upstream, settings.tokens_within, local)
            self._access = Access()
            self._front = Front(
                self._routing,
                self._upstream,
                self._tokenizing,
                access=self._access,
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
            routes = [*self._front.routes(), *self._own_routes()]
            self._site = Site(routes, self._guard, otherwise=self._front.not_found)
            self._server = HttpServer(self._site, shutdown_within=settings.drain, tls=listening.tls)
            self._opened = opened.pop_all()

    def _make_capacity(self) -> None:
        limits = self.settings.open_requests, self.settings.queued_tokens
        self._filters: list[Any] = []
        if limits != (None, None):
            self._filters = [Capacity(open_requests=limits[0], queued_tokens=limits[1])]

    def _new_router(self, model: str) -> Router:
        return Router(self.client, model=model, policy=self.settings.policy, filters=self._filters)

    # Its life -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`."""
        self._server.run([self._socket])

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
        until = time.monotonic() + self.settings.drain
        idle.wait(self.settings.drain)
        self._server.shutdown_within = max(_LAST_SECONDS, until - time.monotonic())
        self._server.stop()

    def close(self) -> None:
        """Stop following the engines. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def found(self, timeout: float) -> dict[str, str]:
        """Wait until all engines are found, or for so long; return those that are missing, why."""
        assert self.client.discovery is not None
        return self.client.discovery.wait_found(timeout)

    def servings(self) -> list[Serving]:
        """Return the engines that are found."""
        return list(self._models.servings().values())

    def statistics(self) -> dict[str, Any]:
        """Return all counters as plain values.

        Those of `Access.statistics`, and `refused`: by the guard, by reason; `token_failures` and
        `engine_failures` by reason; `waiting` and `shed`: requests that wait for a rank with room,
        and those that found none, by reason; `local_tokens`, `upstream`, `routers`: as their parts
        say.
        """
        routing, upstream = self._routing.statistics(), self._upstream.statistics()
        tokenizing = self._tokenizing.statistics()
        shed: Counter[str] = Counter()
        for waiting in routing["waiting"].values():
            shed.update(waiting["shed"])
        return {
            **self._access.statistics(),
            "refused": self._guard.counters.values(),
            "token_failures": tokenizing["failures"],
            "local_tokens": tokenizing["local"],
            "engine_failures": upstream["failures"],
            "waiting": sum(each["waiting"] for each in routing["waiting"].values()),
            "shed": dict(shed),
            "upstream": upstream,
            "routers": routing["routers"],
        }

    # Routes -------------------------------------------------------------------------------------

    def _own_routes(self) -> list[Route]:
        return [
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/admin/statistics", lambda _: json_reply(200, self.statistics())),
            Route("POST", "/admin/drain", self._drain),
            Route("POST", "/admin/undrain", self._undrain),
        ]

    async def _metrics(self, _: Request) -> Reply:
        routers = list(self._models.routers.values())
        read = self.statistics()
        text = await asyncio.to_thread(exposition, self.client, routers, read)
        return Reply(200, text, CONTENT_TYPE)

    def _drain(self, request: Request) -> Reply:
        return self._change(request, self._routing.drain)

    def _undrain(self, request: Request) -> Reply:
        return self._change(request, self._routing.undrain)

    def _change(self, request: Request, change: Callable[[str], None]) -> Reply:
        worker = request.parameter("worker")
        try:
            change(worker)
        except UnknownRankError:
            names = ", ".join(sorted(self._models.servings())) or "none"
            text = f"no engine is called {worker[:200]!r}: there are {names[:500]}"
            return error_reply(404, text, param="worker")
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
            f"a tokenizer needs the package {error.name}: pip install 'kvindex[gateway]'"
        ) from error
    loaded = {folder: LocalTokens(folder) for folder in set(folders.values())}
    return {model: loaded[folder] for model, folder in folders.items()}
