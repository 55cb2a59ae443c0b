"""Checks of the arguments of a queue's ends, before they are used.

A mistake is reported at the call that made it: the expected value, and the given one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypedDict

import msgspec

from kvindex.shm.codec import Codec
from kvindex.shm.handle import Handle
from kvindex.shm.ring import DeadReaderPolicy, Layout, Waiting, check_policy
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError


class QueueOptions(TypedDict, total=False):
    """The keyword options of a `MessageQueue`, which says what each one means.

    Functions that pass options on can take `**options: Unpack[QueueOptions]`.
    """

    codec: str | Codec
    waiting: Waiting | None
    on_dead_reader: DeadReaderPolicy
    max_message_bytes: int
    curve: Curve | None
    remote_window: int


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a queue's writer, whichever readers it has; see `MessageQueue`.

    Raises:
        ConfigurationError: no queue can be made with them.
    """

    max_chunk_bytes: int
    max_chunks: int
    connect_ip: str | None
    codec: Codec
    waiting: Waiting
    on_dead_reader: DeadReaderPolicy
    max_message_bytes: int
    curve: Curve | None
    remote_window: int

    def __post_init__(self) -> None:
        Layout(1, self.max_chunks, self.max_chunk_bytes)
        check_policy(self.on_dead_reader)
        if not _is_int(self.max_message_bytes) or self.max_message_bytes < 1:
            raise ConfigurationError(
                f"max_message_bytes must be a positive int, not {self.max_message_bytes!r}"
            )
        _check_waiting(self.waiting)
        curve = self.curve
        if curve is not None and (not isinstance(curve, Curve) or curve.server_key is not None):
            raise ConfigurationError(
                f"curve must be the writer's own key pair, Curve.generate(), or None, not {curve!r}"
            )
        if not _is_int(self.remote_window):
            raise ConfigurationError(f"remote_window must be an int, not {self.remote_window!r}")


def local_ranks(n_reader: int, n_local: int, ranks: Sequence[int] | None) -> list[int]:
    """Return the local readers' ranks, 0, 1, … by default.

    Raises:
        ConfigurationError: the ranks are invalid.
    """
    if not (_is_int(n_reader) and _is_int(n_local) and 0 <= n_local <= n_reader):
        raise ConfigurationError(
            "n_reader must be an int of at least 0 and n_local_reader one from 0 to n_reader, not "
            f"{n_reader!r} and {n_local!r}"
        )
    if ranks is None:
        return list(range(n_local))
    chosen = list(ranks) if isinstance(ranks, Iterable) else None
    if (
        chosen is None
        or not all(map(_is_int, chosen))
        or not len(set(chosen)) == len(chosen) == n_local
    ):
        raise ConfigurationError(
            f"local_reader_ranks must be {n_local} different ranks, which are ints, not {ranks!r}"
        )
    return chosen


def check_reading(handle: Handle, rank: int, waiting: Waiting | None, curve: Curve | None) -> None:
    """Raise ConfigurationError if no reader of any queue can have these arguments."""
    if not isinstance(handle, Handle):  # not shown, since it opens the queue
        raise ConfigurationError(
            "handle must be the Handle that export_handle gave (Handle.from_bytes makes one of "
            f"bytes), not a {type(handle).__name__}"
        )
    if not _is_int(rank):
        raise ConfigurationError(f"rank must be an int, not {rank!r}")
    _check_waiting(waiting)
    if curve is not None and (not isinstance(curve, Curve) or curve.server_key is None):
        raise ConfigurationError(
            "curve must name the writer's public key, as Curve.generate(server_key) does, or be "
            f"None, not {curve!r}"
        )


def checked_length(length: int | None, most: int) -> int:
    """Return the length of a message that is written in place, `most` bytes by default."""
    if length is None:
        return most
    if not _is_int(length) or not 0 <= length <= most:
        raise ConfigurationError(
            f"length must be 0 to {most} bytes (max_chunk_bytes, max_message_bytes), not {length!r}"
        )
    return length


def check_options(options: Collection[str]) -> None:
    """Raise ConfigurationError if these are no options of a queue; at every rank of a group."""
    known = QueueOptions.__annotations__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: no such options; there are {', '.join(sorted(known))}"
        )


def check_cancel(cancel: Any) -> None:
    """Raise ConfigurationError if it is neither None nor an event."""
    if cancel is not None and not hasattr(cancel, "is_set"):
        raise ConfigurationError(f"cancel must be a threading.Event or None, not {cancel!r}")


def _check_waiting(waiting: object) -> None:
    if waiting is not None and not isinstance(waiting, Waiting):
        raise ConfigurationError(
            f"waiting must be a Waiting, as in Waiting(spin=0.0), or None, not {waiting!r}"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
