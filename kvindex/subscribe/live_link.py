"""The live side of a publisher: SUB sockets one after the other, each for one connection.

ZeroMQ connects anew by itself under the same socket, and what an earlier connection brought is then
still unread. If the publisher was an engine that has been restarted, those messages are a dead
one's, and nothing in them tells. So a connection that broke is read to its end, and a new socket
takes its place. Where that comes too late, what is unread is dropped: replay brings those of it
that count. So it is for a connection that did not last, too: a new socket connects at once, and a
peer that hangs up each time is to be left to ZeroMQ's pauses.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from kvindex.errors import ConfigurationError
from kvindex.subscribe.connection import Connection

__all__ = ["LiveLink"]


class LiveLink:
    """Tells what a publisher's live side brings, in the order in which it is to be handled.

    Args:
        open_: makes a connection that is watched.
        close: closes it.
        look_again: says that a socket may have something left.
        refused: told why no new socket is to be had, and when.
        bind: whether the sockets bind: one port, which cannot be given up in between.
        hwm: messages that a socket holds at most.
        pause: seconds that a socket must have been there to be replaced.
        counters: where it counts, by name.

    Raises:
        ConfigurationError: ZeroMQ refuses the endpoint.

    Attributes:
        connection: the present one.
    """

    def __init__(
        self,
        open_: Callable[[], Connection],
        close: Callable[[Connection], None],
        look_again: Callable[[], None],
        refused: Callable[[ConfigurationError, float], None],
        *,
        bind: bool,
        hwm: int,
        pause: float,
        counters: Counter[str],
    ) -> None:
        self._open = open_
        self._close = close
        self._look_again = look_again
        self._refused = refused
        self._bind = bind
        self._hwm = hwm
        self._pause = pause
        self._counters = counters
        self._parting = False  # the connection broke; what it brought is not all read
        self._closed = False
        self._drained = False  # whether the last look left nothing behind
        self._rest: list[list[bytes]] = []  # messages that were given back
        self._opened_at = -math.inf  # the first one is replaced whenever it breaks
        self.connection = open_()

    def take(self, now: float) -> Iterator[bool | list[list[bytes]]]:
        """Yield messages, up to a bound; True for a new connection; False for one that is over."""
        # Messages first, then the monitor: so a message of a new connection is never handled
        # before the end of the old one is known.
        parting = self._parting
        messages = self._received()
        for connected in self.connection.changes(now):
            if not connected:
                self._parting = True
            elif not self._parting:
                yield True
            else:
                # There is another connection under this socket already, and nothing tells which
                # messages came before it.
                self._note_dropped(len(messages))
                messages = []
                yield from self._part(now)
                break
        yield messages
        if parting and self._parting and self._drained and not self._rest:
            yield from self._part(now)
        elif self._parting:  # what came between the last look and the end is still to be read
            self._look_again()

    def give_back(self, messages: list[list[bytes]]) -> None:
        """Take messages back for which there was no time: the next `take` begins with them."""
        if messages:
            self._rest = messages
            self._look_again()

    def reopen(self, now: float) -> bool:
        """Replace the socket; False, and later again, if there is none to be had."""
        given_up = self.connection
        try:
            self.connection = self._open()
        except ConfigurationError as error:
            self._counters["reopen_failures"] += 1
            given_up.postpone(now)
            self._refused(error, now)
            return False
        self._counters["reopened"] += 1
        self._opened_at = now
        self._parting = False
        self._note_dropped(len(self._rest))
        self._rest = []
        self._close(given_up)
        return True

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close(self.connection)

    def _received(self) -> list[list[bytes]]:
        if self._rest:
            messages, self._rest = self._rest, []
            # More may have come since: a flood of whole messages is no message without end.
            self._drained = self.connection.drained = False
        else:
            messages = self.connection.receive()
            self._drained = self.connection.drained
        if not self._drained:
            self._look_again()
        return messages

    def _part(self, now: float) -> Iterator[bool]:
        self._parting = False
        yield False
        stays = self._bind or now < self._opened_at + self._pause
        if self._closed or (not stays and self.reopen(now)):
            return
        self._drop_unread()
        if self.connection.connected:
            yield True

    def _drop_unread(self) -> None:
        """Drop what has come until now: at most what a socket holds, for more may come."""
        left = self._hwm
        self.connection.drained = False
        while left > 0 and not self.connection.drained:
            dropped = len(self.connection.receive())
            self._note_dropped(dropped)
            left -= dropped
        self._look_again()

    def _note_dropped(self, count: int) -> None:
        if count:
            self._counters["unread_dropped"] += count
