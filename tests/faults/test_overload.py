"""More comes than can be taken, and engines are restarted meanwhile."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvindex import State
from kvindex.testing import FakeEngine, Workload
from tests.live import assert_true, caught_up, client_of, wait_status, worker_of


def pour(engine: FakeEngine, seed: int) -> None:
    """Publish without a pause, and restart every now and then; the last restart may be the end."""
    rng = random.Random(seed)
    for _ in range(60):
        engine.run(Workload(10, seed=rng.randrange(10**6)))
        if rng.random() < 0.1:
            engine.restart()


@pytest.mark.parametrize("seed", range(3))
def test_overload_with_quick_restarts_nothing_of_a_former_life_is_left(seed: int) -> None:
    engines = [FakeEngine(f"engine-{n}", num_blocks=64, cpu_blocks=64) for n in range(4)]
    try:
        with client_of(*map(worker_of, engines)) as client:
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(pour, engines, range(seed * 10, seed * 10 + len(engines))))
            silent, *others = engines
            silent.restart()
            wait_status(client, silent.rank, seq=None, state=State.LIVE)
            caught_up(client, *others)
            assert all(client.status(engine.rank).complete for engine in engines)
            prompts = [list(request.token_ids) for request in Workload(20, seed=seed)]
            assert_true(client, *engines, prompts=prompts)
    finally:
        for engine in engines:
            engine.close()
