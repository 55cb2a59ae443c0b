"""The replay side of a publisher: a DEALER socket for each request.

Owned by the subscriber's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import zmq

from kvindex.errors import ConfigurationError
from kvindex.sequencer import AskReplay
from kvindex.subscribe.connection import Connection
from kvindex.subscribe.events import Event, ReplayFailed
from kvindex.subscribe.notes import Notes
from kvindex.subscribe.reading import Reader
from kvindex.wire import replay_request

__all__ = ["ReplayLink"]


class ReplayLink:
    """Sends replay requests, one at a time, and tells what is replied.

    Args:
        connect: makes a connection.
        reader: reads replies.
        notes: where it counts and logs.
        look_again: has `take` called soon.

    Attributes:
        connection: that of the open request, or None.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        reader: Reader,
        notes: Notes,
        look_again: Callable[[], None],
    ) -> None:
        self.connection: Connection | None = None
        self._connect = connect
        self._reader = reader
        self._notes = notes
        self._look_again = look_again
        self._request: int | None = None
        self._unread: deque[list[bytes]] = deque()

    def ask(self, ask: AskReplay) -> None:
        """Send a request on a fresh socket: no reply to an earlier one can mix in."""
        self.close()
        self._request = ask.request
        try:
            self.connection = self._connect()
            self.connection.socket.send_multipart(replay_request(ask.start_seq), zmq.NOBLOCK)
        except (ConfigurationError, zmq.ZMQError) as error:
            self._notes.counters["replay_socket_errors"] += 1
            self._notes.warn("replay_socket", "cannot ask for a replay: %s", error)
            self._close_socket()
        self._look_again()

    def take(self, now: float) -> Iterator[Event]:
        """Yield what has come, up to a bound.

        Whoever stops taking in between is to look again: the next `take` goes on from there.
        """
        request, connection = self._request, self.connection
        if request is None:
            return
        if connection is None:
            self._request = None
            yield ReplayFailed(request)
            return
        if not self._unread:
            self._unread.extend(connection.receive())
            if not connection.drained:
                self._look_again()
        for _ in connection.changes(now):
            pass  # only `trouble()` cares
        while self._unread:  # another request, once there is one, has none as yet
            yield from self._reader.reply(request, self._unread.popleft())

    def close(self, request: int | None = None) -> None:
        """Close the socket of this request, or of any; idempotent."""
        if request is None or request == self._request:
            self._request = None
            self._unread.clear()
            self._close_socket()

    def _close_socket(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
