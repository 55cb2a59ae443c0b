"""A deployment as Ray Serve LLM's: engines, and ingresses with Ray's own token trackers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import (
    build_kv_token_tracker,
    get_llm_router_handle,
)
from ray.serve.context import _get_serve_request_context

from kvindex.testing import FakeEngine
from tests.live import PATIENCE
from tests.routing.adapters.traffic import BLOCKS


def kv_event_metadata(engine: FakeEngine) -> dict[str, Any]:
    """Return the report of Ray's own LLM servers on their engine."""
    return {
        "kv_event_metadata": {
            "endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "block_size": engine.block_size,
            "max_num_batched_tokens": 8_192,
            "dp_rank": engine.rank.dp_rank,
        }
    }


def events_of(request: str, new_tokens: int) -> list[Any]:
    """Return the events of a request's life."""
    progress = ("on_decode_progress", (request, new_tokens))
    return [("on_prefill_complete", (request,)), progress, ("on_request_completed", (request,))]


class LLMServer:
    """A replica with one engine, which notifies every ingress of each request's life."""

    def __init__(self) -> None:
        self.engine = FakeEngine(num_blocks=BLOCKS)

    def record_routing_stats(self) -> dict[str, Any]:
        return kv_event_metadata(self.engine)

    async def __call__(
        self, request_token_ids: list[int], new_tokens: list[int]
    ) -> tuple[int, int]:
        name = _get_serve_request_context().request_id
        served = self.engine.serve(request_token_ids, new_tokens=new_tokens)
        events = events_of(name, len(new_tokens))
        sent = get_llm_router_handle().broadcast("on_lifecycle_events", events)
        await sent.results_async(timeout_s=PATIENCE)
        return served.hit_tokens, served.prompt_tokens


class Ingress:
    """What Ray's LLMRouter does with tokens, without its HTTP and without vLLM's tokenizer."""

    async def __init__(self, server: Any) -> None:  # type: ignore[misc]
        config: Any = SimpleNamespace(experimental_configs={})
        self.tracker = build_kv_token_tracker(config, server.deployment_id)
        self.tracker.start_reservation_broadcast(get_llm_router_handle())
        self.server = server
        self.server._init()

    async def __call__(self, token_ids: list[int], new_tokens: list[int]) -> tuple[int, int]:
        served: tuple[int, int] = await self.server.remote(
            request_token_ids=token_ids, new_tokens=new_tokens
        )
        return served

    async def on_lifecycle_events(self, batch: list[Any]) -> None:
        await self.tracker.on_lifecycle_events(batch)

    async def on_reservations_created(self, batch: list[Any]) -> None:
        await self.tracker.on_reservations_created(batch)

    async def state(self) -> dict[str, Any]:
        service = self.tracker._svc
        loads = [service.router.load(rank) for rank in service.router.ranks]
        return {
            "service": type(service).__module__,
            "live": len(service.client.live_ranks()),
            "busy": sum(load != (0, 0, 0) for load in loads),
            "bookings": service.router.statistics()["bookings"],
        }
