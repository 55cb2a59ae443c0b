"""Where a server listens, and whom it admits."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from kvindex.service.http.guards import Limits, check_tokens
from kvindex.service.http.networks import address_of
from kvindex.wire.errors import ConfigurationError

TOKEN_VARIABLE: Final = "KVINDEX_TOKEN"
"""The environment variable that may hold the token."""

_DESCRIPTORS: Final = 65_536
_BACKLOG: Final = 2048  # connections that wait to be accepted


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens, and whom it admits.

    Attributes:
        host: the address or name to listen at.
        port: of it; 0 lets the operating system choose.
        token_file: a file with tokens, each on a line of its own; any of them opens.
        insecure: listen beyond loopback without a token.
        tls_cert: file with the certificate chain, in PEM.
        tls_key: file with its private key.
        allowed_hosts: names besides localhost and addresses that a Host header may have.
        limits: bounds on input from the network.

    Raises:
        ConfigurationError: a value cannot work, with what would.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token_file: str | None = None
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigurationError(f"port must be 0 to 65535, not {self.port}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigurationError("TLS needs both: --tls-cert FILE and --tls-key FILE")

    @property
    def scheme(self) -> str:
        """Either "http" or "https"."""
        return "https" if self.tls_cert else "http"

    @property
    def tls(self) -> tuple[str, str | None] | None:
        """The files with the certificate chain and its private key, if there are any."""
        return None if self.tls_cert is None else (self.tls_cert, self.tls_key)

    def url(self, port: int) -> str:
        """Return where a server at this port is reached from this machine."""
        host = reachable(self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def tokens(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Return the tokens that open, of the file or the environment; none: none is wanted.

        Raises:
            ConfigurationError: one cannot be used, or there is none although the server listens
                beyond loopback and without --insecure.
        """
        if self.token_file is not None:
            path = Path(self.token_file)
            try:
                lines = path.read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"the token file cannot be read: {error}") from None
            return check_tokens((line.strip() for line in lines if line.strip()), str(path))
        if environ.get(TOKEN_VARIABLE):
            return check_tokens((environ[TOKEN_VARIABLE],), TOKEN_VARIABLE)
        if is_loopback(self.host) or self.insecure:
            return ()
        raise ConfigurationError(
            f"{self.host} can be reached from other machines: give a token (--token-file FILE, or "
            f"{TOKEN_VARIABLE} in the environment), or say --insecure if anybody there may send "
            "requests"
        )

    def listen(self) -> socket.socket:
        """Return a socket that listens there; raises OSError.

        The process may open as many files from then on as it is allowed to: each rank and each
        connection needs some.
        """
        _allow_descriptors()
        with self._address() as (family, address):
            listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Accepted sockets inherit it; asyncio sets it only where the protocol's number was given.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening

    def reserve(self) -> socket.socket:
        """Return a socket that keeps the address and never listens; raises OSError.

        A server that sets SO_REUSEADDR can bind and listen beside it.
        """
        with self._address() as (family, address):
            holder = socket.socket(family, socket.SOCK_STREAM)
            try:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(address)
            except OSError:
                holder.close()
                raise
        return holder

    @contextmanager
    def _address(self) -> Iterator[tuple[socket.AddressFamily, Any]]:
        """Look the address up; what fails with it says where it was to listen."""
        try:
            family, *_, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            yield family, address
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"cannot listen at {self.host} port {self.port}: {why}") from error


def reachable(host: str) -> str:
    """Return the host at which this machine reaches a listener at a host."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a listener at this host.

    Examples:
        >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    address = address_of(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
