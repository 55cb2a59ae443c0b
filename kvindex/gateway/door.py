"""What clients and engines see of a gateway: its HTTP server, its routes, its connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvindex import ConfigurationError, UnknownRankError
from kvindex.gateway.access import Access
from kvindex.gateway.calls import error_reply
from kvindex.gateway.front import Front, refusal_reply
from kvindex.gateway.metrics import CONTENT_TYPE
from kvindex.gateway.routers import Routers
from kvindex.gateway.settings import GatewaySettings
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.upstream import Upstream
from kvindex.service.http import Beside, Guard, HttpServer, Reply, Request, Route, Site, json_reply
from kvindex.wire.errors import how_to_install

if TYPE_CHECKING:
    from kvindex.gateway.local import LocalTokens

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
        self._server.run([listener], beside)

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
