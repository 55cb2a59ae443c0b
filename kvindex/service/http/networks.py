"""Which addresses a registration from the network may make this process dial.

Whoever may call `/register` names a host and a port, and this process connects there. Without a
list of allowed networks that would be a way to reach what only this machine can reach. So an
endpoint is taken apart, its host is resolved once, the address is held against the list, and what
ZeroMQ is given afterwards is that address: it never resolves the name again.

Workers from flags, files and discovery are the operator's own words; they are not checked here.
"""

from __future__ import annotations

import concurrent.futures
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final, TypeAlias

from kvindex.wire.errors import ConfigurationError, EndpointRefusedError

Address: TypeAlias = "IPv4Address | IPv6Address"
Network: TypeAlias = "IPv4Network | IPv6Network"
Resolve: TypeAlias = Callable[[str], Sequence[str]]

LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
PRIVATE: Final = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")

_WORDS: Final = {"loopback": LOOPBACK, "private": PRIVATE, "any": ("0.0.0.0/0", "::/0")}
_ENDPOINT = re.compile(
    r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_][A-Za-z0-9_.-]{0,252})):([0-9]{1,5})"
)
_NAT64 = ip_network("64:ff9b::/96")
_COMPATIBLE = ip_network("::/96")  # an IPv4 address behind zeros: RFC 4291, 2.5.5.1
_GUARDED: Final = tuple(
    ip_network(text)
    for text in (
        *("169.254.0.0/16", "fe80::/10", "fec0::/10"),  # link-local: most clouds' metadata
        *("fd00:ec2::/32", "fd20:ce::254"),  # AWS, Google
        *("100.100.100.200", "168.63.129.16", "192.0.0.0/24"),  # Alibaba, Azure, Oracle
        *("64:ff9b:1::/48", "0.0.0.0/8", "240.0.0.0/4"),  # a NAT64 of one's own; no hosts
    )
)
_NAME_SECONDS: Final = 5.0  # for a name to be resolved in
_MOST_NAMES: Final = 16  # that are being resolved at once
_resolving = threading.BoundedSemaphore(_MOST_NAMES)


def address_of(text: str) -> Address | None:
    """Return the IP address in a text, which may stand in brackets; None if it is none."""
    try:
        return ip_address(text.strip("[]"))
    except ValueError:
        return None


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return networks from CIDR texts, single addresses, or "loopback", "private" and "any".

    Raises:
        ConfigurationError: one is none of these; says which.

    Examples:
        >>> parse_networks(["10.0.0.0/8", "192.168.1.7"])
        (IPv4Network('10.0.0.0/8'), IPv4Network('192.168.1.7/32'))
    """
    networks: list[Network] = []
    for text in texts:
        for network in _WORDS.get(text, (text,)):
            try:
                networks.append(ip_network(network))
            except ValueError as error:
                raise ConfigurationError(
                    f"{text!r} is no network ({error}): write it as 10.0.0.0/8, or one of "
                    + ", ".join(_WORDS)
                ) from None
    return tuple(networks)


def resolved(host: str, within: float = _NAME_SECONDS) -> list[str]:
    """Return the addresses of a host name, in the resolver's order.

    The system's resolver may wait for a silent name server for as long as it likes, so it does
    that on a thread of its own.

    Raises:
        EndpointRefusedError: it did not answer within so many seconds.
    """
    answer: concurrent.futures.Future[list[str]] = concurrent.futures.Future()

    def resolve() -> None:
        try:
            addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.set_result(list(dict.fromkeys(str(address[0]) for *_, address in addresses)))
        except (OSError, UnicodeError):
            answer.set_result([])
        finally:
            _resolving.release()

    if _resolving.acquire(timeout=within):
        threading.Thread(target=resolve, name="kvindex-resolver", daemon=True).start()
        concurrent.futures.wait([answer], within)
    if not answer.done():
        raise EndpointRefusedError(
            f"the name {host!r} was not resolved within {within:g} s; register the address itself",
            reason="name",
        )
    return answer.result()


class Networks:
    """An allow-list of networks for endpoints that arrive over HTTP.

    Link-local addresses and others where clouds have their metadata are allowed only by a network
    that lies within that special one, and multicast and unspecified addresses never: no wide
    network lets them in. An IPv4 address inside an IPv6 one is held to the same rules.

    Args:
        allowed: what `parse_networks` returns.
        resolve: a host name's addresses.

    Thread safety: immutable; `check` waits while a name is resolved.

    Examples:
        >>> networks = Networks(parse_networks(["loopback"]))
        >>> networks.check("tcp://127.0.0.1:5557")
        'tcp://127.0.0.1:5557'
        >>> networks.check("tcp://10.0.0.5:5557")
        Traceback (most recent call last):
            ...
        kvindex.wire.errors.EndpointRefusedError: 'tcp://10.0.0.5:5557': 10.0.0.5 is in none of the
        allowed networks (127.0.0.0/8, ::1/128); allow its network with --register-network
    """

    def __init__(self, allowed: Iterable[Network], resolve: Resolve = resolved) -> None:
        self.allowed = tuple(allowed)
        self._resolve = resolve

    def check(self, endpoint: str) -> str:
        """Return the endpoint to dial: the same one, with the address in the place of a name.

        Raises:
            EndpointRefusedError: it must not be dialled; `reason` is "transport" (not tcp), "form",
                "name" (it has no address) or "network".
        """
        host, port = _parts(endpoint)
        texts = [host] if address_of(host) else self._resolve(host)
        addresses = [address for address in map(address_of, texts) if address is not None]
        if not addresses:
            raise EndpointRefusedError(
                f"{endpoint!r}: the name {host!r} has no address here; check it, or register the "
                "address itself",
                reason="name",
            )
        for address in addresses:
            if self.allows(address):
                shown = f"[{address}]" if address.version == 6 else str(address)
                return f"tcp://{shown}:{port}"
        raise EndpointRefusedError(self._why_not(endpoint, addresses[0]), reason="network")

    def allows(self, address: Address) -> bool:
        """Return whether this address may be dialled."""
        return all(self._allows_one(each) for each in (address, *_inside(address)))

    def _allows_one(self, address: Address) -> bool:
        if address.is_multicast or address.is_unspecified:
            return False
        return (
            any(
                address in network
                and all(_within(network, guarded) for guarded in _GUARDED if address in guarded)
                for network in self.allowed
            )
            or getattr(address, "ipv4_mapped", None) is not None
        )  # what is inside decides

    def _why_not(self, endpoint: str, address: Address) -> str:
        listed = ", ".join(map(str, self.allowed)) or "no network is allowed"
        addresses = (address, *_inside(address))
        if any(each.is_multicast or any(each in net for net in _GUARDED) for each in addresses):
            return (
                f"{endpoint!r}: {address} is a link-local, multicast or metadata address, or none "
                "of a host: registrations may not name it"
            )
        return (
            f"{endpoint!r}: {address} is in none of the allowed networks ({listed}); allow its "
            "network with --register-network"
        )


def _parts(endpoint: str) -> tuple[str, int]:
    """Return host and port of a tcp endpoint."""
    if not endpoint.startswith("tcp://"):
        scheme = endpoint.partition("://")[0][:20]
        raise EndpointRefusedError(
            f"an endpoint of a registration is tcp://HOST:PORT, not {scheme!r}: name workers with "
            "other endpoints in the configuration of this server",
            reason="transport",
        )
    parts = _ENDPOINT.fullmatch(endpoint)
    port = int(parts[3]) if parts else 0
    if parts is None or not 1 <= port <= 65_535:
        raise EndpointRefusedError(
            f"{endpoint[:200]!r} is not tcp://HOST:PORT with a host name or an address, and a port "
            "of 1 to 65535",
            reason="form",
        )
    return parts[1] or parts[2], port


def _within(network: Network, other: Network) -> bool:
    return network.network_address in other and network.prefixlen >= other.prefixlen


def _inside(address: Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that an IPv6 address stands for."""
    if not isinstance(address, IPv6Address):
        return []
    inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        inside.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in inside if each is not None]
