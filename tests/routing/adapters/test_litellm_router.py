"""The callback in LiteLLM's own SDK Router, over HTTP, before engines that say what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("litellm", reason="the extra `litellm` is not installed")

import litellm
import openai
from litellm.integrations.custom_logger import CustomLogger

from kvindex import Client, Rank
from kvindex.routing import Router
from kvindex.routing.adapters.litellm import KVAwareCallback
from tests.live import PATIENCE, caught_up
from tests.routing.adapters.openai_server import Server, tokens_of

pytestmark = [
    pytest.mark.adapter,
    pytest.mark.filterwarnings("ignore"),
]  # of LiteLLM and what it imports

LOOP = asyncio.new_event_loop()
PROMPT = "Once upon a time there was a prompt of more than one block. " * 2


@contextlib.contextmanager
def callback_of(client: Client, **options: Any) -> Iterator[KVAwareCallback]:
    """Yield a callback that LiteLLM calls, and nothing else is called."""
    callback = KVAwareCallback(
        Router(client, seed=1), options.pop("tokenize", tokens_of), **options
    )
    litellm.callbacks = [callback]
    try:
        yield callback
    finally:
        litellm.logging_callback_manager._reset_all_callbacks()


def deployment(server: Server, **model_info: Any) -> dict[str, Any]:
    params = {"model": "openai/fake", "api_base": server.url, "api_key": "none"}
    info = {"id": server.name, **model_info}
    return {"model_name": "fake", "litellm_params": params, "model_info": info}


class Fleet:
    """LiteLLM's router before servers, with the callback and the client that it asks."""

    def __init__(self, servers: list[Server], client: Client, callback: KVAwareCallback) -> None:
        self.servers = servers
        self.client = client
        self.callback = callback
        self.litellm = self.router_of([deployment(server) for server in servers])

    @staticmethod
    def router_of(deployments: list[dict[str, Any]], **options: Any) -> Any:
        return litellm.Router(
            model_list=deployments, **{"num_retries": 0, "retry_after": 0, **options}
        )

    async def ask(self, prompt: str = PROMPT, **options: Any) -> Any:
        messages = [{"role": "user", "content": prompt}]
        return await self.litellm.acompletion(model="fake", messages=messages, **options)

    async def told(self) -> None:
        """Wait until every event of the engines is in the index."""
        engines = [engine for server in self.servers for engine in server.engines]
        await asyncio.to_thread(caught_up, self.client, *engines)

    def open(self) -> int:
        return int(self.callback.router.statistics()["bookings"]["open"])

    def ended(self) -> dict[str, int]:
        return {k: n for k, n in self.callback.router.statistics()["bookings"].items() if n}

    async def idle(self) -> None:
        """Wait until no load is left on any rank."""
        await until(lambda: self.open() == 0)
        for rank in self.client.ranks:
            assert self.callback.router.load(rank) == (0, 0, 0)


def run(test: Coroutine[Any, Any, Any]) -> Any:
    """Run a test in the one event loop that LiteLLM's logging lives in."""
    return LOOP.run_until_complete(asyncio.wait_for(test, 60.0))


async def until(reached: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not reached():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), PATIENCE)


@contextlib.asynccontextmanager
async def fleet(
    size: int = 2,
    *,
    first_rank: int = 0,
    dp_size: int = 1,
    num_blocks: int = 256,
    **options: Any,
) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            Server(f"vllm-{n}", first_rank=first_rank, dp_size=dp_size, num_blocks=num_blocks)
            for n in range(size)
        ]
        for server in servers:
            await stack.enter_async_context(server)
        client = stack.enter_context(Client([server.worker for server in servers]))
        await client.wait_live_async(timeout=PATIENCE)
        callback = stack.enter_context(callback_of(client, **options))
        yield Fleet(servers, client, callback)


def test_a_request_goes_to_the_deployment_that_holds_its_prompt() -> None:
    async def main() -> None:
        async with fleet(3) as three:
            for server in three.servers[1:]:
                server.engines[0].serve(tokens_of({"messages": [{"content": server.name * 20}]}))
            await three.told()
            for name, server in zip(("vllm-1", "vllm-2"), three.servers[1:], strict=True):
                answer = await three.ask(name * 20)
                assert server.ranks == [0]
                assert answer.usage.prompt_tokens_details.cached_tokens == 112
            assert three.callback.counts == {"routed": 2}
            await three.idle()

    run(main())


def test_what_the_engine_found_cached_reaches_the_funnel() -> None:
    async def main() -> None:
        async with fleet() as two:
            for _ in range(2):
                await two.ask()
                await two.idle()
                await two.told()
            stream = await two.ask(stream=True, stream_options={"include_usage": True})
            async for _ in stream:
                pass
            await two.idle()
            funnel = two.callback.router.statistics()["funnel"]["reported"]
            assert funnel["requests"] == 3
            assert funnel["delivered"] == funnel["chosen"] == 2 * (len(PROMPT) // 16 * 16)

    run(main())


def test_what_the_engine_did_not_read_or_says_of_another_sibling_is_no_delivery() -> None:
    async def main() -> None:
        async with fleet() as two:
            await two.ask(extra_body={"prompt_logprobs": 0})  # the engine reads no cache
            await two.idle()
            assert two.callback.counts == {"routed": 1}
            assert two.callback.router.statistics()["funnel"]["finished"]["requests"] == 0
            await two.ask(n=2)  # the last answer finds the first one's blocks
            await two.idle()
            funnel = two.callback.router.statistics()["funnel"]
            assert (funnel["finished"]["requests"], funnel["reported"]["requests"]) == (1, 0)

    run(main())


def test_the_load_is_on_the_rank_until_the_answer_is_whole() -> None:
    async def main() -> None:
        async with fleet() as two:
            for server in two.servers:
                server.held.clear()
            asked = [asyncio.create_task(two.ask()) for _ in range(4)]
            for server in two.servers:  # the load spreads what nobody holds
                await server.arrived.acquire()
                await server.arrived.acquire()
            loads = [two.callback.router.load(rank) for rank in two.client.ranks]
            assert [load.open_requests for load in loads] == [2, 2]
            assert [load.queued_tokens for load in loads] == [2 * len(PROMPT)] * 2
            for server in two.servers:
                server.held.set()
            await asyncio.gather(*asked)
            await two.idle()
            assert two.ended() == {"finished": 4}

    run(main())


def test_a_stream_gives_its_prefill_back_with_its_first_token() -> None:
    async def main() -> None:
        async with fleet(1) as one:
            one.servers[0].held.clear()
            stream = await one.ask(stream=True)
            chunks = [await anext(stream)]
            load = one.callback.router.load("vllm-0")
            assert (load.queued_tokens, load.open_requests) == (0, 1)
            one.servers[0].held.set()
            chunks += [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == "a b"
            await one.idle()
            assert one.ended() == {"finished": 1}

    run(main())


def test_an_attempt_that_fails_gives_its_load_back_before_the_next_one() -> None:
    async def main() -> None:
        async with fleet() as two:
            two.litellm = two.router_of([deployment(s) for s in two.servers], num_retries=3)
            for server in two.servers:
                server.failures = 1
            await two.ask()
            assert two.ended()["finished"] == 1
            assert two.ended()["cancelled"] == sum(not server.failures for server in two.servers)
            await two.idle()

    run(main())


def test_a_request_that_fails_for_good_leaves_no_load() -> None:
    async def main() -> None:
        async with fleet() as two:
            for server in two.servers:
                server.failures = 9
            with pytest.raises(litellm.InternalServerError):
                await two.ask()
            await two.idle()
            assert two.ended() == {"cancelled": 1}

    run(main())


def test_a_stream_that_breaks_off_leaves_no_load() -> None:
    async def main() -> None:
        async with fleet(1) as one:
            (server,) = one.servers
            server.held.clear()
            server.breaks = 1
            stream = await one.ask(stream=True)
            await anext(stream)
            server.held.set()
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
            await one.idle()
            assert one.ended() == {"cancelled": 1}

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_cancelled_leaves_no_load(stream: bool) -> None:
    async def main() -> None:
        async with fleet(1) as one:
            (server,) = one.servers
            server.held.clear()

            async def ask() -> None:
                answer = await one.ask(stream=stream)
                async for _ in answer:
                    pass

            asked = asyncio.create_task(ask())
            await server.arrived.acquire()
            assert one.open() == 1
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            del asked
            gc.collect()  # a stream is part of a cycle
            await one.idle()
            assert one.ended() == {"cancelled": 1}

    run(main())


def test_a_stream_that_is_left_leaves_no_load() -> None:
    async def main() -> None:
        async with fleet(1) as one:
            (server,) = one.servers
            server.held.clear()
            stream = await one.ask(stream=True)
            await anext(stream)
            await stream.aclose()
            assert one.open() == 1
            del stream
            gc.collect()
            await one.idle()
            assert one.ended() == {"cancelled": 1}

    run(main())


@pytest.mark.parametrize("first_rank", [0, 4], ids=["of-the-whole", "of-a-node"])
def test_the_header_names_the_rank_of_a_worker_that_has_several(first_rank: int) -> None:
    async def main() -> None:
        async with fleet(2, first_rank=first_rank, dp_size=2) as two:
            two.servers[1].engines[1].serve([ord(character) for character in PROMPT])
            await two.told()
            await two.ask(extra_headers={"X-Of-The-User": "1"})
            assert (two.servers[0].ranks, two.servers[1].ranks) == ([], [1])
            assert two.servers[1].hit_tokens == len(PROMPT) // 16 * 16
            await two.idle()

    run(main())


def test_a_deployment_can_name_its_worker_or_its_rank() -> None:
    async def main() -> None:
        async with fleet(2, ranks={"second": Rank("vllm-1")}) as two:
            first, second = two.servers
            two.litellm = two.router_of(
                [
                    deployment(first, id="first", kvindex_rank="vllm-0/0"),
                    deployment(second, id="second"),
                ]
            )
            for server in two.servers:
                server.engines[0].serve(tokens_of({"messages": [{"content": server.name * 20}]}))
            await two.told()
            for server in two.servers:
                await two.ask(server.name * 20)
                assert server.ranks == [0]
            assert two.callback.counts == {"routed": 2}

    run(main())


async def nothing(request: Mapping[str, Any]) -> None:
    return None


def broken(request: Mapping[str, Any]) -> list[int]:
    raise RuntimeError("no vocabulary")


@pytest.mark.parametrize(
    ("tokenize", "ids", "why"),
    [
        (nothing, ("vllm-0", "vllm-1"), "no tokens"),
        (broken, ("vllm-0", "vllm-1"), "RuntimeError"),
        (lambda request: [0.5] * 64, ("vllm-0", "vllm-1"), "TokenError"),
        (tokens_of, ("vllm-0", "unheard-of"), "UnknownRankError"),
    ],
    ids=["no-tokens", "an-error", "no-ints", "an-unknown-deployment"],
)
def test_where_it_cannot_choose_litellm_does(tokenize: Any, ids: tuple[str, ...], why: str) -> None:
    async def main() -> None:
        async with fleet(2, tokenize=tokenize) as two:
            pairs = zip(two.servers, ids, strict=True)
            two.litellm = two.router_of([deployment(server, id=name) for server, name in pairs])
            two.servers[0].engines[0].serve(tokens_of({"messages": [{"content": PROMPT}]}))
            await two.told()
            random.seed(4)  # LiteLLM draws deployments
            for _ in range(20):
                await two.ask()
            assert all(server.ranks for server in two.servers)
            assert two.callback.counts == {why: 20}
            assert two.ended() == {}

    run(main())


def test_two_callbacks_of_one_process_each_hear_of_their_own_streams() -> None:
    async def main() -> None:
        async with fleet(1) as one:
            # LiteLLM keeps one logger of those that it takes for the same.
            other = KVAwareCallback(Router(one.client), nothing)
            litellm.callbacks = [other, one.callback]
            stream = await one.ask(stream=True)
            async for _ in stream:
                pass
            await one.idle()
            assert one.ended() == {"finished": 1}

    run(main())


def test_tokenizing_may_be_awaited() -> None:
    async def in_a_thread(request: Mapping[str, Any]) -> list[int]:
        return await asyncio.to_thread(tokens_of, request)

    async def main() -> None:
        async with fleet(tokenize=in_a_thread) as two:
            await two.ask()
            assert two.callback.counts == {"routed": 1}

    run(main())


def test_the_tokenizer_sees_the_tools_and_the_salt_is_part_of_the_prompt() -> None:
    seen: list[Mapping[str, Any]] = []

    def tokenize(request: Mapping[str, Any]) -> list[int]:
        seen.append(request)
        return tokens_of(request)

    async def main() -> None:
        async with fleet(tokenize=tokenize) as two:
            two.servers[0].engines[0].serve([ord(character) for character in PROMPT], salt="mine")
            await two.told()
            tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
            await two.ask(tools=tools, extra_body={"cache_salt": "mine"})
            assert seen[0]["tools"] == tools
            assert seen[0]["model"] == "fake"
            assert two.callback.router.statistics()["funnel"]["finished"]["chosen"] > 0

    run(main())


def test_an_answer_of_litellms_own_cache_is_no_news_of_the_engine() -> None:
    async def main() -> None:
        async with fleet(1) as one:
            litellm.cache = litellm.Cache(type="local")
            try:
                for _ in range(2):
                    await one.ask(caching=True)
                    await one.idle()
            finally:
                litellm.cache = None
            assert len(one.servers[0].ranks) == 1
            assert one.ended() == {"finished": 1, "cancelled": 1}

    run(main())


def test_what_litellm_sends_elsewhere_in_the_end_is_not_booked() -> None:
    class Contrary(CustomLogger):
        other: list[Any]

        async def async_filter_deployments(self, **asked: Any) -> list[Any]:
            return self.other

    async def main() -> None:
        async with fleet() as two:
            two.servers[0].engines[0].serve([ord(character) for character in PROMPT])
            await two.told()
            contrary = Contrary()
            contrary.other = [deployment(two.servers[1])]
            litellm.callbacks.append(contrary)
            await two.ask()
            assert two.servers[1].ranks == [0]
            assert two.callback.counts == {"routed": 1, "overruled": 1}
            assert two.ended() == {"cancelled": 1}

    run(main())


def test_calls_at_once_may_share_their_metadata() -> None:
    async def main() -> None:
        async with fleet() as two:
            for server in two.servers:
                server.held.clear()
            metadata = {"user": "one"}
            asked = [asyncio.create_task(two.ask(metadata=metadata)) for _ in range(2)]
            for server in two.servers:
                await server.arrived.acquire()
            assert two.open() == 2
            for server in two.servers:
                server.held.set()
            await asyncio.gather(*asked)
            await two.idle()
            assert two.ended() == {"finished": 2}

    run(main())


def test_it_finds_more_in_the_caches_than_litellms_default() -> None:
    async def hit_rate(with_callback: bool) -> float:
        async with fleet(4, num_blocks=96) as four:
            if not with_callback:
                litellm.callbacks = []
            chance = random.Random(5)
            chats = [f"{n} is the system prompt of this chat. " * 6 for n in range(16)]
            for _ in range(160):
                await four.ask(chance.choice(chats))
                await four.told()
            assert with_callback is bool(four.callback.counts)
            servers = four.servers
            return sum(s.hit_tokens for s in servers) / sum(s.prompt_tokens for s in servers)

    random.seed(6)  # LiteLLM draws deployments
    by_default, routed = (run(hit_rate(with_callback)) for with_callback in (False, True))
    print(f"hit rate {by_default:.3f} by default, {routed:.3f} with the callback")
    assert routed > by_default + 0.2


def test_many_requests_at_once_of_all_fates_leave_no_load() -> None:
    async def main() -> None:
        async with fleet(3) as three:
            fates: Counter[str] = Counter()

            async def one(number: int) -> None:
                stream = number % 2 == 0
                asked = asyncio.create_task(three.ask(f"{number % 7} {PROMPT}", stream=stream))
                if number % 7 == 1:
                    three.servers[number % 3].failures += 1
                if number % 4 == 0:
                    await asyncio.sleep(0)
                    asked.cancel()
                try:
                    answer = await asked
                    if stream and number % 3:
                        async for _ in answer:
                            pass
                    fates["answered"] += 1
                except openai.APIError:
                    fates["failed"] += 1
                except asyncio.CancelledError:
                    fates["cancelled"] += 1

            await asyncio.gather(*map(one, range(60)))
            await until(lambda: gc.collect() >= 0 and three.open() == 0)
            await three.idle()
            assert fates.total() == 60
            assert min(fates["answered"], fates["failed"], fates["cancelled"]) > 0

    run(main())
