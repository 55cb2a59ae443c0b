"""Engines listed in a file that is read again whenever it changes."""

from __future__ import annotations

import importlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvindex.subscribe import Worker
from kvindex.subscribe.discovery.engine import engine_name
from kvindex.subscribe.discovery.targets import Notify, Target, check_names
from kvindex.wire import CacheSettings
from kvindex.wire.errors import UNREADABLE, ConfigurationError, DiscoveryError
from kvindex.wire.web import split_url

_MAX_BYTES: Final = 16 << 20
LOOK_EVERY: Final = 0.1  # seconds
_SETTLED: Final = 1.0  # seconds for which a changed file stays the same before it is read


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One engine in a file."""

    name: str = ""
    url: str = ""
    endpoint: str | list[str] | dict[str, str] | None = None
    replay: str | list[str] | dict[str, str] | None = None
    dp_size: int | None = None
    topic: str = ""
    bind: bool = False
    model: str = ""
    routing_group: str = "default"
    labels: dict[str, str] = {}
    cache: CacheSettings = CacheSettings()


def read_targets(listed: Mapping[str, Any] | Iterable[Any]) -> tuple[Target, ...]:
    """Return the engines that a file's content lists.

    Args:
        listed: an object with `workers` (a list of tables, each with `name` and `endpoint`, and if
            need be `replay`, `dp_size`, `topic`, `bind`) or `engines` (a list of URLs, or of tables
            with `url` and perhaps `name`) or both; each table may have `model`, `routing_group`,
            `labels` and `cache`. Other keys are ignored. Or a list of such entries.

    Raises:
        ConfigurationError: an entry cannot be understood; which and why.

    Examples:
        >>> [target.name for target in read_targets(["http://vllm-0:8000"])]
        ['vllm-0:8000']
        >>> read_targets([{"name": "a", "endpoint": "tcp://a:5557", "dp": 2}])
        Traceback (most recent call last):
        ...
        kvindex.wire.errors.ConfigurationError: entry 1: there is no key `dp`
    """
    if isinstance(listed, Mapping):
        if "workers" not in listed and "engines" not in listed:
            raise ConfigurationError("it has neither `workers` nor `engines`")
        parts = [listed.get("workers", []), listed.get("engines", [])]
        if not all(isinstance(part, list | tuple) for part in parts):
            raise ConfigurationError("`workers` and `engines` must be lists")
        entries = [entry for part in parts for entry in part]
    else:
        entries = list(listed)
    targets = tuple(_target(entry, number) for number, entry in enumerate(entries, 1))
    check_names(
        (target.name for target in targets), "two engines are called {!r}: give each its own name"
    )
    return targets


def _target(entry: Any, number: int) -> Target:
    try:
        given = _Entry(url=entry) if isinstance(entry, str) else msgspec.convert(entry, _Entry)
        if bool(given.url) == (given.endpoint is not None):
            raise ConfigurationError("give either `url`, to ask the engine, or `endpoint`")
        if given.url:
            split_url(given.url)
        return Target(
            given.name or engine_name(given.url),
            given.url.rstrip("/"),
            None if given.url else _worker(given),
            given.model,
            given.routing_group,
            given.labels,
            cache=given.cache,
        )
    except (msgspec.ValidationError, ConfigurationError) as error:
        text = str(error).replace("Object contains unknown field", "there is no key")
        raise ConfigurationError(f"entry {number}: {text}") from None


def _worker(given: _Entry) -> Worker:
    return Worker(
        given.name,
        _by_rank(given.endpoint) or "",
        replay=_by_rank(given.replay),
        dp_size=given.dp_size,
        topic=given.topic,
        bind=given.bind,
        cache=given.cache,
    )


def _by_rank(endpoints: str | list[str] | dict[str, str] | None) -> Any:
    """Return endpoints with dp_ranks as numbers: the keys of JSON and TOML are text."""
    if not isinstance(endpoints, dict):
        return endpoints
    if not all(rank.isascii() and rank.isdigit() for rank in endpoints):
        raise ConfigurationError(f"endpoints by dp_rank: {sorted(endpoints)} are not all numbers")
    return {int(rank): endpoint for rank, endpoint in endpoints.items()}


class FollowedFile(ABC):
    """A file as a source: lists its engines, and again whenever it changes.

    A file that is missing, empty or cannot be understood removes no engine: its last list stays
    valid, and the error is raised once. Since half of a file may look whole, a changed file is read
    once its size and time of change have stayed the same for a second; after `look`, at once.

    Args:
        path: the file.
        interval: seconds between two looks at it.

    Thread safety: `watch` on one thread; `look` and `close` from any, and from signal handlers.
    """

    is_certain = True
    _clock = staticmethod(time.monotonic)

    def __init__(self, path: str | os.PathLike[str], *, interval: float = LOOK_EVERY) -> None:
        self.path = Path(path)
        self.name = f"file {path}"
        self._interval = interval
        self._wake = threading.Event()
        self._closed = False
        self._at_once = True  # to read it at once; true at first
        self._looked: object = self  # what the file looked like at the last look,
        self._since = 0.0  # and since when
        self._read_state: object = self  # what it looked like when it was last read
        self._is_good = False  # whether it could be used then

    @abstractmethod
    def read(self) -> Iterable[Target]:
        """Return the engines that the file lists now; `DiscoveryError` if it cannot be used."""

    def watch(self, notify: Notify) -> None:
        """Call `notify` with the engines, and again after each change, until `close`.

        Raises:
            DiscoveryError: the file cannot be read or used.
        """
        notified = False  # by this call: a later call reports the engines again
        while not self._closed:
            self._wake.clear()
            looks, at_once, self._at_once = self._look(), self._at_once, False
            now = self._clock()
            if looks != self._looked:
                self._looked, self._since = looks, now
            is_settled = at_once or now - self._since >= _SETTLED
            is_changed = looks != self._read_state and is_settled
            if is_changed or (self._is_good and not notified):
                self._read_state, self._is_good = looks, False
                targets = self._read()
                if looks == self._look():
                    notify(targets)
                    self._is_good = notified = True
                else:  # part of the content may be old: read it once more
                    self._read_state = self
            self._wake.wait(self._interval)

    def look(self) -> None:
        """Look at the file now, and read it if it has changed."""
        self._at_once = True
        self._wake.set()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """End `watch`. Idempotent."""
        self._closed = True
        self._wake.set()

    def _look(self) -> tuple[int, ...] | None:
        """Return a value that changes with the file's state, or None if there is no file."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> Iterable[Target]:
        try:
            return self.read()
        except DiscoveryError as error:
            if error.reason == "unreachable" and self._looked is not None:
                self._read_state = self  # it is there: perhaps it can be read the next time
            raise


class FileSource(FollowedFile):
    """Lists the engines in a file, and reads it again whenever it changes.

    The name decides the form: .toml, .json, or .ndjson and .jsonl with an entry on each line, as
    `read_targets` describes. `FollowedFile` describes when the file is read again, and what a
    mistake in it does. To list no engine, write `[]` (TOML: `engines = []`).

    Args:
        path: the file.
        interval: seconds between two looks at it.

    Raises:
        ConfigurationError: a value cannot work, or TOML cannot be read (Python 3.10 without tomli).

    Examples:
        >>> FileSource("engines.toml").name
        'file engines.toml'
    """

    def __init__(self, path: str | os.PathLike[str], *, interval: float = LOOK_EVERY) -> None:
        super().__init__(path, interval=interval)
        if self.path.suffix not in (".toml", ".json", ".ndjson", ".jsonl"):
            raise ConfigurationError(
                f"{path}: expected a name that ends with .toml, .json, .ndjson or .jsonl"
            )
        if not 0 < interval < 1e6:
            raise ConfigurationError(f"interval must be above 0 seconds, not {interval!r}")
        if self.path.suffix == ".toml":
            _toml()  # raises now rather than at the first reading

    def read(self) -> tuple[Target, ...]:
        try:
            with self.path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            text = f"{self.path} cannot be read: {error.strerror}"
            raise DiscoveryError(text, url=str(self.path), reason="unreachable") from None
        try:
            if len(content) > _MAX_BYTES:
                raise ConfigurationError(f"it has more than {_MAX_BYTES} bytes")
            if not content.strip():
                raise ConfigurationError("it is empty")
            return read_targets(self._decoded(content))
        except UNREADABLE as error:
            text = f"{self.path} cannot be understood: {error}"
            raise DiscoveryError(text, url=str(self.path), reason="content") from None

    def _decoded(self, content: bytes) -> Any:
        if self.path.suffix == ".toml":
            return _toml().loads(content.decode())
        if self.path.suffix == ".json":
            listed = msgspec.json.decode(content)
            if not isinstance(listed, list | dict):
                raise ConfigurationError("expected a list or an object")
            return listed
        return [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]


def _toml() -> Any:
    for name in ("tomllib", "tomli"):  # Python 3.11 brings the first
        try:
            return importlib.import_module(name)
        except ImportError:
            pass
    raise ConfigurationError("reading TOML takes Python 3.11, or `pip install tomli`")
