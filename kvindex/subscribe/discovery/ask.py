"""Engines, asked where they publish, and their answers, read without trusting them."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from kvindex.subscribe import PublisherAddress, Worker
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ConfigurationError, DiscoveryError
from kvindex.wire.web import Web

ASK_TIMEOUT: Final = 5.0
"""Seconds in which an engine must have answered."""

MAX_RANKS: Final = 1024
"""Most DP ranks that one engine may name; the largest deployments have some hundreds."""

_SERVER_INFO = ("/server_info", "/get_server_info")
_MAX_TEXT = 1024
_MAX_MODELS = 256
_MAX_FIELDS = 32  # of one of them
_MAX_NAMES = 16  # hosts that are looked up for one answer; further ones are used as given


class EngineReport(msgspec.Struct, frozen=True):
    """An engine's answers about itself.

    Attributes:
        url: where it was asked.
        kind: "vllm", "sglang", or "" if unknown.
        version: of the engine; "" if unknown.
        models: the names under which it serves, adapters included.
        adapters: those of them that are LoRA adapters, as vLLM lists them.
        block_size: tokens of a block, if it reported them; the events contain them in any case.
        publishes: whether it publishes events; None if it does not report it, as vLLM before 0.31.
        ranks: where each rank can be reached, sorted.
        topic: of its messages, if all ranks have the same one.
        notes: remarks about these endpoints, for people.
        listed: each of the models as the engine lists it, but for lists and objects in there.
        answers: by path, the received JSON, without keys and passwords.
        failures: by path, why no usable answer arrived.
        away: why the engine serves nothing now, as it says: "asleep" (vLLM's `/is_sleeping`) or
            "unwell" (its `/health` is 503); "" if it says nothing of the kind.
        is_silent: whether the engine has left two questions unanswered since. Only reports of
            `Discovery.engines` are ever silent.
        role: "prefill" or "decode", as its source says (`Target.role`); "": it does both.
    """

    url: str
    kind: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    block_size: int | None = None
    publishes: bool | None = None
    ranks: tuple[PublisherAddress, ...] = ()
    topic: str = ""
    notes: tuple[str, ...] = ()
    listed: Mapping[str, Mapping[str, Any]] = {}
    answers: dict[str, Any] = {}
    failures: dict[str, str] = {}
    away: str = ""
    is_silent: bool = False
    role: str = ""

    @property
    def first_rank(self) -> int:
        """The lowest of its dp_ranks: those of an engine that is one of several begin above 0."""
        return min((address.dp_rank for address in self.ranks), default=0)

    @property
    def model(self) -> str:
        """The first of the names under which it serves; "" if unknown."""
        return self.models[0] if self.models else ""

    def worker(self, name: str = "", *, cache: CacheSettings | None = None) -> Worker:
        """Return the engine as a worker to subscribe to.

        Args:
            name: the worker's; HOST:PORT of the URL by default.
            cache: what its events do not state.

        Raises:
            DiscoveryError: it does not publish ("off"), does not report where ("unsaid"), or at
                no reachable endpoint ("content"); the message has the remedy.
        """
        if not self.ranks:
            reason, text = "unsaid", "does not report where it publishes: name its endpoints"
            if self.publishes is False:
                reason = "off"
                text = f"publishes no events: start it with {_SWITCH_ON[self.kind]}"
            elif self.publishes:
                reason = "content"
                text = f"publishes where nobody can connect: {'; '.join(self.notes)}"
            elif self.failures:
                why = "; ".join(f"{path} {failure}" for path, failure in self.failures.items())
                text += f" ({why})"
            raise DiscoveryError(f"{self.url} {text}", url=self.url, reason=reason)
        replays = {a.dp_rank: a.replay for a in self.ranks if a.replay is not None}
        try:
            return Worker(
                name or engine_name(self.url),
                {address.dp_rank: address.endpoint for address in self.ranks},
                replay=replays if len(replays) == len(self.ranks) else None,
                topic=self.topic,
                # Once a release sends only the last copy's removal: removals="last" by its version.
                cache=cache or CacheSettings(),
            )
        except ConfigurationError as error:
            text = f"{self.url} names endpoints that cannot be used: {error}"
            raise DiscoveryError(text, url=self.url, reason="content") from None


_ZMQ = '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"'
_SWITCH_ON: Mapping[str, str] = {
    "vllm": f"--kv-events-config '{{\"enable_kv_cache_events\": true, {_ZMQ}}}'",
    "sglang": f"--kv-events-config '{{{_ZMQ}}}'",
    "": "--kv-events-config",
}


def engine_name(url: str) -> str:
    """Return the name of the engine at a URL: HOST:PORT, and the path if there is one.

    Examples:
        >>> engine_name("http://vllm-0:8000/")
        'vllm-0:8000'
    """
    return url.split("://", 1)[-1].rstrip("/")


def ask_engine(
    url: str,
    timeout: float = ASK_TIMEOUT,
    *,
    token: str | Callable[[], str | None] | None = None,
    context: ssl.SSLContext | None = None,
) -> EngineReport:
    """Ask an engine what it is and where it publishes; return its report.

    It reads vLLM's `/kv_event_sources` (0.31 and later) in its three shapes, SGLang's
    `/server_info` (`/get_server_info` before 0.5.4), `/version` and `/v1/models`. Nothing in them
    is trusted: sizes and numbers are bounded, and other forms are reported in `failures`.

    Args:
        url: of the engine's HTTP server, http://HOST:PORT.
        timeout: seconds for all of it.
        token: as for `DiscoveryOptions`.
        context: as for `DiscoveryOptions`.

    Raises:
        DiscoveryError: there is no answer, or no usable one; `reason` is the cause.
        ConfigurationError: the URL is invalid.

    Thread safety: any thread; it keeps nothing. It blocks: in asyncio, call it in a thread.

    Examples:
        >>> from kvindex.subscribe.discovery import ask_engine
        >>> ask_engine("http://127.0.0.1:1")
        Traceback (most recent call last):
        ...
        kvindex.wire.errors.DiscoveryError: http://127.0.0.1:1/kv_event_sources refuses the
        connection...
    """
    asking = _Asking(Web(url, token=token, context=context), timeout)
    block_size = None
    # vLLM's path first: to any other engine it is a 404, while vLLM may have a /server_info too.
    kind, announced = "vllm", asking.get("/kv_event_sources", read_sources)
    if announced is None and (info := asking.server_info()) is not None:
        kind, (announced, block_size) = "sglang", info
    models, adapters, owner = asking.get("/v1/models", read_models) or ((), (), "")
    version = asking.version()  # after the server info, which may have it
    # One usable answer is enough: old engines have no path that says where they publish.
    if not asking.answers and asking.failure is not None:
        raise asking.failure
    publishes = None if announced is None else bool(announced)
    if announced is None:
        kind, announced = owner if owner in ("vllm", "sglang") else "", []
    if block_size is None:
        # The other `/get_server_info`, that of vLLM's Rust front end.
        info = asking.answers.get("/get_server_info")
        block_size = _positive(info.get("kv_block_size")) if isinstance(info, Mapping) else None
    ranks: list[PublisherAddress] = []
    notes: list[str] = []
    for source in announced:
        offset = source.dp_rank if source.names_base else 0
        reach_from = (asking.web.host, offset, asking.resolve)
        replay = None
        if source.replay is not None:
            replay, note = reach(source.replay, *reach_from)
            notes += [f"replay of rank {source.dp_rank}: {note}"] if note else []
        events, note = reach(source.endpoint, *reach_from)
        notes += [f"rank {source.dp_rank}: {note}"] if note else []
        if events is not None:
            ranks.append(PublisherAddress(source.dp_rank, events, replay))
    topics = {source.topic for source in announced}
    return EngineReport(
        asking.web.url,
        kind,
        version,
        models,
        adapters,
        block_size,
        publishes,
        tuple(ranks),
        topics.pop() if len(topics) == 1 else "",
        tuple(notes),
        _listed(asking.answers.get("/v1/models"), models),
        asking.answers,
        asking.failures,
        asking.away(kind),
    )


class _Asking:
    """The questions to one engine: they share a deadline, and each may fail by itself."""

    def __init__(self, web: Web, timeout: float) -> None:
        if not 0 < timeout <= 3600:
            raise ConfigurationError(f"timeout must be above 0 and up to 3600 s, not {timeout!r}")
        self.web = web
        self.answers: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._until = time.monotonic() + timeout
        self._timeout = timeout
        self.failure: DiscoveryError | None = None  # the first, or the one that denies access
        self._addresses: dict[str, frozenset[str]] = {}

    def get(self, path: str, read: Callable[[Any], Any]) -> Any:
        """Return what `read` makes of the answer, or None with the failure noted."""
        left = self._until - time.monotonic()
        if left <= 0:
            text = f"{self.web.url} does not answer everything within {self._timeout:g} s"
            raise DiscoveryError(text, url=self.web.url, reason="timeout")
        try:
            answer = self.web.get(path, left)
        except DiscoveryError as error:
            if error.reason == "timeout":
                # `error` has the seconds that were left to this path, which nobody asked for.
                text = f"does not answer within {self._timeout:g} s, which all questions share"
                raise self.web.error(path, "timeout", text) from None
            # What listens there is dead or no HTTP server: no other path will answer either.
            if error.reason != "content":
                raise
            return self._note(path, "content", str(error).removeprefix(f"{self.web.url}{path} "))
        if answer.status in (401, 403):
            text = f"answers {answer.status}: give the engine's API key as token="
            return self._note(path, "denied", text)
        if answer.status != 200:
            text = f"answers {answer.status}"
            if self.web.url.endswith("/v1"):
                text += ": leave out the /v1 of the URL"
            elif answer.status == 404 and path == "/kv_event_sources":
                text += ": vLLM before 0.31 does not say where it publishes, so name a Worker"
            return self._note(path, "status", text)
        try:
            content = answer.json()
            result = read(content)
            # Only now: an answer that cannot be read is no answer.
            self.answers[path] = _without_secrets(content)
        except (ValueError, TypeError, RecursionError) as error:
            return self._note(path, "content", _unusable(error))
        return result

    def server_info(self) -> tuple[list[Announcement], int | None] | None:
        """Return SGLang's server info; None from any other engine."""
        for path in _SERVER_INFO:
            info = self.get(path, lambda answer: answer)
            if is_sglang(info):
                try:
                    return read_server_info(info)
                except (ValueError, TypeError, RecursionError) as error:
                    raise self.web.error(path, "content", _unusable(error)) from None
        return None

    def version(self) -> str:
        """Return the engine's version, which SGLang reports in its server info."""
        for path in _SERVER_INFO:
            if version := _text_of(self.answers.get(path), "version"):
                return version
        return _text_of(self.get("/version", lambda answer: answer), "version")

    def away(self, kind: str) -> str:
        """Return why the engine serves nothing now, if it says so while there is time."""
        paths = ("/health", "/is_sleeping") if kind == "vllm" else ("/health",)
        for path in paths:
            left = self._until - time.monotonic()
            try:
                answer = self.web.get(path, left) if left > 0 else None
                if answer is not None and answer.status == 503:
                    return "unwell"
                if path == "/is_sleeping" and answer is not None and answer.status == 200:
                    content = answer.json()
                    is_asleep = isinstance(content, Mapping) and content.get("is_sleeping") is True
                    return "asleep" if is_asleep else ""
            except (DiscoveryError, ValueError, TypeError, RecursionError):
                continue  # it says nothing about that
        return ""

    def resolve(self, host: str) -> frozenset[str]:
        """Return a host's addresses: of a few names only, each once, and while there is time."""
        if host not in self._addresses:
            # An answer with a thousand names would keep the resolver busy for minutes.
            if len(self._addresses) >= _MAX_NAMES or time.monotonic() >= self._until:
                return frozenset()
            self._addresses[host] = addresses_of(host)
        return self._addresses[host]

    def _note(self, path: str, reason: str, text: str) -> None:
        self.failures[path] = text
        if self.failure is None or reason == "denied":
            self.failure = self.web.error(path, reason, text)


def _unusable(error: Exception) -> str:
    return f"answers what cannot be used: {str(error)[:200]}"


def _text_of(answer: Any, key: str) -> str:
    value = answer.get(key) if isinstance(answer, Mapping) else None
    return value[:100] if isinstance(value, str) and value.isprintable() else ""


# What engines answer -----------------------------------------------------------------------------


class Announcement(msgspec.Struct, frozen=True):
    """An engine's report of where one rank publishes, in its own words."""

    dp_rank: int
    endpoint: str
    replay: str | None = None
    topic: str = ""
    names_base: bool = False  # whether the endpoints are rank 0's, from which this one's follows


def read_sources(answer: Any) -> list[Announcement]:
    """Return vLLM's `/kv_event_sources`, by rank; nothing if events are off.

    The answer has three shapes: settings by rank (vLLM 0.31 and later), a list with one entry for
    each rank, and such a list under "sources".

    Raises:
        ValueError: the answer has none of these shapes.

    Examples:
        >>> read_sources({"1": {"publisher": "zmq", "endpoint": "tcp://*:5558"}})
        [Announcement(dp_rank=1, endpoint='tcp://*:5558', replay=None, topic='', names_base=False)]
    """
    if isinstance(answer, Mapping) and isinstance(answer.get("sources"), list):
        answer = answer["sources"]
    if isinstance(answer, list):
        entries = [(_rank_in(entry, place), entry) for place, entry in enumerate(answer)]
    elif isinstance(answer, Mapping):
        entries = [(_number(str(key), "rank"), entry) for key, entry in answer.items()]
    else:
        raise ValueError(f"expected a list or an object, not {_kind(answer)}")
    if len(entries) > MAX_RANKS:
        raise ValueError(f"{len(entries)} ranks, above the limit of {MAX_RANKS}")
    announced = []
    for rank, entry in entries:
        if not _publishes(entry):
            continue
        endpoint = _text(entry, "endpoint")
        if endpoint is None:
            raise ValueError(f"rank {rank} has no endpoint")
        replay, topic = _text(entry, "replay_endpoint"), _text(entry, "topic") or ""
        announced.append(Announcement(rank, endpoint, replay, topic))
    # Two entries of one rank: one of them would be lost without a word.
    if len({source.dp_rank for source in announced}) < len(announced):
        raise ValueError("a rank is named twice")
    return sorted(announced, key=lambda source: source.dp_rank)


def read_server_info(info: Mapping[str, Any]) -> tuple[list[Announcement], int | None]:
    """Return the ranks in SGLang's `/server_info`, and the tokens of a block.

    `kv_events` (0.5.13 and later) has the values in use. Before, `kv_events_config` has the option
    as it was given, as text or as an object.

    Raises:
        ValueError: the answer cannot be understood.

    Examples:
        >>> read_server_info(
        ...     {"kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'}
        ... )[0]
        [Announcement(dp_rank=0, endpoint='tcp://*:5557', replay=None, topic='', names_base=True)]
    """
    config = info.get("kv_events_config")
    if isinstance(config, str):
        config = msgspec.json.decode(config) if config.strip() else None
    config = config if isinstance(config, Mapping) else {}
    described = info.get("kv_events")
    block_size = _positive(info.get("page_size"))
    size = _count(info.get("dp_size"))
    # The values in use first: the option leaves out what SGLang chooses by itself.
    if isinstance(described, Mapping) and _publishes(described):
        size = _count(described.get("dp_size", size))
        block_size = _positive(described.get("block_size")) or block_size
        base = _described(described, "", "endpoint_port_base")
        replay = _described(described, "replay_", "replay_endpoint_port_base")
        topic = _text(described, "topic") or ""
        if base is None:
            raise ValueError("kv_events names no endpoint_port_base")
    elif _publishes(config) and config.get("publisher"):
        # Without an endpoint in the option SGLang binds this one.
        base, replay = _text(config, "endpoint") or "tcp://*:5557", None
        topic = _text(config, "topic") or ""
    else:
        return [], block_size
    replay = replay or _text(config, "replay_endpoint")
    ranks = {rank: Announcement(rank, base, replay, topic, True) for rank in range(size)}
    # Ranks on other nodes have addresses of their own (sgl-project/sglang#38032).
    own = described.get("publishers") if isinstance(described, Mapping) else None
    for listed in read_sources(own or []):
        at = _beside(listed, replay) if listed.replay is None else listed.replay
        ranks[listed.dp_rank] = Announcement(listed.dp_rank, listed.endpoint, at, topic)
    if len(ranks) > MAX_RANKS:
        raise ValueError(f"{len(ranks)} ranks, above the limit of {MAX_RANKS}")
    return sorted(ranks.values(), key=lambda source: source.dp_rank), block_size


def is_sglang(info: Any) -> bool:
    """Return whether this is SGLang's `/server_info`, not another server's of that name."""
    marks = ("kv_events", "kv_events_config", "internal_states", "page_size", "disable_radix_cache")
    return isinstance(info, Mapping) and any(mark in info for mark in marks)


def read_models(answer: Any) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the ids in `/v1/models`, those of LoRA adapters among them, and the first's owner.

    Malformed entries are left out.

    Examples:
        >>> read_models({"data": [{"id": "llama", "owned_by": "vllm"}, {"id": "sql",
        ...     "parent": "llama"}]})
        (('llama', 'sql'), ('sql',), 'vllm')
    """
    data = answer.get("data") if isinstance(answer, Mapping) else None
    entries = [entry for entry in data or () if isinstance(entry, Mapping)]
    owner = entries[0].get("owned_by") if entries else None
    models = [entry for entry in entries[:_MAX_MODELS] if _is_text(entry.get("id"))]
    names = tuple(entry["id"] for entry in models)
    # What has a parent is an adapter of another model of that engine.
    adapters = tuple(entry["id"] for entry in models if entry.get("parent"))
    return names, adapters, str(owner) if _is_text(owner) else ""


def _listed(answer: Any, models: Collection[str]) -> dict[str, dict[str, Any]]:
    data = answer.get("data") if isinstance(answer, Mapping) else None
    entries = [entry for entry in data or () if isinstance(entry, Mapping)]
    return {
        entry["id"]: {
            name: value
            for name, value in list(entry.items())[:_MAX_FIELDS]
            if value is None or isinstance(value, (int, float)) or _is_text(value)
        }
        for entry in entries
        if entry.get("id") in models
    }


def _without_secrets(answer: Any) -> Any:
    """Return an answer without the keys and passwords that SGLang puts into `/server_info`."""
    if isinstance(answer, Mapping):
        return {
            key: _without_secrets(value)
            for key, value in answer.items()
            if not str(key).lower().endswith(("api_key", "password", "secret", "keyfile_password"))
        }
    if isinstance(answer, list):
        return [_without_secrets(value) for value in answer]
    return answer


def _rank_in(entry: Any, place: int) -> int:
    if not isinstance(entry, Mapping):
        raise ValueError(f"entry {place} is {_kind(entry)}, not an object")
    # Without a number, the place in the list is the rank.
    return _number(str(entry.get("data_parallel_rank", entry.get("dp_rank", place))), "rank")


def _publishes(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected the settings of a rank, not {_kind(entry)}")
    # vLLM lists a rank whose events are off, with either of these.
    return entry.get("enable_kv_cache_events") is not False and entry.get("publisher") != "null"


def _described(info: Mapping[str, Any], prefix: str, key: str) -> str | None:
    """Return the endpoint that SGLang describes by host and port."""
    if info.get(key) is None:
        return None
    port = _number(str(info[key]), key)
    host = _text(info, f"{prefix}endpoint_host") or _text(info, "endpoint_host") or "*"
    return f"tcp://[{host}]:{port}" if ":" in host and host[0] != "[" else f"tcp://{host}:{port}"


def _beside(source: Announcement, replay: str | None) -> str | None:
    """Return where a rank with an address of its own replays, from where rank 0 does."""
    if replay is None:
        return None
    host, _, port = replay.rpartition(":")
    # One process binds both sockets: a replay on every address is where its events are.
    host = source.endpoint.rpartition(":")[0] if host.endswith("*") else host
    return f"{host}:{_number(port, 'port') + source.dp_rank}"


def _text(info: Mapping[str, Any], key: str) -> str | None:
    value = info.get(key)
    if value is None or value == "":
        return None
    if not _is_text(value):
        raise ValueError(f"{key} is {_kind(value)}, not a short text")
    return str(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ValueError(f"{what} {text[:40]!r} is no number")
    return int(text)


def _positive(value: Any) -> int | None:
    """Return a number above 0 and of 31 bits, or None."""
    return value if isinstance(value, int) and 0 < value < 1 << 31 else None


def _count(value: Any) -> int:
    size = 1 if value is None else _number(str(value), "dp_size")
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"dp_size {size} is not 1 to {MAX_RANKS}")
    return size


_KINDS: Mapping[type, str] = {list: "a list", dict: "an object", str: "text", type(None): "null"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number or a truth value")


# Where an endpoint can be reached ---------------------------------------------------------------


_TCP = re.compile(r"tcp://(\[[^\[\]/\s]+\]|::|[^\[\]/:\s]+):(\d{1,5})")
_WILDCARDS = {"*", "0.0.0.0", "::"}

Resolve: TypeAlias = Callable[[str], frozenset[str]]
"""Returns the addresses of a host's name; none if it has none."""


def reach(endpoint: str, engine: str, offset: int, resolve: Resolve) -> tuple[str | None, str]:
    """Return where to connect to for an endpoint that an engine names, and a remark about it.

    A wildcard, the engine's own address and its loopback are replaced by the host that was asked.
    Any other host is used as reported: the DP ranks of one engine may run on several. None: it
    cannot be reached from here. The port lies `offset` further where the engine names rank 0's.

    Examples:
        >>> reach("tcp://*:5557", "10.0.0.5", 1, addresses_of)
        ('tcp://10.0.0.5:5558', '')
    """
    if endpoint.startswith("ipc://") and _is_loopback(engine) and not offset:
        return endpoint, ""
    parts = _TCP.fullmatch(endpoint)
    if parts is None:
        return None, f"{endpoint!r} cannot be reached from another process or host"
    host, port = parts[1].strip("[]"), int(parts[2]) + offset
    if not 1 <= port <= 65_535 or parts[2] == "0":
        return None, f"{endpoint!r} names no port that can be connected to"
    # A wildcard says nothing of how the engine is reached; the URL that was asked does.
    if host in _WILDCARDS or host == engine:
        return with_host(engine, port), ""
    if _is_loopback(host) and not _is_loopback(engine):
        return with_host(engine, port), (
            f"{endpoint} is the engine's own loopback: {engine} is tried instead, but write "
            f"tcp://*:{port - offset} in its settings if nothing answers"
        )
    # Last, since it may take seconds: a name and an address of the same machine.
    if resolve(host) & resolve(engine):
        return with_host(engine, port), ""
    return with_host(host, port), (
        f"{endpoint} is another host than {engine} and used as reported, since ranks may run on "
        "several hosts; an engine whose settings name a concrete host connects there instead of "
        f"listening: if nothing answers, write tcp://*:{port - offset} in them"
    )


def with_host(host: str, port: int) -> str:
    """Return the endpoint of a port of a host, in brackets if it is an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def addresses_of(host: str) -> frozenset[str]:
    """Return the addresses of a host's name; none if it is unknown."""
    try:
        return frozenset(look_up_host(host))
    except (OSError, UnicodeError):
        return frozenset()


def look_up_host(host: str) -> list[str]:
    """Return the addresses of a host's name; OSError or UnicodeError if it is unknown."""
    # One socket type, else each address comes once for each protocol.
    known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in known]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
