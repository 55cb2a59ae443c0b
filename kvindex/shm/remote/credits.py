"""How much readers elsewhere may be sent before they have said what they consumed. Bookkeeping.

The writer keeps one `SendWindow`, each reader a `ReadLedger`. All that travels back is the seq of
the message that a reader takes next, so a lost or repeated acknowledgement is made good by the
next.
"""

from __future__ import annotations

from collections import deque

from kvindex.errors import WriterDiedError

__all__ = ["ReadLedger", "SendWindow"]

_SHARE = 4  # a reader acknowledges each quarter of its window


class SendWindow:
    """What was sent, which of it readers have not consumed, and whether more may follow.

    Args:
        messages: how many a reader may have unread.
        size: the same in bytes; a larger message goes when nothing else is unread.

    Attributes:
        next_seq: the seq of the next message, with which a reader begins that joins now.
        sent_bytes: of all messages before it.

    Examples:
        >>> window = SendWindow(messages=2, size=100)
        >>> window.join(0)
        >>> window.record(60), window.admits(60), window.admits(40)
        (None, False, True)
        >>> window.acknowledge(0, 1), window.admits(500)
        (True, True)
    """

    def __init__(self, *, messages: int, size: int) -> None:
        self.messages = messages
        self.size = size
        self.next_seq = 0
        self.sent_bytes = 0
        self._next: dict[int, int] = {}  # rank -> the seq that it takes next
        self._starts: deque[int] = deque()  # of each unread message: the bytes sent before it

    @property
    def unread(self) -> int:
        """Messages that the slowest reader has not acknowledged."""
        return len(self._starts)

    @property
    def unread_bytes(self) -> int:
        """Bytes of these messages."""
        try:
            return self.sent_bytes - self._starts[0]
        except IndexError:  # of any thread's, as `statistics` is
            return 0

    @property
    def slowest(self) -> int:
        """The rank of the reader that has most unread; there must be one."""
        return min(self._next, key=self._next.__getitem__)

    def unread_by(self, rank: int) -> int:
        """Return how many messages this reader has not acknowledged."""
        return self.next_seq - self._next[rank]

    def join(self, rank: int) -> None:
        """Count on a reader from the next message on."""
        self._next[rank] = self.next_seq

    def leave(self, rank: int) -> None:
        """Count on this reader no more."""
        del self._next[rank]
        self._forget_read()

    def admits(self, size: int) -> bool:
        """Return whether a message of `size` bytes may be sent now. O(1)."""
        starts = self._starts
        if not starts:
            return True
        return len(starts) < self.messages and self.sent_bytes - starts[0] + size <= self.size

    def record(self, size: int) -> None:
        """Count a message of `size` bytes as sent to all."""
        if self._next:
            self._starts.append(self.sent_bytes)
        self.next_seq += 1
        self.sent_bytes += size

    def acknowledge(self, rank: int, next_seq: int) -> bool:
        """Take what a reader says; return False, and change nothing, if that cannot be."""
        if not self._next[rank] <= next_seq <= self.next_seq:
            return False
        self._next[rank] = next_seq
        self._forget_read()
        return True

    def _forget_read(self) -> None:
        unread = self.next_seq - min(self._next.values(), default=self.next_seq)
        while len(self._starts) > unread:
            self._starts.popleft()


class ReadLedger:
    """What a reader took, in order, and when it owes an acknowledgement.

    `first_seq` is the first message's; `messages` and `size` are the writer's window.

    Examples:
        >>> ledger = ReadLedger(0, messages=8, size=1000)
        >>> ledger.take(0, 10), ledger.due, ledger.pending
        (None, False, True)
        >>> ledger.take(1, 10), ledger.due, ledger.acknowledge()
        (None, True, 2)
        >>> ledger.take(3, 10)
        Traceback (most recent call last):
        kvindex.errors.WriterDiedError: message 2 is missing: message 3 came instead
    """

    __slots__ = ("_acked_seq", "_every_bytes", "_every_messages", "_unacked_bytes", "next_seq")

    def __init__(self, first_seq: int, *, messages: int, size: int) -> None:
        self._every_messages = max(1, messages // _SHARE)
        self._every_bytes = max(1, size // _SHARE)
        self.next_seq = self._acked_seq = first_seq
        self._unacked_bytes = 0

    def take(self, seq: int, size: int) -> None:
        """Count the message `seq` as consumed; WriterDiedError if it is not the next one."""
        if seq != self.next_seq:
            raise WriterDiedError(_hole(self.next_seq, seq))
        self.next_seq += 1
        self._unacked_bytes += size

    @property
    def due(self) -> bool:
        """Whether so much was consumed that the writer should be told at once."""
        return (
            self.next_seq - self._acked_seq >= self._every_messages
            or self._unacked_bytes >= self._every_bytes
        )

    @property
    def pending(self) -> bool:
        """Whether anything was consumed that the writer was not told."""
        return self.next_seq != self._acked_seq

    def acknowledge(self) -> int:
        """Return the seq that is taken next, and count it as told."""
        self._acked_seq = self.next_seq
        self._unacked_bytes = 0
        return self._acked_seq


def _hole(expected: int, came: int) -> str:
    if came < expected:
        return f"message {came} came again: message {expected} was next"
    if came == expected + 1:
        return f"message {expected} is missing: message {came} came instead"
    return f"messages {expected} to {came - 1} are missing: message {came} came instead"
