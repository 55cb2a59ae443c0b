"""The targets that sources list, and the engines found there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from kvindex.subscribe import Worker
from kvindex.wire import CacheSettings

__all__ = ["Found", "Source", "Target", "Tell"]


class Target(msgspec.Struct, frozen=True):
    """One engine, as a source lists it: to be asked, or known already.

    Attributes:
        name: its name among all engines; the worker's.
        url: its HTTP server, to be asked where it publishes; "" if it need not be asked.
        worker: the worker if there is no `url`; else the one assumed until the engine answers.
        model: the model that it serves; with "" the engine's own answer counts.
        routing_group: separates deployments of one model.
        labels: further facts that the source lists.
        version: differs when another engine has come under this name and URL.
        cache: what its events do not state.

    Raises:
        ValueError: it has neither a URL nor a worker.
    """

    name: str
    url: str = ""
    worker: Worker | None = None
    model: str = ""
    routing_group: str = "default"
    labels: dict[str, str] = {}
    version: str = ""
    cache: CacheSettings = CacheSettings()

    def __post_init__(self) -> None:
        if not self.url and self.worker is None:
            raise ValueError(f"{self.name}: give a URL or a worker")


class Found(msgspec.Struct, frozen=True):
    """An engine to subscribe to, or ranks of one.

    Attributes:
        worker: the engine and where its ranks publish.
        model: the model that it serves; "" if unknown.
        routing_group: separates deployments of one model.
        engine: the URL of its HTTP server, or None.
        labels: further facts that the source lists.
        source: the source that listed it.
        is_part: whether these are only some of the worker's ranks: it grows or shrinks by them.
    """

    worker: Worker
    model: str = ""
    routing_group: str = "default"
    engine: str | None = None
    labels: dict[str, str] = {}
    source: str = ""
    is_part: bool = False


Tell: TypeAlias = Callable[[Iterable[Target]], None]
"""Takes all engines that a source knows of now, from the thread that called `Source.watch`."""


@runtime_checkable
class Source(Protocol):
    """Lists engines.

    Attributes:
        name: for logs and statistics.
        is_certain: whether an engine that it no longer lists is gone. If not, such an engine is
            kept for a while, since it may be back in the next answer.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_certain(self) -> bool: ...

    def watch(self, tell: Tell) -> None:
        """Call `tell` with all engines, and again whenever they change, until `close`.

        Raises:
            DiscoveryError: it cannot list them now; its last list stays valid, and the source is
                called again after a pause.
        """

    def close(self) -> None:
        """Have `watch` return, now and whenever it is called. From any thread; idempotent."""
