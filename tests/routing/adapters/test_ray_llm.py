"""Ray's own `KVAwareRouter` and its `KVTokenTracker`, unchanged, over our `SelectionService`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs kvindex[ray]")

from ray import serve
from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import (
    KVTokenTracker,
    get_worker_id,
)
from ray.serve.config import RequestRouterConfig

from kvindex import Rank
from kvindex.routing import Load
from kvindex.routing.adapters.ray_llm import SelectionService, install
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, until
from tests.routing.adapters import ray_llm_apps
from tests.routing.adapters.loop import run
from tests.routing.adapters.ray_llm_apps import events_of, kv_event_metadata
from tests.routing.adapters.traffic import BLOCKS, REQUESTS, in_turn

pytestmark = pytest.mark.adapter

PROMPT = list(range(100))
KV_AWARE_ROUTER = "ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router.KVAwareRouter"


class Ingress:
    """One of Ray's trackers with our service, without a Serve controller."""

    def __init__(self, number: int) -> None:
        self.tracker = KVTokenTracker(ingress_replica_rank=number)
        self.service: SelectionService = self.tracker._svc
        self.chosen: list[Any] = []  # reservations to forward to the other ingresses
        self.tracker._reservation_forwarder = SimpleNamespace(report=self.chosen.append)

    async def follow(self, engines: Sequence[FakeEngine]) -> None:
        """Report the running replicas as Ray's controller does; wait until they are live."""
        self.tracker._on_deployment_targets(
            SimpleNamespace(running_replicas=list(map(replica, engines)))
        )
        await asyncio.gather(*self.tracker._pending_tasks)
        await self.service.client.wait_live_async(timeout=PATIENCE)

    async def select(self, name: str, token_ids: Sequence[int], workers: list[int]) -> Any:
        return await self.tracker.select_worker(name, list(token_ids), workers)

    async def learn(self, chosen: list[Any]) -> None:
        await self.tracker.on_reservations_created(chosen)
        await self.tracker._reservation_updates.join()

    async def applied(self, engine: FakeEngine) -> None:
        """Wait until the index has all that an engine has published."""
        await applied(self.service, rank_of(engine), engine.published)

    def load(self, rank: Rank) -> Load:
        return self.service.router.load(rank)

    def is_idle(self) -> bool:
        return is_idle(self.service)


Start = Callable[..., Awaitable[list[Ingress]]]


async def applied(service: SelectionService, rank: Rank, published: int) -> None:
    last = published - 1 if published else None
    await asyncio.to_thread(until, lambda: service.client.status(rank).seq == last)


def is_idle(service: SelectionService) -> bool:
    loads = {service.router.load(rank) for rank in service.router.ranks}
    return loads <= {Load()} and not service._bookings


def replica(engine: FakeEngine) -> SimpleNamespace:
    replica_id = SimpleNamespace(unique_id=engine.worker, to_full_id_str=lambda: engine.worker)
    return SimpleNamespace(replica_id=replica_id, routing_stats=kv_event_metadata(engine))


def rank_of(engine: FakeEngine) -> Rank:
    return Rank(str(get_worker_id(engine.worker)), engine.rank.dp_rank)


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(f"r{i}", num_blocks=BLOCKS)) for i in range(2)]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return how to start ingresses that follow engines."""
    monkeypatch.setitem(sys.modules, "dynamo.llm", None)
    install()
    monkeypatch.setattr(KVTokenTracker, "_start_replica_tracking", lambda tracker: None)
    with ExitStack() as stack:

        async def start(engines: Sequence[FakeEngine], ingresses: int = 1) -> list[Ingress]:
            started = [Ingress(number) for number in range(ingresses)]
            for ingress in started:
                stack.callback(ingress.service.close)
                await ingress.follow(engines)
            return started

        yield start
        run(cancel_trackers())


async def cancel_trackers() -> None:
    """Cancel the tasks of Ray's trackers, which have no end of their own."""
    for task in asyncio.all_tasks():
        if "KVTokenTracker" in repr(task.get_coro()):
            task.cancel()


async def serve_all(
    ingresses: Sequence[Ingress], engines: Sequence[FakeEngine], at_once: int = 4
) -> float:
    """Serve the workload as Ray's router and engines would; return the hit rate."""
    by_worker = {get_worker_id(engine.worker): engine for engine in engines}
    hits = tokens = 0
    requests = list(enumerate(REQUESTS))
    for start in range(0, len(requests), at_once):
        batch = requests[start : start + at_once]
        for number, request in batch:
            chooser = ingresses[number % len(ingresses)]
            chooser.chosen.clear()
            chosen = await chooser.select(f"r{number}", request.token_ids, list(by_worker))
            for ingress in ingresses:
                await ingress.learn(chooser.chosen)
            engine = by_worker[chosen["worker_id"]]
            served = engine.serve(request.token_ids, new_tokens=request.new_tokens)
            hits, tokens = hits + served.hit_tokens, tokens + served.prompt_tokens
        for ingress in ingresses:
            for number, request in batch:
                events = events_of(f"r{number}", len(request.new_tokens))
                await ingress.tracker.on_lifecycle_events(events)
            for engine in engines:
                await ingress.applied(engine)
    return hits / tokens


async def test_rays_tracker_routes_by_prefix_and_all_load_returns(
    follow: Start, engines: list[FakeEngine]
) -> None:
    (ingress,) = await follow(engines)
    router = ingress.service.router
    assert set(router.ranks) == set(map(rank_of, engines))
    hit_rate = await serve_all([ingress], engines)
    print(f"hit rate {hit_rate:.3f}, in turn {in_turn():.3f}")
    assert hit_rate > in_turn() + 0.03
    assert ingress.is_idle()
    assert router.statistics()["bookings"]["finished"] == len(REQUESTS)


async def test_every_ingress_books_the_load_of_the_others(
    follow: Start, engines: list[FakeEngine]
) -> None:
    one, other = ingresses = await follow(engines, ingresses=2)
    workers = [get_worker_id(engine.worker) for engine in engines]
    chosen = await one.select("r", PROMPT, workers)
    await other.learn(one.chosen)
    rank = Rank(str(chosen["worker_id"]))
    assert [ingress.load(rank) for ingress in ingresses] == [Load(100, 1, 7)] * 2
    # So the other one sends the next request elsewhere.
    elsewhere = await other.select("s", range(500, 600), workers)
    assert elsewhere["worker_id"] != chosen["worker_id"]
    for ingress in ingresses:
        ends: list[Any] = [("on_request_completed", (name,)) for name in "rs"]
        await ingress.tracker.on_lifecycle_events(ends)
        assert ingress.is_idle()
    assert await serve_all(ingresses, engines) > in_turn() + 0.03
    assert all(ingress.is_idle() for ingress in ingresses)


async def test_a_replica_that_leaves_takes_its_requests_with_it(
    follow: Start, engines: list[FakeEngine]
) -> None:
    (ingress,) = await follow(engines)
    worker = get_worker_id(engines[0].worker)
    await ingress.select("r", PROMPT, [worker])
    await ingress.follow(engines[1:])
    router = ingress.service.router
    assert router.ranks == (rank_of(engines[1]),)
    assert router.statistics()["bookings"]["cancelled"] == 1
    assert ingress.is_idle()
    with pytest.raises(RuntimeError, match="none of workers"):
        await ingress.select("s", PROMPT, [worker])


async def test_engines_that_hash_alike_prompts_differently_are_followed_alike(
    follow: Start,
) -> None:
    with FakeEngine("r0", seed=1) as one, FakeEngine("r1", seed=2, hash_form="bytes") as other:
        (ingress,) = await follow([one, other])
        for engine in (one, other):
            engine.serve(range(64))
            await ingress.applied(engine)
        match = ingress.service.client.match(list(range(64)))
        assert {m.rank: m.tokens for m in match} == {rank_of(one): 64, rank_of(other): 64}


async def test_each_dp_rank_of_a_worker_is_a_rank() -> None:
    with FakeEngine("dp", dp_rank=2) as two, FakeEngine("dp", dp_rank=3) as three:
        service = SelectionService()
        endpoints = {2: two.endpoint, 3: three.endpoint}
        await service.upsert_worker(worker_report(7, endpoints, block_size=16, size=2))
        await service.client.wait_live_async(timeout=PATIENCE)
        three.serve(range(96))
        await applied(service, Rank("7", 3), 1)
        request = {"selection_id": "r", "token_ids": list(range(96)), "allowed_worker_ids": [7]}
        chosen = await service.select_and_reserve(request)
        assert (chosen["worker_id"], chosen["dp_rank"]) == (7, 3)
        assert chosen["overlap"]["longest_matched"] == 80
        assert chosen["effective_prefill_tokens"] == 16
        again = await service.select_and_reserve(request)  # replaces the first
        await service.prefill_complete("r")
        for _ in range(2):
            service.add_output_block("r", decay_fraction=0.5)
        assert service.router.load(Rank("7", again["dp_rank"])) == Load(0, 1, 8)
        for _ in range(2):
            await service.free_reservation("r")
        await service.prefill_complete("r")
        assert is_idle(service)
        assert not service.ignored
        service.close()


def worker_report(worker_id: int, endpoints: dict[int, str], **options: Any) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "block_size": options.get("block_size", 16),
        "data_parallel_start_rank": min(endpoints),
        "data_parallel_size": options.get("size", 1),
        "kv_events_endpoints": endpoints,
        "replay_endpoint": options.get("replay"),
    }


def test_ranks_without_an_endpoint_follow_at_the_next_ports() -> None:
    service = SelectionService(dp_size=3)
    report = worker_report(1, {0: "tcp://10.0.0.1:5557"}, replay="tcp://10.0.0.1:6557")
    publishers = service._worker(report).publishers()
    assert [(p.dp_rank, p.endpoint, p.replay) for p in publishers] == [
        (rank, f"tcp://10.0.0.1:{5557 + rank}", f"tcp://10.0.0.1:{6557 + rank}")
        for rank in range(3)
    ]
    service.close()


def test_rays_router_finds_more_than_turns_do_and_every_ingress_has_all_load_back(
    cluster: None,
) -> None:
    """In a real cluster: two ingresses, two replicas."""
    pytest.importorskip("pyarrow", reason="Ray's KVAwareRouter needs it")
    server = serve.deployment(ray_llm_apps.LLMServer).options(
        num_replicas=2,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(
            request_router_class=KV_AWARE_ROUTER, request_routing_stats_period_s=0.1
        ),
        graceful_shutdown_timeout_s=0.1,
    )
    ingress = serve.deployment(ray_llm_apps.Ingress).options(
        name="LLMRouter",
        num_replicas=2,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=0.1,
    )
    handle: Any = serve.run(ingress.bind(server.bind()), name="llm", route_prefix=None)

    def states() -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = handle.broadcast("state").results(timeout_s=PATIENCE)
        return results

    until(lambda: [state["live"] for state in states()] == [2, 2])
    hits = tokens = 0
    for request in REQUESTS:
        served = handle.remote(list(request.token_ids), list(request.new_tokens))
        hit_tokens, prompt_tokens = served.result(timeout_s=PATIENCE)
        hits, tokens = hits + hit_tokens, tokens + prompt_tokens
    hit_rate = hits / tokens
    print(f"hit rate {hit_rate:.3f}, in turn {in_turn():.3f}")
    assert hit_rate > in_turn() + 0.03
    until(lambda: [state["busy"] for state in states()] == [0, 0])
    for state in states():
        assert state["service"] == "kvindex.routing.adapters.ray_llm"
        assert state["bookings"]["finished"] + state["bookings"]["cancelled"] > 0
    # Each of them has booked what it chose itself, and what the other one chose.
    assert sum(state["bookings"]["finished"] for state in states()) > len(REQUESTS)
    serve.delete("llm")
