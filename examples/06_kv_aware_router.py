"""A KV-aware router: matched prefix against load, held against round-robin on the same requests.

python examples/06_kv_aware_router.py                                    # compare, four fakes
python examples/06_kv_aware_router.py a=tcp://h:5557 b=tcp://i:5557 …    # route to yours, dry
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack

from kvindex import Client, Rank, State, Worker, connect
from kvindex.testing import FakeEngine, Request, Workload

ENGINES = 4
BLOCKS = 160  # of 16 tokens in each cache: too few for every conversation to be everywhere
REQUESTS = Workload(600, seed=3, system_prompts=6, system_tokens=96, max_tokens=600)


class Router:
    """Send each request where it costs least: tokens left to compute, and work already there."""

    def __init__(self, client: Client, *, load_weight: float = 0.5, memory: float = 0.95) -> None:
        self.client = client
        self.load_weight = load_weight
        self.memory = memory
        self.load: dict[Rank, float] = dict.fromkeys(client.ranks, 0.0)

    def choose(self, token_ids: list[int]) -> Rank:
        # An engine computes the last token always: it never hits the whole prompt.
        match = self.client.match(token_ids, recomputed=1)
        # An engine that is down has no load: it would be the cheapest of all.
        up = [found for found in match if found.state not in (State.CONNECTING, State.CLOSED)]
        to_compute = {
            # What a rank that is not live says may be outdated: count on nothing there.
            found.rank: len(token_ids) - (found.tokens if found.state == State.LIVE else 0)
            for found in up or match
        }
        # Without the load, the first rank to hold a system prompt would get all its users.
        chosen = min(to_compute, key=lambda r: to_compute[r] + self.load_weight * self.load[r])
        # Engines finish work while requests come: a router in service would count what is open.
        for rank in self.load:
            self.load[rank] *= self.memory
        self.load[chosen] += to_compute[chosen]
        return chosen


def serve_all(make_choice: Callable[[Client], Callable[[Request], Rank]]) -> tuple[float, float]:
    """Serve the requests on fresh engines; return hit rate, and the busiest one's share of work."""
    with ExitStack() as stack:
        engines = {
            engine.rank: stack.enter_context(engine)
            for engine in (FakeEngine(f"vllm-{i}", num_blocks=BLOCKS) for i in range(ENGINES))
        }
        workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in engines.values()]
        client = stack.enter_context(connect(workers))
        client.wait_live()
        choose = make_choice(client)
        prompt_tokens = hit_tokens = 0
        computed = dict.fromkeys(engines, 0)
        for request in REQUESTS:
            rank = choose(request)
            engine = engines[rank]
            served = engine.serve(request.token_ids, new_tokens=request.new_tokens)
            prompt_tokens += served.prompt_tokens
            hit_tokens += served.hit_tokens
            computed[rank] += served.prompt_tokens - served.hit_tokens
            # A fake engine needs no time, a real one does: let the events arrive before the next.
            wait_until_applied(client, engine)
        return hit_tokens / prompt_tokens, max(computed.values()) / sum(computed.values())


def wait_until_applied(client: Client, engine: FakeEngine) -> None:
    last = engine.published - 1 if engine.published else None
    client.wait_for(lambda statuses: statuses[engine.rank].seq == last, timeout=5.0)


def by_prefix_and_load(client: Client) -> Callable[[Request], Rank]:
    router = Router(client)
    return lambda request: router.choose(list(request.token_ids))


def round_robin(client: Client) -> Callable[[Request], Rank]:
    turns = iter(client.ranks * len(REQUESTS))
    return lambda request: next(turns)


def route_dry(names: list[str]) -> None:
    """Print where the first requests would go, by what the engines given hold now."""
    workers = [Worker(name, endpoint) for name, _, endpoint in (n.partition("=") for n in names)]
    with connect(workers) as client:
        client.wait_live()
        choose = by_prefix_and_load(client)
        for request in list(REQUESTS)[:10]:
            print(f"{len(request.token_ids)} tokens -> {choose(request)}")


if len(sys.argv) > 1:
    route_dry(sys.argv[1:])
else:
    print("router            hit rate   busiest engine's share of the computing")
    for name, make_choice in (
        ("prefix and load", by_prefix_and_load),
        ("round-robin", round_robin),
    ):
        hit_rate, busiest = serve_all(make_choice)
        print(f"{name:<16}  {hit_rate:8.1%}   {busiest:.1%} (even: {1 / ENGINES:.1%})")
