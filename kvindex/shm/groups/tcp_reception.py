"""Rank 0's side of a TCP rendezvous: strangers are turned away, each rank gets one seat."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import Counter
from typing import Final

import msgspec

from kvindex.shm.groups.tcp_frames import Connection, ConnectionEnded, FrameTooLarge
from kvindex.shm.groups.tcp_handshake import (
    HANDSHAKE_BYTES,
    Doorkeeper,
    Join,
    RefusedError,
    Seats,
    StrangerError,
)

__all__ = ["Reception"]

HANDSHAKE_SECONDS: Final = 5.0
MAX_GUESTS: Final = 64

logger = logging.getLogger(__name__)
_encode: Final = msgspec.msgpack.encode


class _Guest:
    """A connection that has not yet said who it is."""

    def __init__(self, connection: Connection, doorkeeper: Doorkeeper, until: float) -> None:
        self.connection = connection
        self.doorkeeper = doorkeeper
        self.until = until


class Reception:
    """Fills the seats of a group from what connects. One thread at a time.

    A guest that says nothing for 5 seconds, or is the oldest of more than 64 that have not said
    who they are, is sent away. A rank that leaves before all have come loses its seat and may come
    again.

    Args:
        listener: a listening socket that does not block; owned from now on, and closed when all
            have come.
        token: the secret of the group.
        world_size: its ranks.
        max_object_bytes: its limit.

    Attributes:
        seated: the connection of each rank that has come.
        turned_away: connections that got no seat, or lost it, by reason.
    """

    def __init__(
        self, listener: socket.socket, *, token: bytes, world_size: int, max_object_bytes: int
    ) -> None:
        self.seated: dict[int, Connection] = {}
        self.turned_away: Counter[str] = Counter()
        self._listener = listener
        self._token = token
        self._world_size = world_size
        self._max_object_bytes = max_object_bytes
        self._guests: dict[Connection, _Guest] = {}
        self._selector: selectors.BaseSelector | None = None

    @property
    def missing(self) -> list[int]:
        """The ranks that have no connection, sorted."""
        return [rank for rank in range(1, self._world_size) if rank not in self.seated]

    def fill(self, deadline: float) -> bool:
        """Return whether every rank had come by a deadline of `time.monotonic`.

        Those that came stay connected if not; `fill` may be called again.
        """
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            for connection in [*self.seated.values(), *self._guests]:
                self._selector.register(connection, selectors.EVENT_READ)
            while self.missing and time.monotonic() < deadline:
                self._look(deadline)
        self._selector = None
        if not self.missing:
            self._end()
        return not self.missing

    def close(self) -> None:
        """Listen no more, and close all connections, of guests and of ranks."""
        self._listener.close()
        for connection in [*self._guests, *self.seated.values()]:
            connection.close()
        self._guests.clear()
        self.seated.clear()

    def _end(self) -> None:
        """Let all begin; a rank that is gone just now is found by the first collective."""
        self._listener.close()
        self._tell_seats()
        for guest in list(self._guests.values()):
            self._turn_away(guest.connection, "late", "all ranks have come")

    def _look(self, deadline: float) -> None:
        """Handle what has come, waiting for it until the deadline or a guest's."""
        assert self._selector is not None
        until = min([deadline, *(guest.until for guest in self._guests.values())])
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, Connection) and key.fileobj.fileno() >= 0:
                self._hear(key.fileobj)  # else it was turned away just now
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.until <= now]:
            self._turn_away(guest.connection, "silent", f"silent for {HANDSHAKE_SECONDS:g} s")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # who connected is gone again
            logger.debug("a connection was not accepted: %s", error)
            return
        assert self._selector is not None
        connection = Connection(sock, HANDSHAKE_BYTES)
        doorkeeper = Doorkeeper(self._token, self._world_size, self._max_object_bytes)
        guest = _Guest(connection, doorkeeper, time.monotonic() + HANDSHAKE_SECONDS)
        self._guests[connection] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._guests) > MAX_GUESTS:
            self._turn_away(next(iter(self._guests)), "crowded", "too many have not said who")
        self._say(guest.connection, doorkeeper.hello())

    def _hear(self, connection: Connection) -> None:
        guest = self._guests.get(connection)
        try:
            body = connection.read_frame()
            if body is None:
                return
            if guest is None:
                raise StrangerError("it spoke before all had come")
            self._seat(guest, guest.doorkeeper.check(body))
        except RefusedError as error:
            if guest is not None:
                self._say(connection, guest.doorkeeper.refuse(error))
            self._turn_away(connection, error.reason, error)
        except (StrangerError, FrameTooLarge) as error:
            self._turn_away(connection, "stranger", error)
        except ConnectionEnded as error:
            self._turn_away(connection, "ended", error)

    def _seat(self, guest: _Guest, join: Join) -> None:
        if join.rank in self.seated:
            raise RefusedError(
                "duplicate", f"rank {join.rank} is connected already; give each process its own"
            )
        del self._guests[guest.connection]
        self.seated[join.rank] = guest.connection
        guest.connection.allow(HANDSHAKE_BYTES + self._max_object_bytes)
        self._say(guest.connection, guest.doorkeeper.welcome(join))
        if self.missing:
            self._tell_seats()

    def _tell_seats(self) -> None:
        seats = _encode(Seats.of(self.missing))
        for connection in self.seated.values():
            self._say(connection, seats)

    @staticmethod
    def _say(connection: Connection, body: bytes) -> None:
        """Send without waiting; a connection that takes no more shows its end when it is read."""
        try:
            if connection.in_step:
                connection.send(body, deadline=0.0)
        except (ConnectionEnded, TimeoutError) as error:
            logger.debug("a word of the rendezvous was not sent: %r", error)

    def _turn_away(self, connection: Connection, reason: str, why: object) -> None:
        if self._selector is not None:
            self._selector.unregister(connection)
        connection.close()
        self._guests.pop(connection, None)
        for rank, seated in list(self.seated.items()):
            if seated is connection:
                del self.seated[rank]
                logger.info("rank %d lost its seat: %s", rank, why)
                self._tell_seats()
        self.turned_away[reason] += 1
        count = self.turned_away[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: a flood fills no log
            logger.warning("turned away (%s, %d so far): %s", reason, count, why)
