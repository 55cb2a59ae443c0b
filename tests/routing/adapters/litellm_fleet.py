"""LiteLLM's router before servers, with the callback and the client that chooses for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import litellm

from kvindex import Client
from kvindex.routing import Router
from kvindex.routing.adapters.litellm import KVAwareCallback
from tests.live import PATIENCE, caught_up
from tests.routing.adapters.loop import until
from tests.routing.adapters.openai_server import Server, tokens_of

PROMPT = "Once upon a time there was a prompt of more than one block. " * 2
HELD = len(PROMPT) // 16 * 16


def chat(prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": prompt}], **options}


def deployment(server: Server, **model_info: Any) -> dict[str, Any]:
    params = {"model": "openai/fake", "api_base": server.url, "api_key": "none"}
    info = {"id": server.name, **model_info}
    return {"model_name": "fake", "litellm_params": params, "model_info": info}


class Fleet:
    def __init__(self, servers: list[Server], client: Client, callback: KVAwareCallback) -> None:
        self.servers = servers
        self.client = client
        self.callback = callback
        self.router = callback.router

    def deploy(self, *deployments: dict[str, Any], **options: Any) -> None:
        """Make LiteLLM's router, with a deployment for each server by default."""
        made = list(deployments) or [deployment(server) for server in self.servers]
        options = {"num_retries": 0, "retry_after": 0, **options}
        self.litellm = litellm.Router(model_list=made, **options)

    async def ask(self, prompt: str = PROMPT, **options: Any) -> Any:
        return await self.litellm.acompletion(**chat(prompt, **options))

    async def read(self, prompt: str = PROMPT, **options: Any) -> list[Any]:
        """Ask for a stream and read it to its end."""
        return [chunk async for chunk in await self.ask(prompt, stream=True, **options)]

    async def warm(self, server: int, prompt: str = PROMPT, *, rank: int = 0, **keys: Any) -> None:
        """Serve a prompt on a rank, and wait until the index holds its blocks."""
        self.servers[server].engines[rank].serve(tokens_of(chat(prompt)), **keys)
        await self.follow()

    async def follow(self) -> None:
        """Wait until every event of the engines is in the index."""
        engines = [engine for server in self.servers for engine in server.engines]
        await asyncio.to_thread(caught_up, self.client, *engines)

    def hold(self) -> None:
        for server in self.servers:
            server.held.clear()

    def release(self) -> None:
        for server in self.servers:
            server.held.set()

    def bookings(self) -> dict[str, int]:
        """Return how many bookings are open or ended, without zeros."""
        return {stage: n for stage, n in self.router.statistics()["bookings"].items() if n}

    async def assert_ended(self, **ended: int) -> None:
        """Wait until no load is left on any rank; check how the bookings ended."""
        await until(lambda: "open" not in self.bookings())
        assert all(self.router.load(rank) == (0, 0, 0) for rank in self.client.ranks)
        assert self.bookings() == ended


Start = Callable[..., Awaitable[Fleet]]
"""The fixture `start`: `start` below, without its stack."""


async def serve(stack: contextlib.AsyncExitStack, size: int, **server: Any) -> Any:
    """Start servers, and a client that follows their engines."""
    servers = [Server(f"vllm-{n}", **server) for n in range(size)]
    for each in servers:
        await stack.enter_async_context(each)
    client = stack.enter_context(Client([each.worker for each in servers]))
    await client.wait_live_async(timeout=PATIENCE)
    return servers, client


async def start(
    stack: contextlib.AsyncExitStack, size: int = 2, *, server: Any = None, **options: Any
) -> Fleet:
    servers, client = await serve(stack, size, **(server or {}))
    callback = stack.enter_context(_callback_of(client, **options))
    fleet = Fleet(servers, client, callback)
    fleet.deploy()
    return fleet


@contextlib.contextmanager
def _callback_of(
    client: Client, tokenize: Any = tokens_of, **options: Any
) -> Iterator[KVAwareCallback]:
    """Yield a callback that LiteLLM calls, and nothing else is called."""
    callback = KVAwareCallback(Router(client, seed=1), tokenize, **options)
    litellm.callbacks = [callback]
    try:
        yield callback
    finally:
        litellm.logging_callback_manager._reset_all_callbacks()
