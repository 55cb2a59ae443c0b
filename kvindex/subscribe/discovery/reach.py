"""Turns the endpoint that an engine reports into one that can be reached from here."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import TypeAlias

import msgspec

__all__ = ["Reached", "Resolve", "addresses_of", "reach", "with_host"]

_TCP = re.compile(r"tcp://(\[[^\[\]/\s]+\]|::|[^\[\]/:\s]+):(\d{1,5})")
_WILDCARDS = {"*", "0.0.0.0", "::"}

Resolve: TypeAlias = Callable[[str], frozenset[str]]
"""Returns the addresses of a host's name; none if it has none."""


class Reached(msgspec.Struct, frozen=True):
    """Where a rank's socket can be reached, or why not.

    Attributes:
        endpoint: to connect to; None if it cannot be reached from here.
        note: a remark about it; "" if it is as expected.
    """

    endpoint: str | None
    note: str = ""


def reach(endpoint: str, asked: str, *, offset: int, resolve: Resolve) -> Reached:
    """Return where to connect to for an endpoint that an engine names.

    A wildcard, the engine's own address and its loopback are replaced by the host that was asked.
    Any other host is used as reported, since the DP ranks of one engine may run on several
    hosts.

    Args:
        endpoint: in the engine's words.
        asked: the host of the engine's URL.
        offset: added to the port: the engine names rank 0's only.
        resolve: looks names up.

    Examples:
        >>> reach("tcp://*:5557", "10.0.0.5", offset=1, resolve=addresses_of).endpoint
        'tcp://10.0.0.5:5558'
    """
    if endpoint.startswith("ipc://") and _is_loopback(asked) and not offset:
        return Reached(endpoint)
    found = _TCP.fullmatch(endpoint)
    if found is None:
        return Reached(None, f"{endpoint!r} cannot be reached from another process or host")
    host, port = found[1].strip("[]"), int(found[2]) + offset
    if not 1 <= port <= 65_535 or found[2] == "0":
        return Reached(None, f"{endpoint!r} names no port that can be connected to")
    if host in _WILDCARDS or host == asked:
        return Reached(with_host(asked, port))
    if _is_loopback(host) and not _is_loopback(asked):
        return Reached(
            with_host(asked, port),
            f"{endpoint} is the engine's own loopback: {asked} is tried instead, but write "
            f"tcp://*:{port - offset} in its settings if nothing answers",
        )
    if resolve(host) & resolve(asked):
        return Reached(with_host(asked, port))
    return Reached(
        with_host(host, port),
        f"{endpoint} is another host than {asked} and used as told, since ranks may run on several "
        "hosts; an engine whose settings name a concrete host connects there instead of listening: "
        f"if nothing answers, write tcp://*:{port - offset} in them",
    )


def with_host(host: str, port: int) -> str:
    """Return the endpoint of a port of a host.

    Examples:
        >>> with_host("fd00::1", 5557)
        'tcp://[fd00::1]:5557'
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def addresses_of(host: str) -> frozenset[str]:
    """Return the addresses of a host's name; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(str(address[0]) for *_, address in found)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
