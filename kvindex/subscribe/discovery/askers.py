"""Threads that ask engines, so that a slow engine delays no other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Askers"]

logger = logging.getLogger("kvindex.subscribe.discovery")


class Askers:
    """Runs calls in a few threads, which are started when there is work for them.

    They are daemons: a name server that never answers does not delay the end of the process.

    Args:
        most: most threads.

    Thread safety: `run` and `close` from one thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def run(self, call: Callable[[], None]) -> None:
        """Enqueue a call."""
        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name="kvindex-ask", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads, without waiting for calls that are under way."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("an engine could not be asked")
            self._idle.release()
