"""Where a queue's writer listens, and where its readers are told to connect."""

from __future__ import annotations

import ipaddress

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
    if connect_ip == "*":
        raise ConfigurationError(_everywhere(connect_ip))
    if not isinstance(connect_ip, str):  # a number or bytes would be taken for an address in binary
        raise ConfigurationError(f"connect_ip must be an IP address as text, not {connect_ip!r}")
    try:
        address = ipaddress.ip_address(connect_ip)
    except ValueError as error:
        raise ConfigurationError(f"connect_ip must be an IP address as text: {error}") from error
    if address.version == 4:
        if address.is_unspecified:
            raise ConfigurationError(_everywhere(connect_ip))
        return str(address)
    mapped = address.ipv4_mapped
    if address.is_unspecified or (mapped and mapped.is_unspecified):
        raise ConfigurationError(_everywhere(connect_ip))
    return f"[{address}]"


def _everywhere(connect_ip: str) -> str:
    return (
        f"connect_ip {connect_ip!r} means all interfaces of this machine: give the address of one "
        "of them, which readers connect to and which alone is listened on"
    )
