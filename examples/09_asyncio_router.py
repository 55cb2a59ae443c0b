"""A router's core in asyncio: requests at once, the idler of the two best ranks, a failing engine.

python examples/09_asyncio_router.py                                    # three fake engines
python examples/09_asyncio_router.py a=tcp://h:5557 b=tcp://i:5557 …    # states of yours, live
"""

import asyncio
import sys
from collections import Counter
from contextlib import ExitStack

from kvindex import Client, Rank, State, Worker, connect
from kvindex.testing import FakeEngine, Request, Workload

REQUESTS = Workload(60, seed=5, system_prompts=4, system_tokens=96, max_tokens=500)
AT_ONCE = 8


class Router:
    """Tracks which ranks are live and how many requests each one has open."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.live: set[Rank] = set()
        self.open: Counter[Rank] = Counter()

    async def watch(self) -> None:
        """Follow the ranks' states until the client is closed."""
        async for status in self.client.watch():
            if status.state is State.LIVE:
                self.live.add(status.rank)
            else:
                self.live.discard(status.rank)
            print(f"{status.rank} is {status.state}")

    def choose(self, token_ids: list[int]) -> Rank:
        # Takes microseconds and waits for nothing: no await. The last token is always computed.
        best = self.client.match(token_ids, recomputed=1).top(2)
        candidates = [held.rank for held in best] or sorted(self.live or self.client.ranks)
        return min(candidates, key=lambda rank: self.open[rank])


async def main(engines: dict[Rank, FakeEngine]) -> None:
    workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in engines.values()]
    served: Counter[Rank] = Counter()
    async with connect(workers) as client:
        router = Router(client)
        watching = asyncio.create_task(router.watch())
        await client.wait_live_async()
        slots = asyncio.Semaphore(AT_ONCE)

        async def serve(request: Request) -> None:
            async with slots:
                rank = router.choose(list(request.token_ids))
                router.open[rank] += 1
                engines[rank].serve(request.token_ids, new_tokens=request.new_tokens)
                await asyncio.sleep(0.002)  # an engine needs time; other requests arrive
                router.open[rank] -= 1
                served[rank] += 1

        requests = list(REQUESTS)
        await asyncio.gather(*map(serve, requests[:30]))
        failing = max(served, key=lambda rank: served[rank])
        before = served[failing]
        engines[failing].close()
        async for status in client.watch():  # a router in service would try another rank meanwhile
            if status.rank == failing and status.state is not State.LIVE:
                router.live.discard(failing)  # its own watch may come a moment later
                break
        await asyncio.gather(*map(serve, requests[30:]))
    await watching  # it ends when the client is closed
    print(f"{failing} failed; {served[failing] - before} requests went there afterwards,")
    print(f"{served.total() - served[failing]} to the others")


async def show(names: list[str]) -> None:
    workers = [Worker(name, endpoint) for name, _, endpoint in (n.partition("=") for n in names)]
    async with connect(workers) as client:
        await Router(client).watch()


if len(sys.argv) > 1:
    asyncio.run(show(sys.argv[1:]))
else:
    with ExitStack() as stack:
        started = [stack.enter_context(FakeEngine(f"vllm-{i}")) for i in range(3)]
        asyncio.run(main({engine.rank: engine for engine in started}))
