"""The ring of chunks in shared memory: its memory, its handle, and its two kinds of party.

```
            chunk 0        chunk 1        chunk 2        chunk 3
written        1              1              1              0        the writer's flag
read by 0      1              1              0              0        each reader's own flag
read by 1      1              0              0              0
               └ free again   └ reader 1 is here            └ the writer writes here next
                                             └ reader 0 is here
```

The writer goes round and writes a chunk when every reader has read its last message; a reader goes
round and reads each written chunk that it has not read. native/shm/ring.hpp explains which party
may touch which byte when, and why that is safe. Both parties are native code: Python has no
atomics, so without the native module there is no ring.

The memory, which native/shm/layout.hpp describes too:

```
0      header: magic, version, geometry: written before the memory gets its name, never again
       64 state · 128 `published` · 192 `space` · 256 next seq: words of a cache line each
4096   a slot of 64 bytes for each reader: state, spinning, first seq
…      a record for each chunk: seq, length, kind, a written flag, a read flag for each reader
…      the chunks, from the start of a page
```

A message is one body and its kind, a number that the ring passes on. A body that is longer than a
chunk goes in fragments: the first begins with the body's length (u64, little-endian), all but the
last are marked "more follows", all but the first "continues". A message that was abandoned midway
is followed by a chunk that does not continue it.
"""

from __future__ import annotations

import enum
import struct
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvindex.shm.ring.segment import MAKER, Segment, check_platform
from kvindex.wire.backend import why_not_native
from kvindex.wire.errors import ClosedError, ConfigurationError, SegmentError

if TYPE_CHECKING:
    from kvindex.wire._native import RingReader, RingWriter

Buffer = bytes | bytearray | memoryview
"""Bytes that a message is made of."""

RAW = 0
"""The kind of a message that is the caller's bytes as they are; other kinds are up to 15."""

MORE, CONTINUED = 0x10, 0x20
TOTAL = struct.Struct("<Q")
LENGTH_BYTES = TOTAL.size

HEADER_BYTES = 4096
_LINE = 64
_HEADER = struct.Struct("=8sIIIQ")  # magic, version, n_reader, max_chunks, max_chunk_bytes
_MAGIC = b"KVIXRING"
_VERSION = 2

_FLAGS = 24  # in a record
READY, CLOSED = 1, 2  # bits of the state word

_LIMITS = {"n_reader": 4096, "max_chunks": 1 << 20, "max_chunk_bytes": 1 << 40}


class SlotState(enum.IntEnum):
    """The state of a reader's place; the comments name the party that sets it."""

    FREE = 0  # writer
    RESERVED = 1  # writer: kept for a reader that has not come yet
    JOINING = 2  # reader: waits to be admitted
    ACTIVE = 3  # writer, and a reader that gets a reserved place
    LEFT = 4  # reader
    EVICTED = 5  # writer


class Layout(msgspec.Struct, frozen=True):
    """A ring's geometry.

    Attributes:
        n_reader: places for readers.
        max_chunks: how many chunks go round.
        max_chunk_bytes: most bytes in a chunk.

    Raises:
        ConfigurationError: a value is out of range.
    """

    n_reader: int
    max_chunks: int
    max_chunk_bytes: int

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ConfigurationError(f"{name} must be from 1 to {limit}, not {value!r}")

    def slot(self, reader: int) -> int:
        """Return the offset of a reader's slot."""
        return HEADER_BYTES + reader * _LINE

    def record(self, chunk: int) -> int:
        """Return the offset of a chunk's record."""
        return self.slot(self.n_reader) + chunk * _up(_FLAGS + 1 + self.n_reader, _LINE)

    def flags(self, chunk: int) -> int:
        """Return the offset of a chunk's written flag, which the readers' flags follow."""
        return self.record(chunk) + _FLAGS

    def chunk(self, index: int) -> int:
        """Return the offset of a chunk."""
        return _up(self.record(self.max_chunks), 4096) + index * _up(self.max_chunk_bytes, _LINE)

    @property
    def total_bytes(self) -> int:
        """Size of the whole memory, in bytes."""
        return self.chunk(self.max_chunks)

    def header(self) -> bytes:
        """Return the header of a new ring."""
        return _HEADER.pack(_MAGIC, _VERSION, self.n_reader, self.max_chunks, self.max_chunk_bytes)

    def check_header(self, memory: memoryview, name: str) -> None:
        """Raise SegmentError unless the memory is a ring of this layout."""
        # The magic and the version first: of another version the rest may mean something else.
        if len(memory) < HEADER_BYTES:
            raise SegmentError(f"shared memory {name} of {len(memory)} bytes is no ring")
        magic, version, *geometry = _HEADER.unpack_from(memory)
        if magic != _MAGIC:
            raise SegmentError(f"shared memory {name} is not a ring of kvindex")
        if version != _VERSION:
            raise SegmentError(
                f"ring {name} has version {version} and this kvindex speaks {_VERSION}: "
                "run the same kvindex on both sides"
            )
        if geometry != [self.n_reader, self.max_chunks, self.max_chunk_bytes]:
            raise SegmentError(
                f"ring {name} has n_reader, max_chunks, max_chunk_bytes = {geometry}; the handle "
                f"says {[self.n_reader, self.max_chunks, self.max_chunk_bytes]}"
            )
        if len(memory) < self.total_bytes:
            raise SegmentError(f"ring {name} has {len(memory)} bytes, not {self.total_bytes}")


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


RingHandle = tuple[int, int, int, str]
"""The arguments that attach to a ring: n_reader, max_chunk_bytes, max_chunks, name."""

Party = TypeVar("Party", "RingReader", "RingWriter")


class ShmRingBuffer:
    """Chunks in POSIX shared memory, each with a written flag and a read flag for each reader.

    This is the memory; `MessageQueue` sends messages through it. Without a name it is made, private
    to the user (0600) and with all its memory allocated at once; with a name it is attached. It
    pickles as its handle, and a forked child that uses it attaches anew. Its maker unlinks it when
    it is closed, collected, or the process ends; after a kill the readers do, or the next ring that
    is made.

    Args:
        n_reader: places for readers.
        max_chunk_bytes: bytes of a chunk.
        max_chunks: how many chunks.
        name: of the ring to attach to.

    Raises:
        ConfigurationError: a size is out of range.
        SegmentError: there is no room, no such ring, or no native module.

    Thread safety: the views are plain memory; the protocol decides who may write them when.

    Examples:
        >>> from kvindex.shm import ShmRingBuffer
        >>> with ShmRingBuffer(n_reader=2, max_chunk_bytes=1024, max_chunks=4) as ring:
        ...     attached = ShmRingBuffer(*ring.handle())
        ...     with ring.get_data(3) as chunk:
        ...         chunk[:5] = b"hello"
        ...     with attached.get_data(3) as chunk:
        ...         print(bytes(chunk[:5]), len(chunk))
        ...     with attached.get_metadata(3) as flags:
        ...         print(list(flags))
        ...     attached.close()
        b'hello' 1024
        [0, 0, 0]
    """

    def __init__(
        self, n_reader: int, max_chunk_bytes: int, max_chunks: int, name: str | None = None
    ) -> None:
        self.layout = Layout(n_reader, max_chunks, max_chunk_bytes)
        check_native()
        self.is_maker = name is None
        if name is None:
            self.segment = Segment.make(self.layout.total_bytes, self.layout.header())
            return
        self.segment = Segment.attach(name)
        try:
            with memoryview(self.segment.memory) as memory:
                self.layout.check_header(memory, name)
        except SegmentError:
            self.segment.close()
            raise

    @property
    def name(self) -> str:
        """The name to attach with."""
        return self.segment.name

    def handle(self) -> RingHandle:
        """Return the arguments of `ShmRingBuffer(*handle)`, for any process of this user here."""
        layout = self.layout
        return layout.n_reader, layout.max_chunk_bytes, layout.max_chunks, self.name

    def __reduce__(self) -> tuple[Any, ...]:
        # The name, not the memory: what unpickles it attaches to the same ring.
        return type(self), self.handle()

    @contextmanager
    def get_data(self, current_idx: int) -> Iterator[memoryview]:
        """Give a chunk's bytes, writable, for the length of a `with`.

        Raises:
            IndexError: no such chunk.
            ClosedError: the ring is closed in this process.
        """
        at = self.layout.chunk(self._checked(current_idx))
        with memoryview(self.segment.memory)[at : at + self.layout.max_chunk_bytes] as view:
            yield view

    @contextmanager
    def get_metadata(self, current_idx: int) -> Iterator[memoryview]:
        """Give a chunk's flags, writable: one byte "written", then one "read" for each reader.

        Raises as `get_data`.
        """
        at = self.layout.flags(self._checked(current_idx))
        with memoryview(self.segment.memory)[at : at + 1 + self.layout.n_reader] as view:
            yield view

    def writer(self) -> RingWriter:
        """Return the writing party; only the ring's maker has it."""
        segment = self._attached()
        if not self.is_maker:  # in a forked child, too: its parent still writes
            raise SegmentError(f"only the maker of ring {self.name} writes to it")
        # Late, so that all this can be imported where the native module is missing.
        from kvindex.wire._native import RingWriter

        return RingWriter(segment.memory, *self._geometry)

    def reader(self, slot: int) -> RingReader:
        """Take a place and return its reading party.

        Raises:
            SegmentError: a living reader has the place, or it is out of range.
        """
        if not 0 <= slot < self.layout.n_reader:
            raise SegmentError(f"ring {self.name} has no place {slot}")
        segment = self._attached()
        from kvindex.wire._native import RingReader

        party = RingReader(segment.memory, *self._geometry, slot)
        # The lock before the slot is touched: a living reader of this place would be in it.
        if not segment.hold(_lock_of(slot)):
            raise SegmentError(f"place {slot} of ring {self.name} has a living reader already")
        party.attach()
        return party

    def reader_lives(self, slot: int) -> bool:
        """Return whether a reader in another mapping holds this place. A system call."""
        return self.segment.lives(_lock_of(slot))

    def writer_lives(self) -> bool:
        """Return whether the maker, in another mapping, lives. A system call."""
        return self.segment.lives(MAKER)

    def close(self) -> None:
        """Unmap it, and unlink it if it was made here. Idempotent."""
        self.segment.close()

    def __enter__(self) -> ShmRingBuffer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"<ShmRingBuffer of {layout.max_chunks} chunks of {layout.max_chunk_bytes} bytes "
            f"for {layout.n_reader} readers>"
        )

    @property
    def _geometry(self) -> tuple[int, int, int]:
        return self.layout.n_reader, self.layout.max_chunks, self.layout.max_chunk_bytes

    def _attached(self) -> Segment:
        """Return the mapping; in a forked child attach one of its own first."""
        # What a child inherits has no locks, by which others see that it lives.
        if self.segment.inherited:
            self.segment, self.is_maker = Segment.attach(self.name), False
        return self.segment

    def _checked(self, chunk: int) -> int:
        if self._attached().closed:
            raise ClosedError(f"ring {self.name} is closed in this process")
        if not 0 <= chunk < self.layout.max_chunks:
            raise IndexError(f"chunk {chunk} of {self.layout.max_chunks}")
        return chunk


def _lock_of(slot: int) -> int:
    return MAKER + 1 + slot


class _Gone:
    """An end's substitute for its party, whose memory it must not keep: it refuses every use."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(self._why)


class RingEnd(Generic[Party]):
    """One party's end of a ring; it owns the ring."""

    _party: Party

    def __init__(self, ring: ShmRingBuffer, party: Party) -> None:
        self.ring = ring
        self._party = party
        # A child's use of its parent's party would be a second writer, or move a reader on.
        ring.segment.on_fork = self._disown

    def close(self) -> None:
        """Notify the other parties that this one ends, and close the ring. Idempotent.

        The counters can still be read.
        """
        party = self._party
        if isinstance(party, _Gone):  # closed already, or in a forked child the parent's
            return
        # Before anything else: another thread's next call must not touch memory that is unmapped.
        gone: Any = _Gone("this end of the queue is closed")
        counted = party.statistics()
        gone.seq, gone.behind, gone.statistics = party.seq, 0, lambda: counted
        self._party = gone
        self.ring.segment.on_fork = None
        if not self.ring.segment.closed:
            self._leave(party)
            party.interrupt()  # so that a thread of ours that sleeps inside finds it closed
        del party  # and with it the memory, unless a thread is still inside
        self.ring.close()

    @abstractmethod
    def _leave(self, party: Party) -> None: ...

    def _disown(self) -> None:
        """In a forked child: this end is the parent's."""
        gone: Any = _Gone(
            "this end of the queue belongs to the parent process; attach one by the queue's handle"
        )
        self._party = gone


def check_native() -> None:
    """Raise SegmentError where rings are unavailable, with what is missing."""
    check_platform()  # first: elsewhere no build of the native module would help
    try:
        from kvindex.wire._native import RingReader, RingWriter  # noqa: F401
    except ImportError as error:
        raise SegmentError(
            f"queues in shared memory and the fan-out need the native module: {why_not_native()}"
        ) from error
