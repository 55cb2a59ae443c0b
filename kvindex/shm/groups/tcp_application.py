"""The other ranks' side of a TCP rendezvous: connect, be seated, wait until all have come."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import Final

from kvindex.errors import QueueTimeoutError
from kvindex.shm.groups.tcp_address import Address, connect
from kvindex.shm.groups.tcp_frames import Connection, ConnectionEnded, FrameTooLarge
from kvindex.shm.groups.tcp_handshake import (
    HANDSHAKE_BYTES,
    Applicant,
    Seats,
    StrangerError,
    read_message,
)

__all__ = ["apply_for_seat"]

FIRST_RETRY: Final = 0.02
LAST_RETRY: Final = 1.0

logger = logging.getLogger(__name__)


def apply_for_seat(
    address: Address,
    *,
    token: bytes,
    rank: int,
    world_size: int,
    max_object_bytes: int,
    timeout: float,
) -> Connection:
    """Return a connection to rank 0, once every rank has one.

    Tries again, ever less often, while nobody listens there or who does is no process group.

    Raises:
        ConfigurationError: rank 0 refuses this rank, or does not know the token.
        QueueTimeoutError: that took more than `timeout` seconds; the message says what was missing.
    """
    applicant = Applicant(token, rank, world_size, max_object_bytes)
    deadline = time.monotonic() + timeout
    retry_after = FIRST_RETRY
    never = threading.Event()
    failure = ""
    while True:
        attempt = _Attempt(address, applicant)
        try:
            connection = attempt.run(deadline)
        except TimeoutError:
            obstacle = f"{attempt.awaited} was awaited"
        except (OSError, ConnectionEnded, StrangerError, FrameTooLarge) as error:
            failure = f"{error} ({attempt.awaited} was awaited)"
            obstacle = ""
            logger.debug("rank %d has no seat at %s yet: %s", rank, address, failure)
        else:
            connection.allow(HANDSHAKE_BYTES + max_object_bytes)
            return connection
        left = deadline - time.monotonic()
        if left <= 0:
            raise QueueTimeoutError(
                f"rank {rank} waited {timeout:g} s for the group at {address}: "
                + "; before that: ".join(filter(None, (obstacle, failure))),
                timeout=timeout,
            )
        never.wait(min(left, retry_after * random.uniform(0.5, 1.0)))
        retry_after = min(LAST_RETRY, retry_after * 2)


class _Attempt:
    """One connection's course; `awaited` says what was awaited last."""

    def __init__(self, address: Address, applicant: Applicant) -> None:
        self._address = address
        self._applicant = applicant
        self.awaited = "rank 0's port"

    def run(self, deadline: float) -> Connection:
        """Return the connection when all ranks have come."""
        connection = Connection(connect(self._address, deadline), HANDSHAKE_BYTES)
        try:
            self._run(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _run(self, connection: Connection, deadline: float) -> None:
        self.awaited = "rank 0's answer"
        connection.send(self._applicant.join(connection.receive(deadline)), deadline)
        self._applicant.seated(connection.receive(deadline))
        self.awaited = "the rest of the group"
        while True:
            seats = read_message(connection.receive(deadline))
            if not isinstance(seats, Seats):
                raise StrangerError(f"a {type(seats).__name__} where Seats were due")
            if not seats.missing:
                return
            self.awaited = str(seats)
