"""A rollout server as verl sees one: a Ray actor that generates, here before a fake engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import ray

from kvindex import Worker
from kvindex.testing import FakeEngine


class Server:
    def __init__(self, num_blocks: int) -> None:
        self._engine = FakeEngine(num_blocks=num_blocks)
        self._hit_tokens = self._prompt_tokens = 0
        self.failures = 0

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> SimpleNamespace:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise ValueError("out of order")
        served = self._engine.serve(prompt_ids)
        self._hit_tokens += served.hit_tokens
        self._prompt_tokens += served.prompt_tokens
        # As verl's TokenOutput, without the seconds that it takes each actor to import verl.
        return SimpleNamespace(token_ids=[1, 2], stop_reason="completed", extra_fields={})

    async def fail(self, times: int) -> None:
        self.failures = times

    async def endpoints(self) -> tuple[str, str | None]:
        return self._engine.endpoint, self._engine.replay_endpoint

    async def tokens(self) -> tuple[int, int]:
        return self._hit_tokens, self._prompt_tokens


def worker_of(server_id: str, handle: Any) -> Worker:
    """Return where a server's events are: it says so itself."""
    endpoint, replay = ray.get(handle.endpoints.remote())
    return Worker(server_id, endpoint, replay=replay)
