"""Which of a worker's publishers goes on from which saved cursor, and under which name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvindex.errors import ConfigurationError, DecodeError
from kvindex.rank import Rank
from kvindex.subscribe.cursor import SavedCursor
from kvindex.subscribe.rank_names import Claim, settle

__all__ = ["Resumption", "check_cursors", "plan_resumption"]


class Resumption(NamedTuple):
    """How one publisher begins.

    Attributes:
        dp_rank: the name it begins under.
        saved: its cursor; None if there is none that can be read.
        refused: why it cannot go on from there, one word; "" if it may try.
        restored: whether something was saved under its name, which is not to stay unproven.
    """

    dp_rank: int
    saved: SavedCursor | None
    refused: str
    restored: bool


def check_cursors(cursors: object) -> dict[Rank, bytes]:
    """Return what a caller gave as cursors, or raise ConfigurationError."""
    if not isinstance(cursors, Mapping):
        raise ConfigurationError(f"resume must map ranks to cursors, not be {cursors!r:.60}")
    for rank, cursor in cursors.items():
        if not (isinstance(rank, tuple) and len(rank) == 2 and isinstance(cursor, bytes)):
            raise ConfigurationError(
                f"resume maps Rank(worker, dp_rank) to the bytes of `Subscriber.cursor`, "
                f"not {rank!r:.60} to {type(cursor).__name__}"
            )
    return {Rank(*rank): cursor for rank, cursor in cursors.items()}


def plan_resumption(
    dp_ranks: Sequence[int], cursors: Mapping[int, bytes], fingerprints: str
) -> list[Resumption]:
    """Return how each publisher of one worker begins.

    A cursor belongs to the publisher at the port that it was saved of, and that begins under the
    name that it was saved under: what its batches name it was learnt already.

    Args:
        dp_ranks: the publishers, by their ports.
        cursors: what was saved, by the names that ranks went by.
        fingerprints: identity of the function in use.
    """
    found: dict[int, tuple[int, SavedCursor | None, str]] = {}
    for name, saved, refused in sorted(
        _read(cursors, fingerprints), key=lambda read: read[1] is None
    ):
        port = name if saved is None else saved.dp_rank
        if port in dp_ranks:
            found.setdefault(port, (name, saved, refused))
    names = settle([Claim(port, found[port][0] if port in found else None) for port in dp_ranks])
    return [
        Resumption(name, *found.get(port, (name, None, "no_cursor"))[1:], name in cursors)
        for port, name in zip(dp_ranks, names, strict=True)
    ]


def _read(
    cursors: Mapping[int, bytes], fingerprints: str
) -> list[tuple[int, SavedCursor | None, str]]:
    """Return each name's cursor, and why it is of no use."""
    read: list[tuple[int, SavedCursor | None, str]] = []
    for name, data in sorted(cursors.items()):
        try:
            saved = SavedCursor.decode(data)
        except DecodeError:
            read.append((name, None, "unreadable_cursor"))
        else:
            same = saved.fingerprints == fingerprints
            read.append((name, saved, "" if same else "other_fingerprints"))
    return read
