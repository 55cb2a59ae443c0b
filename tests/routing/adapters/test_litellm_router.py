"""The callback in LiteLLM's own SDK Router, over HTTP: which deployment gets a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("litellm", reason="the extra `litellm` is not installed")

import litellm
from litellm.integrations.custom_logger import CustomLogger

from kvindex import Rank
from tests.routing.adapters.litellm_fleet import HELD, Fleet, Start, deployment
from tests.routing.adapters.openai_server import tokens_of

pytestmark = pytest.mark.adapter


async def test_a_request_goes_to_the_deployment_that_holds_its_prompt(start: Start) -> None:
    fleet = await start(3)
    for number in (1, 2):
        await fleet.warm(number, f"vllm-{number}" * 20)
    for number in (1, 2):
        answer = await fleet.ask(f"vllm-{number}" * 20)
        assert fleet.servers[number].ranks == [0]
        assert answer.usage.prompt_tokens_details.cached_tokens == 112
    await fleet.assert_ended(finished=2)
    assert fleet.callback.counts == {"routed": 2}


@pytest.mark.parametrize("first_rank", [0, 4], ids=["of-the-whole", "of-a-node"])
async def test_the_header_names_the_rank_of_a_worker_that_has_several(
    start: Start, first_rank: int
) -> None:
    fleet = await start(2, server={"first_rank": first_rank, "dp_size": 2})
    await fleet.warm(1, rank=1)
    await fleet.ask(extra_headers={"X-Of-The-User": "1"})
    assert [server.ranks for server in fleet.servers] == [[], [1]]
    assert fleet.servers[1].hit_tokens == HELD
    await fleet.assert_ended(finished=1)


async def test_a_deployment_can_name_its_worker_or_its_rank(start: Start) -> None:
    fleet = await start(2, ranks={"second": Rank("vllm-1")})
    first, second = fleet.servers
    by_rank = deployment(first, id="first", kvindex_rank="vllm-0/0")
    fleet.deploy(by_rank, deployment(second, id="second"))
    for number in (0, 1):
        await fleet.warm(number, f"vllm-{number}" * 20)
    for number, server in enumerate(fleet.servers):
        await fleet.ask(f"vllm-{number}" * 20)
        assert server.ranks == [0]
    assert fleet.callback.counts == {"routed": 2}


async def no_tokens(request: Mapping[str, Any]) -> None:
    return None


def broken(request: Mapping[str, Any]) -> list[int]:
    raise RuntimeError("no vocabulary")


@pytest.mark.parametrize(
    ("tokenize", "second", "why"),
    [
        (no_tokens, "vllm-1", "no tokens"),
        (broken, "vllm-1", "RuntimeError"),
        (lambda request: [0.5] * 64, "vllm-1", "TokenError"),
        (tokens_of, "unknown", "UnknownRankError"),
    ],
    ids=["no-tokens", "an-error", "no-ints", "an-unknown-deployment"],
)
async def test_where_it_cannot_choose_litellm_does(
    start: Start, tokenize: Any, second: str, why: str
) -> None:
    fleet = await start(tokenize=tokenize)
    fleet.deploy(deployment(fleet.servers[0]), deployment(fleet.servers[1], id=second))
    await fleet.warm(0)
    random.seed(4)  # LiteLLM draws deployments
    for _ in range(20):
        await fleet.ask()
    assert all(server.ranks for server in fleet.servers)
    assert fleet.callback.counts == {why: 20}
    await fleet.assert_ended()


async def test_the_tokenizer_sees_the_tools_and_the_salt_is_part_of_the_prompt(
    start: Start,
) -> None:
    requests: list[Mapping[str, Any]] = []

    async def tokenize(request: Mapping[str, Any]) -> list[int]:
        requests.append(request)
        return await asyncio.to_thread(tokens_of, request)

    fleet = await start(tokenize=tokenize)
    await fleet.warm(0, salt="mine")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await fleet.ask(tools=tools, extra_body={"cache_salt": "mine"})
    assert (requests[0]["model"], requests[0]["tools"]) == ("fake", tools)
    assert fleet.callback.counts == {"routed": 1}
    assert fleet.router.statistics()["funnel"]["finished"]["chosen"] > 0


async def test_a_request_that_litellm_sends_elsewhere_in_the_end_is_not_booked(
    start: Start,
) -> None:
    class Contrary(CustomLogger):
        async def async_filter_deployments(self, **options: Any) -> list[Any]:
            return [deployment(fleet.servers[1])]

    fleet = await start()
    await fleet.warm(0)
    litellm.callbacks.append(Contrary())
    await fleet.ask()
    assert fleet.servers[1].ranks == [0]
    assert fleet.callback.counts == {"routed": 1, "overruled": 1}
    await fleet.assert_ended(cancelled=1)


async def test_it_finds_more_in_the_caches_than_litellms_default(start: Start) -> None:
    async def hit_rate(fleet: Fleet) -> float:
        chance = random.Random(5)
        chats = [f"{n} is the system prompt of this chat. " * 6 for n in range(16)]
        for _ in range(160):
            await fleet.ask(chance.choice(chats))
            await fleet.follow()
        hits = sum(server.hit_tokens for server in fleet.servers)
        return hits / sum(server.prompt_tokens for server in fleet.servers)

    random.seed(6)  # LiteLLM draws deployments
    alone = await start(4, server={"num_blocks": 96})
    litellm.callbacks = []
    by_default = await hit_rate(alone)
    assert not alone.callback.counts
    routed = await hit_rate(await start(4, server={"num_blocks": 96}))
    print(f"hit rate {by_default:.3f} by default, {routed:.3f} with the callback")
    assert routed > by_default + 0.2
