"""Values of a process group to bytes and back: msgpack within bounds, never pickle."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvindex.wire.errors import ConfigurationError, DecodeError

__all__ = ["MAX_OBJECT_BYTES", "check_rank", "pack_object", "unpack_object"]

MAX_OBJECT_BYTES: Final = 64 << 20
"""The largest packed value that a group carries unless told, in bytes."""


def pack_object(obj: Any, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
    """Return a value as msgpack.

    Raises:
        ConfigurationError: msgpack cannot carry it, or it takes more than `max_bytes`.

    Examples:
        >>> unpack_object(pack_object({"ranks": (0, 1)}))
        {'ranks': [0, 1]}
    """
    try:
        data = msgspec.msgpack.encode(obj)
    except Exception as error:  # msgspec raises several kinds, down to RecursionError
        raise ConfigurationError(
            f"a process group cannot carry this {type(obj).__name__}: {error}; give it None, "
            "numbers of 64 bits, str, bytes, and lists and maps of these"
        ) from error
    if len(data) > max_bytes:
        raise ConfigurationError(
            f"this {type(obj).__name__} takes {len(data)} bytes, more than the {max_bytes} that "
            "the group carries; raise max_object_bytes at every rank"
        )
    return data


def unpack_object(data: bytes | bytearray | memoryview) -> Any:
    """Return the value in what `pack_object` made.

    Raises:
        DecodeError: the bytes are not one msgpack value. Nothing else is raised.
    """
    try:
        return msgspec.msgpack.decode(data)
    except Exception as error:  # as above; MemoryError too
        size = memoryview(data).nbytes
        raise DecodeError(
            f"not a value of a process group ({size} bytes): {type(error).__name__}: {error}",
            size=size,
        ) from None


def check_rank(name: str, rank: int, world_size: int) -> None:
    """Reject a value that is no rank of the group.

    Raises:
        ConfigurationError: `rank` is no int in [0, world_size).
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise ConfigurationError(
            f"{name}={rank!r} is no rank of this group: it has {world_size}, from 0"
        )
