"""Why a rank's match of a prompt ends where it does, as values: for people, not for routing."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from kvindex.index.match import Match, RankMatch
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_rank

Notes: TypeAlias = Callable[[Rank], Iterable[str]]
"""Returns what else may matter of a rank, in sentences."""


class Ending(str, enum.Enum):
    """Why a match ends.

    Attributes:
        WHOLE: it does not: every whole block of the prompt is a hit.
        SHORT: the prompt is shorter than one block.
        EMPTY: the rank holds nothing at all.
        BLOCK_SIZE: the question was for another block size than the rank's.
        PROMPTS: the same tokens are a longer hit under another LoRA or salt.
        MEDIA: more is resident on media that do not count.
        GROUP: another KV cache group of a hybrid model lacks blocks that a longer hit needs.
        HOLE: one or more blocks are missing; later ones are resident.
        END: nothing of the prompt is resident from there on.
        ENGINE: more is resident, but the engine's own rule cuts its hits shorter.
    """

    WHOLE = "whole"
    SHORT = "short"
    EMPTY = "empty"
    BLOCK_SIZE = "block_size"
    PROMPTS = "prompts"
    MEDIA = "media"
    GROUP = "group"
    HOLE = "hole"
    END = "end"
    ENGINE = "engine"

    def __str__(self) -> str:
        return self.value


class OtherPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """A longer hit of the same tokens. A salt itself is not shown: it is a secret of its user.

    Attributes:
        lora: LoRA of the prompts that were stored.
        salted: whether they start under a salt, or other extra keys of the first block.
        tokens: how long the hit would be.
    """

    lora: str | int | None
    salted: bool
    tokens: int


class GroupHeld(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prompt that a KV cache group holds.

    Attributes:
        group_idx: which group.
        kind: its kind of attention.
        sliding_window: its window in tokens, if it has one.
        spans: the stretches of the prompt's tokens, [start, stop), that it holds.
    """

    group_idx: int
    kind: str
    sliding_window: int | None
    spans: tuple[tuple[int, int], ...]


class RankExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why one rank's match ends where it does.

    Attributes:
        match: what `match` answers for the rank.
        ending: why it ends there.
        text: the same in words.
        held: the part held by the group whose blocks are counted, on the media that count; None if
            the rank has stored nothing yet.
        limits: groups that lack blocks of `held`, for the ending "group".
        other: the longest hit under another LoRA or salt, if that is longer.
        notes: further notes: orphans, ignored blocks, a stream that is not live.
    """

    match: RankMatch
    ending: Ending
    text: str
    held: GroupHeld | None = None
    limits: tuple[GroupHeld, ...] = ()
    other: OtherPrompts | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.match.rank}: " + "; ".join((self.text, *self.notes))


class Explanation:
    """One `RankExplanation` for each rank, longest match first; a console prints it as text.

    Attributes:
        match: the `Match` that is explained.

    Thread safety: immutable.
    """

    __slots__ = ("_ranks", "match")

    def __init__(self, match: Match, ranks: Iterable[RankExplanation]) -> None:
        self.match = match
        self._ranks = {explained.match.rank: explained for explained in ranks}

    def __getitem__(self, rank: RankName) -> RankExplanation:
        """Return a rank's explanation.

        Raises:
            UnknownRankError: the rank is not known, or the question left it out.
        """
        return self._ranks[find_rank(rank, self._ranks)]

    def __iter__(self) -> Iterator[RankExplanation]:
        return iter(self._ranks.values())

    def __len__(self) -> int:
        return len(self._ranks)

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no ranks are known"

    __repr__ = __str__  # so that a console shows the explanation

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain JSON-ready values: each rank's explanation by `str(rank)`."""
        plain = self.match.to_dict()
        return {
            str(rank): {**msgspec.to_builtins(explained), "match": plain[str(rank)]}
            for rank, explained in self._ranks.items()
        }
