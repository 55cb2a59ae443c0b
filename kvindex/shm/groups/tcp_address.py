"""Addresses of TCP groups: host:port as text, and the sockets that they mean."""

from __future__ import annotations

import re
import socket
import time
from typing import Any, Final

import msgspec

from kvindex.errors import ConfigurationError

__all__ = ["Address", "connect", "listen", "parse_address"]

_FORM: Final = re.compile(r"(?:\[(?P<literal>[^\[\]]+)\]|(?P<host>[^:\[\]/]+)):(?P<port>\d{1,5})")
_BACKLOG: Final = 128


class Address(msgspec.Struct, frozen=True):
    """A host (name or number) and a port.

    Examples:
        >>> str(Address("::1", 29500))
        '[::1]:29500'
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address in `host:port`, or `[host]:port` for a number of IPv6.

    Raises:
        ConfigurationError: the text is neither.

    Examples:
        >>> parse_address("[::1]:0")
        Address(host='::1', port=0)
    """
    match = _FORM.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigurationError(
            f"address {text!r} is not host:port, as in 10.0.0.1:29500 or [::1]:29500; port 0 lets "
            "the system choose (at rank 0)"
        )
    return Address(match["literal"] or match["host"], int(match["port"]))


def listen(address: Address) -> tuple[socket.socket, Address]:
    """Listen at this address and no other; return the socket and what it is bound to.

    Raises:
        ConfigurationError: it cannot be listened at.
    """
    failures: list[str] = []
    try:
        candidates = _resolve(address)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {address}: {error.strerror}") from error
    for family, where in candidates:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(where)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            host, port = sock.getsockname()[:2]
        except OSError as error:
            sock.close()
            failures.append(error.strerror or str(error))
        else:
            return sock, Address(host, port)
    raise ConfigurationError(
        f"cannot listen at {address}: {'; '.join(failures)}. Rank 0 needs an address of its own "
        "machine and a port that nobody listens at"
    )


def connect(address: Address, deadline: float) -> socket.socket:
    """Return a socket connected to the address by a deadline of `time.monotonic`.

    Raises:
        OSError: nobody answers there, or the host is not known.
    """
    failure: OSError = TimeoutError("no time is left")
    for family, where in _resolve(address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(where)
            if sock.getsockname() == sock.getpeername():  # a port of ours met itself
                raise ConnectionRefusedError("nobody listens there")
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _resolve(address: Address) -> list[tuple[int, Any]]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ConfigurationError(f"{address.host!r} is no host: {error}") from error
    return [(family, where) for family, _, _, _, where in found]
