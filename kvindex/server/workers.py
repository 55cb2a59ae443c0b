"""The workers that the TOML file of `kvindex serve` names, followed as it changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.discovery import Target
from kvindex.discovery import read_targets as read_listed
from kvindex.errors import DiscoveryError
from kvindex.server.settings import ConfigFile, Table, read_config

__all__ = ["BLOCK_SIZE", "TABLES", "ConfigSource", "Defaults", "read_targets", "target_of"]

TABLES: Final = ("workers", "engines", "discovery")
"""The tables of the file besides those of `settings.py`."""

BLOCK_SIZE: Final = "kvindex/block-size"
"""The label that carries a worker's tokens per block through discovery."""

_LOOK: Final = 1.0  # seconds between looks at whether the file has changed
_SETTLED: Final = 3  # further looks at which a changed file is still the same before it is read


class Defaults(msgspec.Struct, frozen=True):
    """What holds for workers whose entry does not say."""

    model: str = "default"
    routing_group: str = "default"
    block_size: int | None = None
    cache: CacheSettings = CacheSettings()

    def apply(self, target: Target) -> Target:
        """Return a target with these where it says nothing; an engine itself tells its model."""
        cache = self.cache if target.cache == CacheSettings() else target.cache
        worker = target.worker
        if worker is not None:
            worker = msgspec.structs.replace(worker, cache=cache)
        labels = dict(target.labels)
        if self.block_size is not None and not target.url:
            labels.setdefault(BLOCK_SIZE, str(self.block_size))
        return msgspec.structs.replace(
            target,
            worker=worker,
            model=target.model or ("" if target.url else self.model),
            routing_group=self.routing_group
            if target.routing_group == "default"
            else target.routing_group,
            labels=labels,
            cache=cache,
        )


def target_of(
    worker: Worker,
    *,
    model: str = "",
    routing_group: str = "default",
    block_size: int | None = None,
    labels: Mapping[str, str] | None = None,
) -> Target:
    """Return a worker that is known already as a discovery target."""
    return Target(
        worker.name,
        worker=worker,
        model=model,
        routing_group=routing_group,
        labels={**(labels or {}), **_sized(worker.name, block_size)},
        cache=worker.cache,
    )


def read_targets(tables: Table, defaults: Defaults) -> list[Target]:
    """Return the workers and engines that a file's tables name.

    Args:
        tables: [[workers]] and [[engines]], as `kvindex.discovery.read_targets` has them; each may
            also have `block_size`.
        defaults: for entries that do not say.

    Raises:
        ConfigurationError: an entry cannot work, or two have one name; says which entry.
    """
    listed = {name: tables[name] for name in ("workers", "engines") if name in tables}
    if not listed:
        return []
    sizes: dict[str, dict[str, str]] = {}
    plain = {name: _without_sizes(entries, sizes) for name, entries in listed.items()}
    return [
        defaults.apply(
            msgspec.structs.replace(target, labels={**target.labels, **sizes.get(target.name, {})})
        )
        for target in read_listed(plain)
    ]


def _without_sizes(entries: Any, sizes: dict[str, dict[str, str]]) -> Any:
    """Return entries without `block_size`; note it in `sizes`, as a label of the entry's name."""
    if not isinstance(entries, list):
        return entries
    plain = []
    for entry in entries:
        if isinstance(entry, dict) and "block_size" in entry:
            name = str(entry.get("name"))
            sizes[name] = _sized(name, entry["block_size"])
            entry = {key: value for key, value in entry.items() if key != "block_size"}
        plain.append(entry)
    return plain


def _sized(name: str, block_size: object) -> dict[str, str]:
    """Return the label of a block size."""
    if block_size is None:
        return {}
    if not isinstance(block_size, int) or not 1 <= block_size < 1 << 32:
        raise ConfigurationError(
            f"worker {name!r}: block_size must be a number above 0, not {block_size!r}"
        )
    return {BLOCK_SIZE: str(block_size)}


class ConfigSource:
    """The file as a discovery source: tells its workers, again whenever it changes.

    A file that cannot be read, or names what cannot work, changes nothing: the workers that were
    told stay, and the error is logged once and shown in the statistics of the discovery. A file
    that has changed is read once it stays the same for three seconds, since part of it may be
    written; after `look`, at once.

    Args:
        path: of the file.
        defaults: for entries that do not say.
        on_config: called with what the file says whenever it was read anew; it may raise
            ConfigurationError, and then nothing of it counts.
        every: seconds between two looks at the file.

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
        *,
        every: float = _LOOK,
    ) -> None:
        self.name = f"file {path}"
        self._path = path
        self._defaults = defaults
        self._on_config = on_config
        self._every = every
        self._wake = threading.Event()
        self._closed = False
        self._is_asked = True  # to read it at once; so it is at first
        self._looked: object = self  # what it looked like at the last look,
        self._same = 0  # and at how many looks before that
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
            looks, asked, self._is_asked = _looks(self._path), self._is_asked, False
            self._same = self._same + 1 if looks == self._looked else 0
            self._looked = looks
            is_changed = looks != self._seen and (asked or self._same >= _SETTLED)
            if is_changed or (self._is_good and not told):
                self._seen, self._is_good = looks, False
                tell(self._read())
                self._is_good = told = True
            self._wake.wait(self._every)

    def look(self) -> None:
        """Look at the file now, and read it if it has changed."""
        self._is_asked = True
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
            text = str(error)
            if not text.startswith(self._path):
                text = f"{self._path}: {text}"
            raise DiscoveryError(text, url=self._path, reason="content") from None
        return targets


def _looks(path: str) -> tuple[int, int, int] | None:
    """Return what tells one state of a file from the next, or None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
