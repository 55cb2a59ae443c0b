"""The life of what keeps others' replicas: a fan-out or a relay."""

from __future__ import annotations

import atexit
import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvindex.replicas.outflow import StreamTap
from kvindex.wire.errors import ClosedError

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Self


class Serving(ABC):
    """Serves until it is closed, or ends by itself.

    Thread safety: every method may be called from any thread.
    """

    _tap: StreamTap

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._closing = False
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why nothing is sent any more, or None."""
        return self._failure or self._tap.failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is closed; return whether it was in time.

        Args:
            timeout: longest wait, in seconds.

        Raises:
            ClosedError: it ended by itself; the message says why.
        """
        ended = self._ended.wait(timeout)
        if ended and not self._closing:
            raise ClosedError(self.failure or "the subscriber's thread has ended")
        return ended

    def close(self) -> None:
        """Stop serving and subscribing; replicas notice it, and show it. Idempotent.

        Done by itself when the process ends; a process that is killed does not.
        """
        if self._pid != os.getpid():
            return  # it is the parent's
        self._closing = True
        self._close_parts()
        self._ended.set()
        atexit.unregister(self.close)

    @abstractmethod
    def _close_parts(self) -> None:
        """Close those that use others first; may be interrupted and called again."""

    def _stopped(self) -> None:
        """Note that the subscriber's thread has ended; on that thread."""
        self._tap.stop()
        self._ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
