"""The callback in LiteLLM's proxy, named in its configuration, over HTTP from client to engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("litellm.proxy.proxy_server", reason="litellm[proxy] is not installed")

import httpx
import litellm
import uvicorn
import yaml
from litellm.proxy.proxy_server import app

from kvindex import Client
from kvindex.routing import Router
from kvindex.routing.adapters.litellm import KVAwareCallback
from tests.live import PATIENCE
from tests.routing.adapters.openai_server import Server, tokens_of
from tests.routing.adapters.test_litellm_router import PROMPT, Fleet, deployment, run, until

pytestmark = [
    pytest.mark.adapter,
    pytest.mark.filterwarnings("ignore"),
]  # of LiteLLM and what it imports

HANDLERS = """
from tests.routing.adapters import test_litellm_proxy

callback = test_litellm_proxy.CALLBACKS.pop()
"""
CALLBACKS: list[KVAwareCallback] = []  # for the proxy, which imports what its configuration names


class Proxy(Fleet):
    """LiteLLM's proxy before servers, and an HTTP client of it."""

    def __init__(self, servers: list[Server], client: Client, http: httpx.AsyncClient) -> None:
        self.servers = servers
        self.client = client
        self.callback = CALLBACKS[-1]
        self.http = http

    async def post(self, prompt: str = PROMPT, **options: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=self.chat(prompt, **options))

    @staticmethod
    def chat(prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": "fake", "messages": messages, **options}

    @contextlib.asynccontextmanager
    async def stream(self, **options: Any) -> AsyncIterator[AsyncIterator[str]]:
        asked = self.chat(stream=True, **options)
        async with self.http.stream("POST", "/v1/chat/completions", json=asked) as response:
            yield (line async for line in response.aiter_lines() if line)


@contextlib.asynccontextmanager
async def proxy(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any
) -> AsyncIterator[Proxy]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [Server(f"vllm-{n}", **options) for n in range(2)]
        for server in servers:
            await stack.enter_async_context(server)
        client = stack.enter_context(Client([server.worker for server in servers]))
        await client.wait_live_async(timeout=PATIENCE)
        CALLBACKS.append(KVAwareCallback(Router(client, seed=1), tokens_of))
        key = f"sk-{secrets.token_hex(32)}"
        configure(monkeypatch, folder, servers, key)
        stack.callback(litellm.logging_callback_manager._reset_all_callbacks)
        url = await stack.enter_async_context(serve())
        http = httpx.AsyncClient(
            base_url=url, timeout=PATIENCE, headers={"Authorization": f"Bearer {key}"}
        )
        callbacks = [one for one in litellm.callbacks if isinstance(one, KVAwareCallback)]
        CALLBACKS.append(*callbacks)
        yield Proxy(servers, client, await stack.enter_async_context(http))


def configure(
    monkeypatch: pytest.MonkeyPatch, folder: Path, servers: list[Server], key: str
) -> None:
    (folder / "handlers.py").write_text(HANDLERS)
    configuration = {
        "model_list": [deployment(server) for server in servers],
        "litellm_settings": {"callbacks": ["handlers.callback"], "num_retries": 2},
        "router_settings": {"retry_after": 0},
        "general_settings": {"master_key": key},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(configuration))
    monkeypatch.setenv("CONFIG_FILE_PATH", str(path))


@contextlib.asynccontextmanager
async def serve() -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started or serving.done())
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


def test_the_proxy_routes_by_prefix_and_tells_what_was_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        async with proxy(monkeypatch, tmp_path, dp_size=2) as two:
            two.servers[1].engines[1].serve(tokens_of(two.chat()))
            await two.told()
            answer = (await two.post()).raise_for_status().json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 112
            async with two.stream() as lines:
                assert [line async for line in lines][-1] == "data: [DONE]"
            await two.idle()
            assert (two.servers[0].ranks, two.servers[1].ranks) == ([], [1, 1])
            assert two.ended() == {"finished": 2}
            reported = two.callback.router.statistics()["funnel"]["reported"]
            assert reported["requests"] == 2
            assert reported["delivered"] == reported["chosen"] == 2 * 112

    run(main())


def test_the_proxy_gives_the_load_of_failures_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        async with proxy(monkeypatch, tmp_path) as two:
            for server in two.servers:
                server.failures = 1
            assert (await two.post()).status_code == 200
            failed = sum(not server.failures for server in two.servers)
            assert two.ended() == {"cancelled": failed, "finished": 1}
            for server in two.servers:
                server.failures = 9
            assert (await two.post()).status_code == 500
            await two.idle()

    run(main())


def test_a_client_of_the_proxy_that_goes_away_leaves_no_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        async with proxy(monkeypatch, tmp_path) as two:
            for server in two.servers:
                server.held.clear()
            async with two.stream() as lines:
                await anext(aiter(lines))
                (rank,) = [r for r in two.client.ranks if two.callback.router.load(r).open_requests]
                assert two.callback.router.load(rank).queued_tokens == 0  # the first token is here
            await two.idle()
            assert two.ended() == {"cancelled": 1}

    run(main())
