"""One follower of a pool on a machine, for any number of processes there."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvindex.index.nats.following import LogOrigin
from kvindex.index.replicas.copy import Copy
from kvindex.index.replicas.follower import Follower
from kvindex.index.replicas.meeting_point import Listener
from kvindex.index.replicas.outflow import Outflow, StreamTap
from kvindex.index.replicas.reception import Reception
from kvindex.index.replicas.replica import Replica, check_seconds
from kvindex.index.replicas.server import BaseFanOut
from kvindex.subscribe import RankStatus, State
from kvindex.wire.errors import BusyError
from kvindex.wire.nats import NatsOptions, parse_pool, require_nats
from kvindex.wire.rank import Rank

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_CALL_SECONDS = 30.0  # for a call between two messages

_Result = TypeVar("_Result")


class FanOut(BaseFanOut):
    """Follows a pool once, and lets any number of processes on this machine ask.

    As `kvindex.index.replicas.FanOut`, but its index is a replica of the pool's relay. Each process
    calls `kvindex.index.replicas.join(path)`, which waits until this has a copy. When the copy is
    replaced by another one, the processes join anew by themselves; the counters of `statistics`
    begin anew, too. Linux only.

    Args:
        url: as for `kvindex.index.nats.join`.
        path, patience, max_replicas, chunk_bytes, chunks: as for `kvindex.index.replicas.FanOut`.
        pool: as for `kvindex.index.nats.join`.
        stale_after: likewise.
        options: likewise.

    Attributes:
        replica: what is handed on; it can be asked as well.
        path: where it listens.

    Raises:
        ConfigurationError: a value cannot work, a living server is at `path`, others could write
            there, the index is the Python one, or nats-py is missing.
        OSError: the socket cannot be made.

    Thread safety: every method may be called from any thread.
    """

    def __init__(
        self,
        url: str,
        path: str | os.PathLike[str],
        pool: str | None = None,
        *,
        patience: float = 1.0,
        max_replicas: int = 64,
        chunk_bytes: int = 64 << 10,
        chunks: int = 256,
        stale_after: float = 3.0,
        **options: Unpack[NatsOptions],
    ) -> None:
        super().__init__(path, patience)
        check_seconds(stale_after=stale_after)
        require_nats()
        origin = LogOrigin(parse_pool(url, pool, options), stale_after)
        self._ring = (max_replicas, chunk_bytes, chunks, patience)
        self._listener: Listener | None = Listener(path)  # until the first copy is there
        self._copy: Copy | None = None  # what is handed on
        self.replica = Replica(Follower(origin, stale_after, self._begin, self._fail))
        # Before the finalizers of the ring, whose hook is older.
        atexit.register(self.close)

    @property
    def source(self) -> Replica:
        """The replica."""
        return self.replica

    def close(self) -> None:
        """Stop listening and following; replicas are notified, and show it. Idempotent.

        Done by itself when the process ends; a process that is killed does not.
        """
        if self._pid != os.getpid():
            return  # it is the parent's
        self._closing = True
        self.replica.close()  # its thread makes the others
        self._end()
        if self._listener is not None:
            self._listener.close()
        self._ended.set()
        atexit.unregister(self.close)

    # On the follower's thread -----------------------------------------------------------------

    def _begin(self, follower: Follower) -> None:
        """Hand on another copy from now on."""
        self._end()
        copy = follower.copy
        try:
            with ExitStack() as opened:  # closed again if something goes wrong
                listener, self._listener = self._listener or Listener(self.path), None
                opened.callback(listener.close)
                max_replicas, chunk_bytes, chunks, patience = self._ring
                outflow = Outflow(max_replicas, chunk_bytes, chunks, patience)
                opened.callback(outflow.close)
                tap = StreamTap(outflow, self._note_end, clock=lambda: copy.sent_at)
                tap.names = dict(copy.names)
                self._reception = Reception(
                    listener,
                    _CopySource(copy, follower),
                    tap,
                    outflow,
                    max_replicas,
                    self._rest,
                    self._fail,
                )
                opened.pop_all()
        except Exception as error:
            logger.exception("the fan-out at %s failed: nobody can join any more", self.path)
            self._fail(f"the fan-out failed: {error!r}")
            return
        self._outflow, self._tap, self._copy = outflow, tap, copy
        with copy.applying:
            copy.hand_on = tap.hand_on

    def _end(self) -> None:
        """Hand on the present copy no more: its readers join anew."""
        if self._copy is not None and self._tap is not None:
            with self._copy.applying:
                self._copy.hand_on = None
                self._tap.stop()
        if self._reception is not None:
            self._reception.close()


class _CopySource:
    """A follower's copy as the source of snapshots. Thread safety: any thread."""

    def __init__(self, copy: Copy, follower: Follower) -> None:
        self.index = copy.index
        self.subscriber = self
        self._copy = copy
        self._follower = follower

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function between two messages; raises BusyError if that takes too long."""
        if not self._copy.applying.acquire(timeout=_CALL_SECONDS):
            raise BusyError(_CALL_SECONDS)
        try:
            return function()
        finally:
            self._copy.applying.release()

    def find(self, rank: Rank) -> RankStatus | None:
        """Return a rank's status as the copy has it, stale while that is not followed."""
        status, trouble = self._copy.statuses.get(rank), self._follower.trouble
        if status is None or not trouble:
            return status
        return msgspec.structs.replace(status, state=State.STALE, reason=trouble)

    def cursor(self, rank: Rank) -> bytes | None:
        """Return nothing: the engines' streams are the relay's."""
        return None
