"""Sections: one rank's contents, as bytes that only an index of the same seed restores.

A section is a head, a body that only the native core understands, and two digests:

```
 offset  bytes  what
      0      4  magic b"KVIR"
      4      2  version of the format, little-endian as all numbers: 2
      6      1  1: the index is the native one
      7      1  0
      8      8  length of the body
     16      n  body
   16+n     32  checksum: BLAKE2b of everything before it
   48+n     16  seal: BLAKE2b of b"native", key check and checksum, keyed with the index's seed
```

The checksum finds damage. The seal finds sections of an index with another seed, whose prefix keys
mean nothing here, and keeps out sections made without knowing the seed.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final, NamedTuple

from kvindex.wire.errors import ConfigurationError, SnapshotError

SECTION_VERSION = 2
NATIVE: Final = 1
"""The backend in the head of a section and of a snapshot. The Python index has none."""

_MAGIC = b"KVIR"
_HEAD = struct.Struct("<4sHBxQ")
_CHECKSUM_BYTES = 32
_SEAL_BYTES = 16
_TRAILER_BYTES = _CHECKSUM_BYTES + _SEAL_BYTES


class Identity(NamedTuple):
    """The properties that two indexes must share to restore each other's sections.

    `key_check` are prefix keys of contents that never change, so that a release which computes keys
    in another way rejects the sections of this one.
    """

    seed: int
    key_check: bytes

    def seal(self, checksum: bytes) -> bytes:
        """Return the seal of a section with this checksum."""
        return blake2b(
            b"native" + self.key_check + checksum,
            digest_size=_SEAL_BYTES,
            key=self.seed.to_bytes(16, "little"),
            person=b"kvindex section",
        ).digest()


def seal_section(body: bytes, identity: Identity) -> bytes:
    """Return a section with this body."""
    head = _HEAD.pack(_MAGIC, SECTION_VERSION, NATIVE, len(body))
    checksum = _checksum(head, body)
    return b"".join((head, body, checksum, identity.seal(checksum)))


def open_section(section: bytes | bytearray | memoryview, identity: Identity) -> memoryview:
    """Return the body of a section that an index of this identity may restore.

    Raises:
        SnapshotError: the section is damaged, or made by another kind of index.
        ConfigurationError: it is no bytes at all.
    """
    view = bytes_of(section, "a section")
    if _MAGIC[: len(view)] != view[: len(_MAGIC)]:
        raise SnapshotError(f"{len(view)} bytes are no section of a snapshot", reason="format")
    if len(view) < _HEAD.size:
        raise _truncated(len(view), _HEAD.size)
    _, version, backend, length = _HEAD.unpack_from(view)
    if version != SECTION_VERSION:
        raise SnapshotError(
            f"the section has format version {version}, this release reads {SECTION_VERSION}:"
            " let the rank synchronize from its engine instead",
            reason="version",
        )
    size = _HEAD.size + length + _TRAILER_BYTES
    if len(view) < size:
        raise _truncated(len(view), size)
    if len(view) > size:
        extra = f"{len(view) - size} bytes follow the end of a section of {size}"
        raise SnapshotError(extra, reason="format")
    body = view[_HEAD.size : _HEAD.size + length]
    trailer = bytes(view[size - _TRAILER_BYTES :])
    checksum, seal = trailer[:_CHECKSUM_BYTES], trailer[_CHECKSUM_BYTES:]
    if _checksum(view[: _HEAD.size], body) != checksum:
        raise SnapshotError(
            f"the section of {size} bytes is damaged: its checksum does not agree",
            reason="checksum",
        )
    check_backend(backend)
    if identity.seal(checksum) != seal:
        raise SnapshotError(
            "the section was made by an index with another seed (or of a release with other prefix"
            " keys): restore it into Index(seed=...) with the seed of that index",
            reason="backend",
        )
    return body


def bytes_of(data: object, what: str) -> memoryview:
    """Return a caller's buffer as bytes, not copied.

    Raises:
        ConfigurationError: it is no buffer, or one with gaps.
    """
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]  # this is the question
    except TypeError:
        raise ConfigurationError(
            f"{what} must be bytes, a bytearray or a memoryview without gaps, not "
            f"{type(data).__name__}"
        ) from None


def check_backend(number: int) -> None:
    """Reject a head of another implementation of the index.

    Raises:
        SnapshotError: it is not the native one's.
    """
    if number != NATIVE:
        raise SnapshotError(
            f"the snapshot names backend {number}; this release reads those of the native index"
            f" ({NATIVE}): synchronize from the engines instead",
            reason="backend",
        )


def no_room(wanted: int, room: int, limit: str) -> SnapshotError:
    """Return the error for a section that is larger than a limit allows."""
    return SnapshotError(
        f"the section has {wanted} resident blocks, and {limit} leaves room for {max(room, 0)}:"
        f" give the index a higher {limit}, or synchronize the rank from its engine",
        reason="room",
    )


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _truncated(size: int, expected: int) -> SnapshotError:
    return SnapshotError(
        f"the section is cut off: {size} of at least {expected} bytes are there",
        reason="truncated",
    )
