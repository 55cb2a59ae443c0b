"""Keeps a whole snapshot of the present epoch in the object store, which the log continues."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

from kvindex.index import Index
from kvindex.replicas.nats.log import Log, NoStreamError, StreamSettings
from kvindex.replicas.nats.log_writer import LogWriter
from kvindex.replicas.nats.pool_snapshots import Note, PoolSnapshots, encode_snapshot, name_of
from kvindex.replicas.snapshot import Part, Snapshots
from kvindex.wire.errors import ClosedError, NatsError
from kvindex.wire.log_rate import LogRate
from kvindex.wire.nats import run_apart

logger = logging.getLogger(__name__)

_KEPT = 2
_LOOK_EVERY = 5.0  # seconds between two looks at the newest, and at where the log begins
_BACKOFF, _MAX_BACKOFF = 0.5, 30.0  # seconds between two attempts


class StoredSnapshot(NamedTuple):
    """The newest snapshot that was stored: its position in the log, what is noted, and when."""

    name: str
    position: int
    note: Note
    stored_at: float


class SnapshotKeeper:
    """Writes a snapshot at the start of an epoch, and again before the log leaves the newest.

    The bucket is not trusted: a snapshot that is not there as it was stored is written again.

    Args:
        log: which they belong to.
        settings: of the bucket, if it is to be made again.
        writer: of the log.
        store: for them.
        snapshots: makes them.
        index: of the client.
        every: bytes appended after which there is another snapshot.

    Attributes:
        newest: the newest of this epoch that was stored.
        failures: attempts that failed, by the kind of error.
        counters: how often what happened.

    Owner: the event loop of the connection.
    """

    def __init__(
        self,
        log: Log,
        settings: StreamSettings,
        writer: LogWriter,
        store: PoolSnapshots,
        snapshots: Snapshots,
        index: Index,
        every: int,
    ) -> None:
        self.newest: StoredSnapshot | None = None
        self.failures: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self._log = log
        self._settings = settings
        self._writer = writer
        self._store = store
        self._snapshots = snapshots
        self._index = index
        self._every = every
        self._appended = 0  # bytes, since the newest snapshot was begun
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._log_rate = LogRate()

    def begin(self) -> None:
        """Begin, since an epoch has begun."""
        self.newest = None
        self._task = asyncio.ensure_future(self._run())

    async def end(self) -> None:
        """Write no more, since the epoch is over."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def note_append(self, size: int) -> None:
        """Note that so many bytes were appended."""
        self._appended += size
        if self._appended >= self._every:
            self._is_due.set()

    def statistics(self) -> dict[str, Any]:
        """Return counters, and what the newest snapshot of this epoch is."""
        newest = self.newest
        return {
            "snapshots": self.counters["stored"],
            "snapshots_lost": self.counters["lost"],
            "snapshot_failures": dict(self.failures),
            "last_snapshot": None
            if newest is None
            else {
                "position": newest.position,
                "bytes": newest.note.size,
                "age": time.monotonic() - newest.stored_at,
            },
        }

    async def _run(self) -> None:
        pause = _BACKOFF
        while True:
            try:
                await self._write()
            except Exception as error:
                self._note_failure("no snapshot could be stored", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_BACKOFF)
                continue
            pause = _BACKOFF
            await self._wait()

    async def _write(self) -> None:
        """Store a snapshot, and delete the older ones."""
        self._appended = 0
        self._is_due.clear()
        # Before the snapshot begins: all messages from then on are appended after this position.
        epoch, position = self._writer.epoch, self._writer.position + 1
        name = name_of(position, epoch)
        data = await self._encoded(name, epoch, position)
        try:
            note = await self._store.put(name, data)
        except NoStreamError:
            self._note_loss("the bucket of its snapshots is gone")
            await self._log.make(self._settings)
            note = await self._store.put(name, data)
        self.newest = StoredSnapshot(name, position, note, time.monotonic())
        self.counters["stored"] += 1
        logger.info("%s: stored the snapshot %s of %d bytes", self._log.pool, name, len(data))
        await self._store.keep(_KEPT)

    async def _encoded(self, name: str, epoch: str, position: int) -> bytes:
        """Return a snapshot; another thread makes it, which ends before this does."""
        is_over = threading.Event()

        def parts() -> Iterator[Part]:
            with closing(self._snapshots.parts()) as made:
                for part in made:
                    if is_over.is_set():
                        raise ClosedError("the epoch is over")
                    yield part

        def encode() -> bytes:
            return encode_snapshot(parts(), self._index, epoch, position)

        work = asyncio.get_running_loop().run_in_executor(None, encode)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            is_over.set()
            with suppress(Exception):
                await work
            raise

    async def _wait(self) -> None:
        """Wait until the next snapshot is due."""
        while not self._is_due.is_set():
            with suppress(asyncio.TimeoutError):
                await run_apart(self._is_due.wait(), _LOOK_EVERY)
            try:
                if await self._is_left_behind() or await self._is_lost():
                    return
            except NatsError as error:
                if self._log.is_connected:  # else appends fail likewise, and report it
                    self._note_failure("the newest snapshot could not be looked at", error)

    async def _is_lost(self) -> bool:
        """Return whether the newest snapshot is not in the store any more, or is damaged.

        The log may be on another server than the bucket, so appends do not show it.
        """
        assert self.newest is not None
        if await self._store.has(self.newest.name, self.newest.note):
            return False
        self._note_loss(f"the snapshot {self.newest.name} is gone or damaged")
        return True

    async def _is_left_behind(self) -> bool:
        """Return whether the log will soon begin after the newest snapshot, or does.

        A stream that exists already may have other limits than those given here.
        """
        if self.newest is None or self._is_due.is_set():
            return True
        head = await self._log.head()
        position = self.newest.position
        return position < head.first_seq or (
            head.first_seq > 1 and position - head.first_seq < (head.seq - head.first_seq) // 2
        )

    def _note_loss(self, what: str) -> None:
        if self.newest is None:  # noted before
            return
        self.newest = None
        self.counters["lost"] += 1
        if self._log_rate.allows("lost"):
            logger.warning("%s: %s; another snapshot is written", self._log.pool, what)

    def _note_failure(self, what: str, error: Exception) -> None:
        self.failures[type(error).__name__] += 1
        if self._log_rate.allows(what):
            logger.warning(
                "%s: %s, so that perhaps no replica can join: %s",
                self._log.pool,
                what,
                error,
                exc_info=None if isinstance(error, NatsError) else error,
            )
