"""The workers that the TOML file of `kvindex serve` names, followed as it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.service.settings import ConfigFile, Table, read_config
from kvindex.subscribe.discovery import Target
from kvindex.subscribe.discovery import read_targets as read_listed
from kvindex.subscribe.discovery.files import LOOK_EVERY, FollowedFile
from kvindex.wire.errors import DiscoveryError

TABLES: Final = ("workers", "engines", "discovery")
"""The tables of the file besides those of `settings.py`."""

BLOCK_SIZE: Final = "kvindex/block-size"
"""The label that carries a worker's tokens per block through discovery."""


class Defaults(msgspec.Struct, frozen=True):
    """Defaults for workers whose entry does not set them."""

    model: str = "default"
    routing_group: str = "default"
    block_size: int | None = None
    cache: CacheSettings = CacheSettings()

    def apply(self, target: Target) -> Target:
        """Return a target with these where it sets nothing; an engine itself reports its model."""
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
        tables: [[workers]] and [[engines]], as `kvindex.subscribe.discovery.read_targets` has them;
            each may also have `block_size`.
        defaults: for entries that do not say.

    Raises:
        ConfigurationError: an entry cannot work, or two have one name; says which entry.
    """
    listed = {name: tables[name] for name in ("workers", "engines") if name in tables}
    if not listed:
        return []
    plain = {
        name: [*map(_with_size_in_labels, entries)] if isinstance(entries, list) else entries
        for name, entries in listed.items()
    }
    return [defaults.apply(target) for target in read_listed(plain)]


def _with_size_in_labels(entry: Any) -> Any:
    """Return an entry whose `block_size`, if it has one, is a label."""
    if not isinstance(entry, dict) or "block_size" not in entry:
        return entry
    rest = dict(entry)
    size = _sized(str(rest.get("name")), rest.pop("block_size"))
    labels = rest.get("labels", {})
    return {**rest, "labels": {**labels, **size} if isinstance(labels, dict) else labels}


def _sized(name: str, block_size: object) -> dict[str, str]:
    """Return the label of a block size."""
    if block_size is None:
        return {}
    if not isinstance(block_size, int) or not 1 <= block_size < 1 << 32:
        raise ConfigurationError(
            f"worker {name!r}: block_size must be a number above 0, not {block_size!r}"
        )
    return {BLOCK_SIZE: str(block_size)}


class ConfigSource(FollowedFile):
    """The file as a discovery source: lists its workers, again whenever it changes.

    Args:
        path: of the file.
        defaults: for entries that do not say.
        on_config: called with the file's settings whenever it was read anew; it may raise
            ConfigurationError, and then none of them counts.

    Thread safety: as `FollowedFile`.
    """

    def __init__(
        self,
        path: str,
        defaults: Defaults,
        on_config: Callable[[ConfigFile], None] = lambda config: None,
    ) -> None:
        super().__init__(path, interval=LOOK_EVERY)
        self._defaults = defaults
        self._on_config = on_config

    def read(self) -> list[Target]:
        """Return the workers that the file names now.

        Raises:
            DiscoveryError: it cannot be read or used, with the line or entry.
        """
        path = str(self.path)
        try:
            config = read_config(path, TABLES)
            targets = read_targets(config.tables, self._defaults)
            self._on_config(config)
        except OSError as error:
            raise DiscoveryError(f"{path}: {error}", url=path, reason="unreachable") from None
        except ConfigurationError as error:
            text = str(error) if str(error).startswith(path) else f"{path}: {error}"
            raise DiscoveryError(text, url=path, reason="content") from None
        return targets
