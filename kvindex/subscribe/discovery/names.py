"""Engines behind a DNS name with several addresses: a headless service, for instance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from kvindex.subscribe import Worker
from kvindex.subscribe.discovery.answers import look_up_host, with_host
from kvindex.subscribe.discovery.targets import Notify, Target
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ConfigurationError, DiscoveryError
from kvindex.wire.web import split_url

LookUp: TypeAlias = Callable[[str], Sequence[str]]
"""Returns the addresses of a name, or raises an OSError."""


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
        look_up: LookUp | None = None,
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
            shown = f"[{address}]" if ":" in address else address
            worker = usual_worker(address, address, self._ports, cache)
            url = f"{self._scheme}://{shown}{self._rest}" if self._scheme else ""
            yield Target(address, url, worker, model, group, cache=cache)


class UsualPorts(NamedTuple):
    """Where the ranks of an engine publish: at port + rank, where engines put them.

    Attributes:
        events: where rank 0 publishes; None assumes nothing.
        replay: where rank 0 answers replay requests, or None.
        dp_size: number of ranks.
    """

    events: int | None
    replay: int | None
    dp_size: int


def usual_worker(
    name: str, host: str, ports: UsualPorts, cache: CacheSettings, first_rank: int = 0
) -> Worker | None:
    """Return an engine at its usual ports; None if they assume nothing.

    Raises:
        ConfigurationError: a port is invalid, or the engine's two ranges of ports overlap.
    """
    events, replay, dp_size = ports
    if events is None:
        return None
    end = first_rank + dp_size
    if replay is not None and events < replay < events + end:
        raise ConfigurationError(
            f"with {end} ranks, replay port {replay} is where rank {replay - events} publishes: "
            f"keep it at least {end} above {events}"
        )

    def at(base: int) -> dict[int, str]:
        return {rank: with_host(host, base + rank) for rank in range(first_rank, end)}

    return Worker(name, at(events), replay=None if replay is None else at(replay), cache=cache)
