"""The balancer as verl runs it: named in YAML, made by verl as a Ray actor, asked by its client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl.workers.rollout.llm_server", reason="the extra `verl` is not installed")

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

from tests.live import PATIENCE
from tests.routing.adapters import verl_servers

pytestmark = pytest.mark.adapter

ROOT = Path(__file__).parents[3]
YAML = """
router_class: kvindex.routing.adapters.verl.KVAwareBalancer
worker_of: tests.routing.adapters.verl_servers:worker_of
router: {policy: least-requests, predict: 5.0, seed: 1}
"""


@pytest.fixture(scope="module", autouse=True)
def ray_of_one_machine() -> Iterator[None]:
    if ray.is_initialized():  # by Ray's own adapters' tests
        yield
        return
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()


class Rollout:
    """verl's client before servers, and the balancer between them."""

    def __init__(self, yaml: Path | None, servers: int = 3, num_blocks: int = 256) -> None:
        made = ray.remote(num_cpus=0)(verl_servers.Server)
        self.servers = {f"10.0.0.{n}:8000": made.remote(num_blocks) for n in range(servers)}
        path = None if yaml is None else str(yaml)
        self.balancer = get_router_handle(self.servers, router_config_path=path)
        rollout = SimpleNamespace(name="vllm", full_determinism=False)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        self._client = LLMServerClient(config, load_balancer_handle=self.balancer)

    async def generate(self, request_id: str, prompt_ids: list[int]) -> Any:
        return await self._client.generate(request_id, prompt_ids=prompt_ids, sampling_params={})

    async def idle(self) -> dict[str, Any]:
        """Wait until verl has released everything; it does not wait for that itself."""

        async def poll() -> None:
            while await self.balancer.get_total_inflight.remote():
                await asyncio.sleep(0.005)

        await asyncio.wait_for(poll(), PATIENCE)
        status: dict[str, Any] = await self.balancer.get_status.remote()
        return status

    async def hit_rate(self) -> float:
        asked = [one.tokens.remote() for one in self.servers.values()]
        tokens: list[tuple[int, int]] = await asyncio.gather(*asked)
        return sum(hit for hit, _ in tokens) / sum(prompt for _, prompt in tokens)

    def end(self) -> None:
        for actor in (self.balancer, *self.servers.values()):
            ray.kill(actor)


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text(YAML)
    return path


async def groups(rollout: Rollout, *, prompts: int = 12, siblings: int = 4, turns: int = 3) -> None:
    """Roll out as agents do: several answers to each prompt, each in several turns."""
    chance = random.Random(3)
    slots = asyncio.Semaphore(8)

    async def one(request_id: str, prompt: list[int]) -> None:
        async with slots:
            for _ in range(turns):
                await rollout.generate(request_id, prompt)
                prompt = [*prompt, *(chance.randrange(1000) for _ in range(40))]

    asked = [[number] * 400 for number in range(prompts) for _ in range(siblings)]
    await asyncio.gather(*(one(f"r{n}", prompt) for n, prompt in enumerate(asked)))


def test_verl_finds_more_in_the_caches_than_with_its_own_balancer(yaml: Path) -> None:
    async def hit_rate(path: Path | None) -> float:
        rollout = Rollout(path, num_blocks=1024)
        try:
            await groups(rollout)
            status = await rollout.idle()
            assert status["total_inflight"] == 0
            if path is not None:
                bookings = status["routing"]["bookings"]
                assert (bookings["open"], bookings["finished"]) == (0, 12 * 4 * 3)
                for rank in status["routing"]["ranks"].values():
                    assert rank["queued_tokens"] == rank["open_requests"] == 0
            return await rollout.hit_rate()
        finally:
            rollout.end()

    by_default = asyncio.run(hit_rate(None))
    routed = asyncio.run(hit_rate(yaml))
    print(f"hit rate {by_default:.3f} by verl's own balancer, {routed:.3f} by kvindex")
    assert routed > by_default


def test_requests_that_fail_leave_no_load(yaml: Path) -> None:
    async def main() -> None:
        rollout = Rollout(yaml)
        try:
            await asyncio.gather(*[one.fail.remote(1) for one in rollout.servers.values()])
            asked = [rollout.generate(f"r{n}", [n] * 100) for n in range(12)]
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(isinstance(one, ValueError) for one in ended) == 3
            status = await rollout.idle()
            assert status["routing"]["bookings"]["finished"] == 12
        finally:
            rollout.end()

    asyncio.run(main())


def test_verl_knows_the_error_of_an_empty_pool(yaml: Path) -> None:
    async def main() -> None:
        rollout = Rollout(yaml)
        try:
            everyone = await rollout.balancer.get_all_servers.remote()
            await rollout.balancer.remove_servers.remote(everyone)
            with pytest.raises(RuntimeError, match="No available servers in load balancer"):
                await rollout.generate("r", [1])
            one = dict([next(iter(rollout.servers.items()))])
            await rollout.balancer.add_servers.remote(one)
            await rollout.generate("r", [1])
            assert (await rollout.idle())["servers"] == dict.fromkeys(one, 0)
        finally:
            rollout.end()

    asyncio.run(main())
