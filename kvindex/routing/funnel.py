"""The stages from the requested tokens to those that engines found cached, and the losses between.

All stages are in tokens of prompts, of the same requests: those that finished. So they have one
denominator, the requested tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Final

from kvindex.routing.decision import Decision
from kvindex.wire.rank import Rank

__all__ = ["Funnel"]

_ENOUGH: Final = 20  # requests of a rank, before it is suspected
_GROWTH: Final = 1.01  # weight of a request against the one before it: some hundred count
_HEAVIEST: Final = 1e200
_WRONG: Final = 0.2  # of the tokens that were predicted, or found
_NEARLY_ALL: Final = 0.95  # of the requests

_NO_USAGE = (
    "its engine does not say how many tokens it found cached: start vLLM with "
    "--enable-prompt-tokens-details, SGLang with --enable-cache-report"
)
_NOTHING_FOUND = (
    "its engine finds nothing cached where its events say that it holds blocks: do requests reach "
    "this rank (header X-data-parallel-rank), and with the tokens that the router has?"
)
_ELSEWHERE = (
    "its engine finds what other ranks hold: requests seem to reach another rank than the one that "
    "was chosen (header X-data-parallel-rank)"
)
_GONE = (
    "its engine finds less than its events told: blocks are evicted between the choice and the "
    "prefill, or the router's tokens differ from the engine's"
)
_UNTOLD = (
    "its engine finds more than its events told: some were lost (see its status), they come late, "
    "or another cache feeds it"
)


@dataclass
class _Stages:
    """Sums over finished requests."""

    requests: int = 0
    asked: int = 0
    attainable: int = 0
    chosen: int = 0

    def count(self, decision: Decision) -> None:
        self.requests += 1
        self.asked += decision.prompt_tokens
        self.attainable += decision.attainable
        self.chosen += decision.tokens

    def plain(self) -> dict[str, int]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass
class _Reported(_Stages):
    """The same of requests whose engine reported its cached tokens."""

    delivered: int = 0


@dataclass
class _Lately:
    """The recent reports of a rank's engine: sums in which later requests weigh more.

    So nothing needs to fade. Only the ratios of the sums count.
    """

    weight: float = 1.0  # of the last request
    requests: float = 0.0
    silent: float = 0.0  # requests without a report of the engine
    expected: float = 0.0  # requests that should have found cached tokens
    empty: float = 0.0  # those of them that found nothing
    elsewhere: float = 0.0  # requests that found the best other rank's tokens, and not this rank's
    chosen: float = 0.0
    delivered: float = 0.0
    missing: float = 0.0  # tokens predicted and not found
    untold: float = 0.0  # tokens found and not predicted

    def count(self, decision: Decision, delivered: int | None) -> None:
        if self.weight > _HEAVIEST:
            self._lighten()
        weight = self.weight = self.weight * _GROWTH
        self.requests += weight
        if delivered is None:
            self.silent += weight
            return
        chosen = decision.tokens
        self.expected += weight * (chosen > 0)
        self.empty += weight * (delivered == 0 < chosen)
        self.elsewhere += weight * (chosen != delivered == decision.attainable > 0)
        self.chosen += weight * chosen
        self.delivered += weight * delivered
        self.missing += weight * max(0, chosen - delivered)
        self.untold += weight * max(0, delivered - chosen)

    def _lighten(self) -> None:
        """Divide everything by the last weight: doubles end at 1e308."""
        weight = self.weight
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) / weight)

    def suspicion(self) -> str:
        reported = self.requests - self.silent
        if self.silent >= _NEARLY_ALL * self.requests:
            return _NO_USAGE
        if self.expected and self.empty >= _NEARLY_ALL * self.expected:
            return _NOTHING_FOUND
        if self.elsewhere > _WRONG * reported:
            return _ELSEWHERE
        if self.missing > _WRONG * self.chosen:
            return _GONE
        if self.untold > _WRONG * self.delivered:
            return _UNTOLD
        return ""


@dataclass
class _Counts:
    finished: _Stages = field(default_factory=_Stages)
    reported: _Reported = field(default_factory=_Reported)
    lately: _Lately = field(default_factory=_Lately)

    def count(self, decision: Decision, delivered: int | None) -> None:
        self.finished.count(decision)
        self.lately.count(decision, delivered)
        if delivered is not None:
            self.reported.count(decision)
            self.reported.delivered += delivered


class Funnel:
    """Counts the stages of finished requests, for all ranks and for each.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self) -> None:
        self._all = _Counts()
        self._ranks: defaultdict[Rank, _Counts] = defaultdict(_Counts)

    def count(self, decision: Decision, delivered: int | None) -> None:
        """Count one finished request, and its engine's cached tokens, if reported. O(1)."""
        self._all.count(decision, delivered)
        self._ranks[decision.rank].count(decision, delivered)

    def keep(self, ranks: Collection[Rank]) -> None:
        """Forget the ranks that are not among these; their part stays in the sums of all."""
        for rank in self._ranks.keys() - set(ranks):
            del self._ranks[rank]

    def statistics(self, rank: Rank | None = None) -> dict[str, dict[str, int]]:
        """Return the stages for all ranks, or for one.

        `finished`: of all finished requests their number (`requests`), the tokens `asked`, those
        `attainable` on the best rank, and those that the `chosen` rank was expected to find.
        `reported`: the same of those whose engine reported its cached tokens, which are
        `delivered`.
        """
        counts = self._all if rank is None else self._ranks.get(rank, _Counts())
        return {"finished": counts.finished.plain(), "reported": counts.reported.plain()}

    def suspicion(self, rank: Rank) -> str:
        """Return why a rank's predictions go wrong, in words; "" if they do not.

        It looks at some hundred requests, and says nothing before the first 20.
        """
        counts = self._ranks.get(rank)
        if counts is None or counts.finished.requests < _ENOUGH:
            return ""
        return counts.lately.suspicion()
