"""What lists engines: URLs, files and names; Kubernetes has a file of its own.

A source lists all its engines, not changes: so a lost message cannot leave a dead engine behind,
and a source that fails removes none.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from kvindex.subscribe import Worker
from kvindex.subscribe.discovery.ask import engine_name, look_up_host, with_host
from kvindex.wire import CacheSettings
from kvindex.wire.errors import UNREADABLE, ConfigurationError, DiscoveryError
from kvindex.wire.web import split_url

LOOK_EVERY: Final = 0.1  # seconds
ROLES: Final = ("prefill", "decode")
ROLE_LABEL: Final = "llm-d.ai/role"
_SETTLED: Final = 1.0  # seconds for which a changed file stays the same before it is read
_MAX_BYTES: Final = 16 << 20


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
    def role(self) -> str:
        """Whether it only prefills or decodes, by its label `llm-d.ai/role`; "": it does both."""
        role = self.labels.get(ROLE_LABEL, "")
        return role if role in ROLES else ""

    @property
    def place(self) -> str:
        """A text that differs when another engine has this name."""
        return f"{self.url} {self.version}"


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
    """Raise ConfigurationError with `refusal`, formatted with the first name that comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigurationError(refusal.format(name))
        seen.add(name)


# URLs ---------------------------------------------------------------------------------------------


class EngineSource:
    """Lists engines at fixed URLs; a `Discovery` asks them again and again.

    Args:
        urls: one URL or several, http://HOST:PORT. The worker is called HOST:PORT.
        prefill, decode: URLs of engines with these roles.
        model, routing_group, cache: as for `Target`; by default each is asked for its model.

    Raises:
        ConfigurationError: a URL is invalid, or is given twice.

    Examples:
        >>> EngineSource(["http://vllm-0:8000", "http://vllm-1:8000"]).name
        'engines http://vllm-0:8000 and 1 more'
    """

    is_certain = True

    def __init__(
        self,
        urls: Iterable[str] | str = (),
        *,
        prefill: Iterable[str] = (),
        decode: Iterable[str] = (),
        model: str = "",
        routing_group: str = "default",
        cache: CacheSettings | None = None,
    ) -> None:
        listed = [(url, "") for url in ([urls] if isinstance(urls, str) else urls)]
        for role, apart in zip(ROLES, (prefill, decode), strict=True):
            listed += [(url, role) for url in apart]
        if not listed:
            raise ConfigurationError("give the URL of at least one engine")
        for url, _ in listed:
            split_url(url)
        cache = cache or CacheSettings()
        self.targets = tuple(
            Target(
                engine_name(url),
                url.rstrip("/"),
                model=model,
                routing_group=routing_group,
                labels={ROLE_LABEL: role} if role else {},
                cache=cache,
            )
            for url, role in listed
        )
        check_names((target.name for target in self.targets), "the engine at {} is given twice")
        more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
        self.name = f"{'engines' if more else 'engine'} {self.targets[0].url}{more}"
        self._closed = threading.Event()

    def watch(self, notify: Notify) -> None:
        """List them, once."""
        notify(self.targets)
        self._closed.wait()

    def close(self) -> None:
        """End `watch`."""
        self._closed.set()


Engines: TypeAlias = Iterable[Worker | str | Source] | Worker | str | Source
"""Workers, URLs of engines to be asked (http://…), and sources that list engines."""


def split_engines(engines: Engines) -> tuple[Iterable[Worker] | Worker, list[Source]]:
    """Return the workers among these engines, and the sources of all others; URLs become one.

    Any other value is left among the workers, for the subscriber to reject.

    Raises:
        ConfigurationError: a URL is invalid, or is given twice.

    Examples:
        >>> workers, sources = split_engines([Worker("a", "tcp://a:5557"), "http://b:8000"])
        >>> [source.name for source in sources]
        ['engine http://b:8000']
    """
    if isinstance(engines, Source) or _is_url(engines):
        entries: list[Any] = [engines]
    elif isinstance(engines, Worker | str | bytes | Mapping) or not isinstance(engines, Iterable):
        return cast("Worker", engines), []
    else:
        entries = list(engines)
    # URLs together are one source, which needs one thread.
    urls = [entry for entry in entries if _is_url(entry)]
    sources = [entry for entry in entries if isinstance(entry, Source)]
    workers = [entry for entry in entries if entry not in urls and entry not in sources]
    return workers, [EngineSource(urls), *sources] if urls else sources


def _is_url(entry: object) -> bool:
    return isinstance(entry, str) and entry.lower().startswith(("http://", "https://"))


# Files --------------------------------------------------------------------------------------------


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
            `labels` and `cache`. `prefill` and `decode` are as `engines`, of engines with these
            roles. Other keys are ignored. Or a list of such entries.

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
        parts = {name: listed[name] for name in ("workers", "engines", *ROLES) if name in listed}
        if not parts:
            raise ConfigurationError("it has neither `workers` nor `engines`")
        if not all(isinstance(part, list | tuple) for part in parts.values()):
            raise ConfigurationError(f"{' and '.join(f'`{name}`' for name in parts)} must be lists")
        entries = [(entry, name) for name, part in parts.items() for entry in part]
    else:
        entries = [(entry, "") for entry in listed]
    targets = []
    for number, (entry, name) in enumerate(entries, 1):
        try:
            target = _target(entry)
            if name in ROLES:
                labels = {**target.labels, ROLE_LABEL: name}
                target = msgspec.structs.replace(target, labels=labels)
            targets.append(target)
        except (msgspec.ValidationError, ConfigurationError) as error:
            text = str(error).replace("Object contains unknown field", "there is no key")
            raise ConfigurationError(f"entry {number}: {text}") from None
    check_names(
        (target.name for target in targets), "two engines are called {!r}: give each its own name"
    )
    return tuple(targets)


def _target(listed: Any) -> Target:
    entry = _Entry(url=listed) if isinstance(listed, str) else msgspec.convert(listed, _Entry)
    if bool(entry.url) == (entry.endpoint is not None):
        raise ConfigurationError("give either `url`, to ask the engine, or `endpoint`")
    worker = None
    if entry.url:
        split_url(entry.url)
    else:
        worker = Worker(
            entry.name,
            _by_rank(entry.endpoint) or "",
            replay=_by_rank(entry.replay),
            dp_size=entry.dp_size,
            topic=entry.topic,
            bind=entry.bind,
            cache=entry.cache,
        )
    return Target(
        entry.name or engine_name(entry.url),
        entry.url.rstrip("/"),
        worker,
        entry.model,
        entry.routing_group,
        entry.labels,
        cache=entry.cache,
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
        is_listed = False  # by this call: a later call lists the engines again
        while not self._closed:
            # Before the look: a call of `look` from here on makes another turn.
            self._wake.clear()
            looks, at_once, self._at_once = self._look(), self._at_once, False
            now = self._clock()
            if looks != self._looked:
                self._looked, self._since = looks, now
            is_settled = at_once or now - self._since >= _SETTLED
            is_changed = looks != self._read_state and is_settled
            if is_changed or (self._is_good and not is_listed):
                self._read_state, self._is_good = looks, False
                targets = self._read()
                if looks == self._look():
                    notify(targets)
                    self._is_good = is_listed = True
                else:
                    # It changed while it was read: part of the content may be old.
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
        # The inode too: a file that replaces another may have its size, within one tick of mtime.
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> Iterable[Target]:
        try:
            return self.read()
        except DiscoveryError as error:
            if error.reason == "unreachable" and self._looked is not None:
                # It is there, but could not be read (rights, a broken mount): try again, although
                # it looks the same.
                self._read_state = self
            raise


class FileSource(FollowedFile):
    """Lists the engines in a file, and reads it again whenever it changes.

    The name decides the form: .toml, .json, or .ndjson and .jsonl with an entry on each line, as
    `read_targets` describes. A changed file is read once its size and time have stayed the same for
    a second. A file that is missing, empty or cannot be understood removes no engine. To list no
    engine, write `[]` (TOML: `engines = []`).

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
            # An editor that writes in place makes the file empty first: that removes nobody.
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


# Names --------------------------------------------------------------------------------------------


class DnsSource:
    """Lists one engine for each address of a name, and looks the name up again and again.

    An address that is missing from an answer is not gone at once, since name servers return part
    of their addresses, and only ready pods: the discovery keeps it for `forget_after` seconds. A
    name that cannot be looked up removes no engine.

    Args:
        url: of the engines, by the name: "http://vllm.default.svc.cluster.local:8000". Each address
            is asked at the URL's port (with https, certificates must name the address). Or
            "tcp://NAME:5557", for engines that cannot be asked: then rank 0 publishes at that port.
        replay_port: where rank 0 answers replay requests; for tcp, and for engines at
            `events_port`.
        dp_size: number of ranks of such an engine.
        events_port: where rank 0 publishes if its engine does not report it; None assumes
            nothing.
        interval: seconds between two look-ups.
        model, routing_group, cache: as for `Target`; by default each is asked for its model.
        look_up: returns a name's addresses; for tests.

    Raises:
        ConfigurationError: a value cannot work.

    Examples:
        >>> DnsSource("http://vllm:8000").name
        'name vllm'
    """

    is_certain = False

    def __init__(
        self,
        url: str,
        *,
        replay_port: int | None = None,
        dp_size: int = 1,
        events_port: int | None = None,
        interval: float = 5.0,
        model: str = "",
        routing_group: str = "default",
        cache: CacheSettings | None = None,
        look_up: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        is_asked = not url.lower().startswith("tcp://")
        parts = split_url(url if is_asked else "http" + url[3:])
        if not is_asked and (parts.port is None or parts.path or events_port is not None):
            raise ConfigurationError(f"{url!r} is no name with a port: write tcp://NAME:5557")
        if not 0 < interval < 1e6:
            raise ConfigurationError(f"interval must be above 0 seconds, not {interval!r}")
        self._host = parts.hostname or ""
        self.name = f"name {self._host}"
        self._scheme = parts.scheme if is_asked else ""
        self._rest = ("" if parts.port is None else f":{parts.port}") + parts.path.rstrip("/")
        self._ports = UsualPorts(events_port if is_asked else parts.port, replay_port, dp_size)
        self._facts = model, routing_group, cache or CacheSettings()
        self._interval = interval
        self._look_up = look_up or look_up_host
        self._closed = threading.Event()
        tuple(self._targets(["127.0.0.1"]))  # rejects invalid ports

    def watch(self, notify: Notify) -> None:
        """Call `notify` with the engines at the name's addresses, and again when they change."""
        listed: tuple[Target, ...] | None = None
        while not self._closed.is_set():
            try:
                # Sorted: name servers turn the addresses round with each answer.
                addresses = sorted(set(self._look_up(self._host)))
            except (OSError, UnicodeError) as error:
                raise DiscoveryError(
                    f"{self._host} cannot be looked up ({error})", url=self._host, reason="name"
                ) from None
            targets = tuple(self._targets(addresses))
            if targets != listed:
                listed = targets
                notify(targets)
            self._closed.wait(self._interval)

    def close(self) -> None:
        """End `watch`."""
        self._closed.set()

    def _targets(self, addresses: Sequence[str]) -> Iterator[Target]:
        model, group, cache = self._facts
        for address in addresses:
            host = f"[{address}]" if ":" in address else address
            worker = usual_worker(address, address, self._ports, cache)
            url = f"{self._scheme}://{host}{self._rest}" if self._scheme else ""
            yield Target(address, url, worker, model, group, cache=cache)


class UsualPorts(NamedTuple):
    """Where the ranks of an engine publish: at port + rank, where engines put them."""

    events: int | None  # of rank 0; None assumes nothing
    replay: int | None  # of rank 0, or None
    dp_size: int


def usual_worker(
    name: str, host: str, ports: UsualPorts, cache: CacheSettings, first_rank: int = 0
) -> Worker | None:
    """Return an engine at its usual ports; None if they assume nothing."""
    events, replay, dp_size = ports
    if events is None:
        return None
    end = first_rank + dp_size
    # Each rank's sockets lie at the base port + its number, so ranges that meet share a port.
    if replay is not None and events < replay < events + end:
        raise ConfigurationError(
            f"with {end} ranks, replay port {replay} is where rank {replay - events} publishes: "
            f"keep it at least {end} above {events}"
        )

    def at(base: int) -> dict[int, str]:
        return {rank: with_host(host, base + rank) for rank in range(first_rank, end)}

    return Worker(name, at(events), replay=None if replay is None else at(replay), cache=cache)
