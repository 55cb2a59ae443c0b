"""The policies that other routers choose by, to hold ours against: each by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from kvindex import routing
from kvindex.routing import Candidates, Choice, Policy

_LONG_MATCH: Final = 0.3  # of the prompt, as in SGLang's router
_MOST_APART: Final = 64  # open requests
_MOST_RATIO: Final = 1.5


class SpillGate:
    """SMG 1.13: the rank that holds most, unless it has far more open requests than the mean.

    Then, and where no rank holds anything, the one where fewest tokens wait for prefill. "Far
    more": half as many again, and 4 to 64 more (twice the root of the mean).

    Source: `model_gateway/src/policies/cache_aware.rs` of SMG.
    """

    name = "smg-gate"

    def choose(self, candidates: Candidates) -> Choice:
        """Choose a rank; see `Policy`."""
        rows = candidates.rows()
        loads, held = candidates.loads, candidates.hits.tokens
        mean = sum(loads.open[row] for row in rows) / len(rows)
        most = _MOST_RATIO * mean
        apart = mean + min(_MOST_APART, max(4, math.ceil(2 * math.sqrt(mean))))
        longest = max(held[row] for row in rows)
        if longest:
            holders = [row for row in rows if held[row] == longest]
            row = _first(candidates, holders, lambda row: loads.open[row])
            if not (loads.open[row] > most and loads.open[row] > apart):
                return Choice(row, why=f"it holds most, {longest} tokens, and is not overloaded")
        row = _first(candidates, rows, lambda row: loads.queued[row])
        why = (
            "the rank that holds most has too much to do" if longest else "no rank holds any of it"
        )
        return Choice(row, why=f"{why}; here it waits least")


class TwoTier:
    """SGLang's router, also in Dynamo: by load while loads differ much, else by prefix.

    Loads differ much if the most open requests are over 64 more and over 1.5 times the fewest. A
    match counts if it is more than 0.3 of the prompt.

    Source: `cache_aware_zmq` of sgl-router; PR 14498 of Dynamo.
    """

    name = "two-tier"

    def choose(self, candidates: Candidates) -> Choice:
        """Choose a rank; see `Policy`."""
        rows = candidates.rows()
        loads, held = candidates.loads.open, candidates.hits.tokens
        fewest, most = min(loads[row] for row in rows), max(loads[row] for row in rows)
        longest = max(held[row] for row in rows)
        by_load = _first(candidates, rows, lambda row: loads[row])
        if most - fewest > _MOST_APART and most > _MOST_RATIO * fewest:
            return Choice(by_load, why="open requests differ too much; it has the fewest")
        if longest > _LONG_MATCH * candidates.prompt_tokens:
            holders = (row for row in rows if held[row] == longest)
            row = _first(candidates, holders, lambda row: loads[row])
            return Choice(row, why=f"it holds most, {longest} tokens")
        return Choice(by_load, why="no rank holds 0.3 of the prompt; it has the fewest requests")


def _first(candidates: Candidates, rows: Iterable[int], cost: Callable[[int], float]) -> int:
    """Return the row of least cost; of equal ones one that was given least lately, by chance."""
    order = {row: (cost(row), candidates.loads.given[row]) for row in rows}
    least = min(order.values())
    equal = [row for row, key in order.items() if key == least]
    return equal[int(candidates.chance * len(equal))]


Cost = Callable[[Candidates, int], float]

_PEAK_PREFILL: Final = 15_928.0  # tokens/s, of llm-d's configuration


class Cheapest:
    """The rank where a cost is least."""

    def __init__(self, name: str, cost: Cost) -> None:
        self.name = name
        self._cost = cost

    def choose(self, candidates: Candidates) -> Choice:
        """Choose a rank; see `Policy`."""
        costs = [self._cost(candidates, row) for row in range(len(candidates.ranks))]
        return Choice(_first(candidates, candidates.rows(), costs.__getitem__), costs)


class Homes:
    """llm-d-router ebab687 (2026-08-21), its optimized baseline: homes, then the least in flight.

    Among ranks that hold 0.8 of the prompt, the one where fewest blocks decode, unless the best of
    all is 18 s of prefill ahead of it.
    """

    name = "llm-d"

    def choose(self, candidates: Candidates) -> Choice:
        """Choose a rank; see `Policy`."""
        rows, held = candidates.rows(), candidates.hits.tokens
        costs = [blocks * candidates.block_size for blocks in candidates.loads.decode]
        homes = [row for row in rows if held[row] >= 0.8 * candidates.prompt_tokens]
        best = min(costs[row] for row in rows)
        if homes and min(costs[row] for row in homes) - best > 18.0 * _PEAK_PREFILL:
            homes = []
        return Choice(_first(candidates, homes or rows, costs.__getitem__), costs)


def _lmetric(of: Candidates, row: int) -> float:
    """arXiv 2603.15202, with the credits of vllm-router 0.1.17."""
    work = of.loads.queued[row] + of.prompt_tokens - _credit(of, row, 1.0, 0.8, 0.3)
    return max(0.0, work) * (of.loads.open[row] + 1.0)


def _dynamo(of: Candidates, row: int) -> float:
    """Dynamo 1.6.1's default: prefill that waits plus blocks that decode."""
    work = of.loads.queued[row] + of.prompt_tokens - _credit(of, row, 1.0, 0.75, 0.25)
    return max(0.0, work) + of.block_size * of.loads.decode[row]


def _dynamo_agentic(of: Candidates, row: int) -> float:
    """Dynamo's preset for agents: prefill scale 4, 64 blocks for a request, and credit 2.

    The credit is for the device alone ("device-local prefix overlap").
    """
    work = of.loads.queued[row] + of.prompt_tokens - _credit(of, row, 2.0, 0.75, 0.25)
    request = 64 * _AGENTIC_BLOCK * of.loads.open[row]
    return 4.0 * max(0.0, work) + of.block_size * of.loads.decode[row] + request


def _credit(of: Candidates, row: int, device: float, host: float, storage: float) -> float:
    on_device, with_host, tokens = of.hits.device[row], of.hits.host[row], of.hits.tokens[row]
    return device * on_device + host * (with_host - on_device) + storage * (tokens - with_host)


_AGENTIC_BLOCK: Final = 16  # tokens: Dynamo weighs a request as 64 blocks
_COSTS: Final[dict[str, Cost]] = {
    "lmetric": _lmetric,
    "dynamo": _dynamo,
    "dynamo-agentic": _dynamo_agentic,
}
_GATES: Final[dict[str, Callable[[], Policy]]] = {
    Homes.name: Homes,
    "smg-gate": SpillGate,
    "two-tier": TwoTier,
}
FIELD: Final = (*_COSTS, *_GATES)
"""The names of what others route by."""
POLICIES: Final = (*routing.POLICIES, *FIELD)
"""The names of all that are compared."""


def make_policy(name: str) -> Policy:
    """Return a policy by its name, kvindex' own included."""
    if name in _COSTS:
        return Cheapest(name, _COSTS[name])
    return _GATES[name]() if name in _GATES else routing.make_policy(name)
