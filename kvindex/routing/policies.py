"""Policies: from a request's candidates to the choice, and the decision that shows its reasons."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvindex.index import Hits
from kvindex.routing.kv_source import Holders, KvSource
from kvindex.routing.load import Load, LoadColumns
from kvindex.wire.backend import BACKEND
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank

if TYPE_CHECKING or BACKEND == "native":
    from kvindex.wire._native import choose as choose_natively


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
        why: the reason in words; "" for the usual words of a cost.
        attainable: the most tokens that a usable rank holds; None if not computed.
    """

    row: int
    costs: Sequence[float] = ()
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


class Weights(NamedTuple):
    """The weights of a cost, in tokens of prefill.

    ```
    credited = device × tokens on the device + host × … + storage × …
    missing  = prompt tokens - credited
    price    = new + backlog × least queued tokens / prompt tokens
                   + churn × max(0, tokens given lately / their mean over ranks - 1)
    overflow = max(0, min(missing, missing + min(contexts, cache) - full × cache))
    cost     = max(0, queued × queued tokens + price × missing) + request × open requests
                   + keep × overflow
    ```

    Attributes:
        device: credit for a token that the device holds.
        host: for a token that the host holds, after the device's prefix.
        storage: for a token that lies further away, after that.
        new: weight of a token that this request has to prefill.
        queued: of a token that earlier requests have to prefill.
        request: of an open request.
        backlog: weight of the tokens that wait on the rank with fewest, for an uncached prompt.
            They are 0 unless every rank has a backlog; then hits shorten it.
        churn: how much more a missing token costs on a rank that was given more tokens to prefill
            lately than the mean rank: it would evict the blocks stored there last.
        keep: of a missing token that does not fit beside the contexts of the rank's sessions: an
            idle rank may be full of sessions that pause. Nothing where the size of the cache is not
            known (`LoadColumns.cache`).
        full: the part of a cache into which they should fit.
    """

    device: float = 1.0
    host: float = 0.8
    storage: float = 0.3
    new: float = 1.0
    queued: float = 1.0
    request: float = 0.0
    backlog: float = 0.0
    churn: float = 0.0
    keep: float = 0.0
    full: float = 0.8


def choose_in_python(
    prompt_tokens: int,
    hits: Hits,
    loads: LoadColumns,
    usable: bytes | bytearray,
    weights: Weights,
    chance: float,
    costs: array[float],
) -> tuple[int, int]:
    """Return the `row` and `attainable` of a `Choice`; -1 if no row is usable.

    The specification of `native/core/choosing.cpp`, and its substitute where there is no compiler.
    Each row's cost is written into `costs`: infinite if it is no number, or the row is not usable.
    Of rows that cost the same, those that were given least lately come first; among these, chance
    decides. O(rows).
    """
    rows = [row for row, is_usable in enumerate(usable) if is_usable]
    price = weights.new
    if prompt_tokens > 0:
        queued = (loads.queued[row] for row in rows if loads.queued[row] < math.inf)
        # The backlog of the idlest rank: while even that one has some, a hit saves more.
        price += weights.backlog * min(queued, default=0.0) / prompt_tokens
    given = sum(loads.given[row] for row in rows)
    mean = given / len(rows) if 0.0 < given < math.inf else 0.0  # 0 too where it underflows
    costs[:] = array("d", [math.inf]) * len(usable)
    order, attainable = {}, 0
    for row in rows:
        device, host, tokens = hits.device[row], hits.host[row], hits.tokens[row]
        credited = weights.device * device + weights.host * (host - device)
        credited += weights.storage * (tokens - host)
        churned = weights.churn * max(0.0, loads.given[row] / mean - 1.0) if mean > 0.0 else 0.0
        missing = prompt_tokens - credited
        # Credits above 1 may make it negative; a rank cannot owe time.
        work = max(0.0, weights.queued * loads.queued[row] + (price + churned) * missing)
        cost = work + weights.request * loads.open[row]
        if (cache := loads.cache[row]) > 0.0:
            over = missing + min(loads.contexts[row], cache) - weights.full * cache
            cost += weights.keep * max(0.0, min(missing, over))
        costs[row] = cost if cost < math.inf else math.inf
        order[row] = (costs[row], loads.given[row] if loads.given[row] < math.inf else math.inf)
        attainable = max(attainable, tokens)
    if not rows:
        return -1, 0
    cheapest = min(order.values())
    equal = [row for row in rows if order[row] == cheapest]
    return equal[int(chance * len(equal))], attainable


_choose = choose_natively if BACKEND == "native" else choose_in_python
_ZERO: Final = array("d", [0.0])


class CostPolicy:
    """Chooses the rank where a request costs least.

    Args:
        name: its name in decisions.
        weights: the weights of the cost.

    Raises:
        ConfigurationError: a weight is no finite number.

    Examples:
        >>> fewest = CostPolicy("fewest-requests", Weights(new=0.0, queued=0.0, request=1.0))
        >>> fewest.name
        'fewest-requests'
    """

    def __init__(self, name: str, weights: Weights) -> None:
        if not all(map(math.isfinite, weights)):
            raise ConfigurationError(f"a weight of policy {name!r} is no finite number: {weights}")
        self.name = name
        self.weights = weights

    def choose(self, candidates: Candidates) -> Choice:
        _, prompt_tokens, hits, loads, usable, _, _, chance = candidates
        # New ones for each choice: the decision keeps them, to show its reasons.
        costs = _ZERO * len(usable)
        row, attainable = _choose(prompt_tokens, hits, loads, usable, self.weights, chance, costs)
        return Choice(row, costs, "", attainable)


class RoundRobin:
    """Each rank in its turn, whatever its blocks and load."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Candidates) -> Choice:
        rows = candidates.rows()
        self._turn += 1
        return Choice(rows[(self._turn - 1) % len(rows)], why="it is its turn")


_WEIGHTS: Final[dict[str, Weights]] = {
    # Ours. A token that is computed again costs its time, and as much twice more: all behind it
    # wait, and its block evicts others. docs/routing-benchmarks.md compares alternatives.
    "kvindex": Weights(new=3.0, request=256.0, backlog=1.0, churn=1.0, keep=0.3),
    "least-queued": Weights(new=0.0, queued=1.0),
    "least-requests": Weights(new=0.0, queued=0.0, request=1.0),
    "longest-prefix": Weights(queued=0.0),
}
POLICIES: Final = (*_WEIGHTS, RoundRobin.name)
"""The names of the policies; "kvindex" is the default, "least-queued" looks at load alone."""


def make_policy(policy: Policy | str) -> Policy:
    """Return a policy by its name, or the policy itself; raises ConfigurationError if none is."""
    if not isinstance(policy, str):
        return policy
    if policy == RoundRobin.name:
        return RoundRobin()
    if policy in _WEIGHTS:
        return CostPolicy(policy, _WEIGHTS[policy])
    raise ConfigurationError(f"policy is {policy!r}; the names are: {', '.join(POLICIES)}")


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


@dataclass(slots=True, eq=False, repr=False)
class Decision:
    """The rank for one request, the tokens it will find cached, and why this rank.

    Attributes:
        policy: the name of the policy that chose.
        predicted_tokens: those of `tokens` that no event has confirmed (see `Router`'s `predict`).
        reads_cache: whether the engine will read its cache. If not, no rank counts as holding
            anything.

    Thread safety: immutable.
    """

    policy: str
    reads_cache: bool
    predicted_tokens: int
    _candidates: Candidates  # with loads that do not change any more
    _choice: Choice
    _live: bytes
    _holders: Holders

    @property
    def rank(self) -> Rank:
        """Where to send the request."""
        return self._candidates.ranks[self._choice.row]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._candidates.prompt_tokens

    @property
    def tokens(self) -> int:
        """Those that the rank will find cached, never the last one."""
        return self._candidates.hits.tokens[self._choice.row]

    @property
    def new_tokens(self) -> int:
        """Tokens that the rank has to prefill."""
        return self.prompt_tokens - self.tokens

    @property
    def work_ahead(self) -> float:
        """Tokens that the rank prefills before the first token: the queued ones, and these."""
        return self._candidates.loads.queued[self._choice.row] + self.new_tokens

    @property
    def block_size(self) -> int:
        """Tokens per block, in which the load is counted."""
        return self._candidates.block_size

    @property
    def own_block_size(self) -> int:
        """Tokens per block of the rank itself; 0 if it has stored none."""
        return self._candidates.hits.block_size[self._choice.row]

    @property
    def attainable(self) -> int:
        """The most tokens that a usable candidate would find cached. O(ranks) at most."""
        if (attainable := self._choice.attainable) is not None:
            return attainable
        return max(compress(self._candidates.hits.tokens, self._candidates.usable))

    @property
    def source(self) -> KvSource | None:
        """Where the rank may pull from what it misses: another live rank that holds it.

        None if no other one holds at least the router's `min_tokens` more. It is for the caller to
        tell the engine, see `Booking.pull`. O(ranks).
        """
        return self._holders.source(self._candidates, self._choice.row)

    @property
    def cost(self) -> float | None:
        """What the request costs on this rank; None if the policy counts no costs."""
        return self._candidate(self._choice.row).cost

    @property
    def by_tier(self) -> dict[str, int]:
        """The tokens that the rank holds on its "device", on the "host", in "storage"."""
        return self._candidate(self._choice.row).by_tier

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks of the time of the decision, sorted."""
        return tuple(self._candidates.ranks)

    def moved(self, rank: Rank) -> Decision:
        """Return the decision for another of `ranks`, which serves the request instead."""
        row = self._candidates.ranks.index(rank)
        usable = bytearray(map(bool, self._candidates.usable))
        # Whatever the filters said: it serves the request.
        usable[row] = 1
        return replace(
            self,
            predicted_tokens=0,
            _candidates=self._candidates._replace(usable=usable),
            _choice=Choice(row, why=f"it serves the request in place of {self.rank}"),
        )

    @property
    def candidates(self) -> list[Candidate]:
        """Every rank at the time of the decision, the cheapest first. O(ranks × log ranks)."""
        candidates = map(self._candidate, range(len(self._candidates.ranks)))
        return sorted(candidates, key=lambda c: (not c.usable, c.cost or 0.0, c.rank))

    @property
    def reason(self) -> str:
        """Why this rank, in words."""
        choice = self._choice
        if choice.why or not len(choice.costs):
            return f"{self.rank}: {choice.why or f'the policy {self.policy!r} chose it'}"
        load = self._candidate(choice.row).load
        usable = sum(map(bool, self._candidates.usable))
        of = "1 rank" if usable == 1 else f"{usable} ranks"
        held = f"it holds {self.tokens} of {self.prompt_tokens} tokens"
        if not self.reads_cache:
            held = f"the engine reads no cache for these {self.prompt_tokens} tokens"
        return (
            f"{self.rank} costs least of {of}: {held}, {load.queued_tokens} wait for prefill "
            f"there, and {load.open_requests} requests are open"
        )

    def _candidate(self, row: int) -> Candidate:
        ranks, _, hits, loads, usable, *_ = self._candidates
        costs = self._choice.costs
        device, host, tokens = hits.device[row], hits.host[row], hits.tokens[row]
        return Candidate(
            rank=ranks[row],
            cost=float(costs[row]) if len(costs) else None,
            tokens=tokens,
            by_tier={"device": device, "host": host - device, "storage": tokens - host},
            load=Load(int(loads.queued[row]), int(loads.open[row]), int(loads.decode[row])),
            live=bool(self._live[row]),
            usable=bool(usable[row]),
        )

    def __repr__(self) -> str:
        return f"<Decision for {self.rank}: {self.tokens} of {self.prompt_tokens} tokens held>"
