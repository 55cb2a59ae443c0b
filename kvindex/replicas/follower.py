"""A replica's thread: joins, follows, and joins anew when that is over, for whatever reason."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import random
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from kvindex.replicas.copy import Copy
from kvindex.replicas.joining import Membership, Origin, RefusedError
from kvindex.subscribe import State
from kvindex.subscribe.status_board import StatusBoard
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    QueueTimeoutError,
    SegmentError,
    SnapshotError,
)
from kvindex.wire.log_rate import LogRate

logger = logging.getLogger(__name__)

_BACKOFF, _MAX_BACKOFF = 0.05, 1.0  # seconds between two attempts to join
_REASONS: tuple[tuple[type[Exception], str], ...] = (  # after those of the origin
    (RefusedError, "refused"),
    (SegmentError, "ring"),
    (SnapshotError, "bad_snapshot"),
    (DecodeError, "bad_message"),
    (OSError, "connection"),
)


class Follower:
    """Keeps a copy of an index elsewhere, as long as its origin can be reached.

    Args:
        origin: where copies come from.
        stale_after: seconds without a message after which ranks are stale.

    Thread safety: `close`, `request_stop` and `statistics` from any thread; the rest is its own.
    """

    def __init__(self, origin: Origin, stale_after: float) -> None:
        self.origin = origin
        self.copy = Copy()  # replaced as a whole when another one is complete
        shown_name = origin.name.replace("{", "{{").replace("}", "}}")  # the board formats it
        self.board = StatusBoard(
            time.monotonic,
            stale_after,
            silent=f"nothing recent was received from {shown_name} for {{:.0f}} s",
        )
        self.joined = threading.Event()  # once the first copy is complete, or it `failed`
        self.failed: Exception | None = None  # why there will never be one
        self.trouble = "joining"  # why it is not following at present
        self._end_reason = "the replica was closed"
        self._lost = ""  # why it follows no longer; also shown while it cannot join again
        self._stale_after = stale_after
        # Not waited for, which would take its lock: the collector may run in there, and set it.
        self._stop = threading.Event()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._at_exit = partial(_close, weakref.ref(self), os.getpid())
        self._membership: Membership | None = None
        self._is_following = False
        self._counters: Counter[str] = Counter()
        self._rejoins: Counter[str] = Counter()  # by reason, as the failures
        self._failures: Counter[str] = Counter()
        self._log_rate = LogRate()
        self._thread = threading.Thread(target=self._run, name="kvindex-replica", daemon=True)
        self._thread.start()

    def statistics(self) -> dict[str, Any]:
        """Return how often it joined and why, and how much it applied."""
        membership = self._membership
        return {
            "server": self.origin.address,
            "following": self._is_following,
            "trouble": self.trouble,
            **{name: self._counters[name] for name in ("joins", "messages", "silences")},
            "batches": self.copy.applied,
            "entries_passed": self.copy.catchup.passed,
            "backlog": 0 if membership is None else membership.backlog,
            "rejoins": dict(self._rejoins),
            "join_failures": dict(self._failures),
            "thread_failures": self._counters["thread_failures"],
            **self.origin.statistics(),
        }

    def close(self) -> None:
        """End the thread and give the place up. Idempotent."""
        self.request_stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def close_at_exit(self) -> None:
        """Close when the process ends, unless that was done before.

        Not by `weakref.finalize`: that ends the latest first, and after a rejoining it would take
        the ring's memory before the thread has left. Its own hook must have been there before this.
        """
        atexit.register(self._at_exit)

    def request_stop(self) -> None:
        """Ask the thread to end; this waits for no lock, so finalizers may call it."""
        self._stop.set()
        self._woken.put(None)
        membership = self._membership
        if membership is not None:
            membership.interrupt()

    def _run(self) -> None:
        attempts = 0
        try:
            while not self._stop.is_set():
                joins = self._counters["joins"]
                self._live_once()
                attempts = 0 if self._counters["joins"] > joins else attempts + 1
                pause = min(_MAX_BACKOFF, _BACKOFF * 2 ** min(attempts, 10))
                with suppress(queue.Empty):
                    self._woken.get(timeout=pause * random.uniform(0.5, 1.0))
        except BaseException as error:
            logger.exception("the replica's thread failed; it is closed")
            self._counters["thread_failures"] += 1
            self._end_reason = f"the replica's thread failed: {error!r}"
            self.failed = ClosedError(self._end_reason)
        finally:
            reason = self._end_reason
            self.trouble = reason
            self.board.end(reason)
            self.joined.set()
            atexit.unregister(self._at_exit)

    def _live_once(self) -> None:
        """Join and follow until that ends; note why."""
        followed = False
        try:
            self._membership = membership = self.origin.open(self._note_joining)
            try:
                if self._stop.is_set():
                    return
                membership.join()
                followed = True
                self._take_over(membership)
                self._follow(membership)
            finally:
                self._is_following = False
                self._membership = None
                membership.close()
        except Exception as error:
            if not self._stop.is_set():
                self._note_end(error, followed=followed)

    def _note_joining(self, trouble: str) -> None:
        if trouble not in self.trouble:  # else the last attempt failed with it, and said more
            self.trouble = trouble

    def _take_over(self, membership: Membership) -> None:
        """Use the new copy for answers from now on."""
        self.copy = membership.copy
        self._is_following = True
        self._counters["joins"] += 1
        self._counters["messages"] += membership.messages
        self.trouble = self._lost = ""
        self.copy.changed.update(self.copy.statuses)
        self._show()
        self.joined.set()
        logger.info("joined %s: %d ranks", self.origin.name, len(self.copy.statuses))

    def _follow(self, membership: Membership) -> None:
        """Apply messages until there are no more."""
        receive = membership.receive
        while not self._stop.is_set():
            try:
                message = receive(self._stale_after, self._stop)
            except QueueTimeoutError as error:
                self._note_silence(error)
                continue
            self.copy.apply(message)
            self._counters["messages"] += 1
            if self.trouble:  # it was silent, and is not any more
                self.trouble = ""
                self.copy.changed.update(self.copy.statuses)
            self._show()

    def _show(self) -> None:
        """Show others what has changed."""
        copy, board = self.copy, self.board
        board.sign(copy.sent_at)
        if copy.renewed:
            copy.renewed = False
            board.keep(copy.statuses, copy.names, copy.take_changes())
        else:
            board.show(copy.take_changes())

    def _note_silence(self, error: QueueTimeoutError) -> None:
        if not self.trouble:
            self._counters["silences"] += 1
        self._show_stale(f"{self.origin.name} is silent: {error}")

    def _note_end(self, error: Exception, *, followed: bool) -> None:
        reasons = (*self.origin.reasons, *_REASONS)
        reason = next((word for type_, word in reasons if isinstance(error, type_)), "error")
        (self._rejoins if followed else self._failures)[reason] += 1
        is_final = isinstance(error, ConfigurationError) or (
            isinstance(error, RefusedError) and error.final
        )
        if is_final and not self._counters["joins"]:
            self.failed = error
            self._end_reason = str(error)
            self._stop.set()
        if reason == "error":
            logger.error("the replica of %s joins anew", self.origin.name, exc_info=error)
        if followed or self._log_rate.allows(reason):
            logger.warning("%s: %s", self.origin.name, error)
        cause = f"({reason}): {error}"
        if followed:
            what = self._lost = f"lost {cause}"
        elif self._lost:
            what = f"{self._lost}; cannot be joined again {cause}"
        else:
            what = f"cannot be joined {cause}"
        self._show_stale(f"{self.origin.name} {what}")

    def _show_stale(self, reason: str) -> None:
        """Mark every status as outdated."""
        self.trouble = reason
        stale = [
            msgspec.structs.replace(status, state=State.STALE, reason=reason)
            for status in self.copy.statuses.values()
        ]
        self.board.show(stale)


def _close(follower: weakref.ref[Follower], pid: int) -> None:
    alive = follower()
    if alive is not None and os.getpid() == pid:  # a forked child has the parent's
        alive.close()
