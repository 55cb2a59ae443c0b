"""A router's decision, and its reasons."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

from kvindex.routing.candidates import Candidates, Choice
from kvindex.routing.loads import Load
from kvindex.wire.rank import Rank

__all__ = ["Candidate", "Decision"]


class Candidate(NamedTuple):
    """One rank at the time of a decision.

    Attributes:
        rank: the rank.
        cost: the request's cost there, in the policy's unit; None if it counts no costs.
        tokens: tokens of the prompt that the request would find cached.
        by_tier: those on the "device", the "host", and further away ("storage").
        load: its load.
        live: whether its events are up to date; if not, its blocks do not count.
        usable: whether the filters let it be chosen.
    """

    rank: Rank
    cost: float | None
    tokens: int
    by_tier: dict[str, int]
    load: Load
    live: bool
    usable: bool


class Decision:
    """The rank for one request, the tokens it will find cached, and why this rank.

    Attributes:
        rank: where to send the request.
        policy: the name of the policy that chose.
        prompt_tokens: tokens of the prompt.
        tokens: those that the rank will find cached, never the last one.
        predicted_tokens: of `tokens`, those that no event has confirmed yet: they were sent there a
            moment ago (`Router(predict=...)`). 0 without `predict`.
        reads_cache: whether the engine will read its cache, by the router's caller. If not, no rank
            counts as holding anything.

    Thread safety: immutable.
    """

    __slots__ = (
        "_candidates",
        "_choice",
        "_live",
        "policy",
        "predicted_tokens",
        "prompt_tokens",
        "rank",
        "reads_cache",
        "tokens",
    )

    def __init__(
        self,
        policy: str,
        candidates: Candidates,
        choice: Choice,
        live: bytes,
        *,
        predicted_tokens: int = 0,
        reads_cache: bool = True,
    ) -> None:
        self.policy = policy
        self.rank = candidates.ranks[choice.row]
        self.prompt_tokens = candidates.prompt_tokens
        self.tokens = candidates.hits.tokens[choice.row]
        self.predicted_tokens = predicted_tokens
        self.reads_cache = reads_cache
        self._candidates = candidates  # with loads that do not change any more
        self._choice = choice
        self._live = live

    @property
    def new_tokens(self) -> int:
        """Tokens that the rank has to prefill."""
        return self.prompt_tokens - self.tokens

    @property
    def attainable(self) -> int:
        """The most tokens that any candidate would find cached. O(ranks) at most."""
        if self._choice.attainable is not None:
            return self._choice.attainable
        return max(compress(self._candidates.hits.tokens, self._candidates.usable))

    @property
    def cost(self) -> float | None:
        """What the request costs on this rank; None if the policy counts no costs."""
        return self._cost(self._choice.row)

    @property
    def by_tier(self) -> dict[str, int]:
        """The tokens that the rank holds on its "device", on the "host", in "storage"."""
        return self._by_tier(self._choice.row)

    @property
    def candidates(self) -> list[Candidate]:
        """Every rank at the time of the decision, the cheapest first. O(ranks × log ranks)."""
        rows = range(len(self._candidates.ranks))
        all_of_them = (self._candidate(row) for row in rows)
        return sorted(all_of_them, key=lambda one: (not one.usable, one.cost or 0.0, one.rank))

    @property
    def reason(self) -> str:
        """Why this rank, in words."""
        choice = self._choice
        if choice.why or not len(choice.costs):
            return f"{self.rank}: {choice.why or f'the policy {self.policy!r} chose it'}"
        return f"{self.rank} costs least of {self._among()}: {self._sum()}"

    def _among(self) -> str:
        choice, usable = self._choice, sum(map(bool, self._candidates.usable))
        if choice.kept is None:
            return _ranks(usable)
        if choice.stayed:
            return f"the {_ranks(choice.kept)} that hold enough of the prompt"
        if choice.kept:
            return f"{_ranks(usable)}; those that hold enough of the prompt are too far behind"
        return f"{_ranks(usable)}, none of which holds enough of the prompt to be preferred"

    def _sum(self) -> str:
        load = self._load(self._choice.row)
        held = f"it holds {self.tokens} of {self.prompt_tokens} tokens"
        if not self.reads_cache:
            held = f"the engine reads no cache for these {self.prompt_tokens} tokens"
        return (
            f"{held}, {load.queued_tokens} wait for prefill there, and {load.open_requests} "
            "requests are open"
        )

    def _candidate(self, row: int) -> Candidate:
        return Candidate(
            rank=self._candidates.ranks[row],
            cost=self._cost(row),
            tokens=self._candidates.hits.tokens[row],
            by_tier=self._by_tier(row),
            load=self._load(row),
            live=bool(self._live[row]),
            usable=bool(self._candidates.usable[row]),
        )

    def _cost(self, row: int) -> float | None:
        return float(self._choice.costs[row]) if len(self._choice.costs) else None

    def _by_tier(self, row: int) -> dict[str, int]:
        hits = self._candidates.hits
        device, host, tokens = hits.device[row], hits.host[row], hits.tokens[row]
        return {"device": device, "host": host - device, "storage": tokens - host}

    def _load(self, row: int) -> Load:
        loads = self._candidates.loads
        return Load(int(loads.queued[row]), int(loads.open[row]), int(loads.decode[row]))

    def __repr__(self) -> str:
        return f"<Decision for {self.rank}: {self.tokens} of {self.prompt_tokens} tokens held>"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
