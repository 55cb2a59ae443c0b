"""What `kvindex serve` serves: settings and sources of workers, of its options and its file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.service.http.guards import Limits
from kvindex.service.settings import ConfigFile, ServeSettings, Table, read_config
from kvindex.service.workers import TABLES, ConfigSource, Defaults, read_targets, target_of
from kvindex.subscribe.discovery import (
    DnsSource,
    EngineSource,
    FileSource,
    KubernetesSource,
    Source,
    Target,
)

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


class Reconfigured(Protocol):
    """Receives a changed file."""

    def reconfigure(self, config: ConfigFile, options: Mapping[str, Any]) -> None: ...


class FixedSource:
    """The workers of the command line as a discovery source. Thread safety: any thread."""

    name = "the command line"
    is_certain = True

    def __init__(self, targets: Iterable[Target]) -> None:
        self.targets = tuple(targets)
        self._closed = threading.Event()

    def watch(self, tell: Callable[[Iterable[Target]], None]) -> None:
        """List them, once."""
        tell(self.targets)
        self._closed.wait()

    def close(self) -> None:
        """End `watch`."""
        self._closed.set()


class Serving:
    """The settings and sources of one server.

    Args:
        path: of the TOML file, or None.
        options: settings of the command line; they count for more than the file's.
        limits: likewise, of `Limits`.
        cache: what events do not state, for workers whose entry does not set it.

    Attributes:
        settings: of options and file together.
        sources: they list workers.

    Raises:
        ConfigurationError: an option or the file cannot work.
    """

    def __init__(
        self,
        path: str | None,
        options: Mapping[str, Any],
        limits: Mapping[str, int],
        cache: CacheSettings,
    ) -> None:
        self._options = dict(options)
        self._limits = dict(limits)
        self._running: Reconfigured | None = None
        self._file: ConfigSource | None = None
        self.sources: list[Source] = []
        config = ConfigFile()
        if path is not None:
            try:
                config = read_config(path, TABLES)
            except OSError as error:
                raise ConfigurationError(f"--config {path}: {error.strerror}") from error
        self.settings = ServeSettings(**{**config.serve, **self._told(config)})
        self.defaults = Defaults(
            self.settings.model, self.settings.routing_group, self.settings.block_size, cache
        )
        if path is not None:
            try:
                read_targets(config.tables, self.defaults)  # a mistake is reported at once
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}: {error}") from None
            self._file = ConfigSource(path, self.defaults, self._changed)
            self.sources.append(self._file)
            listed = config.tables.get("discovery", [])
            if not (isinstance(listed, list) and all(isinstance(each, dict) for each in listed)):
                raise ConfigurationError(
                    "discovery must be tables, each under its own [[discovery]]"
                )
            self.add_discovery(listed)

    def add_workers(self, workers: Iterable[tuple[Worker, Mapping[str, Any]]]) -> None:
        """Add the workers of the command line, with the arguments of `target_of` for each."""
        targets = [self.defaults.apply(target_of(worker, **said)) for worker, said in workers]
        if targets:
            self.sources.insert(0, FixedSource(targets))

    def add_discovery(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add sources, as [[discovery]] tables of the file have them."""
        self.sources += [
            source_of(entry, self.defaults, f"discovery {number}")
            for number, entry in enumerate(entries, 1)
        ]

    def begin(self, running: Reconfigured) -> None:
        """Pass the file's changes to a server from now on."""
        self._running = running

    def look(self) -> None:
        """Look at the file now. From signal handlers, too."""
        if self._file is not None:
            self._file.look()

    def _changed(self, config: ConfigFile) -> None:
        if self._running is not None:
            self._running.reconfigure(config, self._told(config))

    def _told(self, config: ConfigFile) -> dict[str, Any]:
        """Return the options, with limits of both."""
        if not self._limits:
            return self._options
        of_file = config.serve.get("limits", Limits())
        return {**self._options, "limits": msgspec.structs.replace(of_file, **self._limits)}
