"""Where a queue's writer listens, and where its readers are told to connect."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

from kvindex.errors import ConfigurationError

__all__ = ["endpoint_host"]


def endpoint_host(connect_ip: str) -> str:
    """Return an IP address of this machine as an endpoint spells it.

    Raises:
        ConfigurationError: it is none, or stands for all interfaces: readers could not connect to
            that, and nobody should be listened to by accident.

    Examples:
        >>> endpoint_host("10.0.0.1"), endpoint_host("::1")
        ('10.0.0.1', '[::1]')
        >>> endpoint_host("0.0.0.0")
        Traceback (most recent call last):
        kvindex.errors.ConfigurationError: connect_ip '0.0.0.0' means all interfaces ...
    """
    address = None
    with suppress(ValueError):
        if isinstance(connect_ip, str):  # a number or bytes would be an address in binary
            address = ipaddress.ip_address(connect_ip)
    if connect_ip == "*" or _is_unspecified(address):
        raise ConfigurationError(
            f"connect_ip {connect_ip!r} means all interfaces of this machine: give the address of "
            "one of them, which readers connect to and which alone is listened on"
        )
    if address is None:
        raise ConfigurationError(f"connect_ip must be an IP address as text, not {connect_ip!r}")
    return f"[{address}]" if address.version == 6 else str(address)


def _is_unspecified(address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any(form is not None and form.is_unspecified for form in (address, mapped))
