r"""Snapshots: an index as a file, rank by rank, and a rank by itself as a *section*.

All numbers are little-endian. A *digest* is 32 bytes of BLAKE2b, keyed with the index's seed. A
section is the result of `Index.dump`, and goes from process to process also without a file:

```
 bytes  what
     4  magic b"KVIR"
     2  version of the format: 3
     8  length of the body
    16  identity: BLAKE2b of the key check, keyed with the seed
     n  body, which only the native core understands (native/core/snapshot.hpp)
    32  digest of everything before it
```

A file:

```
     8  magic b"\x89KVI\r\n\x1a\n"
     2  version of the format: 3
    16  seed of the index
        then for each rank
     1      1
     4      length of the worker's name, at most 65,536
     8      dp_rank, signed
     4      length of the cursor, at most 65,536; 2**32 - 1: there is none
     8      length of the section
            name in UTF-8, cursor, section
        and in the end
     1  0
     8  number of ranks
    32  digest of everything before it, but of each section only of its own digest
```

So every byte is under one digest: a section, which is checked wherever it comes from, or the file's
own. A digest finds damage, and keeps out what was made without knowing the seed. The identity finds
sections of another seed, or of a release that computes other prefix keys: they mean nothing here.

A snapshot is a cache, not an archive: a release refuses snapshots of another version number, and
synchronizes from the engines instead. It contains the index's seed, which must be secret from
clients that send prompts: files are made readable by their owner only.

A *cursor* belongs to the follower of the rank's stream: the position up to which events were
applied. Nothing here looks into it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from hmac import compare_digest
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, Literal, NamedTuple, Protocol, TypeAlias

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from kvindex.wire.backend import BACKEND, Backend, why_not_native
from kvindex.wire.errors import ConfigurationError, SnapshotError, UnknownRankError
from kvindex.wire.rank import Rank

SNAPSHOT_VERSION: Final = 3
MAX_CURSOR_BYTES: Final = 65_536

SnapshotTarget: TypeAlias = str | os.PathLike[str] | BinaryIO
SnapshotSource: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO

# As PNG's: a copy that was made as text, with other line ends, is refused at once.
_MAGIC = b"\x89KVI\r\n\x1a\n"
_HEAD = struct.Struct("<8sH16s")
_RANK = struct.Struct("<IqIQ")
_COUNT = struct.Struct("<Q")
_RANK_FOLLOWS, _END_FOLLOWS = b"\x01", b"\x00"
_NO_CURSOR = 2**32 - 1
_SECTION_MAGIC = b"KVIR"
_SECTION_HEAD = struct.Struct("<4sHQ16s")
_DIGEST_BYTES = 32
_STEP = 2**20  # bytes read at once, whatever length is written
_NO_CURSORS: Mapping[Rank, bytes] = MappingProxyType({})


def require_native(backend: Backend = BACKEND) -> None:
    """Reject the Python index where an index is saved, loaded or copied to another process."""
    if backend != "native":
        raise needs_native("snapshots")


def needs_native(what: Literal["snapshots", "prefixes"]) -> ConfigurationError:
    """Return the error for a feature that the Python index does not have."""
    uses = {"snapshots": "saving, loading, warm restarts and replicas", "prefixes": "they"}[what]
    return ConfigurationError(
        f"the Python index has no {what}: {uses} need the native module: {why_not_native()}"
    )


# Sections -------------------------------------------------------------------------------------


def section_identity(seed: int, key_check: bytes) -> bytes:
    """Return what two indexes must share to restore each other's sections.

    `key_check` are prefix keys of contents that never change, so that a release which computes keys
    in another way rejects the sections of this one.
    """
    key = seed.to_bytes(16, "little")
    return blake2b(key_check, digest_size=16, key=key, person=b"kvindex identity").digest()


def seal_section(body: bytes, seed: int, identity: bytes) -> bytes:
    """Return a section with this body."""
    head = _SECTION_HEAD.pack(_SECTION_MAGIC, SNAPSHOT_VERSION, len(body), identity)
    return b"".join((head, body, _digest(seed, head, body)))


def open_section(section: bytes | bytearray | memoryview, seed: int, identity: bytes) -> memoryview:
    """Return the body of a section that an index of this seed and identity may restore.

    Raises:
        SnapshotError: the section is damaged, or made by another kind of index.
        ConfigurationError: it is no bytes at all.
    """
    view = bytes_of(section, "a section")
    if _SECTION_MAGIC[: len(view)] != view[: len(_SECTION_MAGIC)]:
        raise SnapshotError(f"{len(view)} bytes are no section of a snapshot", reason="format")
    size = _SECTION_HEAD.size + _DIGEST_BYTES
    if len(view) >= _SECTION_HEAD.size:
        _, version, length, made_by = _SECTION_HEAD.unpack_from(view)
        # Before the length is believed: it may stand elsewhere in another version.
        if version != SNAPSHOT_VERSION:
            raise SnapshotError(
                f"the section has format version {version}, this release reads {SNAPSHOT_VERSION}:"
                " let the rank synchronize from its engine instead",
                reason="version",
            )
        size += length
    if len(view) < size:
        raise SnapshotError(
            f"the section is cut off: {len(view)} of at least {size} bytes are there",
            reason="truncated",
        )
    if len(view) > size:
        extra = f"{len(view) - size} bytes follow the end of a section of {size}"
        raise SnapshotError(extra, reason="format")
    # Before the digest, which is keyed with the seed: under another seed it could not tell that
    # from damage.
    if made_by != identity:
        raise SnapshotError(
            "the section was made by an index with another seed (or of a release with other prefix"
            " keys): restore it into Index(seed=...) with the seed of that index",
            reason="backend",
        )
    if not compare_digest(_digest(seed, view[:-_DIGEST_BYTES]), view[-_DIGEST_BYTES:]):
        raise SnapshotError(
            f"the section of {size} bytes is damaged: its checksum does not agree",
            reason="checksum",
        )
    return view[_SECTION_HEAD.size : -_DIGEST_BYTES]


def bytes_of(data: object, what: str) -> memoryview:
    """Return a caller's buffer as bytes, not copied; ConfigurationError if it cannot be read so."""
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]  # this is the question
    except TypeError:
        raise ConfigurationError(
            f"{what} must be bytes, a bytearray or a memoryview without gaps, not "
            f"{type(data).__name__}"
        ) from None


def _digest(seed: int, *parts: bytes | memoryview) -> bytes:
    digest = _new_digest(seed)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _new_digest(seed: int) -> blake2b:
    key = seed.to_bytes(16, "little")
    return blake2b(digest_size=_DIGEST_BYTES, key=key, person=b"kvindex snapshot")


# Files ----------------------------------------------------------------------------------------


class Dumpable(Protocol):
    """What a snapshot is made of: an index."""

    @property
    def backend(self) -> Backend: ...

    @property
    def seed(self) -> int: ...

    @property
    def ranks(self) -> tuple[Rank, ...]: ...

    def dump(self, rank: Rank) -> bytes: ...


class SnapshotRecord(NamedTuple):
    """One rank of a snapshot: the result of `Index.dump`, and the cursor that the writer added."""

    rank: Rank
    section: bytes
    cursor: bytes | None


class Snapshot(NamedTuple):
    """A whole snapshot in memory; its sections restore into `Index(seed=seed)`."""

    seed: int
    ranks: tuple[SnapshotRecord, ...]


class SnapshotWriter:
    """Writes a snapshot of an index of this seed to a binary file, which it does not close.

    The file is a snapshot once `finish` has returned. Thread safety: none.
    """

    def __init__(self, file: BinaryIO, *, seed: int) -> None:
        self._file = file
        self._digest = _new_digest(seed)
        self._ranks: set[Rank] = set()
        self._put(_HEAD.pack(_MAGIC, SNAPSHOT_VERSION, seed.to_bytes(16, "little")))

    def add(self, rank: Rank, section: bytes, cursor: bytes | None = None) -> None:
        """Write one rank.

        Raises:
            ConfigurationError: the rank was written before, its name is longer than 65,536 bytes,
                or the cursor is.
        """
        if rank in self._ranks:
            raise ConfigurationError(f"{rank} is in the snapshot already")
        self._ranks.add(rank)
        name = rank[0].encode("utf-8", "surrogatepass")
        for what, size in (("the worker's name", len(name)), ("the cursor", len(cursor or b""))):
            if size > MAX_CURSOR_BYTES:
                raise ConfigurationError(f"{rank}: {what} has {size} bytes, at most 65536 can be")
        length = _NO_CURSOR if cursor is None else len(cursor)
        numbers = _RANK.pack(len(name), rank[1], length, len(section))
        self._put(_RANK_FOLLOWS + numbers + name + (cursor or b""))
        # Its own digest stands for it: it is not hashed twice, and cannot be another rank's.
        self._digest.update(section[-_DIGEST_BYTES:])
        self._file.write(section)

    def finish(self) -> None:
        """Write the end."""
        self._put(_END_FOLLOWS + _COUNT.pack(len(self._ranks)))
        self._file.write(self._digest.digest())

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


class SnapshotReader:
    """Iterates over the records of a snapshot, one in memory at a time.

    A section's damage is found with its record, that of names and cursors at the end of an
    iteration: if that raises, drop all that was restored before. A context manager, since it may
    have to close a file.

    Args:
        source: a path, the bytes of a snapshot, or a file open for reading, which is read up to
            the end of the snapshot and not closed.

    Attributes:
        seed: of the index that was written.

    Raises:
        SnapshotError: by the constructor and by iterating; it is no (whole) snapshot.
        ConfigurationError: the source is neither a path nor a readable file nor bytes.
        OSError: the file cannot be read.
    """

    seed: int

    def __init__(self, source: SnapshotSource) -> None:
        self._owned = True  # nothing but the snapshot may be in it
        if isinstance(source, (bytes, bytearray, memoryview)):
            whole = isinstance(source, bytes)  # no copy needed
            self._file: BinaryIO = BytesIO(source if whole else bytes_of(source, "a snapshot"))
        elif isinstance(source, (str, os.PathLike)):
            self._file = open(source, "rb")  # noqa: SIM115 - closed by `close`
        elif hasattr(source, "read"):
            self._file, self._owned = source, False
        else:
            raise ConfigurationError(
                "a snapshot is read from a path, bytes, or a file open for reading, not from "
                f"{type(source).__name__}"
            )
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file that was opened here."""
        if self._owned:
            self._file.close()

    def __iter__(self) -> Iterator[SnapshotRecord]:
        ranks: set[Rank] = set()
        while (tag := self._read(1)) == _RANK_FOLLOWS:
            self._digest.update(tag)
            record = self._read_record()
            if record.rank in ranks:
                raise SnapshotError(f"the snapshot has {record.rank} twice", reason="content")
            ranks.add(record.rank)
            yield record
        if tag != _END_FOLLOWS:
            raise SnapshotError(
                f"no rank begins with {tag!r} after {len(ranks)} ranks: the snapshot is damaged",
                reason="checksum",
            )
        count = self._read(_COUNT.size)
        self._digest.update(tag + count)
        if not compare_digest(self._read(_DIGEST_BYTES), self._digest.digest()):
            raise SnapshotError(
                "the snapshot is damaged: its checksum does not agree", reason="checksum"
            )
        if _COUNT.unpack(count)[0] != len(ranks):
            counted = f"{len(ranks)} ranks, counted {_COUNT.unpack(count)[0]}"
            raise SnapshotError(counted, reason="content")
        if self._owned and self._file.read(1):
            raise SnapshotError("something follows the end of the snapshot", reason="format")

    def _read_head(self) -> None:
        head = self._take(_HEAD.size)
        if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
            raise SnapshotError("this is no snapshot of an index", reason="format")
        if len(head) < _HEAD.size:
            raise _truncated(_HEAD.size, len(head))
        _, version, seed = _HEAD.unpack(head)
        if version != SNAPSHOT_VERSION:
            raise SnapshotError(
                f"the snapshot has format version {version}, this release reads"
                f" {SNAPSHOT_VERSION}: synchronize from the engines, and write a new one",
                reason="version",
            )
        self.seed = int.from_bytes(seed, "little")
        self._digest = _new_digest(self.seed)
        self._digest.update(head)

    def _read_record(self) -> SnapshotRecord:
        numbers = self._read(_RANK.size)
        name_bytes, dp_rank, cursor_bytes, section_bytes = _RANK.unpack(numbers)
        has_cursor = cursor_bytes != _NO_CURSOR
        if name_bytes > MAX_CURSOR_BYTES or (has_cursor and cursor_bytes > MAX_CURSOR_BYTES):
            raise SnapshotError(
                f"a rank's name of {name_bytes} bytes, its cursor of {cursor_bytes}: at most 65536"
                " can be; the snapshot is damaged",
                reason="checksum",
            )
        name = self._read(name_bytes)
        cursor = self._read(cursor_bytes) if has_cursor else None
        section = self._read(section_bytes)
        try:
            rank = Rank(name.decode("utf-8", "surrogatepass"), dp_rank)
        except UnicodeDecodeError:
            raise SnapshotError(f"no name of a worker: {name[:64]!r}", reason="content") from None
        digest = section[-_DIGEST_BYTES:]
        if not compare_digest(_digest(self.seed, memoryview(section)[:-_DIGEST_BYTES]), digest):
            raise SnapshotError(
                f"the snapshot is damaged: the checksum of {rank} does not agree",
                reason="checksum",
            )
        self._digest.update(numbers + name + (cursor or b"") + digest)
        return SnapshotRecord(rank, section, cursor)

    def _read(self, size: int) -> bytes:
        data = self._take(size)
        if len(data) < size:
            raise _truncated(size, len(data))
        return data

    def _take(self, size: int) -> bytes:
        """Read so many bytes, or as many as exist."""
        # Not all at once: a length that somebody made up must not cost its memory.
        data = self._file.read(min(size, _STEP))
        while 0 < len(data) < size:
            more = self._file.read(min(len(data), size - len(data)))
            if not more:
                break
            data += more
        return data


def _truncated(expected: int, left: int) -> SnapshotError:
    return SnapshotError(
        f"the snapshot is cut off: {left} bytes are left where {expected} should follow",
        reason="truncated",
    )


def write_snapshot(
    target: SnapshotTarget, index: Dumpable, *, cursors: Mapping[Rank, bytes] = _NO_CURSORS
) -> None:
    """Write an index, each rank as it is at its turn.

    Args:
        target: a path, whose file is replaced when all is written, or a file open for writing.
        index: it is locked (against events, not against queries) for one rank at a time.
        cursors: for each rank, at most 64 KiB that `read_snapshot` returns.

    Raises:
        ConfigurationError: a cursor or a rank's name is too long; the target is neither a path
            nor a writable file; or it is the Python index, which has no snapshots.
        OSError: the file cannot be written; an existing file is unchanged.
    """
    require_native(index.backend)
    if isinstance(target, (str, os.PathLike)):
        with replaced_file(target) as file:
            write_snapshot(file, index, cursors=cursors)
        return
    if not hasattr(target, "write"):
        raise ConfigurationError(
            "a snapshot is written to a path or a file open for writing, not to "
            f"{type(target).__name__}"
        )
    writer = SnapshotWriter(target, seed=index.seed)
    for rank in index.ranks:
        with suppress(UnknownRankError):  # removed just now
            writer.add(rank, index.dump(rank), cursors.get(rank))
    writer.finish()


def read_snapshot(source: SnapshotSource) -> Snapshot:
    """Return a whole snapshot; for a large one iterate over a `SnapshotReader` instead.

    Raises:
        SnapshotError: it is no whole snapshot, by `reason`.
        OSError: the file cannot be read.
    """
    with SnapshotReader(source) as reader:
        return Snapshot(reader.seed, tuple(reader))


@contextmanager
def replaced_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` if all went well; only its owner may read it.

    Readers see the old file or the new one, whole, even if the machine stops in between.

    Raises:
        OSError: it cannot be written; an existing file is unchanged.
    """
    target = Path(path)
    prefix = f".{target.name}."
    descriptor, name = _locked_file(target.parent, prefix)
    try:
        with open(descriptor, "wb") as file:
            _remove_leftovers(target.parent, prefix)
            yield file
            # On the disk before it gets its name: else a machine that stops leaves the name of an
            # empty file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    if os.name == "posix":  # Windows cannot synchronize a folder, which has the name
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _locked_file(folder: Path, prefix: str) -> tuple[int, str]:
    """Return a new file whose lock shows that it is being written."""
    import tempfile  # here: it loads every kind of compression

    while True:
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        if fcntl is None:
            return descriptor, name
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # another writer took it for a leftover, before it was locked


def _remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove the files of writers that were killed: no living one holds their locks."""
    if fcntl is None:
        return
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(prefix)]
    for name in names:
        if len(name) != len(prefix) + 8:  # as tempfile makes them
            continue
        with suppress(OSError):  # it is locked, or somebody else's, or was renamed just now
            left = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
            finally:
                os.close(left)
