"""The settings and worker sources of `kvindex serve`, from its options and its TOML file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.service.guards import Limits
from kvindex.service.settings import ConfigFile, ServeSettings, read_config
from kvindex.service.sources import listed_sources, source_of
from kvindex.service.workers import TABLES, ConfigSource, Defaults, read_targets, target_of
from kvindex.subscribe.discovery import Source, Target

__all__ = ["FixedSource", "Reconfigured", "Serving"]


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
            self.add_discovery(listed_sources(config))

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
