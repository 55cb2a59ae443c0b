"""Assigns each of a worker's publishers its dp_rank, and the saved cursor to resume from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kvindex.subscribe.sequencer import Cursor
from kvindex.wire.errors import UNREADABLE, ConfigurationError, DecodeError
from kvindex.wire.rank import Rank

_VERSION = 1
_NOBODY: Mapping[int, int] = MappingProxyType({})


class Claim(NamedTuple):
    """One publisher's dp_rank, by its port and by its batches."""

    expected: int
    named: int | None  # None while its batches have named none


def settle(claims: Sequence[Claim]) -> list[int]:
    """Return each publisher's dp_rank: all different, in whatever order their batches arrived.

    The dp_rank that a publisher names counts, unless another names the same: then both keep their
    ports' ranks. A publisher that has named none keeps its port's rank where that is free, and
    gets one of those left otherwise.

    Examples:
        >>> settle([Claim(0, 1), Claim(1, None)])
        [1, 0]
        >>> settle([Claim(0, 0), Claim(1, 0)])
        [0, 1]
    """
    users = Counter(claim.named for claim in claims)
    # A port's own rank goes first to publishers whose names were not accepted.
    doubted = {c.expected for c in claims if c.named is not None and users[c.named] > 1}
    names = [None if users[c.named] > 1 or c.named in doubted else c.named for c in claims]
    taken = set(names)
    for i, claim in enumerate(claims):
        if names[i] is None and claim.expected not in taken:
            names[i] = claim.expected
            taken.add(claim.expected)
    left = iter(sorted({claim.expected for claim in claims} - taken))
    return [next(left) if dp_rank is None else dp_rank for dp_rank in names]


class SavedCursor(msgspec.Struct, frozen=True, kw_only=True):
    """A cursor, and what its subscriber needs in order to give it to the right publisher."""

    cursor: Cursor
    dp_rank: int  # by the publisher's port; the rank may have had another name
    named: int | None  # the dp_rank that its batches named
    fingerprints: str  # which function made them

    def encode(self) -> bytes:
        """Return the cursor as bytes: msgpack of this format's version and the fields."""
        return _encoder.encode((_VERSION, self))

    @classmethod
    def decode(cls, data: bytes) -> SavedCursor:
        """Return the cursor that `encode` wrote; DecodeError for anything else."""
        try:
            version, fields = _envelopes.decode(data)
            if version == _VERSION:
                return _decoder.decode(fields)
        except UNREADABLE as error:
            raise DecodeError(f"no cursor: {error}", size=len(data)) from error
        raise DecodeError(
            f"a cursor of version {version}; this release reads {_VERSION}", size=len(data)
        )


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(SavedCursor)


class SavedRanks(ABC):
    """The saved states of ranks; called when their worker is added, on the subscriber's thread.

    Attributes:
        patient: whether a state without a publisher is kept for a publisher that is added later.
    """

    patient = False

    @abstractmethod
    def cursors(self, worker: str) -> Mapping[int, bytes | None]:
        """Return the cursors of a worker's ranks, by the dp_ranks that they had.

        A rank that was saved without a cursor (None) restarts, by `RankRestarted`.
        """

    @abstractmethod
    def restore(self, worker: str, refused: Mapping[Rank, str]) -> Mapping[Rank, str]:
        """Restore the saved contents of a worker's ranks into the index that the sink fills.

        Called each time that ranks of a worker are added, before the sink gets their first item.

        Args:
            worker: the worker that is added, or gets more ranks.
            refused: for each of these ranks with a saved state, why its stream cannot go on from
                there, in one word; "" if it may try.

        Returns:
            For each rank that may try but cannot be restored, the reason, in one word.
        """


class Resumption(NamedTuple):
    """How one publisher begins."""

    dp_rank: int  # the name it begins under
    saved: SavedCursor | None  # None if there is none that can be read
    refused: str  # why it cannot go on from the cursor, one word; "" if it may try
    restored: bool  # whether a state was saved under its name; it must be proven or dropped


_ANEW = Resumption(0, None, "no_cursor", False)


class _Cursors(SavedRanks):
    """Cursors alone: the sink has restored the contents by itself."""

    def __init__(self, cursors: Mapping[Rank, bytes]) -> None:
        self._cursors = cursors

    def cursors(self, worker: str) -> Mapping[int, bytes]:
        return {r.dp_rank: data for r, data in self._cursors.items() if r.worker == worker}

    def restore(self, worker: str, refused: Mapping[Rank, str]) -> Mapping[Rank, str]:
        return {}


def check_saved(saved: object) -> SavedRanks:
    """Return what a caller gave as `resume`, or raise ConfigurationError."""
    if isinstance(saved, SavedRanks):
        return saved
    if not isinstance(saved, Mapping):
        raise ConfigurationError(f"resume must map ranks to cursors, not be {saved!r:.60}")
    for rank, cursor in saved.items():
        if not (isinstance(rank, tuple) and len(rank) == 2 and isinstance(cursor, bytes)):
            raise ConfigurationError(
                f"resume maps Rank(worker, dp_rank) to the bytes of `Subscriber.cursor`, "
                f"not {rank!r:.60} to {type(cursor).__name__}"
            )
    return _Cursors({Rank(*rank): cursor for rank, cursor in saved.items()})


def resume_ranks(
    saved: SavedRanks,
    worker: str,
    dp_ranks: Sequence[int],
    fingerprints: str,
    present: Mapping[int, int] = _NOBODY,
) -> tuple[list[Resumption], list[Rank]]:
    """Return how each of a worker's new publishers begins, and the ranks saved in vain."""
    cursors = saved.cursors(worker)
    plan = plan_resumption(dp_ranks, cursors, fingerprints, present)
    refused = {Rank(worker, r.dp_rank): r.refused for r in plan if r.restored}
    # Patient ones keep them for a publisher that comes later.
    names = () if saved.patient else cursors.keys() - present.values()
    unused = [rank for name in sorted(names) if (rank := Rank(worker, name)) not in refused]
    # Before the sink gets the ranks' first items, which follow upon what is restored.
    refused.update(saved.restore(worker, refused))
    plan = [r._replace(refused=refused.get(Rank(worker, r.dp_rank), r.refused)) for r in plan]
    return plan, unused


def plan_resumption(
    dp_ranks: Sequence[int],
    cursors: Mapping[int, bytes | None],
    fingerprints: str,
    present: Mapping[int, int] = _NOBODY,
) -> list[Resumption]:
    """Return how each of a worker's new publishers begins.

    A cursor is given to the publisher at the port where it was saved. That publisher begins under
    the dp_rank under which it was saved, if no other rank of the worker has that: its batches named
    the dp_rank in the earlier process. Publishers go by their ports, cursors and those `present`
    (which stay as they are) by the names of the ranks.
    """
    taken = set(present.values())
    assigned: dict[int, Resumption] = {}
    read = [_read(name, data, fingerprints) for name, data in sorted(cursors.items())]
    # Those that can be read first: they say at which port they were saved, the others do not.
    for resumption in sorted(read, key=lambda resumption: resumption.saved is None):
        name, saved = resumption.dp_rank, resumption.saved
        port = name if saved is None else saved.dp_rank
        if port in dp_ranks and name not in taken:
            assigned.setdefault(port, resumption)
    # Names are settled as when batches name them; those present go first, for they have theirs.
    saved_names = {port: resumption.dp_rank for port, resumption in assigned.items()}
    claims = [Claim(port, name) for port, name in present.items()]
    claims += [Claim(port, saved_names.get(port)) for port in dp_ranks]
    names = settle(claims)[len(present) :]
    return [
        assigned.get(port, _ANEW)._replace(dp_rank=name, restored=name in cursors)
        for port, name in zip(dp_ranks, names, strict=True)
    ]


def _read(name: int, data: bytes | None, fingerprints: str) -> Resumption:
    """Return how the rank of a name begins, with its cursor or why that cannot be used."""
    if data is None:
        return _ANEW._replace(dp_rank=name)
    try:
        saved = SavedCursor.decode(data)
    except DecodeError:
        return _ANEW._replace(dp_rank=name, refused="unreadable_cursor")
    refused = "" if saved.fingerprints == fingerprints else "other_fingerprints"
    return Resumption(name, saved, refused, True)
