"""A KV-aware router: matched prefix against load, compared with round-robin on the same requests.

python examples/06_kv_aware_router.py                                    # compare, four fakes
python examples/06_kv_aware_router.py a=tcp://h:5557 b=tcp://i:5557 …    # route to yours, dry
"""

import sys
import time
from collections import deque
from contextlib import ExitStack

from kvindex import Worker, connect
from kvindex.routing import Booking, Router
from kvindex.testing import FakeEngine, Workload

ENGINES = 4
BLOCKS = 640  # of 16 tokens in each cache: too few for every conversation to be everywhere
OPEN = 8  # requests at a time
REQUESTS = Workload(
    600,
    seed=3,
    system_prompts=6,
    system_tokens=384,
    turn_tokens=160,
    new_tokens=96,
    max_tokens=2_400,
)


def serve_all(policy: str) -> tuple[float, float]:
    """Serve the requests on fresh engines; return hit rate, and the busiest one's share of work."""
    with ExitStack() as stack:
        engines = {
            engine.rank: stack.enter_context(engine)
            for engine in (FakeEngine(f"vllm-{i}", num_blocks=BLOCKS) for i in range(ENGINES))
        }
        workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in engines.values()]
        client = stack.enter_context(connect(workers))
        client.wait_live()
        router = Router(client, policy=policy, seed=1)
        prompt_tokens = hit_tokens = 0
        computed = dict.fromkeys(engines, 0)
        opened: deque[Booking] = deque()
        for request in REQUESTS:
            if len(opened) == OPEN:
                opened.popleft().finish()
            booking = router.reserve(request.token_ids)
            opened.append(booking)
            engine = engines[booking.rank]
            served = engine.serve(request.token_ids, new_tokens=request.new_tokens)
            prompt_tokens += served.prompt_tokens
            hit_tokens += served.hit_tokens
            computed[booking.rank] += served.prompt_tokens - served.hit_tokens
            # A fake engine needs no time, a real one does: let the events arrive first.
            tokens = list(request.token_ids)
            while client.match(tokens)[engine.rank].tokens != engine.lookup(tokens).tokens:
                time.sleep(0.001)
        return hit_tokens / prompt_tokens, max(computed.values()) / sum(computed.values())


def route_dry(names: list[str]) -> None:
    """Print where the first requests would go, by the present blocks of the given engines."""
    workers = [Worker(name, endpoint) for name, _, endpoint in (n.partition("=") for n in names)]
    with connect(workers) as client:
        client.wait_live()
        router = Router(client)
        for request in list(REQUESTS)[:10]:
            decision = router.reserve(request.token_ids).decision
            print(f"{len(request.token_ids)} tokens -> {decision.rank}\n    {decision.reason}")


if len(sys.argv) > 1:
    route_dry(sys.argv[1:])
else:
    print("router            hit rate   busiest engine's share of the computing")
    for name, policy in (("prefix and load", "kvindex"), ("round-robin", "round-robin")):
        hit_rate, busiest = serve_all(policy)
        print(f"{name:<16}  {hit_rate:8.1%}   {busiest:.1%} (even: {1 / ENGINES:.1%})")
