"""Where an engine's publishers are: one per data-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from kvindex.wire import CacheSettings
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError

Endpoints: TypeAlias = str | Sequence[str] | Mapping[int, str]
"""One endpoint for rank 0 (later ranks follow from it), one for each rank, or `{dp_rank: …}`."""

_TCP_PORT = re.compile(r"(tcp://.+):(\d+)")
_HOST_PORT = re.compile(r"(?:[\w.-]{1,255}|\[[0-9a-fA-F:.]+\]):\d{1,5}/?")
_TRANSPORTS = ("tcp://", "ipc://", "inproc://")
_MAX_DP_SIZE = 65_536


class PublisherAddress(msgspec.Struct, frozen=True):
    """Where one rank's publisher is expected.

    Attributes:
        dp_rank: the rank by its port; a `dp_rank` in its batches wins.
        endpoint: its PUB socket.
        replay: its ROUTER socket, or None.
    """

    dp_rank: int
    endpoint: str
    replay: str | None


class Worker(msgspec.Struct, frozen=True):
    """One engine deployment and the endpoints of its publishers.

    Attributes:
        name: its id, chosen by the user: the `worker` of its ranks.
        endpoint: ZeroMQ endpoint of the PUB socket (tcp, ipc or inproc). One string is rank 0's:
            as the engines do, rank r then is at port + r (tcp) or has the suffix `_dp{r}`
            (inproc). Or one for each rank, as a list or as `{dp_rank: endpoint}`.
        replay: the same for the replay (ROUTER) socket; None if the engine has none: gaps then
            cannot be repaired.
        dp_size: number of data-parallel ranks.
        topic: only messages whose topic starts with this; "" (the engines' default) is all.
        bind: listen at `endpoint` ourselves, for publishers that connect (vLLM does when its
            endpoint names a concrete host). Replay is still connected to.
        curve: our CURVE keys, for both sockets, with the publisher's public key as `server_key`.
        cache: what the engine's events do not state about its cache: kinds of groups before vLLM
            0.22, report mode, EAGLE, and whether answers are only upper bounds.

    Raises:
        ConfigurationError: endpoints that no rank could be reached at, with the reason.

    Examples:
        >>> worker = Worker("vllm-0", "tcp://10.0.0.5:5557", dp_size=2)
        >>> [address.endpoint for address in worker.publishers()]
        ['tcp://10.0.0.5:5557', 'tcp://10.0.0.5:5558']
    """

    name: str
    endpoint: Endpoints
    replay: Endpoints | None = None
    dp_size: int | None = None
    topic: str = ""
    bind: bool = False
    curve: Curve | None = None
    cache: CacheSettings = CacheSettings()

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ConfigurationError(f"name must be a non-empty string, not {self.name!r}")
        # Here, for a program without a type checker: ZeroMQ would refuse much later, in its words.
        kinds: dict[str, tuple[type, ...]] = {
            "endpoint": (str, Sequence, Mapping),
            "replay": (str, Sequence, Mapping, type(None)),
            "dp_size": (int, type(None)),
            "topic": (str,),
            "bind": (bool,),
            "curve": (Curve, type(None)),
            "cache": (CacheSettings,),
        }
        for name, allowed in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, allowed) or isinstance(value, bytes):
                wanted = " or ".join(kind.__name__ for kind in allowed)
                raise ConfigurationError(f"{name} must be {wanted}, not {value!r}")
        if self.curve is not None and self.curve.server_key is None:
            raise ConfigurationError(
                "curve must name the publisher's public key: Curve.generate(server_key)"
            )
        connected = {"replay": self.replay, **({} if self.bind else {"endpoint": self.endpoint})}
        for name, endpoints in connected.items():
            if "*" in str(endpoints):
                or_bind = ", or bind=True" if name == "endpoint" else ""
                raise ConfigurationError(
                    f"{name} {endpoints!r}: nobody can connect to '*', which is what the engine "
                    f"binds; give its host{or_bind}"
                )
        if self.dp_size is not None and not 1 <= self.dp_size <= _MAX_DP_SIZE:
            raise ConfigurationError(
                f"dp_size must be 1 to {_MAX_DP_SIZE} ranks, not {self.dp_size}"
            )
        # It raises where no rank could be reached.
        self.publishers()
        # Of listed endpoints it may be meant: `Roster` only warns of those.
        shared = self.shared_endpoints() if isinstance(self.endpoint, str) else []
        if shared:
            raise ConfigurationError(
                f"with {self.dp_size} ranks, one publishes at {shared[0]}, where another replays: "
                f"set the engine's replay port at least {self.dp_size} above its events' port"
            )

    def __hash__(self) -> int:
        """Return a hash of immutable fields: endpoints and settings may hold lists and dicts."""
        return hash((self.name, self.dp_size, self.topic, self.bind, self.curve))

    def publishers(self) -> list[PublisherAddress]:
        """Return the address of each rank's publisher, by dp_rank."""
        endpoints = _by_rank(self.endpoint, self.dp_size, "endpoint")
        if self.replay is None:
            return [PublisherAddress(r, e, None) for r, e in sorted(endpoints.items())]
        replays = _by_rank(self.replay, len(endpoints), "replay", counted_by="endpoint")
        if endpoints.keys() != replays.keys():
            raise ConfigurationError(
                f"worker {self.name!r}: endpoint names dp_ranks {sorted(endpoints)}, "
                f"replay {sorted(replays)}; give both for the same ranks"
            )
        return [PublisherAddress(r, e, replays[r]) for r, e in sorted(endpoints.items())]

    def shared_endpoints(self, beside: Iterable[PublisherAddress] = ()) -> list[str]:
        """Return endpoints where one rank publishes and another replays, as with ports one apart.

        `beside` are further ranks of this worker, already checked among themselves.
        """
        own, beside = self.publishers(), list(beside)
        replays = {address.replay for address in own}
        theirs = {address.replay for address in beside} - replays
        shared = [address.endpoint for address in [*own, *beside] if address.endpoint in replays]
        return shared + [address.endpoint for address in own if address.endpoint in theirs]


def workers_of(workers: Iterable[Worker] | Worker) -> list[Worker]:
    """Return the workers that a caller gave: one or several.

    Raises:
        ConfigurationError: the values are not workers.
    """
    if isinstance(workers, Worker):
        return [workers]
    is_list = isinstance(workers, Iterable) and not isinstance(workers, (str, bytes, Mapping))
    listed: list[Any] = list(workers) if is_list else [workers]
    for worker in listed:
        if not isinstance(worker, Worker):
            raise not_a_worker(worker)
    return listed


def not_a_worker(value: object) -> ConfigurationError:
    """Return the error for a value that is no `Worker`, with what to write instead."""
    write = 'Worker("NAME", "tcp://HOST:PORT", replay="tcp://HOST:PORT"), or a list of such'
    if isinstance(value, str):
        # What people pass instead: an endpoint, or the engine's address.
        if value.startswith(_TRANSPORTS):
            write = f'Worker("NAME", "{value:.500}", replay="tcp://HOST:PORT")'
        elif _HOST_PORT.fullmatch(value):
            write = f'"http://{value}" if that is the engine\'s HTTP server, else {write}'
    return ConfigurationError(
        f"{value!r:.500} ({type(value).__name__}) is no Worker: write {write}"
    )


def _by_rank(
    endpoints: Endpoints, dp_size: int | None, name: str, *, counted_by: str = "dp_size"
) -> dict[int, str]:
    if isinstance(endpoints, str):
        return {r: _offset(endpoints, r, name) for r in range(dp_size or 1)}
    by_rank = dict(endpoints if isinstance(endpoints, Mapping) else enumerate(endpoints))
    if not by_rank:
        raise ConfigurationError(f"{name} is empty: give one for each rank")
    if dp_size is not None and len(by_rank) != dp_size:
        raise ConfigurationError(
            f"{name} lists {len(by_rank)}, but {counted_by} says {dp_size}: give one for each rank"
        )
    for dp_rank, endpoint in by_rank.items():
        if not isinstance(dp_rank, int) or dp_rank < 0:
            raise ConfigurationError(f"{name}: dp_rank must be 0 or more, not {dp_rank!r}")
        _offset(endpoint, 0, name)
    return by_rank


def _offset(endpoint: str, dp_rank: int, name: str) -> str:
    """Return a rank's endpoint from rank 0's, by the engines' own rule."""
    scheme, _, address = endpoint.partition("://")
    if scheme in ("inproc", "ipc") and address:
        # vLLM's `offset_endpoint_port` knows tcp and inproc only.
        if dp_rank and scheme == "ipc":
            raise ConfigurationError(
                f"{name} {endpoint!r}: ranks of an ipc endpoint follow no rule; "
                "give a list with one for each rank"
            )
        return f"{endpoint}_dp{dp_rank}" if dp_rank else endpoint
    tcp = _TCP_PORT.fullmatch(endpoint)
    if tcp is None:
        raise ConfigurationError(
            f"{name} {endpoint!r} is no endpoint; "
            "expected tcp://HOST:PORT, ipc://PATH or inproc://NAME"
        )
    port = int(tcp[2]) + dp_rank
    if not 1 <= port <= 65_535:
        raise ConfigurationError(f"{name} {endpoint!r}: port {port} of rank {dp_rank} is no port")
    return f"{tcp[1]}:{port}"
