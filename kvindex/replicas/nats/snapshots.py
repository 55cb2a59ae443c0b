"""A pool's snapshots: how they are written down, the object store, and who keeps it filled.

An object is named by its position and its epoch. It is

```
 length of the head (u32, big-endian), head (msgpack of `SnapshotHead`)
 a snapshot file (`kvindex.index.snapshot`); each rank's cursor is msgpack of `RankCursor`
```
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from kvindex.index import Index
from kvindex.index.snapshot import MAX_CURSOR_BYTES, SnapshotReader, SnapshotWriter
from kvindex.replicas.messages import LENGTH, PROTOCOL, Begin
from kvindex.replicas.nats.log import Log, NoStreamError, StreamSettings, ask
from kvindex.replicas.nats.log_writer import LogWriter
from kvindex.replicas.outflow import Part, Snapshots, TakenRank
from kvindex.subscribe import RankStatus
from kvindex.wire.errors import UNREADABLE, ClosedError, NatsError, SnapshotError
from kvindex.wire.log_rate import LogRate
from kvindex.wire.nats import NatsPool, run_apart
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

logger = logging.getLogger(__name__)

MAX_SNAPSHOT_BYTES = 16 << 30
_MAX_HEAD_BYTES = 16 << 20  # its names grow with the ranks
_CHUNK_BYTES = 512 << 10
_API_SECONDS = 2.0  # for each request, and for each chunk: without progress it fails
_KEPT = 2
_LOOK_EVERY = 5.0  # seconds between two looks at the newest, and at where the log begins
_BACKOFF, _MAX_BACKOFF = 0.5, 30.0  # seconds between two attempts

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class SnapshotHead(msgspec.Struct, frozen=True):
    """What a snapshot is of, and where the log continues it."""

    protocol: int  # of the messages in the log
    epoch: str  # of the log
    position: int  # in the log, which has every message numbered `begin` or above from there on
    begin: int  # number of the next message when the snapshot was begun
    end: int  # and when it was ended
    names: list[tuple[Rank, Rank]]  # the rank of each port, and its present name
    max_blocks_per_rank: int | None  # of the relay's index


class RankCursor(msgspec.Struct, frozen=True):
    """How a rank continues: as `TakenRank` has it."""

    number: int
    status: RankStatus | None
    cursor: bytes | None


def name_of(position: int, epoch: str) -> str:
    """Return the name of the object of this snapshot; newer ones of an epoch are greater."""
    return f"{position:020d}-{epoch}"


def position_and_epoch(name: str) -> tuple[int, str] | None:
    """Return what an object is named by; None if it is no snapshot's."""
    position, _, epoch = name.partition("-")
    return (int(position), epoch) if position.isdecimal() and len(position) == 20 else None


# How a snapshot is written down ---------------------------------------------------------------


def encode_snapshot(parts: Iterable[Part], index: Index, epoch: str, position: int) -> bytes:
    """Return a snapshot of an index as bytes; `parts` are those of `Snapshots`."""
    begin, ranks = 0, deque[TakenRank]()
    for part in parts:
        if isinstance(part, Begin):  # again, if ranks were renamed meanwhile
            begin = part.number
            ranks.clear()
        elif isinstance(part, TakenRank):
            ranks.append(part)
        else:
            end = part
    head = SnapshotHead(
        PROTOCOL,
        epoch,
        position,
        begin,
        end.number,
        end.names,
        index.max_blocks_per_rank,
    )
    encoded, file = msgspec.msgpack.encode(head), io.BytesIO()
    file.write(LENGTH.pack(len(encoded)) + encoded)
    writer = SnapshotWriter(file, seed=index.seed)
    while ranks:
        # Each section is dropped once it is written, or all of them would be in memory twice.
        taken = ranks.popleft()
        cursor = RankCursor(taken.number, taken.status, taken.cursor)
        try:
            encoded = msgspec.msgpack.encode(cursor)
        except Exception:
            encoded = b""
        if not 0 < len(encoded) <= MAX_CURSOR_BYTES:
            # One rank's status must not prevent all snapshots: the log has its next one.
            encoded = msgspec.msgpack.encode(msgspec.structs.replace(cursor, status=None))
        writer.add(taken.rank, taken.section, encoded)
    writer.finish()
    return file.getvalue()


class SnapshotContents:
    """Iterates over the ranks of a snapshot, one section in memory at a time beside its bytes.

    The constructor or iterating, at the latest at its end, raises SnapshotError if it is no whole
    snapshot that this release and backend can restore.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._file = io.BytesIO(data)
        (length,) = LENGTH.unpack(self._file.read(LENGTH.size).ljust(LENGTH.size, b"\0"))
        if length > min(_MAX_HEAD_BYTES, len(data)):
            raise SnapshotError(f"{name}: a head of {length} bytes", reason="format")
        self.head = _decoded(self._file.read(length), SnapshotHead, f"{name}: its head")
        if self.head.protocol != PROTOCOL:
            raise SnapshotError(
                f"{name}: its relay has protocol {self.head.protocol}, this release {PROTOCOL}: "
                "use the same release of kvindex everywhere",
                reason="version",
            )
        # Whoever may write to the bucket can store one under another's name.
        if name_of(self.head.position, self.head.epoch) != name:
            raise SnapshotError(f"{name}: it is another snapshot's", reason="content")
        self._reader = SnapshotReader(self._file)
        self.seed = self._reader.seed

    def __iter__(self) -> Iterator[TakenRank]:
        for record in self._reader:
            cursor = _decoded(record.cursor or b"", RankCursor, f"the cursor of {record.rank}")
            number, status = cursor.number, cursor.status
            yield TakenRank(record.rank, number, status, record.section, cursor.cursor)
        if self._file.read(1):
            raise SnapshotError("something follows the end of the snapshot", reason="format")


def _decoded(data: bytes, kind: type[_Struct], what: str) -> _Struct:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as error:
        raise SnapshotError(f"{what} cannot be read: {error}", reason="content") from error


# The object store -----------------------------------------------------------------------------


class ObjectNote(msgspec.Struct):
    """What the object store notes of an object; without a `nuid` it is none that can be used."""

    nuid: str = ""
    size: int = 0
    digest: str = ""
    chunks: int = 0
    deleted: bool = False
    seq: int = 0  # number of this note in the bucket's stream; 0: not read from there


class PoolSnapshots:
    """The snapshots of a pool, in its bucket. Owner: the event loop of the connection.

    All methods raise NatsError if NATS refuses, or if nothing goes on for some seconds.
    """

    def __init__(self, client: NatsClient, pool: NatsPool) -> None:
        self._pool = pool
        self._stream_name = f"OBJ_{pool.bucket}"
        self._metas, self._chunks = f"$O.{pool.bucket}.M.", f"$O.{pool.bucket}.C."
        self._chunk_bytes = min(_CHUNK_BYTES, client.max_payload - 1024)  # headers count, too
        self._stream = client.jetstream(timeout=_API_SECONDS)
        self._without: set[str] = set()  # subjects of chunks that belong to no object

    async def put(self, name: str, data: bytes) -> ObjectNote:
        """Store an object: it is listed once all of it is stored. Return what is noted of it."""
        from nats.js import api

        store = await ask(self._pool, self._stream.object_store(self._pool.bucket))
        options = api.ObjectMetaOptions(max_chunk_size=self._chunk_bytes)
        meta = api.ObjectMeta(name=name, options=options)
        info = await ask(self._pool, store.put(name, data, meta))
        return ObjectNote(info.nuid, info.size, info.digest, info.chunks)

    async def has(self, name: str, note: ObjectNote) -> bool:
        """Return whether an object is there as it was put, by its note and the number of chunks."""
        try:
            present = await self._note(name)
            chunks = await self._chunk_count(note.nuid)
        except NoStreamError:  # the bucket or the note is gone
            return False
        present.seq = note.seq  # which `put` does not know
        return present == note and chunks == note.chunks

    async def names(self) -> list[str]:
        """Return the names of all snapshots, sorted; others in the bucket are left out."""
        names = []
        for subject in await self._subjects(f"{self._metas}>"):
            with suppress(ValueError):  # not made by an object store
                name = base64.urlsafe_b64decode(subject.removeprefix(self._metas)).decode()
                if position_and_epoch(name) is not None:
                    names.append(name)
        return sorted(names)

    async def size(self, name: str) -> int:
        """Return how many bytes an object has."""
        return (await self._note(name)).size

    async def get(self, name: str) -> bytes:
        """Return an object whose digest is right."""
        # `ObjectStore.get` is not used: it waits for ever if the object is deleted meanwhile.
        note = await self._note(name)
        if not note.nuid or note.size > MAX_SNAPSHOT_BYTES:
            raise NatsError(f"{self._pool}: the snapshot {name} of {note.size} bytes is unreadable")
        chunks = await self._chunk_count(note.nuid)
        if chunks != note.chunks:
            raise NatsError(
                f"{self._pool}: the snapshot {name} has {chunks} of {note.chunks} chunks"
            )
        subscription = await ask(
            self._pool,
            self._stream.subscribe(
                self._chunks + note.nuid, stream=self._stream_name, ordered_consumer=True
            ),
        )
        file, digest = io.BytesIO(), hashlib.sha256()
        try:
            for _ in range(chunks):  # memory grows with the bytes that arrive, not with those noted
                message = await ask(self._pool, subscription.next_msg(_API_SECONDS))
                digest.update(message.data)
                file.write(message.data)
                if file.tell() >= note.size:
                    break
        finally:
            with suppress(NatsError):
                await ask(self._pool, subscription.unsubscribe())
        wanted = note.digest.partition("=")[2]
        if file.tell() != note.size or wanted != base64.urlsafe_b64encode(digest.digest()).decode():
            raise NatsError(f"{self._pool}: the snapshot {name} is damaged: its digest is wrong")
        return file.getvalue()

    async def newest(self) -> list[str]:
        """Return the names of all snapshots, those first that were stored last."""
        return [name for name, _ in await self._by_age()]

    async def keep(self, newest: int) -> None:
        """Delete all snapshots but those stored last, and what unfinished uploads have left."""
        by_age = await self._by_age()
        for name, _ in by_age[newest:]:
            await self._purge(self._meta(name))
        kept = {self._chunks + note.nuid for _, note in by_age[:newest]}
        deleted = {self._chunks + note.nuid for _, note in by_age[newest:]}
        without = set(await self._subjects(f"{self._chunks}>")) - kept
        # An upload that is under way looks like an unfinished one: its chunks are deleted if they
        # were there at the last call, too.
        for subject in without & (deleted | self._without):
            await self._purge(subject)
        self._without = without

    async def _by_age(self) -> list[tuple[str, ObjectNote]]:
        notes = []
        for name in await self.names():
            with suppress(NoStreamError):  # deleted just now
                notes.append((name, await self._note(name)))
        # By the bucket's numbers, not by positions: a log that was deleted counts from 1 again.
        return sorted(notes, key=lambda pair: pair[1].seq, reverse=True)

    def _meta(self, name: str) -> str:
        return self._metas + base64.urlsafe_b64encode(name.encode()).decode()

    async def _note(self, name: str) -> ObjectNote:
        call = self._stream.get_last_msg(self._stream_name, self._meta(name))
        message = await ask(self._pool, call)
        try:
            note = msgspec.json.decode(message.data or b"", type=ObjectNote)
        except UNREADABLE:
            note = ObjectNote()  # deleted like any other, so that nobody has to
        if note.deleted:
            raise NoStreamError(f"{self._pool}: the snapshot {name} is deleted")
        note.seq = message.seq or 0
        return note

    async def _chunk_count(self, nuid: str) -> int:
        subject = self._chunks + nuid
        return (await self._subjects(subject)).get(subject, 0)

    async def _subjects(self, wanted: str) -> dict[str, int]:
        """Return subjects in the bucket, and how many messages each has."""
        call = self._stream.stream_info(self._stream_name, subjects_filter=wanted)
        return (await ask(self._pool, call)).state.subjects or {}

    async def _purge(self, subject: str) -> None:
        await ask(self._pool, self._stream.purge_stream(self._stream_name, subject=subject))


# Keeping the newest --------------------------------------------------------------------------


class StoredSnapshot(NamedTuple):
    """The newest snapshot that was stored."""

    name: str
    position: int  # in the log
    note: ObjectNote
    stored_at: float


class SnapshotKeeper:
    """Writes a snapshot at the start of an epoch, and again before the log leaves the newest.

    The bucket is not trusted: a snapshot that is not there as it was stored is written again. There
    is another one after `every` bytes of the log. Owner: the event loop of the connection.
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
        self.newest: StoredSnapshot | None = None  # of this epoch
        self.failures: Counter[str] = Counter()  # of attempts, by the kind of error
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
        data = await self._encoded(epoch, position)
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

    async def _encoded(self, epoch: str, position: int) -> bytes:
        """Return a snapshot; another thread makes it, which ends before this does."""
        is_over = threading.Event()

        def parts() -> Iterator[Part]:
            with closing(self._snapshots.parts()) as made:
                for part in made:
                    if is_over.is_set():
                        raise ClosedError("the epoch is over")
                    yield part

        work = asyncio.ensure_future(
            asyncio.to_thread(encode_snapshot, parts(), self._index, epoch, position)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread still uses the tap, which the next epoch attends anew.
            is_over.set()
            with suppress(Exception):
                await work
            raise

    async def _wait(self) -> None:
        """Wait until the next snapshot is due."""
        while not self._is_due.is_set():
            with suppress(asyncio.TimeoutError):
                await run_apart(self._is_due.wait(), _LOOK_EVERY)
            newest = self.newest
            if newest is None or self._is_due.is_set():
                return
            try:
                # The log will soon begin after the newest: a stream that exists already may have
                # other limits than those given here.
                head = await self._log.head()
                ahead, size = newest.position - head.first_seq, head.seq - head.first_seq
                if ahead < 0 or (head.first_seq > 1 and ahead < size // 2):
                    return
                # The log may be on another server than the bucket, so appends do not show a loss.
                if not await self._store.has(newest.name, newest.note):
                    self._note_loss(f"the snapshot {newest.name} is gone or damaged")
                    return
            except NatsError as error:
                if self._log.is_connected:  # else appends fail likewise, and report it
                    self._note_failure("the newest snapshot could not be looked at", error)

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
