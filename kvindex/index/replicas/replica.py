"""A replica: an index in this process, kept by a subscriber in another one."""

from __future__ import annotations

import math
import os
import time
import weakref
from functools import partial
from typing import Any

import msgspec

from kvindex.index import Index
from kvindex.index.client.answering import Answering
from kvindex.index.replicas.copy import Copy
from kvindex.index.replicas.follower import Follower
from kvindex.index.replicas.joining import FanOutOrigin, RefusedError
from kvindex.index.replicas.meeting_point import check_platform
from kvindex.shm.ring import check_native
from kvindex.subscribe import State
from kvindex.subscribe.status_board import StatusBoard
from kvindex.wire.errors import ConfigurationError, QueueTimeoutError
from kvindex.wire.forks import Fork, prepare_forks

_BUFFER_BYTES = 256 << 20
_FORK_PATIENCE = 5.0  # seconds for which a fork waits for a message or a query under way


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

    `kvindex.index.replicas.join` and `kvindex.index.nats.join` make one.

    When the server is gone, silent or has evicted this replica, every rank is shown as stale with
    the reason, queries are answered from the last state, and the replica joins anew by itself. A
    new server's index replaces the old one when it is complete.

    A forked child of a process with a replica must join by itself: its inherited copy receives
    nothing. In that copy every rank is closed at once, with the reason, and queries are answered
    as of the fork.

    Thread safety: every method may be called from any thread.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._board = follower.board
        self._pid = os.getpid()
        self._disowned = ""  # why it follows no server, if this is a forked child's
        # It waits for nothing: the collector may run inside a lock that the thread is to take.
        weakref.finalize(self, _drop, follower, os.getpid()).atexit = False
        # Without `Leave` the server would count and log a death.
        follower.close_at_exit()
        prepare_forks(self, Replica._prepare_fork)

    @property
    def index(self) -> Index:
        """The present copy of the server's index; another one after each joining."""
        return self._follower.copy.index

    @property
    def trouble(self) -> str:
        """Why it does not follow at present; "" while it does."""
        return self._disowned or self._follower.trouble

    def _own_statistics(self) -> dict[str, Any]:
        replica = self._follower.statistics()
        if self._disowned:
            replica.update(following=False, trouble=self._disowned)
        return {"replica": replica}

    def close(self) -> None:
        """Leave the server, and refuse further questions. Idempotent.

        `index` stays as it is and still answers questions. A replica closes by itself when it is
        dropped, or the process ends.
        """
        self._closed = True
        if self._pid == os.getpid():  # a forked child has the parent's
            self._follower.close()

    def _prepare_fork(self, fork: Fork) -> None:
        """Wait until no message is half applied: a child lacks the applying thread."""
        copy = self._follower.copy
        fork.do_in_child(partial(self._disown, copy))
        # Not for ever: a handler that forks may have come in a query that the message waits for.
        fork.hold(copy.applying, _FORK_PATIENCE)

    def _disown(self, copy: Copy) -> None:
        """In a forked child: go on with a copy that is not updated, and a board that shows it."""
        self._disowned = (
            f"this replica is that of process {os.getppid()}, from which this one was forked: join "
            "in this process"
        )
        self._follower.copy = copy
        board = StatusBoard(time.monotonic, math.inf)  # another thread may have held the old one's
        board.rename((), copy.names, ())
        board.end(self._disowned)
        board.show(
            msgspec.structs.replace(
                status, state=State.CLOSED, connected=False, reason=self._disowned
            )
            for status in copy.statuses.values()
        )
        self._board = board


def _drop(follower: Follower, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the parent's
        follower.request_stop()
