"""How far a queue's writer may run ahead of its remote readers. No sockets here."""

from __future__ import annotations

from collections import deque


class SendWindow:
    """Which messages are unread, and whether another one may be sent.

    A reader acknowledges with the seq of the message that it wants next. So the next one makes up
    for an acknowledgement that was lost or repeated.

    Args:
        messages: how many messages each reader may have unread.
        size: the same in bytes; a larger message is sent when nothing else is unread.

    Attributes:
        next_seq: the seq of the next message; a reader that joins now begins with it.
        sent_bytes: the bytes of all messages before it.
    """

    def __init__(self, *, messages: int, size: int) -> None:
        self.messages = messages
        self.size = size
        self.next_seq = 0
        self.sent_bytes = 0
        self._wanted: dict[int, int] = {}  # rank -> the seq that this reader wants next
        self._starts: deque[int] = deque()  # for each unread message, the bytes sent before it

    @property
    def unread(self) -> int:
        """How many messages the slowest reader has not acknowledged."""
        return len(self._starts)

    @property
    def unread_bytes(self) -> int:
        """The bytes of these messages."""
        try:
            return self.sent_bytes - self._starts[0]
        except IndexError:  # also where another thread empties it meanwhile
            return 0

    @property
    def slowest(self) -> int:
        """The rank of the reader that has most unread; there must be a reader."""
        return min(self._wanted, key=self._wanted.__getitem__)

    def unread_by(self, rank: int) -> int:
        """Return how many messages this reader has not acknowledged."""
        return self.next_seq - self._wanted[rank]

    def join(self, rank: int) -> None:
        """Add a reader, which begins with the next message."""
        self._wanted[rank] = self.next_seq

    def leave(self, rank: int) -> None:
        """Remove a reader."""
        del self._wanted[rank]
        self._forget_read()

    def admits(self, size: int) -> bool:
        """Return whether a message of `size` bytes may be sent now. O(1)."""
        starts = self._starts
        if not starts:
            return True
        return len(starts) < self.messages and self.sent_bytes - starts[0] + size <= self.size

    def record(self, size: int) -> None:
        """Count a message of `size` bytes as sent to all readers."""
        if self._wanted:
            self._starts.append(self.sent_bytes)
        self.next_seq += 1
        self.sent_bytes += size

    def acknowledge(self, rank: int, next_seq: int) -> bool:
        """Apply a reader's acknowledgement; return False, and change nothing, if it cannot be."""
        if not self._wanted[rank] <= next_seq <= self.next_seq:
            return False
        self._wanted[rank] = next_seq
        self._forget_read()
        return True

    def _forget_read(self) -> None:
        unread = self.next_seq - min(self._wanted.values(), default=self.next_seq)
        while len(self._starts) > unread:
            self._starts.popleft()
