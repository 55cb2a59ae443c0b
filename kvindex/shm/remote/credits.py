"""How much a reader elsewhere may be sent before it has said what it consumed. Pure bookkeeping.

The writer keeps a `SendWindow` for each reader, the reader a `ReadLedger`. What travels between
them is one pair of numbers, cumulative since the reader joined: the seq of the message that the
reader takes next, and the bytes that it has consumed. A lost or repeated acknowledgement is
therefore made good by the next.
"""

from __future__ import annotations

from kvindex.errors import WriterDiedError

__all__ = ["ReadLedger", "SendWindow"]

_SHARE = 4  # a reader acknowledges each quarter of its window


class SendWindow:
    """What one reader was sent, what of it was consumed, and whether more may follow.

    At most so many `messages` may be unacknowledged, and so many bytes (`size`); a larger message
    goes when nothing else is. `first_seq` is the first that this reader is sent.

    Examples:
        >>> window = SendWindow(7, messages=2, size=100)
        >>> window.record(60), window.admits(60), window.admits(40)
        (None, False, True)
        >>> window.acknowledge(8, 60), window.admits(500)
        (True, True)
    """

    __slots__ = ("_acked_bytes", "_acked_seq", "_messages", "_next_seq", "_sent_bytes", "_size")

    def __init__(self, first_seq: int, *, messages: int, size: int) -> None:
        self._messages = messages
        self._size = size
        self._next_seq = self._acked_seq = first_seq
        self._sent_bytes = self._acked_bytes = 0

    @property
    def unread(self) -> int:
        """Messages that were sent and not acknowledged."""
        return self._next_seq - self._acked_seq

    @property
    def unread_bytes(self) -> int:
        """Bytes of these messages."""
        return self._sent_bytes - self._acked_bytes

    def admits(self, size: int) -> bool:
        """Return whether a message of `size` bytes may be sent now."""
        unread = self._next_seq - self._acked_seq
        if unread >= self._messages:
            return False
        return unread == 0 or self._sent_bytes - self._acked_bytes + size <= self._size

    def record(self, size: int) -> None:
        """Count a message of `size` bytes as sent."""
        self._next_seq += 1
        self._sent_bytes += size

    def acknowledge(self, next_seq: int, consumed_bytes: int) -> bool:
        """Take what the reader says; return False, and change nothing, if that cannot be.

        Impossible are counts that go back, that exceed what was sent, or that leave bytes open
        where no message is.
        """
        if not self._acked_seq <= next_seq <= self._next_seq:
            return False
        if not self._acked_bytes <= consumed_bytes <= self._sent_bytes:
            return False
        if next_seq == self._next_seq and consumed_bytes != self._sent_bytes:
            return False
        self._acked_seq = next_seq
        self._acked_bytes = consumed_bytes
        return True


class ReadLedger:
    """What a reader took, in order, and when it owes an acknowledgement.

    `first_seq` is the first message's; `messages` and `size` are the writer's window.

    Examples:
        >>> ledger = ReadLedger(0, messages=8, size=1000)
        >>> ledger.take(0, 10), ledger.due, ledger.pending
        (None, False, True)
        >>> ledger.take(1, 10), ledger.due, ledger.acknowledge()
        (None, True, (2, 20))
        >>> ledger.take(3, 10)
        Traceback (most recent call last):
        kvindex.errors.WriterDiedError: message 2 is missing: message 3 came instead
    """

    __slots__ = (
        "_acked_bytes",
        "_acked_seq",
        "_consumed_bytes",
        "_every_bytes",
        "_every_messages",
        "next_seq",
    )

    def __init__(self, first_seq: int, *, messages: int, size: int) -> None:
        self._every_messages = max(1, messages // _SHARE)
        self._every_bytes = max(1, size // _SHARE)
        self.next_seq = self._acked_seq = first_seq
        self._consumed_bytes = self._acked_bytes = 0

    def take(self, seq: int, size: int) -> None:
        """Count the message `seq` as consumed; WriterDiedError if it is not the next one."""
        if seq != self.next_seq:
            raise WriterDiedError(_hole(self.next_seq, seq))
        self.next_seq += 1
        self._consumed_bytes += size

    @property
    def due(self) -> bool:
        """Whether so much was consumed that the writer should be told at once."""
        return (
            self.next_seq - self._acked_seq >= self._every_messages
            or self._consumed_bytes - self._acked_bytes >= self._every_bytes
        )

    @property
    def pending(self) -> bool:
        """Whether anything was consumed that the writer was not told."""
        return self.next_seq != self._acked_seq

    def acknowledge(self) -> tuple[int, int]:
        """Return the next seq and the bytes consumed, and count them as told."""
        self._acked_seq = self.next_seq
        self._acked_bytes = self._consumed_bytes
        return self._acked_seq, self._acked_bytes


def _hole(expected: int, came: int) -> str:
    if came < expected:
        return f"message {came} came again: message {expected} was next"
    if came == expected + 1:
        return f"message {expected} is missing: message {came} came instead"
    return f"messages {expected} to {came - 1} are missing: message {came} came instead"
