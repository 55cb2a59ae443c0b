"""The requests that all routers here are compared on, and how much two engines in turns find."""

from __future__ import annotations

from kvindex.testing import FakeEngine, Workload

BLOCKS = 400  # of 16 tokens in each cache: too few for every conversation to be everywhere
REQUESTS = Workload(
    240, seed=3, system_prompts=40, system_tokens=200, turn_tokens=60, max_tokens=900
)


def in_turn() -> float:
    """Return the hit rate of two engines that take turns."""
    engines = [FakeEngine(f"turn-{i}", num_blocks=BLOCKS, publish=False) for i in range(2)]
    served = [
        engines[number % 2].serve(request.token_ids, new_tokens=request.new_tokens)
        for number, request in enumerate(REQUESTS)
    ]
    return sum(s.hit_tokens for s in served) / sum(s.prompt_tokens for s in served)
