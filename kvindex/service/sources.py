"""The [[discovery]] tables of `kvindex serve`: the sources that list engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvindex import ConfigurationError
from kvindex.service.settings import ConfigFile, Table
from kvindex.service.workers import Defaults
from kvindex.subscribe.discovery import (
    DnsSource,
    EngineSource,
    FileSource,
    KubernetesSource,
    Source,
    Target,
)

__all__ = ["listed_sources", "source_of", "token_reader"]

# What each kind takes; the sources' own docstrings say what it means.
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "engines": {"urls": list[str], "model": str},
    "dns": {
        "url": str,
        "replay_port": int,
        "events_port": int,
        "dp_size": int,
        "interval": float,
        "model": str,
    },
    "file": {"path": str, "interval": float},
    "kubernetes": {
        "selector": str,
        "pool": str,
        "preset": str,
        "namespace": str,
        "port": int,
        "events_port": int,
        "replay_port": int,
        "dp_size": int,
        "model_label": str,
        "kube_url": str,
        "token": str,
        "certificate": str,
    },
}
_GROUP: Final = "routing_group"  # every kind takes it


def listed_sources(config: ConfigFile) -> list[Mapping[str, Any]]:
    """Return the [[discovery]] tables of a file.

    Raises:
        ConfigurationError: they are no tables.
    """
    listed = config.tables.get("discovery", [])
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigurationError("discovery must be tables, each under its own [[discovery]]")
    return listed


def source_of(entry: Mapping[str, Any], defaults: Defaults, where: str) -> Source:
    """Return the source that a table describes.

    Args:
        entry: `kind` ("engines", "dns", "file" or "kubernetes") and the options of that kind.
        defaults: for engines whose source does not set them.
        where: the table's name in errors.

    Raises:
        ConfigurationError: the kind or a key is unknown, or a value cannot work.

    Examples:
        >>> source_of({"kind": "dns", "url": "http://vllm:8000"}, Defaults(), "discovery 1").name
        'name vllm'
    """
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigurationError(f"{where}: kind {kind!r} is none of {', '.join(_KINDS)}")
    takes = {**_KINDS[kind], _GROUP: str}
    given: Table = {}
    for key, value in entry.items():
        if key == "kind":
            continue
        if key not in takes:
            raise ConfigurationError(
                f"{where}: {kind} knows no {key!r}: it has {', '.join(sorted(takes))}"
            )
        try:
            given[key] = msgspec.convert(value, takes[key])
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where}: {key}: {error}") from None
    try:
        return _made(kind, given, defaults)
    except (ConfigurationError, TypeError) as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _made(kind: str, given: Table, defaults: Defaults) -> Source:
    group = given.pop(_GROUP, defaults.routing_group)
    if kind == "file":
        return _ListedFile(msgspec.structs.replace(defaults, routing_group=group), **given)
    sources: dict[str, Callable[..., Source]] = {
        "engines": EngineSource,
        "dns": DnsSource,
        "kubernetes": KubernetesSource,
    }
    return sources[kind](**given, routing_group=group, cache=defaults.cache)


class _ListedFile(FileSource):
    """A file of engines that get defaults."""

    def __init__(self, defaults: Defaults, **options: Any) -> None:
        super().__init__(**options)
        self._defaults = defaults

    def read(self) -> tuple[Target, ...]:
        return tuple(self._defaults.apply(target) for target in super().read())


def token_reader(path: str) -> Callable[[], str | None]:
    """Return a function that reads the engines' API key from a file, which may change.

    Raises:
        ConfigurationError: it cannot be read now.
    """

    def read() -> str | None:
        return Path(path).read_text("utf-8").strip() or None

    try:
        read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--engine-token-file {path}: {error}") from None
    return read
