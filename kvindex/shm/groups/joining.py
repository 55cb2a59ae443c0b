"""How ranks find each other: rank 0's address, the keys of a token, and tries to connect."""

from __future__ import annotations

import hmac
import random
import re
import socket
import threading
import time
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils import z85

from kvindex.curve import Curve
from kvindex.errors import ConfigurationError, QueueTimeoutError
from kvindex.shm.groups.star import ConnectionLost, Hub, Spoke
from kvindex.shm.groups.words import Settings

__all__ = ["join", "keys_from", "listen", "parse_address"]

_FORM: Final = re.compile(r"(?:\[(?P<literal>[^\[\]]+)\]|(?P<host>[^:\[\]/]+)):(?P<port>\d{1,5})")
_FIRST_RETRY: Final = 0.02  # seconds
_LAST_RETRY: Final = 1.0
_PROBE_SECONDS: Final = 2.0


def keys_from(token: bytes) -> Curve:
    """Return rank 0's keys, which nobody can work out without the token.

    CURVE never sends the server's public key, so it stays as secret as the token, and lets in
    those ranks alone that know the token.
    """
    secret_key = z85.encode(hmac.digest(token, b"kvindex process group", "sha256"))
    return Curve(public_key=zmq.curve_public(secret_key), secret_key=secret_key)


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port in `host:port`, or `[host]:port` for a number of IPv6.

    Raises:
        ConfigurationError: the text is neither.

    Examples:
        >>> parse_address("[::1]:0")
        ('::1', 0)
    """
    match = _FORM.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigurationError(
            f"address {text!r} is not host:port, as in 10.0.0.1:29500 or [::1]:29500; port 0 lets "
            "the system choose (at rank 0)"
        )
    return match["literal"] or match["host"], int(match["port"])


def listen(address: str, keys: Curve, settings: Settings) -> Hub:
    """Return rank 0's end of a group, which listens there and nowhere else.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    host, port = parse_address(address)
    why = ""
    try:
        for number in _numbers(host):
            try:
                return Hub(number, port, keys, settings)
            except ConfigurationError as error:
                why = str(error)
    except OSError as error:
        why = error.strerror or str(error)
    raise ConfigurationError(
        f"cannot listen at {address}: {why}. Rank 0 needs an address of its own machine and a "
        "port that nobody listens at"
    )


def join(address: str, keys: Curve, rank: int, settings: Settings, timeout: float) -> Spoke:
    """Return this rank's end of a group, once every rank has come.

    Tries again, ever less often, while nobody listens there, or who does is no process group.

    Raises:
        ConfigurationError: rank 0 refuses this rank, or has another token.
        QueueTimeoutError: that took more than `timeout` seconds; the message says what was missing.
    """
    host, port = parse_address(address)
    deadline = time.monotonic() + timeout
    suspects: set[str] = set()
    pause, retry_after = threading.Event(), _FIRST_RETRY
    while True:
        try:
            for number in _numbers(host):
                endpoint = f"tcp://{number}:{port}"
                spoke = Spoke(endpoint, Curve.generate(keys.public_key), rank, settings)
                try:
                    spoke.meet(deadline)
                    return spoke
                except ConnectionLost as lost:
                    spoke.close(0.0)
                    obstacle = str(lost)
                    if spoke.connection.handshake_failure is not None:
                        _suspect(endpoint, rank, settings, suspects)
                except BaseException:
                    spoke.close(0.0)
                    raise
        except OSError as error:
            obstacle = f"{host}: {error.strerror or error}"
        left = deadline - time.monotonic()
        pause.wait(max(0.0, min(left, retry_after * random.uniform(0.5, 1.0))))
        retry_after = min(_LAST_RETRY, retry_after * 2)
        if time.monotonic() >= deadline:
            raise QueueTimeoutError(
                f"rank {rank} waited {timeout:g} s for the group at {address}: {obstacle}",
                timeout=timeout,
            )


def _suspect(endpoint: str, rank: int, settings: Settings, suspects: set[str]) -> None:
    """Raise ConfigurationError if who listens there has other keys, and not once but twice.

    A handshake fails, too, at a proxy before a rank 0 that does not listen yet. So a connection
    without keys finds out whether a CURVE server listens there.
    """
    if endpoint in suspects:
        raise ConfigurationError(
            f"rank {rank} and who listens at {endpoint} do not have the same token: this rank's is "
            "not that of rank 0, or the address is another group's"
        )
    probe = Spoke(endpoint, None, rank, settings)
    with suppress(ConnectionLost):
        probe.hear(time.monotonic() + _PROBE_SECONDS)
    probe.close(0.0)
    if probe.connection.handshake_failure == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        suspects.add(endpoint)


def _numbers(host: str) -> list[str]:
    """The host's IP addresses as ZeroMQ spells them; raises OSError if nobody knows it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ConfigurationError(f"{host!r} is no host: {error}") from error
    numbers = [str(where[0]) for *_, where in found]
    return [f"[{number}]" if ":" in number else number for number in numbers]
