"""An OpenAI-compatible server before fake engines: real HTTP, a real prefix cache, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from aiohttp import web

from kvindex import Worker
from kvindex.testing import FakeEngine


def tokens_of(request: Mapping[str, Any]) -> list[int]:
    """Return a chat's token ids: its characters. It stands for a model's own chat template."""
    return [ord(character) for message in request["messages"] for character in message["content"]]


class Server:
    """One worker with DP ranks behind one HTTP port; requests name a rank by vLLM's header.

    Attributes:
        ranks: for each request the number that its header named: of the DP rank in this server.
        failures: how many of the next requests fail.
        breaks: how many of the next streams break off in the middle.
        held: while it is cleared, answers and streams wait in the middle.
        arrived: released once for each request.
    """

    def __init__(
        self, worker: str, *, first_rank: int = 0, dp_size: int = 1, num_blocks: int = 256
    ) -> None:
        ranks = range(first_rank, first_rank + dp_size)
        self.engines = [FakeEngine(worker, dp_rank=r, num_blocks=num_blocks) for r in ranks]
        self.name = worker
        self.ranks: list[int] = []
        self.failures = self.breaks = 0
        self.hit_tokens = self.prompt_tokens = 0
        self.held = asyncio.Event()
        self.held.set()
        self.arrived = asyncio.Semaphore(0)
        self._runner: web.AppRunner | None = None

    @property
    def worker(self) -> Worker:
        return Worker(
            self.name,
            {engine.rank.dp_rank: engine.endpoint for engine in self.engines},
            replay={e.rank.dp_rank: e.replay_endpoint or "" for e in self.engines},
        )

    @property
    def url(self) -> str:
        assert self._runner is not None
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.held.set()
        assert self._runner is not None
        await self._runner.cleanup()
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rank = int(request.headers.get("X-data-parallel-rank", 0))  # the real ones draw one
        self.ranks.append(rank)
        self.arrived.release()
        if self.failures:
            self.failures -= 1
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        served = self.engines[rank].serve(tokens_of(body))
        self.prompt_tokens += served.prompt_tokens
        self.hit_tokens += served.hit_tokens
        usage = {
            "prompt_tokens": served.prompt_tokens,
            "completion_tokens": 2,
            "total_tokens": served.prompt_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": served.hit_tokens},
        }
        if body.get("stream"):
            return await self._stream(request, usage)
        await self.held.wait()
        message = {"role": "assistant", "content": "a b"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {**_ENVELOPE, "object": "chat.completion", "choices": [choice], "usage": usage}
        return web.json_response(answer)

    async def _stream(self, request: web.Request, usage: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await _send(response, [_delta({"role": "assistant", "content": "a "})])
        await self.held.wait()
        if self.breaks:
            self.breaks -= 1
            assert request.transport is not None
            request.transport.abort()
            return response
        await _send(response, [_delta({"content": "b"})])
        await _send(response, [_delta({}, finish_reason="stop")])
        await _send(response, [], usage=usage)
        await response.write(b"data: [DONE]\n\n")
        return response


_ENVELOPE = {"id": "answer", "created": 1, "model": "fake"}


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


async def _send(response: web.StreamResponse, choices: list[Any], **more: Any) -> None:
    chunk = {**_ENVELOPE, "object": "chat.completion.chunk", "choices": choices, **more}
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
