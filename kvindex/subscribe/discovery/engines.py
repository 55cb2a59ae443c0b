"""Engines that are known by their URLs."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvindex.subscribe.discovery.engine import engine_name
from kvindex.subscribe.discovery.targets import Target, Tell
from kvindex.subscribe.discovery.web import split_url
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ConfigurationError

__all__ = ["EngineSource"]


class EngineSource:
    """Lists engines at fixed URLs; a `Discovery` asks them again and again.

    Args:
        urls: one URL or several, http://HOST:PORT. The worker is called HOST:PORT.
        model: the model that they serve; by default each is asked.
        routing_group: separates deployments of one model.
        cache: what their events do not state.

    Raises:
        ConfigurationError: a URL is invalid, or is given twice.

    Examples:
        >>> EngineSource(["http://vllm-0:8000", "http://vllm-1:8000"]).name
        'engines http://vllm-0:8000 and 1 more'
    """

    is_certain = True

    def __init__(
        self,
        urls: Iterable[str] | str,
        *,
        model: str = "",
        routing_group: str = "default",
        cache: CacheSettings | None = None,
    ) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        if not given:
            raise ConfigurationError("give the URL of at least one engine")
        for url in given:
            split_url(url)
        self.targets = tuple(
            Target(
                engine_name(url),
                url.rstrip("/"),
                model=model,
                routing_group=routing_group,
                cache=cache or CacheSettings(),
            )
            for url in given
        )
        names = [target.name for target in self.targets]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"the engine at {name} is given twice")
        more = f" and {len(given) - 1} more" if len(given) > 1 else ""
        self.name = f"{'engines' if more else 'engine'} {self.targets[0].url}{more}"
        self._closed = threading.Event()

    def watch(self, tell: Tell) -> None:
        """List them, once."""
        tell(self.targets)
        self._closed.wait()

    def close(self) -> None:
        """End `watch`."""
        self._closed.set()
