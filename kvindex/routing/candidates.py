"""A policy's input, the candidates, and its output, the choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvindex.index import Hits
from kvindex.routing.loads import LoadColumns
from kvindex.wire.rank import Rank

__all__ = ["Candidates", "Choice", "Policy"]


class Candidates(NamedTuple):
    """The ranks that one request could go to: columns with one row for each rank.

    Attributes:
        ranks: the ranks, sorted.
        prompt_tokens: tokens of the prompt.
        hits: each rank's cached tokens of it, without its last token; none for ranks that are not
            live.
        loads: each rank's load.
        usable: a byte for each rank: 0 where a filter refuses it.
        block_size: tokens per block, of a rank that has stored any.
        prefill_rate: tokens per second, as measured on the bookings' first tokens.
        chance: a random number in [0, 1), to break ties with.
    """

    ranks: Sequence[Rank]
    prompt_tokens: int
    hits: Hits
    loads: LoadColumns
    usable: bytes | bytearray
    block_size: int
    prefill_rate: float
    chance: float

    def rows(self) -> list[int]:
        """Return the rows that may be chosen; at least one. O(ranks)."""
        return [row for row, usable in enumerate(self.usable) if usable]


class Choice(NamedTuple):
    """A policy's choice.

    Attributes:
        row: of the rank that is chosen.
        costs: each rank's cost in the policy's own unit, if it counts costs.
        kept: how many ranks were preferred for their cached tokens; None if the policy prefers
            none.
        stayed: whether one of these was chosen.
        why: the reason in words; "" for the usual words of a cost.
        attainable: the most tokens that a usable rank holds; None if not computed.
    """

    row: int
    costs: Sequence[float] = ()
    kept: int | None = None
    stayed: bool = False
    why: str = ""
    attainable: int | None = None


class Policy(Protocol):
    """Chooses a rank for a request. Pure: its input decides, apart from a state of its own.

    A router calls it under its lock. At least one row is usable.
    """

    @property
    def name(self) -> str:
        """Its name in statistics and decisions."""

    def choose(self, candidates: Candidates) -> Choice:
        """Choose one of the usable rows."""
