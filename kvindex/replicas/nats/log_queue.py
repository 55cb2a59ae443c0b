"""The messages of a tap that wait to be appended to the log."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from kvindex.replicas.nats.bodies import AROUND_BYTES, MAX_MESSAGE_BYTES, cut_message, join_bodies
from kvindex.replicas.outflow import Patience

_CHUNK_BYTES = 256 << 10
_PATIENCE = 1.0  # seconds


class LogQueue:
    """Stands where the fan-out's `Outflow` stands, and keeps messages until they are taken.

    While it is not attached, messages are dropped: another relay writes. If it is attached and
    full, it delays the subscriber's thread as long as messages are taken, for at most a second
    that grows back slowly. Then it *overflows*: it drops all, and is not attached any more.

    Args:
        on_message: called by `send` if `take` found nothing before.
        most: bytes that may wait.
        clock: monotonic seconds.

    Attributes:
        chunk_bytes: bytes of a message that is not unusual.
        trouble: why it overflowed, until it is attached again.

    Thread safety: `send`, `attach`, `admit` and `close` by the subscriber's thread, the others by
    any.
    """

    def __init__(
        self,
        on_message: Callable[[], None],
        *,
        most: int = MAX_MESSAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chunk_bytes = _CHUNK_BYTES
        self.trouble = ""
        self._on_message = on_message
        self._most = most
        self._clock = clock
        self._patience = Patience(_PATIENCE, clock)
        self._changed = threading.Condition()
        self._is_attached = False
        self._messages: deque[bytes] = deque()
        self._pieces: deque[bytes] = deque()  # bodies of a message that was too long for one
        self._bytes = 0
        self._taken_at = clock()
        self._is_awaited = False
        self._blocked = 0.0
        self._counters: Counter[str] = Counter()

    @property
    def is_attached(self) -> bool:
        """Whether messages are kept."""
        return self._is_attached

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the messages that wait."""
        return self._bytes

    def attach(self) -> None:
        """Keep every message from the next one on."""
        with self._changed:
            self._empty()
            self.trouble = ""
            self._is_attached = True
            self._taken_at = self._clock()

    def detach(self) -> None:
        """Drop all messages, and every one from now on."""
        with self._changed:
            self._empty()
            self._is_attached = False
            self._changed.notify_all()

    def send(self, body: bytes) -> None:
        """Keep a message, if this is attached."""
        with self._changed:
            if self._is_attached and self._bytes + len(body) > self._most:
                self._wait_for_room(len(body))
            if not self._is_attached:
                return
            self._messages.append(body)
            self._bytes += len(body)
            self._counters["messages"] += 1
            self._counters["bytes"] += len(body)
            is_awaited, self._is_awaited = self._is_awaited, False
        if is_awaited:
            self._on_message()

    def take(self, limit: int) -> bytes:
        """Return the messages that wait, as one body of at most `limit` bytes; b"" if none does."""
        with self._changed:
            self._taken_at = self._clock()
            body = self._pieces.popleft() if self._pieces else self._next_body(limit)
            self._is_awaited = not body
            self._changed.notify_all()
        return body

    def admit(self) -> None:
        """Do nothing: the readers of the log need no admission."""

    def count_readers(self) -> int:
        """Return 1 if messages are kept, else 0."""
        return int(self._is_attached)

    def statistics(self) -> dict[str, float]:
        """Return what was kept, how often it overflowed, and for how long the thread waited."""
        return {
            "messages": self._counters["messages"],
            "bytes": self._counters["bytes"],
            "waiting_bytes": self._bytes,
            "overflows": self._counters["overflows"],
            "blocked_seconds": self._blocked,
        }

    def close(self) -> None:
        """Let nobody wait any more. Idempotent."""
        self.detach()

    def _wait_for_room(self, size: int) -> None:
        """Wait until a message has room; overflow if that is too long, or impossible."""
        began = self._clock()
        left = self._patience.left()
        while self._is_attached and self._bytes + size > self._most:
            now = self._clock()
            until = min(began + left, self._taken_at + _PATIENCE)
            if size > self._most or now >= until:
                self._overflow(size)
                break
            self._changed.wait(until - now)
        self._patience.spend()
        self._blocked += self._clock() - began

    def _overflow(self, size: int) -> None:
        self._counters["overflows"] += 1
        if size > self._most:
            self.trouble = f"a message of {size} bytes is too long: at most {self._most} can be"
        else:
            self.trouble = f"{self._bytes} bytes wait, and NATS accepts them too slowly"
        self._empty()
        self._is_attached = False
        self._is_awaited = False
        self._on_message()

    def _next_body(self, limit: int) -> bytes:
        messages: list[bytes] = []
        size = 0
        while self._messages:
            size += len(self._messages[0]) + AROUND_BYTES
            if size > limit:
                break
            messages.append(self._pop())
        if messages or not self._messages:
            return join_bodies(messages)
        self._pieces.extend(cut_message(self._pop(), limit))
        return self._pieces.popleft()

    def _pop(self) -> bytes:
        message = self._messages.popleft()
        self._bytes -= len(message)
        return message

    def _empty(self) -> None:
        self._messages.clear()
        self._pieces.clear()
        self._bytes = 0
