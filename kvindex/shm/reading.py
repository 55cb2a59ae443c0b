"""Reading ends: of a writer on this machine, by its memory, and of one elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kvindex.errors import DecodeError, QueueTimeoutError
from kvindex.shm.codec import Buffer, Codec
from kvindex.shm.messages import BUFFERS, decode
from kvindex.shm.receiver import RingReceiver
from kvindex.shm.remote.reader import RemoteReader
from kvindex.shm.turn import Turn
from kvindex.shm.waiting import Patience, Waiting

__all__ = ["LocalReadingEnd", "RemoteReadingEnd"]

T = TypeVar("T")


class LocalReadingEnd:
    """The `ReadingEnd` of a reader on the writer's machine.

    Args:
        receiver: reads the ring; the end closes it.
        waiting: how to wait.
    """

    def __init__(self, receiver: RingReceiver, waiting: Waiting) -> None:
        self.receiver = receiver
        self._waiting = waiting

    def wait_ready(self, timeout: float | None) -> None:
        self.receiver.wait_ready(Patience(self._waiting, timeout), timeout)

    def statistics(self) -> dict[str, Any]:
        counted = self.receiver.statistics()
        return {"messages": counted["messages"], "local": counted}

    def close(self) -> None:
        self.receiver.close()


class RemoteReadingEnd:
    """The `ReadingEnd` of a reader on another machine than the writer's.

    Args:
        reader: takes the messages' frames; the end closes it.
        waiting: how to wait.
    """

    def __init__(self, reader: RemoteReader, waiting: Waiting) -> None:
        self._reader = reader
        self._waiting = waiting
        self._turn = Turn()
        self._messages = 0

    @property
    def receiver(self) -> RemoteReadingEnd:
        return self

    def receive(
        self,
        codec: Codec,
        timeout: float | None,
        cancel: threading.Event | None = None,
        *,
        quiet: bool = False,
    ) -> Any:
        kind, frames = self._next(timeout, cancel, quiet)
        if kind == BUFFERS:
            return codec.decode(frames[0], [bytearray(frame) for frame in frames[1:]])
        return decode(kind, _joined(frames), codec)

    @contextmanager
    def message(
        self, timeout: float | None, cancel: threading.Event | None, *, quiet: bool
    ) -> Iterator[memoryview]:
        _, frames = self._next(timeout, cancel, quiet)
        yield memoryview(_joined(frames)).toreadonly()

    def wait_ready(self, timeout: float | None) -> None:
        patience = Patience(self._waiting, timeout)
        self._patiently(self._reader.wait_ready, patience, None, "the queue was not ready")

    def statistics(self) -> dict[str, Any]:
        return {"messages": self._messages}

    def close(self) -> None:
        self._turn.end(self._reader.close)

    def _next(
        self, timeout: float | None, cancel: threading.Event | None, quiet: bool
    ) -> tuple[int, list[memoryview]]:
        """Return the next message's kind and its frames, of which there is at least one."""
        patience = Patience(self._waiting, timeout, quiet=quiet)
        head, *frames = self._patiently(self._reader.receive, patience, cancel, "no message came")
        if len(head) != 1 or not frames:
            raise DecodeError("a message that does not say its kind", size=len(head))
        self._messages += 1
        return head[0], frames

    def _patiently(
        self,
        call: Callable[[float | None, threading.Event], T],
        patience: Patience,
        cancel: threading.Event | None,
        failure: str,
    ) -> T:
        """Return what a call of the reader returns, having warned whenever that took long."""
        while True:
            remaining = patience.remaining()
            most = self._waiting.warn_after
            try:
                with self._turn.taken(cancel) as ending:
                    return call(most if remaining is None else min(most, remaining), ending)
            except QueueTimeoutError:
                if patience.exhausted:
                    raise self._timed_out(failure, patience.timeout) from None
                patience.warn(self._reader.awaited)

    def _timed_out(self, failure: str, timeout: float) -> QueueTimeoutError:
        why = "" if self._reader.is_ready else f": waited for {self._reader.awaited}"
        return QueueTimeoutError(f"{failure} in {timeout:g} s{why}", timeout=timeout)


def _joined(frames: list[memoryview]) -> Buffer:
    return frames[0] if len(frames) == 1 else b"".join(frames)
