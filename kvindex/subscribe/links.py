"""The two sides of a publisher, each as the events that it brings.

**The live side** is a row of SUB sockets, each for one connection. ZeroMQ would reconnect the same
socket by itself, and messages of both connections would then stand in one queue. If the engine was
restarted in between, the first of them are the dead engine's, and nothing in them says so. So after
a disconnect the link reads the socket until it is empty, and then opens a new one.

In three cases the link drops the unread messages instead (`unread_dropped`), and replay brings
those that are still needed: ZeroMQ has reconnected already; the socket is bound, and must keep its
port; or it was opened less than `pause` seconds ago. In the last case it stays, because a new
socket connects at once, and would dial a peer that hangs up each time without a rest. ZeroMQ makes
pauses.

**The replay side** is a DEALER socket for each request.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

import zmq

from kvindex.subscribe.connection import Connection
from kvindex.subscribe.notes import Notes
from kvindex.subscribe.reading import Connected, Disconnected, Event, Reader, ReplayOver
from kvindex.subscribe.sequencer import AskReplay
from kvindex.wire import replay_request
from kvindex.wire.errors import ConfigurationError

__all__ = ["LiveLink", "ReplayLink"]


class LiveLink:
    """Yields the events of a publisher's live side, in the order in which to handle them.

    Raises:
        ConfigurationError: ZeroMQ refuses the endpoint.

    Attributes:
        connection: the present connection.
    """

    def __init__(
        self,
        connect: Callable[[tuple[bytes, ...]], Connection],
        reader: Reader,
        notes: Notes,
        *,
        bind: bool,  # one port, which must stay bound
        hwm: int,  # messages that a socket holds at most
        pause: float,  # seconds that a socket must have been there to be replaced
    ) -> None:
        self._connect = connect
        self._reader = reader
        self._notes = notes
        self._bind = bind
        self._hwm = hwm
        self._pause = pause
        self._parting = False  # the connection broke; its messages are not all read
        self._closed = False
        self._drained = False  # whether the last look emptied the socket
        self._unread: deque[list[bytes]] = deque()  # messages that were received
        self._opened_at = -math.inf  # the first socket is replaced whenever it breaks
        self.connection = self._open()

    def take(self, now: float) -> Iterator[Event]:
        """Yield what has come, up to a bound.

        Whoever stops taking in between is to look again: the next `take` goes on from there.
        """
        # Messages first, then the monitor: so a message of a new connection is never handled
        # before the end of the old one is known.
        parting = self._parting
        self._receive()
        for connected in self.connection.changes(now):
            if not connected:
                self._parting = True
            elif not self._parting:
                yield Connected()
            else:
                # This socket has another connection already, and nothing shows which messages came
                # before it.
                self._drop_received()
                yield from self._part(now)
                break
        for event in self._reader.live(self._unread):
            self._narrow()
            yield event
        if parting and self._parting and self._drained:
            yield from self._part(now)
        elif self._parting:  # messages between the last look and the end are still unread
            self.connection.look_again()

    @property
    def is_behind(self) -> bool:
        """Whether the last look left something."""
        return bool(self._unread) or not self.connection.drained

    def shed(self) -> int:
        """Drop messages where more bytes wait than may; return how many.

        The newest message stays: its number shows what is missing.
        """
        connection = self.connection
        count, newest = connection.drop() if connection.is_overfull() else (0, [])
        if count:
            self._unread.append(newest)
            connection.drained = False
            connection.look_again()
        return max(0, count - 1)

    def reopen(self, now: float) -> bool:
        """Replace the socket; return False if none can be opened, and try again later."""
        given_up = self.connection
        try:
            self.connection = self._open()
        except ConfigurationError as error:
            self._notes.counters["reopen_failures"] += 1
            given_up.postpone(now)
            self._notes.warn("reopen", "%s", error)
            return False
        self._notes.counters["reopened"] += 1
        self._opened_at = now
        self._parting = False
        self._drop_received()
        given_up.close()
        return True

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._closed = True
        self.connection.close()

    def _open(self) -> Connection:
        topic = self._reader.topic
        self._listens_to_all = not topic.confirmed
        return self._connect((topic.topic, b"") if self._listens_to_all else (topic.topic,))

    def _narrow(self) -> None:
        """Listen to the wanted topic only, once the topic is confirmed."""
        if self._listens_to_all and self._reader.topic.confirmed:
            self._listens_to_all = False
            self.connection.socket.unsubscribe(b"")
            self.connection.look_again()

    def _receive(self) -> None:
        if self._unread:
            # More may have come since: a flood of whole messages is no endless message.
            self._drained = self.connection.drained = False
        else:
            self._unread.extend(self.connection.receive())
            self._drained = self.connection.drained
        if not self._drained:
            self.connection.look_again()

    def _part(self, now: float) -> Iterator[Event]:
        self._parting = False
        yield Disconnected()
        stays = self._bind or now < self._opened_at + self._pause
        if self._closed or (not stays and self.reopen(now)):
            return
        self._drop_unread()
        if self.connection.connected:
            yield Connected()

    def _drop_received(self) -> None:
        self._note_dropped(len(self._unread))
        self._unread.clear()

    def _drop_unread(self) -> None:
        """Drop the messages received so far: at most a socketful, for more may come."""
        left = self._hwm
        self.connection.drained = False
        while left > 0 and not self.connection.drained:
            dropped = len(self.connection.receive())
            self._note_dropped(dropped)
            left -= dropped
        self.connection.look_again()

    def _note_dropped(self, count: int) -> None:
        if count:
            self._notes.counters["unread_dropped"] += count


class ReplayLink:
    """Sends replay requests, one at a time, and yields the replies.

    Attributes:
        connection: the open request's, or None.
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
        self._cut = False  # whether replies were cut off, since too much waited

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
        if connection is None and not self._unread:
            self._request = None
            yield ReplayOver(request, failed=True)
            return
        if connection is not None:
            self._receive(connection)
            for _ in connection.changes(now):
                pass  # only `trouble()` cares
        while self._unread:  # a new request has no replies yet
            yield from self._reader.reply(request, self._unread.popleft())

    @property
    def is_behind(self) -> bool:
        """Whether the last look left something."""
        return bool(self._unread) or (self.connection is not None and not self.connection.drained)

    def shed(self) -> bool:
        """Cut off the replies where more bytes wait than may; return whether it did.

        Waiting replies are still read. Then the request has failed, and the next one goes on.
        """
        connection = self.connection
        if self._cut or connection is None or not connection.is_overfull():
            return False
        self._cut = True
        connection.hang_up()
        return True

    def _receive(self, connection: Connection) -> None:
        if self._unread:
            return
        self._unread.extend(connection.receive())
        if not connection.drained:
            self._look_again()
        elif self._cut:
            self._close_socket()
            self._look_again()

    def close(self, request: int | None = None) -> None:
        """Close the socket of this request, or of any; idempotent."""
        if request is None or request == self._request:
            self._request = None
            self._unread.clear()
            self._close_socket()

    def _close_socket(self) -> None:
        self._cut = False
        if self.connection is not None:
            self.connection.close()
            self.connection = None
