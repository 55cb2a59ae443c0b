"""Where a queue's writer listens, and where its readers are told to connect."""

from __future__ import annotations

import ipaddress

from kvindex.errors import ConfigurationError

__all__ = ["endpoint_host", "listening_at"]


def listening_at(
    connect_ip: str, *, allow_all_interfaces: bool = False, advertise_ip: str | None = None
) -> tuple[str, str]:
    """Return the host to bind to and the host that readers connect to, as endpoints spell them.

    Raises:
        ConfigurationError: `connect_ip` is no IP address, or means all interfaces and that is not
            allowed, or readers could not connect to what they would be told.

    Examples:
        >>> listening_at("10.0.0.1"), listening_at("::1")
        (('10.0.0.1', '10.0.0.1'), ('[::1]', '[::1]'))
        >>> listening_at("*")
        Traceback (most recent call last):
        kvindex.errors.ConfigurationError: connect_ip '*' means all interfaces of this machine; ...
    """
    bound = endpoint_host("0.0.0.0" if connect_ip == "*" else connect_ip)
    if _is_everywhere(bound) and not allow_all_interfaces:
        raise ConfigurationError(
            f"connect_ip {connect_ip!r} means all interfaces of this machine; give the address of"
            " one, or allow_all_interfaces=True"
        )
    told = bound if advertise_ip is None else endpoint_host(advertise_ip)
    if _is_everywhere(told):
        raise ConfigurationError(
            f"readers cannot connect to {told}: give advertise_ip, an address of this machine"
        )
    return bound, told


def endpoint_host(ip: str) -> str:
    """Return an IP address as it is spelled in an endpoint.

    Raises:
        ConfigurationError: it is no IP address.
    """
    try:
        address = ipaddress.ip_address(ip)
    except ValueError as error:
        raise ConfigurationError(f"connect_ip must be an IP address: {error}") from error
    return f"[{address}]" if address.version == 6 else str(address)


def _is_everywhere(host: str) -> bool:
    return ipaddress.ip_address(host.strip("[]")).is_unspecified
