"""The callback in LiteLLM's proxy, named in its configuration, over HTTP from client to engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("litellm.proxy.proxy_server", reason="litellm[proxy] is not installed")

import httpx
import litellm
import uvicorn
import yaml
from litellm.proxy.proxy_server import app

from kvindex.routing import Router
from kvindex.routing.adapters.litellm import KVAwareCallback
from tests.live import PATIENCE
from tests.routing.adapters.litellm_fleet import Fleet, chat, deployment, serve
from tests.routing.adapters.loop import run, until
from tests.routing.adapters.openai_server import Server, tokens_of

pytestmark = pytest.mark.adapter

HANDLERS = """
from tests.routing.adapters import test_litellm_proxy

callback = test_litellm_proxy.CALLBACKS.pop()
"""
CALLBACKS: list[KVAwareCallback] = []  # for the proxy, which imports what its configuration names
PATH = "/v1/chat/completions"


class Proxy(Fleet):
    """LiteLLM's proxy before servers, and an HTTP client of it."""

    http: httpx.AsyncClient

    async def post(self) -> httpx.Response:
        return await self.http.post(PATH, json=chat())

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[str]]:
        async with self.http.stream("POST", PATH, json=chat(stream=True)) as response:
            yield (line async for line in response.aiter_lines() if line)


Start = Callable[..., Awaitable[Proxy]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Return how to start LiteLLM's proxy before two servers."""

    async def begin(**server: Any) -> Proxy:
        servers, client = await serve(stack, 2, **server)
        CALLBACKS.append(KVAwareCallback(Router(client, seed=1), tokens_of))
        key = f"sk-{secrets.token_hex(32)}"
        configure(monkeypatch, tmp_path, servers, key)
        stack.callback(litellm.logging_callback_manager._reset_all_callbacks)
        url = await stack.enter_async_context(listen())
        (callback,) = (c for c in litellm.callbacks if isinstance(c, KVAwareCallback))
        proxy = Proxy(servers, client, callback)
        headers = {"Authorization": f"Bearer {key}"}
        http = httpx.AsyncClient(base_url=url, timeout=PATIENCE, headers=headers)
        proxy.http = await stack.enter_async_context(http)
        return proxy

    stack = contextlib.AsyncExitStack()
    yield begin
    run(stack.aclose())


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
async def listen() -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started or serving.done())
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def test_the_proxy_routes_by_prefix_and_reports_the_cached_tokens(start: Start) -> None:
    proxy = await start(dp_size=2)
    await proxy.warm(1, rank=1)
    answer = (await proxy.post()).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 112
    async with proxy.stream() as lines:
        assert [line async for line in lines][-1] == "data: [DONE]"
    await proxy.assert_ended(finished=2)
    assert [server.ranks for server in proxy.servers] == [[], [1, 1]]
    reported = proxy.router.statistics()["funnel"]["reported"]
    assert reported["requests"] == 2
    assert reported["delivered"] == reported["chosen"] == 2 * 112


async def test_the_proxy_releases_the_load_of_failures(start: Start) -> None:
    proxy = await start()
    for server in proxy.servers:
        server.failures = 1
    assert (await proxy.post()).status_code == 200
    failed = sum(not server.failures for server in proxy.servers)
    assert proxy.bookings() == {"cancelled": failed, "finished": 1}
    for server in proxy.servers:
        server.failures = 9
    assert (await proxy.post()).status_code == 500
    await until(lambda: "open" not in proxy.bookings())
    await proxy.assert_ended(**proxy.bookings())


async def test_a_client_of_the_proxy_that_leaves_its_stream_leaves_no_load(start: Start) -> None:
    proxy = await start()
    proxy.hold()
    async with proxy.stream() as lines:
        await anext(aiter(lines))
        (load,) = filter(None, (proxy.router.load(r).open_requests for r in proxy.client.ranks))
        assert load == 1
        assert all(not proxy.router.load(rank).queued_tokens for rank in proxy.client.ranks)
    await proxy.assert_ended(cancelled=1)
