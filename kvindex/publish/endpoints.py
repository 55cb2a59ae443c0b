"""Where a rank's publisher listens: the engines' rules for ports, names, and bind or connect.

Rank r of a deployment uses port + r on tcp and the suffix `_dp{r}` on inproc, for the live and the
replay endpoint alike. Pure: text in, text out.
"""

from __future__ import annotations

import re
from typing import Final

from kvindex.wire import Dialect
from kvindex.wire.errors import ConfigurationError

__all__ = ["binds_endpoint", "local_endpoint", "offset_endpoint", "port_of"]

_SCHEMES: Final = ("tcp", "ipc", "inproc")
_MAX_PORT: Final = 65_535
_OS_CHOSEN: Final = ("0", "*")
_SGLANG_BINDS_ANY_ADDRESS: Final = (0, 5, 13)


def offset_endpoint(endpoint: str, data_parallel_rank: int) -> str:
    """Return the endpoint of a rank, given that of rank 0.

    A port chosen by the operating system (`:0` or `:*`) stays so for every rank.

    Raises:
        ConfigurationError: not a tcp, ipc or inproc endpoint, a port that is missing or beyond
            65535 for this rank, or ipc with a rank above 0 (the engines have no rule for it).

    Examples:
        >>> offset_endpoint("tcp://*:5557", 2)
        'tcp://*:5559'
        >>> offset_endpoint("inproc://kv", 1)
        'inproc://kv_dp1'
    """
    scheme, address = _split(endpoint)
    if scheme == "tcp":
        return _offset_port(endpoint, address, data_parallel_rank)
    if data_parallel_rank == 0:
        return endpoint
    if scheme == "inproc":
        return f"{endpoint}_dp{data_parallel_rank}"
    raise ConfigurationError(
        f"endpoint {endpoint!r} cannot serve data_parallel_rank {data_parallel_rank}: ipc has no "
        "port to offset; use tcp:// or inproc://, or a path of its own for each rank with rank 0"
    )


def binds_endpoint(endpoint: str, dialect: Dialect) -> bool:
    """Return whether the engine's live socket binds this endpoint; else it connects to it.

    ipc, inproc and wildcards (`*`, `::`) are bound, a concrete host is connected to; SGLang binds
    0.0.0.0 too since 0.5.13. A port that the operating system chooses can only be bound.

    Examples:
        >>> from kvindex.wire import dialect
        >>> endpoint = "tcp://0.0.0.0:5557"
        >>> binds_endpoint(endpoint, dialect("vllm-0.33.0"))
        False
        >>> binds_endpoint(endpoint, dialect("sglang-0.5.22"))
        True
    """
    scheme, address = _split(endpoint)
    if scheme != "tcp" or "*" in endpoint or "::" in endpoint:
        return True
    host, _, port = address.rpartition(":")
    return port in _OS_CHOSEN or (host == "0.0.0.0" and _binds_any_address(dialect))


def local_endpoint(bound: str) -> str:
    """Return an endpoint at which this machine reaches a bound endpoint.

    Examples:
        >>> local_endpoint("tcp://0.0.0.0:5557")
        'tcp://127.0.0.1:5557'
        >>> local_endpoint("tcp://[::]:5557")
        'tcp://[::1]:5557'
    """
    for wildcard, loopback in (("0.0.0.0", "127.0.0.1"), ("*", "127.0.0.1"), ("[::]", "[::1]")):
        prefix = f"tcp://{wildcard}:"
        if bound.startswith(prefix):
            return f"tcp://{loopback}:{bound[len(prefix) :]}"
    return bound


def port_of(endpoint: str) -> int | None:
    """Return the tcp port of an endpoint; None if it has none or the operating system chooses."""
    scheme, address = _split(endpoint)
    port = address.rpartition(":")[2]
    return int(port) if scheme == "tcp" and port not in _OS_CHOSEN else None


def _split(endpoint: str) -> tuple[str, str]:
    scheme, separator, address = endpoint.partition("://")
    if not separator or not address or scheme not in _SCHEMES:
        raise ConfigurationError(
            f"endpoint {endpoint!r} is none of tcp://host:port, ipc://path, inproc://name"
        )
    return scheme, address


def _offset_port(endpoint: str, address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    if port in _OS_CHOSEN and host:
        return endpoint
    if not host or not re.fullmatch("[0-9]{1,5}", port):
        raise ConfigurationError(f"endpoint {endpoint!r} needs a port, as in tcp://*:5557")
    if int(port) + rank > _MAX_PORT:
        raise ConfigurationError(
            f"endpoint {endpoint!r} has no room for data_parallel_rank {rank}: "
            f"port {int(port) + rank} is beyond {_MAX_PORT}"
        )
    return f"tcp://{host}:{int(port) + rank}"


def _binds_any_address(dialect: Dialect) -> bool:
    version = re.search(r"(\d+)\.(\d+)\.(\d+)", dialect.name)
    if dialect.engine != "sglang" or version is None:
        return dialect.engine == "sglang"
    return tuple(map(int, version.groups())) >= _SGLANG_BINDS_ANY_ADDRESS
