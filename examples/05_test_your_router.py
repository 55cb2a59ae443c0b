"""Test your own router without a GPU: fake engines with known caches, and faults by a seed.

python examples/05_test_your_router.py
"""

from contextlib import ExitStack

from kvindex import Client, Rank, SocketOptions, Worker, connect
from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults, Workload


def choose(client: Client, token_ids: list[int]) -> Rank:
    """Your router, the code under test: the rank that holds most of the prompt."""
    best = client.match(token_ids).best
    return best.rank if best else client.ranks[0]


def applied(client: Client, engines: list[FakeEngine], timeout: float) -> bool:
    """Wait until the client has applied every published batch; return whether it has."""
    last = {engine.rank: engine.published - 1 for engine in engines}
    return client.wait_for(
        lambda statuses: all(statuses[rank].seq == seq for rank, seq in last.items()), timeout
    )


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
            applied(client, [engine], timeout=0.02)

        for link in links:
            link.quiesce()  # faults off: replay repairs what was lost until now
        assert applied(client, engines, timeout=10.0), client.statistics()

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
