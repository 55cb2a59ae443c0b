"""Test your own router without a GPU: fake engines with known caches, and faults by a seed.

python examples/05_test_your_router.py
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from kvindex import Client, Rank, SocketOptions, Worker, connect
from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults, Workload


def choose(client: Client, token_ids: list[int]) -> Rank:
    """Your router, the code under test: the rank that holds most of the prompt."""
    best = client.match(token_ids).best
    return best.rank if best else client.ranks[0]


def wait_until(is_so: Callable[[], bool], timeout: float) -> bool:
    """Look again and again; return whether it became so in time."""
    deadline = time.monotonic() + timeout
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_so()


def agree(client: Client, engine: FakeEngine, token_ids: Sequence[int]) -> bool:
    """Whether the client finds of a prompt what the engine itself has cached."""
    return client.match(token_ids)[engine.rank].tokens == engine.lookup(token_ids).tokens


def is_applied(client: Client, engine: FakeEngine) -> bool:
    """Whether the last batch was applied; a status may be 0.1 s old."""
    return client.status(engine.rank).seq == engine.published - 1


def test_the_router_finds_the_longest_prefix_in_spite_of_faults() -> None:
    faults = Faults(live=LaneFaults(drop=0.2, duplicate=0.2, reorder=0.2))
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine(f"vllm-{i}", num_blocks=80)) for i in range(2)]
        links = [
            stack.enter_context(FaultyLink(e.endpoint, e.replay_endpoint, faults=faults, seed=i))
            for i, e in enumerate(engines)
        ]
        workers = [
            Worker(engine.worker, link.endpoint, replay=link.replay_endpoint)
            for engine, link in zip(engines, links, strict=True)
        ]
        client = stack.enter_context(
            connect(workers, probe_interval=0.2, socket_options=SocketOptions(reconnect=0.05))
        )
        client.wait_live()

        requests = list(Workload(100, seed=1))
        for number, request in enumerate(requests):
            engine = engines[number % 2]
            engine.serve(request.token_ids, new_tokens=request.new_tokens)
            # A fake engine needs no time, a real one does: wait for the batch, unless it is lost.
            wait_until(partial(agree, client, engine, request.token_ids), timeout=0.02)

        for link in links:
            link.quiesce()  # faults off: replay repairs what was lost until now
        for engine in engines:
            assert wait_until(partial(is_applied, client, engine), timeout=10.0), (
                client.statistics()
            )

        # The engines' own caches are the truth: this file has no expected numbers.
        for request in requests:
            tokens = list(request.token_ids)
            held = {engine.rank: engine.lookup(tokens).tokens for engine in engines}
            assert held[choose(client, tokens)] == max(held.values())

        dropped = sum(link.statistics()["live.dropped"] for link in links)
        gaps = sum(client.status(engine.rank).gaps for engine in engines)
        assert dropped > 10, "the faults did not happen"
        print(f"{dropped} batches dropped, {gaps} gaps repaired, {len(requests)} prompts routed")


if __name__ == "__main__":  # or: pytest examples/05_test_your_router.py
    test_the_router_finds_the_longest_prefix_in_spite_of_faults()
