"""Ray's own `KVTokenTracker`, unchanged, over kvindex's `SelectionService`: no cluster needed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs kvindex[ray]")

from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import (
    KVTokenTracker,
    get_worker_id,
)

from kvindex import Rank
from kvindex.routing import Load
from kvindex.routing.adapters.ray_llm import SelectionService, install
from kvindex.testing import FakeEngine
from tests.live import PATIENCE
from tests.routing.adapters.traffic import BLOCKS, REQUESTS, in_turn

pytestmark = pytest.mark.adapter


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(f"r{i}", num_blocks=BLOCKS)) for i in range(2)]


@pytest.fixture
def make_tracker(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[int], KVTokenTracker]]:
    """Return how to make a tracker without a Serve controller: the test tells it of replicas."""
    monkeypatch.setitem(sys.modules, "dynamo.llm", None)
    install()
    monkeypatch.setattr(KVTokenTracker, "_start_replica_tracking", lambda tracker: None)
    with ExitStack() as stack:

        def make(ingress: int = 0) -> KVTokenTracker:
            tracker = KVTokenTracker(ingress_replica_rank=ingress)
            stack.callback(tracker._svc.close)
            return tracker

        yield make


def targets(engines: Sequence[FakeEngine]) -> SimpleNamespace:
    """Return what Ray's controller tells of running replicas."""
    return SimpleNamespace(
        running_replicas=[
            SimpleNamespace(
                replica_id=SimpleNamespace(
                    unique_id=engine.worker, to_full_id_str=lambda name=engine.worker: name
                ),
                routing_stats={
                    "kv_event_metadata": {
                        "endpoint": engine.endpoint,
                        "replay_endpoint": engine.replay_endpoint,
                        "block_size": engine.block_size,
                        "max_num_batched_tokens": 8_192,
                        "dp_rank": engine.rank.dp_rank,
                    }
                },
            )
            for engine in engines
        ]
    )


def rank_of(engine: FakeEngine) -> Rank:
    return Rank(str(get_worker_id(engine.worker)), engine.rank.dp_rank)


async def follow(tracker: KVTokenTracker, engines: Sequence[FakeEngine]) -> SelectionService:
    tracker._on_deployment_targets(targets(engines))
    await asyncio.gather(*tracker._pending_tasks)
    service: SelectionService = tracker._svc
    await service.client.wait_live_async(timeout=PATIENCE)
    return service


async def applied(service: SelectionService, engine: FakeEngine) -> None:
    """Wait until a service's index has all that an engine has published."""
    last = engine.published - 1 if engine.published else None
    await asyncio.to_thread(
        service.client.wait_for,
        lambda all_of: all_of[rank_of(engine)].seq == last,
        timeout=PATIENCE,
    )


async def serve_all(
    trackers: Sequence[KVTokenTracker], engines: Sequence[FakeEngine], at_once: int = 4
) -> float:
    """Serve the workload as Ray's router and engines would; return the hit rate."""
    by_worker = {get_worker_id(engine.worker): engine for engine in engines}
    hits = tokens = 0
    waiting = list(enumerate(REQUESTS))
    while waiting:
        batch, waiting = waiting[:at_once], waiting[at_once:]
        for number, request in batch:
            name, chooser = f"request-{number}", trackers[number % len(trackers)]
            told: list[Any] = []
            chooser._reservation_forwarder = SimpleNamespace(report=told.append)
            chosen = await chooser.select_worker(name, list(request.token_ids), list(by_worker))
            for tracker in trackers:
                await tracker.on_reservations_created(told)
                await tracker._reservation_updates.join()
            served = by_worker[chosen["worker_id"]].serve(
                request.token_ids, new_tokens=request.new_tokens
            )
            hits, tokens = hits + served.hit_tokens, tokens + served.prompt_tokens
        for number, request in batch:
            name = f"request-{number}"
            events: list[Any] = [("on_prefill_complete", (name,))]
            events += [("on_decode_progress", (name, len(request.new_tokens)))]
            events += [("on_request_completed", (name,))]
            for tracker in trackers:
                await tracker.on_lifecycle_events(events)
        for tracker in trackers:
            for engine in engines:
                await applied(tracker._svc, engine)
    return hits / tokens


def idle(service: SelectionService) -> bool:
    loads = [service.router.load(rank) for rank in service.router.ranks]
    return loads == [Load()] * len(loads) and not service._bookings


def test_rays_tracker_routes_by_prefix_and_all_load_returns(
    make_tracker: Callable[..., KVTokenTracker], engines: list[FakeEngine]
) -> None:
    async def main() -> None:
        tracker = make_tracker()
        service = await follow(tracker, engines)
        assert set(service.router.ranks) == {rank_of(engine) for engine in engines}
        hit_rate = await serve_all([tracker], engines)
        print(f"hit rate {hit_rate:.3f}, in turn {in_turn():.3f}")
        assert hit_rate > in_turn() + 0.03
        assert idle(service)
        assert service.router.statistics()["bookings"]["finished"] == len(REQUESTS)

    asyncio.run(main())


def test_every_ingress_knows_the_load_that_the_others_gave(
    make_tracker: Callable[..., KVTokenTracker], engines: list[FakeEngine]
) -> None:
    async def main() -> None:
        one, other = trackers = [make_tracker(ingress) for ingress in range(2)]
        services = [await follow(tracker, engines) for tracker in trackers]
        told: list[Any] = []
        one._reservation_forwarder = SimpleNamespace(report=told.append)
        workers = [get_worker_id(engine.worker) for engine in engines]
        chosen = await one.select_worker("r", list(range(100)), workers)
        await other.on_reservations_created(told)
        await other._reservation_updates.join()
        rank = Rank(str(chosen["worker_id"]))
        assert [service.router.load(rank) for service in services] == [Load(100, 1, 7)] * 2
        # So the other one sends the next request elsewhere.
        elsewhere = await other.select_worker("s", list(range(500, 600)), workers)
        assert elsewhere["worker_id"] != chosen["worker_id"]
        for tracker in trackers:
            await tracker.on_lifecycle_events(
                [("on_request_completed", ("r",)), ("on_request_completed", ("s",))]
            )
        assert all(map(idle, services))
        assert await serve_all(trackers, engines) > in_turn() + 0.03
        assert all(map(idle, services))

    asyncio.run(main())


def test_a_replica_that_goes_takes_its_requests_with_it(
    make_tracker: Callable[..., KVTokenTracker], engines: list[FakeEngine]
) -> None:
    async def main() -> None:
        tracker = make_tracker()
        service = await follow(tracker, engines)
        worker = get_worker_id(engines[0].worker)
        await tracker.select_worker("r", list(range(100)), [worker])
        tracker._on_deployment_targets(targets(engines[1:]))
        await asyncio.gather(*tracker._pending_tasks)
        assert service.router.ranks == (rank_of(engines[1]),)
        assert service.router.statistics()["bookings"]["cancelled"] == 1
        assert idle(service)
        with pytest.raises(RuntimeError, match="none of workers"):
            await tracker.select_worker("s", list(range(100)), [worker])

    asyncio.run(main())


def test_engines_that_hash_alike_prompts_differently_are_followed_alike(
    make_tracker: Callable[..., KVTokenTracker],
) -> None:
    async def main() -> None:
        with FakeEngine("r0", seed=1) as one, FakeEngine("r1", seed=2, hash_form="bytes") as other:
            service = await follow(make_tracker(), [one, other])
            for engine in (one, other):
                engine.serve(range(64))
                await applied(service, engine)
            match = service.client.match(list(range(64)))
            assert {found.rank: found.tokens for found in match} == {
                rank_of(one): 64,
                rank_of(other): 64,
            }

    asyncio.run(main())


def test_each_dp_rank_of_a_worker_is_a_rank() -> None:
    async def main() -> None:
        with FakeEngine("dp", dp_rank=2) as two, FakeEngine("dp", dp_rank=3) as three:
            service = SelectionService()
            await service.upsert_worker(
                {
                    "worker_id": 7,
                    "block_size": 16,
                    "data_parallel_start_rank": 2,
                    "data_parallel_size": 2,
                    "kv_events_endpoints": {2: two.endpoint, 3: three.endpoint},
                    "replay_endpoint": None,
                }
            )
            await service.client.wait_live_async(timeout=PATIENCE)
            three.serve(range(96))
            await asyncio.to_thread(
                service.client.wait_for,
                lambda all_of: all_of[Rank("7", 3)].seq == 0,
                timeout=PATIENCE,
            )
            request = {"selection_id": "r", "token_ids": list(range(96)), "allowed_worker_ids": [7]}
            chosen = await service.select_and_reserve(request)
            assert (chosen["worker_id"], chosen["dp_rank"]) == (7, 3)
            assert chosen["overlap"]["longest_matched"] == 80
            assert chosen["effective_prefill_tokens"] == 16
            again = await service.select_and_reserve(request)  # replaces the first
            await service.prefill_complete("r")
            for _ in range(2):
                service.add_output_block("r", decay_fraction=0.5)
            rank = Rank("7", again["dp_rank"])
            assert service.router.load(rank) == Load(0, 1, 8)
            await service.free_reservation("r")
            await service.free_reservation("r")
            await service.prefill_complete("r")
            assert idle(service)
            assert not service.ignored
            service.close()

    asyncio.run(main())


def test_ranks_without_an_endpoint_follow_at_the_next_ports() -> None:
    service = SelectionService(dp_size=3)
    told = {
        "worker_id": 1,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "kv_events_endpoints": {0: "tcp://10.0.0.1:5557"},
        "replay_endpoint": "tcp://10.0.0.1:6557",
    }
    found = service._worker(told).publishers()
    assert [(one.dp_rank, one.endpoint, one.replay) for one in found] == [
        (rank, f"tcp://10.0.0.1:{5557 + rank}", f"tcp://10.0.0.1:{6557 + rank}")
        for rank in range(3)
    ]
    service.close()
