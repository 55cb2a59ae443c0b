"""The workers and sources that the TOML file of `kvindex serve` names, followed as it changes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from kvindex import CacheSettings, ConfigurationError, GroupSpec, Worker
from kvindex.discovery import Target
from kvindex.errors import DiscoveryError
from kvindex.server.settings import ConfigFile, Table, read_config

__all__ = ["TABLES", "ConfigSource", "Defaults", "WorkerEntry", "read_targets", "target_of"]

logger = logging.getLogger(__name__)

TABLES: Final = ("workers", "engines", "discovery")
"""The tables of the file besides those of `settings.py`."""

_LOOK: Final = 1.0  # seconds between looks at whether the file has changed

BLOCK_SIZE: Final = "kvindex/block-size"  # the label that carries it through discovery


class Defaults(msgspec.Struct, frozen=True):
    """What holds for workers whose entry does not say."""

    model: str = "default"
    routing_group: str = "default"
    block_size: int | None = None
    cache: CacheSettings = CacheSettings()


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[workers]] table: endpoints as in `kvindex.Worker`, and whom it serves.

    Attributes:
        name: of the worker.
        endpoint, replay, dp_size, topic, bind: as in `Worker`; a table of endpoints has the
            dp_ranks as its keys.
        model, routing_group, block_size: of its partition.
        labels: shown beside it.
        report_mode, eagle, hash_block_size, upper_bound, groups: what its events leave unsaid, as
            in `CacheSettings`; `groups` has group indices as its keys.
    """

    name: str
    endpoint: str | list[str] | dict[str, str]
    replay: str | list[str] | dict[str, str] | None = None
    dp_size: int | None = None
    topic: str = ""
    bind: bool = False
    model: str | None = None
    routing_group: str | None = None
    block_size: int | None = None
    labels: dict[str, str] = {}
    report_mode: str | None = None
    eagle: bool | None = None
    hash_block_size: int | None = None
    upper_bound: bool | None = None
    groups: dict[str, GroupSpec] | None = None


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[engines]] table: an engine's HTTP server, which is asked where it publishes."""

    url: str
    name: str | None = None
    model: str = ""
    routing_group: str | None = None
    labels: dict[str, str] = {}


def target_of(
    worker: Worker,
    defaults: Defaults,
    *,
    model: str | None = None,
    routing_group: str | None = None,
    block_size: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> Target:
    """Return a worker that is known already as a discovery target."""
    size = defaults.block_size if block_size is None else block_size
    if size is not None and not 1 <= size < 1 << 32:
        raise ConfigurationError(f"worker {worker.name!r}: block_size must be above 0, not {size}")
    return Target(
        worker.name,
        worker=worker,
        model=defaults.model if model is None else model,
        routing_group=defaults.routing_group if routing_group is None else routing_group,
        labels={**(labels or {}), **({} if size is None else {BLOCK_SIZE: str(size)})},
        cache=worker.cache,
    )


def read_targets(tables: Table, defaults: Defaults) -> list[Target]:
    """Return the workers and engines that a file's tables name.

    Raises:
        ConfigurationError: an entry cannot work, or two have one name; says which entry.
    """
    targets = [
        _worker_target(_entry(table, WorkerEntry, f"workers[{place}]"), defaults)
        for place, table in enumerate(_listed(tables, "workers"))
    ]
    for place, table in enumerate(_listed(tables, "engines")):
        engine = _entry(table, EngineEntry, f"engines[{place}]")
        targets.append(
            Target(
                engine.name or engine.url.split("://", 1)[-1].rstrip("/"),
                engine.url,
                model=engine.model,
                routing_group=engine.routing_group or defaults.routing_group,
                labels=engine.labels,
                cache=defaults.cache,
            )
        )
    names = [target.name for target in targets]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two workers are called {name!r}: give each its own name")
    return targets


def _listed(tables: Table, name: str) -> list[Any]:
    entries = tables.get(name, [])
    if not isinstance(entries, list):
        raise ConfigurationError(f"{name} must be tables, each under its own [[{name}]]")
    return entries


def _entry(table: Any, kind: type[Any], where: str) -> Any:
    name = table.get("name") if isinstance(table, dict) else None
    shown = f"{where}{f' ({name!r})' if isinstance(name, str) else ''}"
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{shown}: {error}") from None


def _worker_target(entry: WorkerEntry, defaults: Defaults) -> Target:
    try:
        worker = Worker(
            entry.name,
            _by_rank(entry.endpoint),
            replay=None if entry.replay is None else _by_rank(entry.replay),
            dp_size=entry.dp_size,
            topic=entry.topic,
            bind=entry.bind,
            cache=_cache(entry, defaults.cache),
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"worker {entry.name!r}: {error}") from None
    return target_of(
        worker,
        defaults,
        model=entry.model,
        routing_group=entry.routing_group,
        block_size=entry.block_size,
        labels=entry.labels,
    )


def _cache(entry: WorkerEntry, default: CacheSettings) -> CacheSettings:
    names = ("report_mode", "eagle", "hash_block_size", "upper_bound")
    given = {name: getattr(entry, name) for name in names if getattr(entry, name) is not None}
    if entry.groups is not None:
        given["groups"] = {_index(key, "group"): kind for key, kind in entry.groups.items()}
    return msgspec.structs.replace(default, **given)


def _by_rank(endpoints: str | list[str] | dict[str, str]) -> str | list[str] | dict[int, str]:
    if isinstance(endpoints, dict):
        return {_index(key, "dp_rank"): endpoint for key, endpoint in endpoints.items()}
    return endpoints


def _index(key: str, what: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise ConfigurationError(f"{key!r} is no {what}")
    return int(key)


class ConfigSource:
    """The file as a discovery source: tells its workers, again whenever it changes.

    A file that cannot be read, or names what cannot work, changes nothing: the workers that were
    told stay, and the error is logged once and shown in the statistics of the discovery.

    Args:
        path: of the file.
        defaults: for entries that do not say.
        on_config: called with what the file says whenever it was read anew; it may raise
            ConfigurationError, and then nothing of it counts.

    Attributes:
        name: for logs and statistics.
        is_certain: True: what is not in the file is gone.

    Thread safety: `watch` on one thread; `look` and `close` from any, and from signal handlers.
    """

    is_certain = True

    def __init__(
        self,
        path: str,
        defaults: Defaults,
        on_config: Callable[[ConfigFile], None] = lambda config: None,
    ) -> None:
        self.name = f"file {path}"
        self._path = path
        self._defaults = defaults
        self._on_config = on_config
        self._wake = threading.Event()
        self._closed = False
        self._seen: object = self  # what the file looked like when it was last read
        self._is_good = False  # whether it could be used then

    def watch(self, tell: Callable[[Iterable[Target]], None]) -> None:
        """Tell the workers, and again after each change, until `close`.

        Raises:
            DiscoveryError: the file cannot be read or used, with the line or entry.
        """
        told = False  # by this call: whoever calls again wants to be told again
        while not self._closed:
            self._wake.clear()
            looks = _looks(self._path)
            if looks != self._seen or (self._is_good and not told):
                self._seen, self._is_good = looks, False
                tell(self._read())
                self._is_good = told = True
            self._wake.wait(_LOOK)

    def look(self) -> None:
        """Look at the file now."""
        self._wake.set()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Have `watch` return. Idempotent."""
        self._closed = True
        self._wake.set()

    def _read(self) -> list[Target]:
        try:
            config = read_config(self._path, TABLES)
            targets = read_targets(config.tables, self._defaults)
            self._on_config(config)
        except (ConfigurationError, OSError) as error:
            raise DiscoveryError(str(error), url=self._path, reason="content") from None
        return targets


def _looks(path: str) -> tuple[int, int, int] | None:
    """Return what tells one state of a file from the next, or None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
