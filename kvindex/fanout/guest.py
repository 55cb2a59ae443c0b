"""One joiner at the server: what it said, what it is still to be sent, how long it may take.

Owned by the reception's thread.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Generator

from kvindex.errors import DecodeError
from kvindex.fanout.frames import (
    Ask,
    Attached,
    FrameDecoder,
    Hello,
    JoinersFrame,
    Leave,
    Refused,
    Report,
    Welcome,
    encode_frame,
)

__all__ = ["Guest", "Stage"]

_RECEIVED = 4096


class Stage(str, enum.Enum):
    """How far a joiner has come."""

    GREETING = "greeting"
    ATTACHING = "attaching"
    JOINING = "joining"
    FOLLOWING = "following"


class Guest:
    """A connection and its state.

    Args:
        connection: non-blocking; the guest closes it.
        welcome: returns what to answer to a greeting.
        report: returns how the server stands, as JSON.
        make_snapshot: returns the parts of a snapshot, made one by one as they are sent.
        patience: seconds in which each next step must be taken, and bytes must move.
        now: the present.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        welcome: Callable[[Hello], Welcome | Refused],
        report: Callable[[], bytes],
        make_snapshot: Callable[[], Generator[bytes, None, None]],
        patience: float,
        now: float,
    ) -> None:
        self.connection = connection
        self.stage = Stage.GREETING
        self.place: int | None = None  # in the ring
        self.left = False  # whether it has said that it goes
        self.answered = False  # and gets no more: why it may not join, or what it asked
        self.pid = 0  # as it says
        self._welcome = welcome
        self._report = report
        self._make_snapshot = make_snapshot
        self._patience = patience
        self._deadline = now + patience
        self._decoder = FrameDecoder()
        self._outgoing = memoryview(b"")
        self._parts: Generator[bytes, None, None] | None = None

    @property
    def deadline(self) -> float | None:
        """When it has taken too long; None while there is nothing for it to do."""
        return None if self.stage is Stage.FOLLOWING else self._deadline

    @property
    def wants_to_send(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._outgoing) or self.stage is Stage.JOINING

    def receive(self, now: float) -> bool:
        """Take what has come; return whether the connection goes on. DecodeError, OSError."""
        try:
            data = self.connection.recv(_RECEIVED)
        except BlockingIOError:
            return True
        for frame in self._decoder.feed(data):
            self._take(frame, now)
        return bool(data) and not self.left

    def send(self, now: float) -> bool:
        """Send as much as goes; return whether the connection goes on. KVIndexError, OSError."""
        if not self._outgoing:
            self._load()
        try:
            sent = self.connection.send(self._outgoing)
        except BlockingIOError:
            return True
        self._outgoing = self._outgoing[sent:]
        self._deadline = now + self._patience
        if self._outgoing:
            return True
        self._load()  # at once, so that the last part's arrival finds the stage as it is
        return not self.answered

    def close(self) -> None:
        """Close the connection, and have nothing more taken for it. Idempotent."""
        self.connection.close()
        if self._parts is not None:
            self._parts.close()

    def _load(self) -> None:
        """Take the next part; after the last one there is nothing more to be done."""
        if self.stage is not Stage.JOINING or self._parts is None:
            return
        part = next(self._parts, None)
        if part is None:
            self.stage = Stage.FOLLOWING
        else:
            self._outgoing = memoryview(part)

    def _take(self, frame: JoinersFrame, now: float) -> None:
        if isinstance(frame, Leave):
            self.left = True
        elif self.answered:
            raise DecodeError(f"{type(frame).__name__} after the answer")
        elif isinstance(frame, Hello) and self.stage is Stage.GREETING:
            self._greet(frame)
        elif isinstance(frame, Ask) and self.stage is Stage.GREETING:
            self.answered = True
            report = self._report()
            self._outgoing = memoryview(encode_frame(Report(len(report))) + report)
        elif isinstance(frame, Attached) and self.stage is Stage.ATTACHING:
            self.stage = Stage.JOINING
            self._parts = self._make_snapshot()
        else:
            raise DecodeError(f"{type(frame).__name__} while {self.stage.value}")
        self._deadline = now + self._patience

    def _greet(self, hello: Hello) -> None:
        self.pid = hello.pid
        answer = self._welcome(hello)
        self._outgoing = memoryview(encode_frame(answer))
        if isinstance(answer, Welcome):
            self.place = answer.place
            self.stage = Stage.ATTACHING
        else:
            self.answered = True
