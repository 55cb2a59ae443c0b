"""How a replica follows a pool's log: a snapshot from the object store, then the log from there on.

The log is not trusted, and neither is the order in which nats-py delivers it. A message counts only
if its number is the expected one, its epoch is that of the snapshot, its body opens, and the
numbers of the relay's own messages in it go on. All else ends the membership, and the follower
joins anew while the old copy answers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvindex.replicas.copy import Copy
from kvindex.replicas.messages import ReceivedMessage, decode_message
from kvindex.replicas.nats.log import (
    BodyReader,
    Head,
    Log,
    LogMessage,
    LogReader,
    NoStreamError,
    UnansweredError,
)
from kvindex.replicas.nats.snapshots import PoolSnapshots, SnapshotContents, position_and_epoch
from kvindex.replicas.replica import Reasons
from kvindex.subscribe import RankStatus
from kvindex.wire.errors import (
    DecodeError,
    NatsError,
    QueueTimeoutError,
    SnapshotError,
    WaitCancelledError,
)
from kvindex.wire.log_rate import LogRate
from kvindex.wire.nats import NatsPool, new_loop, open_connection

logger = logging.getLogger(__name__)

_FAR_BEHIND = 100  # messages that wait, from which on a copy does not count as current
_SNAPSHOT_SECONDS = 10.0  # to wait for a snapshot of the epoch that is being written
_PAUSE, _MAX_PAUSE = 0.1, 1.0  # seconds between two looks for it
_RETRY_SECONDS = 1.0  # between two attempts to read while NATS refuses
_CLOSE_SECONDS = 2.0
_DRIFT = 2e-4  # between two machines' clocks, at most

_Result = TypeVar("_Result")


class NewEpochError(NatsError):
    """Another relay writes, or this one has begun anew: the copy is of an epoch that is over."""


class TrimmedError(NatsError):
    """The next message is not in the log any more."""


class NoSnapshotError(NatsError):
    """No snapshot of the present epoch can be used."""


class PoolConnection(NamedTuple):
    """A connection's log and snapshots, and how it is closed."""

    log: Log
    snapshots: PoolSnapshots
    close: Callable[[], Awaitable[None]]


async def connect(pool: NatsPool, on_change: Callable[[str], None]) -> PoolConnection:
    """Return a new connection; raises as `open_connection`."""
    client = await open_connection(pool, "kvindex replica", on_change=on_change)
    return PoolConnection(Log(client, pool), PoolSnapshots(client, pool), client.close)


Connect = Callable[[NatsPool, Callable[[str], None]], Coroutine[Any, Any, PoolConnection]]


class LogOrigin:
    """The log of a pool, as the origin of a replica's copies.

    Owner: the follower's thread; `statistics` from any.
    """

    reasons: Reasons = (
        (NewEpochError, "new_epoch"),
        (TrimmedError, "trimmed"),
        (NoSnapshotError, "no_snapshot"),
        (NoStreamError, "no_stream"),
        (NatsError, "nats"),
        (TimeoutError, "silent"),
    )

    def __init__(
        self,
        pool: NatsPool,
        stale_after: float,
        connect: Connect = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.address = str(pool)
        self.name = f"the relay of {pool}"
        self.stale_after = stale_after
        self.connect = connect
        self.clock = clock
        self.log_rate = LogRate(clock)
        self.resubscribed = 0
        self.refused: Counter[str] = Counter()  # snapshots, by reason
        self.progress: dict[str, Any] = dict.fromkeys(("epoch", "number", "lag_messages"))
        # When the last message would have come at the earliest, in monotonic seconds.
        self.as_of: float | None = None

    def open(self, note: Callable[[str], None]) -> LogMembership:
        """Return a new place, which connects when it joins."""
        return LogMembership(self, note)

    def statistics(self) -> dict[str, Any]:
        """Return how far the copy is in the log, and what was refused.

        `epoch`; `number`: of the last message that was received; `lag_messages`: that follow it in
        the log; `lag_seconds`: how old it is; `resubscribed`: how often the log was asked
        again from the next number; `snapshots_refused`: by reason.
        """
        as_of = self.as_of
        return {
            **self.progress,
            "lag_seconds": None if as_of is None else max(0.0, self.clock() - as_of),
            "resubscribed": self.resubscribed,
            "snapshots_refused": dict(self.refused),
        }


class LogMembership:
    """A place among the replicas that follow a log: a connection, and the copy fed from it.

    Owner: one thread, which runs the connection's event loop in each call; `interrupt` and
    `backlog` from any.
    """

    def __init__(self, origin: LogOrigin, note: Callable[[str], None]) -> None:
        self.copy = Copy()
        self.messages = 0
        self.backlog = 0
        self._origin = origin
        self._note = note
        self._loop = new_loop()
        self._task: asyncio.Task[Any] | None = None  # the present step
        self._is_interrupted = False
        self._connection: PoolConnection | None = None
        self._trouble = ""  # of the connection
        self._reader: LogReader | None = None
        self._must_ask = False  # what was subscribed to may be gone
        self._asked_again = False  # since the last expected message
        self._epoch = ""
        self._expected = 0  # number of the next message in the log
        self._current_from = 0  # number of the first one that was appended after joining
        self._bodies = BodyReader()
        self._waiting: deque[memoryview] = deque()
        self._received_at = 0.0
        self._offset: float | None = None  # of our clock from the relay's, and the fastest delivery
        self._offset_at = 0.0

    def join(self) -> None:
        """Fill the copy: a snapshot, and the log up to its end as of now; raises KVIndexError."""
        origin = self._origin
        try:
            self._connection = self._run(
                partial(origin.connect, origin.pool, self._note_connection)
            )
            self._restore_newest()
            head = self._run(self._read_again)
            self._current_from = head.seq + 1
            self.copy.sent_at = origin.clock() - origin.stale_after  # the relay may be gone
            while self._expected <= head.seq:
                self._note(f"behind by {head.seq + 1 - self._expected} messages of the log")
                self._run(partial(self._fill, origin.stale_after))
                while self._waiting:
                    self.copy.apply(self._pop())
                    self.messages += 1
        except UnansweredError as error:
            if not self._trouble:
                raise
            # A server that denies a right says so apart from the request, and does not answer it.
            raise NatsError(f"{error}; {self._trouble}") from error
        # Only now is it known how far the relay's clock is from ours: its messages show it.
        statuses = self.copy.statuses
        statuses.update({rank: self._local(status) for rank, status in statuses.items()})
        self.copy.to_local = self._local

    def receive(self, timeout: float, stop: threading.Event) -> ReceivedMessage:
        """Return the next message, as `Membership.receive`."""
        while not self._waiting:
            if stop.is_set():
                raise WaitCancelledError("the replica is being closed")
            self._run(partial(self._fill, timeout))
        return self._pop()

    def interrupt(self) -> None:
        """End the present step, and all later ones."""
        self._is_interrupted = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._loop.run_until_complete(self._shut())
        finally:
            self._loop.close()

    async def _shut(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                await asyncio.wait_for(self._connection.close(), _CLOSE_SECONDS)
        # nats-py leaves some of its own, which would be destroyed with the loop, and complain.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _run(self, step: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Return the result of a step; raises WaitCancelledError if it was interrupted."""
        # A step is cancelled, and begun anew, once the connection is back: with the old one its
        # answer is lost, and to wait for that takes longer than a connection may last.
        while not self._is_interrupted:
            self._task = task = self._loop.create_task(step())
            with suppress(asyncio.CancelledError):
                return self._loop.run_until_complete(task)
        raise WaitCancelledError("the replica is being closed")

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _note_connection(self, trouble: str) -> None:
        self._trouble = trouble
        if not trouble:
            self._must_ask = True
            self._cancel()
        elif not self._epoch:  # it has not joined, so nothing else says what it waits for
            self._note(trouble)

    # The snapshot -----------------------------------------------------------------------------

    def _restore_newest(self) -> None:
        """Restore the newest usable snapshot of the epoch at the log's end; wait for one."""
        assert self._connection is not None
        log, snapshots = self._connection.log, self._connection.snapshots
        refused: set[str] = set()
        until, pause, why = self._origin.clock() + _SNAPSHOT_SECONDS, _PAUSE, ""
        while True:
            head = self._run(log.head)
            for name in reversed(self._run(snapshots.names)):
                position, epoch = position_and_epoch(name) or (0, "")
                # The log can be followed only from one of its epoch whose next message it has.
                if epoch != head.epoch or position < head.first_seq or name in refused:
                    continue
                self._note(f"fetching the snapshot {name}")
                try:
                    self._restore(name, self._run(partial(snapshots.get, name)))
                    return
                except NatsError as error:  # deleted, or cut: perhaps it is there again
                    word, cause = "download", str(error)
                except (SnapshotError, DecodeError) as error:
                    refused.add(name)
                    word = error.reason if isinstance(error, SnapshotError) else "content"
                    cause = str(error)
                self._origin.refused[word] += 1
                why = f"{name} is refused: {cause}"
                if self._origin.log_rate.allows(word):
                    logger.warning("%s: %s", self._origin.pool, why)
            trouble = f"no snapshot of the epoch {head.epoch} that can be used"
            if why:
                trouble += f"; {why}"
            if self._origin.clock() >= until:
                raise NoSnapshotError(trouble)
            self._note(trouble)
            self._run(partial(asyncio.sleep, pause))
            pause = min(2 * pause, _MAX_PAUSE)

    def _restore(self, name: str, data: bytes) -> None:
        """Restore a snapshot, and read the log from its position on."""
        contents = SnapshotContents(data, name)
        head = contents.head
        copy = Copy(contents.seed, head.max_blocks_per_rank)
        copy.begin(head.begin)
        for taken in contents:
            if self._is_interrupted:
                raise WaitCancelledError("the replica is being closed")
            copy.restore(taken.rank, taken.number, taken.section, taken.status)
        copy.catchup.end(head.end)
        copy.names = dict(head.names)
        self.copy = copy
        self._epoch, self._expected = head.epoch, head.position

    # The log ----------------------------------------------------------------------------------

    async def _fill(self, timeout: float) -> None:
        """Receive one body, if it is the next one; NatsError, DecodeError: the log ends here."""
        message = await self._next(timeout)
        if message.seq < self._expected:  # nats-py may deliver again what it delivered
            return
        # Before the number: another epoch may have messages where ours were forgotten.
        if message.epoch != self._epoch:
            raise NewEpochError(f"the epoch {message.epoch} begins at message {message.seq}")
        if message.seq > self._expected:
            # Once it may be nats-py, which drops what waits too long in this process.
            if self._asked_again:
                raise TrimmedError(
                    f"message {message.seq} came where {self._expected} should follow: the log was "
                    "trimmed or purged"
                )
            await self._read_again()
            self._asked_again = True
            return
        self._asked_again = False
        self._expected += 1
        self._received_at = self._origin.clock()
        self.backlog = message.pending
        if not message.body:  # only the begin of an epoch is empty, before every snapshot of it
            raise DecodeError(f"message {message.seq} of {message.epoch} is empty: foreign", size=0)
        self._waiting.extend(self._bodies.split(message.body))

    async def _next(self, timeout: float) -> LogMessage:
        """Return the next message that is delivered; QueueTimeoutError says why there is none."""
        assert self._connection is not None
        log = self._connection.log
        try:
            if self._reader is None or self._must_ask:
                await self._read_again()
            assert self._reader is not None
            return await self._reader.next(timeout)
        except asyncio.TimeoutError:
            pass
        except (NewEpochError, NoStreamError):
            raise
        except NatsError as error:
            self._must_ask = True
            if log.is_closed:
                raise
            await asyncio.sleep(min(timeout, _RETRY_SECONDS))
            raise QueueTimeoutError(str(error), timeout=timeout) from error
        # It is silent: its end says whether it goes on, and what was not delivered is asked for.
        why = f"nothing came for {timeout:g} s: is it stopped?"
        if self._trouble and not log.is_connected:
            why = self._trouble
        else:
            try:
                head = await self._read_again()
                if head.seq < self._expected - 1:
                    why = f"the log has lost its messages from {head.seq + 1} on, until the relay "
                    why += "returns"
            except (NewEpochError, NoStreamError):
                raise
            except NatsError as error:
                self._must_ask = True
                why = str(error)
        raise QueueTimeoutError(why, timeout=timeout)

    async def _read_again(self) -> Head:
        """Ask for the log from the next number on; return its end, or raise what ended it."""
        assert self._connection is not None
        # A log that began anew may stay below that number for long, so its end is looked at each
        # time: a connection that breaks each second leaves no time for a silence.
        head = await self._connection.log.head()
        if head.epoch not in (None, self._epoch):
            raise NewEpochError(f"the epoch {head.epoch} ends the log at message {head.seq}")
        reader, self._reader = self._reader, None
        self._must_ask = False
        if reader is not None:
            self._origin.resubscribed += 1
            await reader.close()
        self._reader = await self._connection.log.read(self._expected)
        return head

    def _pop(self) -> ReceivedMessage:
        """Return the next message in terms of this machine's clock."""
        message, received_at = decode_message(self._waiting.popleft()), self._received_at
        # The least of what clock and delivery took together, so the nearest to the clocks' own
        # distance. Slower deliveries do not count, but for what clocks drift.
        offset = received_at - message.sent_at
        if self._offset is not None:
            offset = min(offset, self._offset + _DRIFT * (received_at - self._offset_at))
        self._offset, self._offset_at = offset, received_at
        number = self._expected - 1
        self._origin.progress = {
            "epoch": self._epoch,
            "number": number,
            "lag_messages": self.backlog,
        }
        self._origin.as_of = message.sent_at + offset
        # What the log had kept says nothing of now; nor does one that many others follow.
        is_current = number >= self._current_from and self.backlog <= _FAR_BEHIND
        as_of = received_at if is_current else self.copy.sent_at
        return ReceivedMessage(message.number, as_of, message.entries)

    def _local(self, status: RankStatus) -> RankStatus:
        """Return a status whose time is by this machine's clock."""
        age, offset = status.last_event_age, self._offset
        if age is None:
            return status
        return msgspec.structs.replace(
            status, last_event_age=None if offset is None else age + offset
        )
