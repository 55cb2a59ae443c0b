"""A gateway in one process: engines, routers, and the server in front, and their order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvindex.gateway.door import Door
from kvindex.gateway.routers import Routers
from kvindex.gateway.settings import GatewaySettings
from kvindex.gateway.shown import Shown
from kvindex.service.page import Page
from kvindex.subscribe.discovery import Engines


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
