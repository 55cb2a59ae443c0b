"""The engines that a caller names, by URL or in any mixture, and a client that follows them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, cast

from kvindex.subscribe import RankStatus, State, Worker
from kvindex.subscribe.discovery.discovery import Discovery, DiscoveryOptions
from kvindex.subscribe.discovery.engine import engine_name
from kvindex.subscribe.discovery.targets import Engine, Notify, Source, Target, check_names
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ClosedError, ConfigurationError, UnknownRankError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName
from kvindex.wire.web import split_url


class EngineSource:
    """Lists engines at fixed URLs; a `Discovery` asks them again and again.

    Args:
        urls: one URL or several, http://HOST:PORT. The worker is called HOST:PORT.
        model, routing_group, cache: as for `Target`; by default each is asked for its model.

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
        check_names((target.name for target in self.targets), "the engine at {} is given twice")
        more = f" and {len(given) - 1} more" if len(given) > 1 else ""
        self.name = f"{'engines' if more else 'engine'} {self.targets[0].url}{more}"
        self._closed = threading.Event()

    def watch(self, notify: Notify) -> None:
        """List them, once."""
        notify(self.targets)
        self._closed.wait()

    def close(self) -> None:
        """End `watch`."""
        self._closed.set()


Engines: TypeAlias = Iterable[Worker | str | Source] | Worker | str | Source
"""Workers, URLs of engines to be asked (http://…), and sources that list engines."""


def split_engines(given: Engines) -> tuple[Iterable[Worker] | Worker, list[Source]]:
    """Return the workers that are given, and the sources of all others; URLs become one source.

    Any other value is left among the workers, for the subscriber to reject.

    Raises:
        ConfigurationError: a URL is invalid, or is given twice.

    Examples:
        >>> workers, sources = split_engines([Worker("a", "tcp://a:5557"), "http://b:8000"])
        >>> [source.name for source in sources]
        ['engine http://b:8000']
    """
    if isinstance(given, Source) or _is_url(given):
        listed: list[Any] = [given]
    elif isinstance(given, Worker | str | bytes | Mapping) or not isinstance(given, Iterable):
        return cast("Worker", given), []
    else:
        listed = list(given)
    urls = [entry for entry in listed if _is_url(entry)]
    sources = [entry for entry in listed if isinstance(entry, Source)]
    workers = [entry for entry in listed if entry not in urls and entry not in sources]
    return workers, [EngineSource(urls), *sources] if urls else sources


def _is_url(given: object) -> bool:
    return isinstance(given, str) and given.lower().startswith(("http://", "https://"))


class _Fed(Protocol):
    """A client, as far as discovery feeds it."""

    def add(self, worker: Worker) -> None: ...

    def remove(self, name: RankName) -> None: ...

    def connected_ranks(self) -> Set[Rank]: ...

    def on_change(self, callback: Callable[[RankStatus], object]) -> Callable[[], None]: ...


def follow_engines(
    client: _Fed,
    sources: Iterable[Source],
    options: DiscoveryOptions | None,
    on_change: Callable[[], object],
) -> Discovery:
    """Return a discovery that feeds a client, for as long as the client is referenced."""
    held = weakref.ref(client)

    def living() -> _Fed:
        fed = held()
        if fed is None:
            raise ClosedError("the client was dropped")
        return fed

    def remove(engine: Engine) -> None:
        with suppress(UnknownRankError):  # another caller removed it
            living().remove(engine.worker.name)

    def is_alive(worker: str) -> bool:
        return any(rank.worker == worker for rank in living().connected_ranks())

    discovery = Discovery(
        sources,
        lambda engine: living().add(engine.worker),
        remove,
        options,
        is_alive=is_alive,
        on_change=on_change,
    )
    client.on_change(_asking_again(discovery))
    weakref.finalize(client, discovery.end).atexit = False
    return discovery


def _asking_again(discovery: Discovery) -> Callable[[RankStatus], None]:
    """Return a listener that asks an engine at once when it hangs up: its ports may change."""
    met: set[Rank] = set()

    def look(status: RankStatus) -> None:
        if status.state is State.LIVE:
            met.add(status.rank)
        elif status.rank in met:
            met.discard(status.rank)
            discovery.refresh(status.rank.worker)

    return look
