"""The targets that sources list, and the engines discovered there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from kvindex.subscribe import Worker
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ConfigurationError


class Target(msgspec.Struct, frozen=True):
    """One engine, as a source lists it: to be asked, or known already.

    Attributes:
        name: its name among all engines; the worker's.
        url: its HTTP server, to be asked where it publishes; "" if it need not be asked.
        worker: the worker if there is no `url`; else the one assumed until the engine answers.
        model: the model that it serves; with "" the engine's own answer counts.
        routing_group: separates deployments of one model.
        labels: further facts that the source lists.
        version: differs when another engine has this name and URL.
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

    @property
    def place(self) -> str:
        """A text that differs when another engine has this name."""
        return f"{self.url} {self.version}"


class Engine(msgspec.Struct, frozen=True):
    """An engine to subscribe to.

    Attributes:
        worker: the engine and where its ranks publish.
        model: the model that it serves; "" if unknown.
        url: of its HTTP server, or None.
        routing_group, labels: as for `Target`.
        source: the source that listed it.
    """

    worker: Worker
    model: str = ""
    routing_group: str = "default"
    url: str | None = None
    labels: dict[str, str] = {}
    source: str = ""


Notify: TypeAlias = Callable[[Iterable[Target]], None]
"""Receives all engines that a source lists now, from the thread that called `Source.watch`."""


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

    def watch(self, notify: Notify) -> None:
        """Call `notify` with all engines, and again whenever they change, until `close`.

        Raises:
            DiscoveryError: it cannot list them now; its last list stays valid, and the source is
                called again after a pause.
        """

    def close(self) -> None:
        """Have `watch` return, now and whenever it is called. From any thread; idempotent."""


def check_names(names: Iterable[str], refusal: str) -> None:
    """Raise ConfigurationError with `refusal`, formatted with the first name given twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigurationError(refusal.format(name))
        seen.add(name)


def shape_of(engine: Engine) -> tuple[object, ...]:
    """Return all that a subscription to an engine depends on."""
    worker = engine.worker
    return (
        *(worker.publishers(), worker.topic, worker.bind, worker.curve, worker.cache),
        *(engine.model, engine.routing_group),
    )


def described(engine: Engine) -> str:
    """Return an engine's description for a log line."""
    addresses = engine.worker.publishers()
    more = f" and {len(addresses) - 1} more ranks" if len(addresses) > 1 else ""
    replay = "" if addresses[0].replay else ", without replay"
    return f"{engine.worker.name} at {addresses[0].endpoint}{more}{replay} ({engine.source})"
