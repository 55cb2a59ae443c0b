"""The measurements on requests: the funnel from requested to cached tokens, and the prefill rate.

All stages of the funnel are in tokens of prompts, of the same requests: those that finished. So
they have one denominator, the requested tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Final

from kvindex.routing.kv_source import KvSource
from kvindex.routing.policies import Decision
from kvindex.wire.rank import Rank

_PULLS: Final = {True: "pulled", False: "not_pulled", None: "unknown"}
_ENOUGH: Final = 20  # requests of a rank, before it is suspected
_GROWTH: Final = 1.01  # weight of a request against the one before it: some hundred count
_HEAVIEST: Final = 1e200
_WRONG: Final = 0.2  # of the tokens that were predicted, or found
_NEARLY_ALL: Final = 0.95  # of the requests

_OTHER_TOKENS = (
    "the engine's tokens may differ from those that were matched (chat template, BOS token, "
    "Harmony, images)"
)
_NO_USAGE = (
    "its engine does not report how many tokens it found cached: start vLLM with "
    "--enable-prompt-tokens-details, SGLang with --enable-cache-report"
)
_NOTHING_FOUND = (
    "its engine finds nothing cached where its events say that it holds blocks: do requests reach "
    "this rank (header X-data-parallel-rank)? Or " + _OTHER_TOKENS
)
_ELSEWHERE = (
    "its engine finds what other ranks hold: requests seem to reach another rank than the one that "
    "was chosen (header X-data-parallel-rank)"
)
_GONE = (
    "its engine finds less than its events reported: blocks are evicted between the choice and the "
    "prefill, or " + _OTHER_TOKENS
)
_UNREPORTED = (
    "its engine finds more than its events reported: some were lost (see its status), they come "
    "late, another cache feeds it, or " + _OTHER_TOKENS
)
_LONGER = "its engine finds more tokens cached than the matched prompt has: " + _OTHER_TOKENS

_FIRST_GUESS: Final = 16_000.0  # tokens/s, until something is measured
_LEAST_TOKENS: Final = 2_048  # a shorter wait shows latencies rather than the rate
_MEMORY: Final = 2_000_000.0  # tokens after which older measurements have lost most of their weight


@dataclass
class _Recent:
    """The recent reports of a rank's engine: sums in which later requests weigh more."""

    weight: float = 1.0  # of the last request
    requests: float = 0.0
    silent: float = 0.0  # requests without a report of the engine
    expected: float = 0.0  # requests that should have found cached tokens
    empty: float = 0.0  # those of them that found nothing
    elsewhere: float = 0.0  # requests that found the best other rank's tokens, and not this rank's
    chosen: float = 0.0
    delivered: float = 0.0
    missing: float = 0.0  # tokens predicted and not found
    unreported: float = 0.0  # tokens found and not predicted
    longer: float = 0.0  # requests that found more tokens than their prompt has

    def count(self, decision: Decision, delivered: int | None) -> None:
        if self.weight > _HEAVIEST:  # doubles end at 1e308
            weight = self.weight
            for sum_ in fields(self):  # only their ratios count
                setattr(self, sum_.name, getattr(self, sum_.name) / weight)
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
        self.unreported += weight * max(0, delivered - chosen)
        self.longer += weight * (delivered > decision.prompt_tokens)

    def suspicion(self) -> str:
        # The plainest cause first: each of those below would show in the sums of the ones after it.
        if self.silent >= _NEARLY_ALL * self.requests:
            return _NO_USAGE
        if self.expected and self.empty >= _NEARLY_ALL * self.expected:
            return _NOTHING_FOUND
        if self.elsewhere > _WRONG * (self.requests - self.silent):
            return _ELSEWHERE
        if self.longer > _WRONG * (self.requests - self.silent):
            return _LONGER
        if self.missing > _WRONG * self.chosen:
            return _GONE
        if self.unreported > _WRONG * self.delivered:
            return _UNREPORTED
        return ""


class _Sums:
    """The stages, summed over finished requests, and over those whose engine reported."""

    def __init__(self) -> None:
        self.finished = {"requests": 0, "asked": 0, "attainable": 0, "chosen": 0}
        self.reported = {**self.finished, "delivered": 0}
        self.sources = {"pulled": 0, "not_pulled": 0, "unknown": 0}

    def count(
        self, stages: Mapping[str, int], delivered: int | None, source: KvSource | None
    ) -> None:
        if source is not None:
            self.sources[_PULLS[source.was_pulled(delivered)]] += 1
        for stage, tokens in stages.items():
            self.finished[stage] += tokens
            if delivered is not None:
                self.reported[stage] += tokens
        if delivered is not None:
            self.reported["delivered"] += delivered

    def plain(self) -> dict[str, dict[str, int]]:
        sums = {"finished": self.finished, "reported": self.reported, "sources": self.sources}
        return {name: {**counts} for name, counts in sums.items()}


class Funnel:
    """Counts the stages of finished requests, for all ranks and for each.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self) -> None:
        self._all = _Sums()
        self._of_rank: defaultdict[Rank, _Sums] = defaultdict(_Sums)
        self._recent: defaultdict[Rank, _Recent] = defaultdict(_Recent)
        self.longer = 0  # reports of more cached tokens than the prompt has

    def count(
        self, decision: Decision, delivered: int | None, source: KvSource | None = None
    ) -> None:
        """Count one finished request, and its engine's cached tokens, if reported. O(1).

        `source` is where the engine was told to pull from.
        Not more are delivered than were asked, whatever the engine reports; `longer` counts those.
        """
        stages = {
            "requests": 1,
            "asked": decision.prompt_tokens,
            "attainable": decision.attainable,
            "chosen": decision.tokens,
        }
        # Before the cap: that an engine reports more than the prompt has is what makes it suspect.
        found = delivered
        if source is not None and delivered is not None:
            found = min(delivered, decision.tokens)  # what was pulled beyond is no surprise
        self._recent[decision.rank].count(decision, found)
        if delivered is not None and delivered > decision.prompt_tokens:
            self.longer += 1
            delivered = decision.prompt_tokens
        self._all.count(stages, delivered, source)
        self._of_rank[decision.rank].count(stages, delivered, source)

    def keep(self, ranks: Collection[Rank]) -> None:
        """Forget the ranks that are not among these; their part stays in the sums of all."""
        for rank in self._of_rank.keys() - set(ranks):
            del self._of_rank[rank]
            self._recent.pop(rank, None)

    def statistics(self, rank: Rank | None = None) -> dict[str, dict[str, int]]:
        """Return the stages for all ranks, or for one.

        `finished`: of all finished requests their number (`requests`), the tokens `asked`, those
        `attainable` on the best rank, and those that the `chosen` rank was expected to find.
        `reported`: the same of those whose engine reported its cached tokens, which are
        `delivered`.
        `sources`: of finished requests whose engine was told of a source, how many it `pulled`, how
        many not (`not_pulled`), and those whose engine does not say (`unknown`).
        """
        return (self._all if rank is None else self._of_rank.get(rank, _Sums())).plain()

    def suspicion(self, rank: Rank) -> str:
        """Return why a rank's predictions go wrong, in words; "" if they do not.

        Some hundred requests count, from the first 20 on.
        """
        if rank not in self._of_rank or self._of_rank[rank].finished["requests"] < _ENOUGH:
            return ""
        return self._recent[rank].suspicion()


class PrefillRate:
    """The tokens per second that a rank prefills, as bookings show it.

    A booking shows how many tokens came before its first token: those queued on its rank, and its
    own. `tokens_per_second` is their sum over the sum of the times, where older ones fade.
    """

    def __init__(self) -> None:
        self.tokens_per_second = _FIRST_GUESS
        # As if two short waits had shown it: real ones soon outweigh the guess.
        self._tokens = 2.0 * _LEAST_TOKENS
        self._seconds = self._tokens / _FIRST_GUESS

    def measure(self, tokens: float, seconds: float) -> None:
        """Add the measurement of one first token, so many seconds after the booking."""
        if tokens < _LEAST_TOKENS or seconds <= 0.0:
            return
        fade = max(0.0, 1.0 - tokens / _MEMORY)  # by tokens, so that idle hours forget nothing
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds
        self.tokens_per_second = self._tokens / self._seconds
