"""A router's gain from the index: the same requests routed by prefix and load, and in turn."""

from __future__ import annotations

from collections import deque

import msgspec

from kvindex import EventBatch, Index, Rank
from kvindex.routing import Booking, Router
from kvindex.testing import FakeEngine, Workload

__all__ = ["Outcome", "compare_routers"]

_ENGINES = 4
_BLOCKS = 640  # of 16 tokens: too few for every conversation to be in every cache
_REQUESTS = 600
_OPEN = 8  # requests at a time


class Outcome(msgspec.Struct, frozen=True):
    """One router's results for the requests.

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
    """Serve the same requests by prefix and load, then in turn, on fresh engines each time."""
    requests = Workload(
        _REQUESTS,
        seed=seed,
        system_prompts=6,
        system_tokens=384,
        turn_tokens=160,
        new_tokens=96,
        max_tokens=2_400,
    )
    return (
        _serve("by prefix and load", requests, "kvindex", seed),
        _serve("round-robin", requests, "round-robin", seed),
    )


def _serve(name: str, requests: Workload, policy: str, seed: int) -> Outcome:
    ranks = [Rank(f"vllm-{number}") for number in range(_ENGINES)]
    engines = {r: FakeEngine(r.worker, num_blocks=_BLOCKS, publish=False) for r in ranks}
    index = Index()
    for rank in ranks:
        index.add(rank)
    router = Router(index, policy=policy, seed=seed)
    prompt_tokens = 0
    computed = dict.fromkeys(ranks, 0)
    opened: deque[Booking] = deque()
    for request in requests:
        if len(opened) == _OPEN:
            opened.popleft().finish()
        booking = router.reserve(request.token_ids)
        opened.append(booking)
        engine = engines[booking.rank]
        served = engine.serve(request.token_ids, new_tokens=request.new_tokens)
        index.apply(booking.rank, EventBatch(0.0, list(engine.events)))
        prompt_tokens += served.prompt_tokens
        computed[booking.rank] += served.prompt_tokens - served.hit_tokens
    total = sum(computed.values())
    return Outcome(name, 1 - total / prompt_tokens, total, max(computed.values()))
