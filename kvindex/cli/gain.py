"""What a router gains by asking: the same requests routed by cached prefix, and in turn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import msgspec

from kvindex import EventBatch, Index, Rank
from kvindex.testing import FakeEngine, Workload

__all__ = ["Outcome", "compare_routers"]

_ENGINES = 4
_BLOCKS = 160  # of 16 tokens: too few for every conversation to be in every cache
_REQUESTS = 600
_LOAD_WEIGHT = 0.5  # one token of work that waits counts as half a token to compute
_LOAD_KEPT = 0.95  # engines finish work while requests come

Choose = Callable[[list[int]], Rank]


class Outcome(msgspec.Struct, frozen=True):
    """What one router made of the requests.

    Attributes:
        router: its name.
        hit_rate: share of prompt tokens that were cached where they were sent.
        computed: prompt tokens that had to be computed.
        busiest: how many of them the busiest engine computed.
    """

    router: str
    hit_rate: float
    computed: int
    busiest: int


def compare_routers(seed: int) -> tuple[Outcome, Outcome]:
    """Serve the same requests by prefix and load, then round-robin, on fresh engines each time."""
    requests = Workload(_REQUESTS, seed=seed, system_prompts=6, system_tokens=96, max_tokens=600)
    ranks = [Rank(f"vllm-{number}") for number in range(_ENGINES)]
    index, turns = Index(), cycle(ranks)
    return (
        _serve("by prefix and load", requests, ranks, index, _ByPrefixAndLoad(index, ranks)),
        _serve("round-robin", requests, ranks, Index(), lambda _: next(turns)),
    )


class _ByPrefixAndLoad:
    """Choose where a request costs least: tokens left to compute, and work already there."""

    def __init__(self, index: Index, ranks: list[Rank]) -> None:
        self._index = index
        self._load = dict.fromkeys(ranks, 0.0)

    def __call__(self, token_ids: list[int]) -> Rank:
        match = self._index.match(token_ids, recomputed=1)
        to_compute = {rank: len(token_ids) - match[rank].tokens for rank in self._load}
        # Without the load, the first rank to hold a system prompt would get all its users.
        chosen = min(self._load, key=lambda rank: to_compute[rank] + self._weighed(rank))
        for rank in self._load:
            self._load[rank] *= _LOAD_KEPT
        self._load[chosen] += to_compute[chosen]
        return chosen

    def _weighed(self, rank: Rank) -> float:
        return _LOAD_WEIGHT * self._load[rank]


def _serve(
    router: str, requests: Workload, ranks: list[Rank], index: Index, choose: Choose
) -> Outcome:
    engines = {r: FakeEngine(r.worker, num_blocks=_BLOCKS, publish=False) for r in ranks}
    for rank in ranks:
        index.add(rank)
    prompt_tokens = 0
    computed = dict.fromkeys(ranks, 0)
    for request in requests:
        rank = choose(list(request.token_ids))
        served = engines[rank].serve(request.token_ids, new_tokens=request.new_tokens)
        index.apply(rank, EventBatch(0.0, list(engines[rank].events)))
        prompt_tokens += served.prompt_tokens
        computed[rank] += served.prompt_tokens - served.hit_tokens
    total = sum(computed.values())
    return Outcome(router, 1 - total / prompt_tokens, total, max(computed.values()))
