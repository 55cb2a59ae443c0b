"""A replica: an index in this process, kept by a subscriber in another one."""

from __future__ import annotations

import math
import os
import weakref
from typing import Any

from kvindex.client.answering import Answering
from kvindex.index import Index
from kvindex.replicas.follower import Follower
from kvindex.replicas.joining import FanOutOrigin, RefusedError
from kvindex.replicas.meeting_point import check_platform
from kvindex.shm.ring import check_native
from kvindex.wire.errors import ConfigurationError, QueueTimeoutError
from kvindex.wire.forks import FORKED, disown_in_children

_BUFFER_BYTES = 256 << 20


def join(
    path: str | os.PathLike[str],
    timeout: float = 5.0,
    *,
    stale_after: float = 3.0,
    buffer_bytes: int = _BUFFER_BYTES,
) -> Replica:
    """Return a replica of the index of the `FanOut` that listens at `path`.

    It returns when the replica has all that the server had, ranks that are not live included:
    `Replica.wait_live` waits for those. It waits for a server that is not there yet.

    Args:
        path: as for `FanOut`.
        timeout: longest wait, in seconds.
        stale_after: seconds without a message of the server after which ranks are shown as stale;
            the server sends one every second.
        buffer_bytes: most bytes kept of the messages that arrive during the snapshot.

    Raises:
        QueueTimeoutError: the replica was not complete in time (a TimeoutError); it says why.
        ConfigurationError: joining is impossible: the server's index is of another kind, or a
            value cannot work.
        SegmentError: there is no native module, which the ring needs; whichever index runs.
    """
    check_platform()
    check_native()
    check_seconds(timeout=timeout, stale_after=stale_after)
    if buffer_bytes < 1:
        raise ConfigurationError(f"buffer_bytes must be at least 1, not {buffer_bytes!r}")
    return joined(Follower(FanOutOrigin(path, buffer_bytes), stale_after), timeout)


def check_seconds(**values: float) -> None:
    """Raise ConfigurationError unless each value is finite and above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} must be above 0 s, not {value!r}")


def joined(follower: Follower, timeout: float) -> Replica:
    """Return the replica of a follower once that has a copy; close it if that takes too long.

    Raises:
        QueueTimeoutError: there was no copy in time; it says why.
        ConfigurationError: there will never be one.
    """
    try:
        if not follower.joined.wait(timeout):
            raise QueueTimeoutError(
                f"no copy from {follower.origin.name} in {timeout:g} s: {follower.trouble}",
                timeout=timeout,
            )
        if isinstance(follower.failed, RefusedError):
            raise ConfigurationError(str(follower.failed))
        if follower.failed is not None:
            raise follower.failed
    except BaseException:
        follower.close()
        raise
    return Replica(follower)


class Replica(Answering):
    """Answers as the server's client does, from an index in this process.

    `kvindex.replicas.join` and `kvindex.replicas.nats.join` make one.

    When the server is gone, silent or has evicted this replica, every rank is shown as stale with
    the reason, queries are answered from the last state, and the replica joins anew by itself. A
    new server's index replaces the old one when it is complete.

    A forked child of a process with a replica must join by itself: in its inherited copy every rank
    is closed, with the reason, and queries raise ClosedError.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._board = follower.board
        self._pid = os.getpid()
        # It waits for nothing: the collector may run inside a lock that the thread is to take.
        weakref.finalize(self, _drop, follower, os.getpid()).atexit = False
        # Without `Leave` the server would count and log a death.
        follower.close_at_exit()
        disown_in_children(self, Replica._disown)

    @property
    def index(self) -> Index:
        """The present copy of the server's index; another one after each joining."""
        return self._follower.copy.index

    @property
    def trouble(self) -> str:
        """Why it does not follow at present; "" while it does."""
        return self._follower.trouble if self._pid == os.getpid() else FORKED

    def _own_statistics(self) -> dict[str, Any]:
        return {"replica": self._follower.statistics()}

    def close(self) -> None:
        """Leave the server, and refuse further questions. Idempotent.

        `index` stays as it is and still answers questions. A replica closes by itself when it is
        dropped, or the process ends.
        """
        self._closed = True
        if self._pid == os.getpid():  # a forked child has the parent's
            self._follower.close()

    def _disown(self) -> None:
        """In a forked child, which lacks the thread that follows."""
        self._board.disown(FORKED)


def _drop(follower: Follower, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the parent's
        follower.request_stop()
