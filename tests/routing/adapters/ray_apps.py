"""Deployments for the tests with a real Ray: replicas that run fake engines."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray import serve
from ray.serve.request_router import PendingRequest

from kvindex.testing import FakeEngine
from tests.routing.adapters.traffic import BLOCKS


class Engine:
    """A replica: engines that publish what they hold, one for each DP rank, and tell Ray where."""

    def __init__(self, dp_size: int = 1) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        self.engines = [
            FakeEngine(self.name, dp_rank=rank, num_blocks=BLOCKS) for rank in range(dp_size)
        ]
        self.may_end = asyncio.Event()

    def record_routing_stats(self) -> dict[str, Any]:
        return {
            "kvindex": {
                "endpoint": [engine.endpoint for engine in self.engines],
                "replay": [engine.replay_endpoint for engine in self.engines],
            }
        }

    async def __call__(self, request: dict[str, Any], dp_rank: int = 0) -> dict[str, Any]:
        engine = self.engines[dp_rank]
        served = engine.serve(request["token_ids"], new_tokens=request.get("new_tokens", ()))
        if request.get("hold"):  # until somebody calls `release`, before or after it arrives
            await self.may_end.wait()
        return {
            "worker": self.name,
            "dp_rank": dp_rank,
            "published": engine.published,
            "hit_tokens": served.hit_tokens,
            "prompt_tokens": served.prompt_tokens,
        }

    async def release(self) -> None:
        self.may_end.set()

    async def do_nothing(self) -> None:
        pass

    async def die(self, request: dict[str, Any]) -> None:
        # After the answer: Ray sends a request again, elsewhere, if a replica dies before it said
        # that it takes it.
        asyncio.get_running_loop().call_later(0.2, os._exit, 1)


def token_ids_in_vain(request: PendingRequest) -> list[int]:
    raise ValueError("no tokenizer today")
