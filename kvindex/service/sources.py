"""What `kvindex serve` serves: settings and sources of workers, of its options and its file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.service.http.guards import Limits
from kvindex.service.settings import ConfigFile, ServeSettings, Table, read_config
from kvindex.subscribe.discovery import (
    DnsSource,
    EngineSource,
    FileSource,
    KubernetesSource,
    Source,
    Target,
)
from kvindex.subscribe.discovery import read_targets as read_listed
from kvindex.subscribe.discovery.sources import LOOK_EVERY, FollowedFile
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
        """Return a target with these where it sets nothing."""
        cache = self.cache if target.cache == CacheSettings() else target.cache
        worker = target.worker
        if worker is not None:
            worker = msgspec.structs.replace(worker, cache=cache)
        # What an engine reports of itself, model and size of blocks, must not be hidden.
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
        labels={**(labels or {}), **_size_label(worker.name, block_size)},
        cache=worker.cache,
    )


def read_targets(tables: Table, defaults: Defaults) -> list[Target]:
    """Return the workers and engines that a file's tables name, or raise ConfigurationError.

    [[workers]] and [[engines]] are those of `kvindex.subscribe.discovery.read_targets`; each entry
    may also have `block_size`.
    """
    listed = {name: tables[name] for name in ("workers", "engines") if name in tables}
    # In a file that lists workers only this is a mistake; this file may have settings alone.
    if not listed:
        return []
    for name, entries in listed.items():
        if isinstance(entries, list):
            listed[name] = [_with_label(entry) for entry in entries]
    return [defaults.apply(target) for target in read_listed(listed)]


def _with_label(entry: Any) -> Any:
    """Return an entry whose `block_size`, if it has one, is a label."""
    # What has not the right form is left to `read_listed`, whose error names the entry.
    if not isinstance(entry, dict) or "block_size" not in entry:
        return entry
    rest = dict(entry)
    size = _size_label(str(rest.get("name")), rest.pop("block_size"))
    labels = rest.get("labels", {})
    return {**rest, "labels": {**labels, **size} if isinstance(labels, dict) else labels}


def _size_label(name: str, block_size: object) -> dict[str, str]:
    if block_size is None:
        return {}
    if not isinstance(block_size, int) or not 1 <= block_size < 1 << 32:
        raise ConfigurationError(
            f"worker {name!r}: block_size must be a number above 0, not {block_size!r}"
        )
    return {BLOCK_SIZE: str(block_size)}


class ConfigSource(FollowedFile):
    """The file as a discovery source: lists its workers, again whenever it changes.

    `on_config` is called with the file's settings whenever it was read anew; it may raise
    ConfigurationError, and then none of them counts.
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
        """Return the workers that the file names now, or raise DiscoveryError."""
        path = str(self.path)
        try:
            config = read_config(path, TABLES)
            # The settings last: a file with a broken entry changes none of them either.
            targets = read_targets(config.tables, self._defaults)
            self._on_config(config)
        except OSError as error:
            raise DiscoveryError(f"{path}: {error}", url=path, reason="unreachable") from None
        except ConfigurationError as error:
            # `read_config` has said which file and line; the others know the entry alone.
            text = str(error) if str(error).startswith(path) else f"{path}: {error}"
            raise DiscoveryError(text, url=path, reason="content") from None
        return targets


# Sources ------------------------------------------------------------------------------------------

# What each kind takes; the sources' own docstrings say what it means.
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "engines": {"urls": list[str], "prefill": list[str], "decode": list[str], "model": str},
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
    """Return the source that a table describes: a `kind`, and the options of that kind.

    A table that describes none is a ConfigurationError, which names it as `where`.

    Examples:
        >>> source_of({"kind": "dns", "url": "http://vllm:8000"}, Defaults(), "discovery 1").name
        'name vllm'
    """
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigurationError(f"{where}: kind {kind!r} is none of {', '.join(_KINDS)}")
    takes = {**_KINDS[kind], _GROUP: str}
    options: Table = {}
    for key, value in entry.items():
        if key == "kind":
            continue
        if key not in takes:
            raise ConfigurationError(
                f"{where}: {kind} knows no {key!r}: it has {', '.join(sorted(takes))}"
            )
        try:
            options[key] = msgspec.convert(value, takes[key])
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where}: {key}: {error}") from None
    group = options.pop(_GROUP, defaults.routing_group)
    sources: dict[str, Callable[..., Source]] = {
        "engines": EngineSource,
        "dns": DnsSource,
        "kubernetes": KubernetesSource,
    }
    try:
        if kind == "file":
            return _ListedFile(msgspec.structs.replace(defaults, routing_group=group), **options)
        return sources[kind](**options, routing_group=group, cache=defaults.cache)
    # TypeError: an option is missing. The constructors know which ones they need.
    except (ConfigurationError, TypeError) as error:
        raise ConfigurationError(f"{where}: {error}") from None


class _ListedFile(FileSource):
    """A file of engines that get defaults."""

    def __init__(self, defaults: Defaults, **options: Any) -> None:
        super().__init__(**options)
        self._defaults = defaults

    def read(self) -> tuple[Target, ...]:
        return tuple(self._defaults.apply(target) for target in super().read())


def token_reader(path: str) -> Callable[[], str | None]:
    """Return a function that reads the engines' API key from a file, which may change."""

    def read() -> str | None:
        return Path(path).read_text("utf-8").strip() or None

    try:
        # So that a mistake is reported at the start.
        read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--engine-token-file {path}: {error}") from None
    return read


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


class Configuration:
    """The settings and sources of one server, of its TOML file and its command line.

    Args:
        path: of the file, or None.
        options: settings of the command line; they count for more than the file's.
        limits: likewise, of `Limits`.
        cache: what events do not state, for workers whose entry does not set it.

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
        self._reconfigure: Callable[[ConfigFile, Mapping[str, Any]], None] | None = None
        self._file: ConfigSource | None = None
        self.sources: list[Source] = []  # they list workers
        config = ConfigFile()
        if path is not None:
            try:
                config = read_config(path, TABLES)
            except OSError as error:
                raise ConfigurationError(f"--config {path}: {error.strerror}") from error
        self.settings = ServeSettings(**{**config.serve, **self._options_with_limits(config)})
        self.defaults = Defaults(
            self.settings.model, self.settings.routing_group, self.settings.block_size, cache
        )
        if path is not None:
            try:
                # A mistake is reported at once; found by the source, it would be a line of the log.
                read_targets(config.tables, self.defaults)
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}: {error}") from None
            self._file = ConfigSource(path, self.defaults, self._changed)
            self.sources.append(self._file)
            listed = config.tables.get("discovery", [])
            if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
                raise ConfigurationError(
                    "discovery must be tables, each under its own [[discovery]]"
                )
            self.add_discovery(listed)

    def add_workers(self, workers: Iterable[tuple[Worker, Mapping[str, Any]]]) -> None:
        """Add the workers of the command line, with the arguments of `target_of` for each."""
        targets = [self.defaults.apply(target_of(worker, **more)) for worker, more in workers]
        if targets:
            self.sources.insert(0, FixedSource(targets))

    def add_discovery(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add sources, as [[discovery]] tables of the file have them."""
        self.sources += [
            source_of(entry, self.defaults, f"discovery {number}")
            for number, entry in enumerate(entries, 1)
        ]

    def begin(self, reconfigure: Callable[[ConfigFile, Mapping[str, Any]], None]) -> None:
        """Pass the file's changes, and the options, to a server from now on."""
        self._reconfigure = reconfigure

    def look(self) -> None:
        """Look at the file now. From signal handlers, too."""
        if self._file is not None:
            self._file.look()

    def _changed(self, config: ConfigFile) -> None:
        if self._reconfigure is not None:  # else it is being read for the first time
            self._reconfigure(config, self._options_with_limits(config))

    def _options_with_limits(self, config: ConfigFile) -> dict[str, Any]:
        # `limits` is one value of the settings: an option would take the file's others with it.
        if not self._limits:
            return self._options
        of_file = config.serve.get("limits", Limits())
        return {**self._options, "limits": msgspec.structs.replace(of_file, **self._limits)}
