"""Engines, asked where they publish."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from kvindex.subscribe import PublisherAddress, Worker
from kvindex.subscribe.discovery.answers import (
    Announcement,
    Resolve,
    addresses_of,
    is_sglang,
    named_adapters,
    named_models,
    positive,
    reach,
    read_server_info,
    read_sources,
    without_secrets,
)
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ConfigurationError, DiscoveryError
from kvindex.wire.web import Web

ASK_TIMEOUT: Final = 5.0
"""Seconds in which an engine must have answered."""

_SERVER_INFO = ("/server_info", "/get_server_info")
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
        answers: by path, the received JSON, without keys and passwords.
        failures: by path, why no usable answer arrived.
        is_silent: whether the engine has left two questions unanswered since. Only reports of
            `Discovery.engines` are ever silent.
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
    answers: dict[str, Any] = {}
    failures: dict[str, str] = {}
    is_silent: bool = False

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
            raise self._why_none()
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

    def _why_none(self) -> DiscoveryError:
        reason, text = "unsaid", "does not report where it publishes: name its endpoints"
        if self.publishes is False:
            reason, text = "off", f"publishes no events: start it with {_SWITCH_ON[self.kind]}"
        elif self.publishes:
            reason, text = "content", f"publishes where nobody can connect: {'; '.join(self.notes)}"
        elif self.failures:
            why = "; ".join(f"{path} {failure}" for path, failure in self.failures.items())
            text += f" ({why})"
        return DiscoveryError(f"{self.url} {text}", url=self.url, reason=reason)


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
    kind, announced = "vllm", asking.get("/kv_event_sources", read_sources)
    if announced is None and (info := asking.server_info()) is not None:
        kind, (announced, block_size) = "sglang", info
    models, owner = asking.get("/v1/models", named_models) or ((), "")
    version = asking.version()
    asking.raise_if_silent()
    publishes = None if announced is None else bool(announced)
    if announced is None:
        kind, announced = owner if owner in ("vllm", "sglang") else "", []
    ranks, notes = _reached(announced, asking.web.host, asking.resolve)
    topics = {source.topic for source in announced}
    return EngineReport(
        asking.web.url,
        kind,
        version,
        models,
        named_adapters(asking.answers.get("/v1/models")),
        block_size or asking.kv_block_size(),
        publishes,
        tuple(ranks),
        topics.pop() if len(topics) == 1 else "",
        tuple(notes),
        asking.answers,
        asking.failures,
    )


def _reached(
    announced: list[Announcement], host: str, resolve: Resolve
) -> tuple[list[PublisherAddress], list[str]]:
    ranks, notes = [], []
    for source in announced:
        offset = source.dp_rank if source.names_base else 0
        events = reach(source.endpoint, host, offset=offset, resolve=resolve)
        replay = None
        if source.replay is not None:
            reached = reach(source.replay, host, offset=offset, resolve=resolve)
            replay = reached.endpoint
            notes += [f"replay of rank {source.dp_rank}: {reached.note}"] if reached.note else []
        notes += [f"rank {source.dp_rank}: {events.note}"] if events.note else []
        if events.endpoint is not None:
            ranks.append(PublisherAddress(source.dp_rank, events.endpoint, replay))
    return ranks, notes


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
        self._failure: DiscoveryError | None = None
        self._addresses: dict[str, frozenset[str]] = {}

    def get(self, path: str, read: Callable[[Any], Any]) -> Any:
        """Return the parsed answer, or None with the failure noted."""
        try:
            answer = self.web.get(path, self._left())
        except DiscoveryError as error:
            if error.reason == "timeout":
                # `error` has the seconds that were left to this path.
                text = f"does not answer within {self._timeout:g} s, which all questions share"
                raise self.web.error(path, "timeout", text) from None
            if error.reason != "content":
                raise  # no other path will answer either
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
            self.answers[path] = without_secrets(content)
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
        infos = (self.answers.get(path) for path in _SERVER_INFO)
        known = next(filter(None, (_text_of(info, "version") for info in infos)), "")
        return known or _text_of(self.get("/version", lambda answer: answer), "version")

    def kv_block_size(self) -> int | None:
        """Return the block size in the other `/get_server_info`, that of vLLM's Rust front end."""
        info = self.answers.get("/get_server_info")
        return positive(info.get("kv_block_size")) if isinstance(info, Mapping) else None

    def resolve(self, host: str) -> frozenset[str]:
        """Return a host's addresses: of a few names only, each once, and while there is time."""
        if host not in self._addresses:
            if len(self._addresses) >= _MAX_NAMES or time.monotonic() >= self._until:
                return frozenset()
            self._addresses[host] = addresses_of(host)
        return self._addresses[host]

    def raise_if_silent(self) -> None:
        """Raise if no question was answered."""
        if not self.answers and self._failure is not None:
            raise self._failure

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            text = f"{self.web.url} does not answer everything within {self._timeout:g} s"
            raise DiscoveryError(text, url=self.web.url, reason="timeout")
        return left

    def _note(self, path: str, reason: str, text: str) -> None:
        self.failures[path] = text
        if self._failure is None or reason == "denied":
            self._failure = self.web.error(path, reason, text)


def _unusable(error: Exception) -> str:
    return f"answers what cannot be used: {str(error)[:200]}"


def _text_of(answer: Any, key: str) -> str:
    value = answer.get(key) if isinstance(answer, Mapping) else None
    return value[:100] if isinstance(value, str) and value.isprintable() else ""
