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

__all__ = ["BLOCK_SIZE", "TABLES", "ConfigSource", "Defaults", "read_targets", "target_of"]

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


class ConfigSource(FollowedFile):
    """The file as a discovery source: lists its workers, again whenever it changes.

    Args:
        path: of the file.
        defaults: for entries that do not say.
        on_config: called with the file's settings whenever it was read anew; it may raise
            ConfigurationError, and then none of them counts.
        interval: seconds between two looks at the file.

    Thread safety: as `FollowedFile`.
    """

    def __init__(
        self,
        path: str,
        defaults: Defaults,
        on_config: Callable[[ConfigFile], None] = lambda config: None,
        *,
        interval: float = LOOK_EVERY,
    ) -> None:
        super().__init__(path, interval=interval)
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
