"""`kvindex gateway` in front of whole engines that prefill and decode apart, with NIXL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvindex import connect
from tests.engines.comparing import Fleet
from tests.engines.test_gateway import GREEDY, Gateway
from tests.engines.vllm import BLOCK_SIZE, Vllm
from tests.engines.workload import Workload
from tests.live import until
from tests.tools.commands import started

pytestmark = pytest.mark.engine

BLOCK_BYTES = 8_192  # of the tiny model: 2 layers of keys and values, one head of 32, 2 bytes each
LOCAL_TOKENS = 64


@pytest.fixture(scope="module")
def gateway(apart: list[Vllm]) -> Iterator[Gateway]:
    p, d, _ = apart
    options = ("--prefill", p.url, "--decode", d.url, "--local-tokens", str(LOCAL_TOKENS))
    with started("gateway", "--port", "0", *options) as process:
        line = next(line for line in process.out if "serves OpenAI's API" in line)
        served = Gateway(line.split()[-1].removesuffix("/v1"))
        until(lambda: served.http.get("/ready").status_code == 200)
        with closing(served):
            yield served


def test_answers_hits_and_transfers_of_a_pair_are_as_foreseen(
    gateway: Gateway, apart: list[Vllm]
) -> None:
    """One request at a time; answers are those of an engine that does both."""
    p, d, plain = apart
    work, seen = Workload(31), Counter[str]()
    with connect([p.url, d.url]) as client:
        fleet = Fleet(client, [p, d])
        for _ in range(40):
            request = work.next()
            gateway.catch_up(fleet, work)
            before, received = gateway.statistics(), d.received_bytes()
            answer = gateway.complete({**request.body, **GREEDY})
            expected = plain.complete({**request.body, **GREEDY})
            assert answer["choices"] == expected["choices"], request.body
            now = gateway.statistics()
            moved, held, delivered = (
                now["tokens"].get(name, 0) - before["tokens"].get(name, 0)
                for name in ("moved", "held", "delivered")
            )
            assert held == delivered, request.body
            received += -(-moved // BLOCK_SIZE) * BLOCK_BYTES  # the last block need not be full
            until(d.received_bytes, received.__eq__)
            seen["apart" if moved else "alone"] += 1
            request.go_on(answer)
    assert min(seen["apart"], seen["alone"]) > 5, seen
    bookings = next(iter(gateway.statistics()["routers"].values()))["bookings"]
    assert (bookings["open"], bookings["expired"]) == (0, 0)
