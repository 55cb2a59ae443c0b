"""The layout of a ring's memory; native/shm/layout.hpp has the same.

```
0      header: magic, version, geometry: written before the memory gets its name, never again
       64 state · 128 `published` · 192 `space` · 256 next seq: words of a cache line each
4096   a slot of 64 bytes for each reader: state, spinning, first seq
…      a record for each chunk: seq, length, kind, a written flag, a read flag for each reader
…      the chunks, from the start of a page
```
"""

from __future__ import annotations

import enum
import struct

import msgspec

from kvindex.wire.errors import ConfigurationError, SegmentError

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
