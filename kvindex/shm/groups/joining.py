"""How ranks find each other: rank 0's address, the keys of a token, and tries to connect."""

from __future__ import annotations

import hmac
import random
import re
import socket
import threading
import time
from typing import Final

import zmq
from zmq.utils import z85

from kvindex.errors import ConfigurationError, QueueTimeoutError
from kvindex.shm.groups.star import ConnectionLost, Hub, Spoke
from kvindex.shm.groups.words import Settings
from kvindex.shm.remote.keys import CurveReader, CurveServer

__all__ = ["Address", "join", "keys_from", "listen"]

_FORM: Final = re.compile(r"(?:\[(?P<literal>[^\[\]]+)\]|(?P<host>[^:\[\]/]+)):(?P<port>\d{1,5})")
_FIRST_RETRY: Final = 0.02  # seconds
_LAST_RETRY: Final = 1.0
_PROBE_SECONDS: Final = 2.0


def keys_from(token: bytes) -> CurveServer:
    """Return rank 0's keys, which whoever has the token can work out and nobody else.

    ZeroMQ's CURVE never sends the server's public key, so that key is a secret, too: it is what
    lets a rank in.
    """
    secret_key = z85.encode(hmac.digest(token, b"kvindex process group", "sha256"))
    return CurveServer(public_key=zmq.curve_public(secret_key), secret_key=secret_key)


class Address:
    """A host (name or number) and a port, from text.

    Raises:
        ConfigurationError: the text is not host:port, or [host]:port for a number of IPv6.

    Examples:
        >>> Address("[::1]:0").port
        0
    """

    def __init__(self, text: str) -> None:
        match = _FORM.fullmatch(text)
        if match is None or int(match["port"]) > 65_535:
            raise ConfigurationError(
                f"address {text!r} is not host:port, as in 10.0.0.1:29500 or [::1]:29500; port 0 "
                "lets the system choose (at rank 0)"
            )
        self.text = text
        self.host = match["literal"] or match["host"]
        self.port = int(match["port"])

    def hosts(self) -> list[str]:
        """Return the host's numbers, as ZeroMQ spells them.

        Raises:
            OSError: nobody knows it.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise ConfigurationError(f"{self.host!r} is no host: {error}") from error
        hosts = [str(where[0]) for *_, where in found]
        return [f"[{host}]" if ":" in host else host for host in hosts]


def listen(address: Address, keys: CurveServer, settings: Settings) -> tuple[Hub, str]:
    """Return rank 0's end of a group, and where it listens.

    Raises:
        ConfigurationError: it cannot listen there.
    """
    why = "the host has no address"
    try:
        for host in address.hosts():
            try:
                hub = Hub(host, address.port, keys, settings)
            except ConfigurationError as error:
                why = str(error)
            else:
                return hub, f"{host}:{hub.port}"
    except OSError as error:
        why = error.strerror or str(error)
    raise ConfigurationError(
        f"cannot listen at {address.text}: {why}. Rank 0 needs an address of its own machine and a "
        "port that nobody listens at"
    )


def join(
    address: Address, keys: CurveServer, rank: int, settings: Settings, timeout: float
) -> Spoke:
    """Return this rank's end of a group, once every rank has come.

    Tries again, ever less often, while nobody listens there, or who does is no process group.

    Raises:
        ConfigurationError: rank 0 refuses this rank, or has another token.
        QueueTimeoutError: that took more than `timeout` seconds; the message says what was missing.
    """
    deadline = time.monotonic() + timeout
    suspects: set[str] = set()
    pause, retry_after = threading.Event(), _FIRST_RETRY
    while True:
        try:
            for host in address.hosts():
                endpoint = f"tcp://{host}:{address.port}"
                spoke = Spoke(endpoint, CurveReader.generate(keys.public_key), rank, settings)
                try:
                    spoke.meet(deadline)
                    return spoke
                except ConnectionLost as lost:
                    spoke.close()
                    obstacle = str(lost)
                    if spoke.handshake_failure is not None:
                        _suspect(endpoint, rank, settings, suspects)
                except BaseException:
                    spoke.close()
                    raise
        except OSError as error:
            obstacle = f"{address.host}: {error.strerror or error}"
        left = deadline - time.monotonic()
        pause.wait(max(0.0, min(left, retry_after * random.uniform(0.5, 1.0))))
        retry_after = min(_LAST_RETRY, retry_after * 2)
        if time.monotonic() >= deadline:
            raise QueueTimeoutError(
                f"rank {rank} waited {timeout:g} s for the group at {address.text}: {obstacle}",
                timeout=timeout,
            )


def _suspect(endpoint: str, rank: int, settings: Settings, suspects: set[str]) -> None:
    """Find out why a handshake failed: whoever has other keys does so twice, and has keys.

    A proxy whose rank 0 does not listen yet fails it, too.

    Raises:
        ConfigurationError: who listens there has other keys.
    """
    if endpoint in suspects:
        raise ConfigurationError(
            f"rank {rank} and who listens at {endpoint} do not have the same token: this rank's is "
            "not that of rank 0, or the address is another group's"
        )
    probe = Spoke(endpoint, None, rank, settings)
    try:
        probe.hear(time.monotonic() + _PROBE_SECONDS)
    except ConnectionLost:
        if probe.handshake_failure == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            suspects.add(endpoint)
    finally:
        probe.close()
