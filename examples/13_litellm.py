"""LiteLLM's router with kvindex: hit rates of its own strategy, and with the callback.

It needs LiteLLM: pip install -e '.[litellm]'.
"""

import asyncio
import os
import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of prices

import litellm

from kvindex import Client, Worker, connect
from kvindex.routing import Router
from kvindex.routing.adapters.litellm import KVAwareCallback
from kvindex.testing import FakeEngine

ENGINES = 4
BLOCKS = 128  # of 16 tokens in each cache: too few for every chat to be everywhere
CHATS = [
    f"{number} is the number of this chat, whose system prompt is long. " * 6
    for number in range(16)
]


def tokenize(request: Mapping[str, Any]) -> list[int]:
    """Return one token for each character. For a real model, use its own tokenizer:

    tokenizer.apply_chat_template(
        request["messages"], tools=request.get("tools"), add_generation_prompt=True
    )
    """
    return [ord(character) for message in request["messages"] for character in message["content"]]


class Engines(litellm.CustomLLM):  # type: ignore[misc]  # where LiteLLM is not installed
    """A provider of LiteLLM's whose models are fake engines; it needs no HTTP."""

    def __init__(self, engines: list[FakeEngine], client: Client) -> None:
        super().__init__()
        self._engines = {engine.worker: engine for engine in engines}
        self._client = client
        self.hit_tokens = self.prompt_tokens = 0

    async def acompletion(
        self, model: str, messages: list[Any], model_response: Any, *_: Any, **__: Any
    ) -> Any:
        engine = self._engines[model]
        served = engine.serve(tokenize({"messages": messages}))
        # A fake engine needs no time, a real one does: let the events arrive first.
        while self._client.status(engine.rank).seq != engine.published - 1:
            await asyncio.sleep(0.001)
        self.hit_tokens += served.hit_tokens
        self.prompt_tokens += served.prompt_tokens
        model_response.usage = litellm.Usage(
            prompt_tokens=served.prompt_tokens,
            completion_tokens=1,
            total_tokens=served.prompt_tokens + 1,
            prompt_tokens_details={"cached_tokens": served.hit_tokens},
        )
        return model_response


async def hit_rate(*, with_kvindex: bool) -> float:
    with ExitStack() as stack:
        fakes = [
            stack.enter_context(FakeEngine(f"vllm-{number}", num_blocks=BLOCKS))
            for number in range(ENGINES)
        ]
        workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in fakes]
        client = stack.enter_context(connect(workers))
        client.wait_live()
        engines = Engines(fakes, client)
        litellm.custom_provider_map = [{"provider": "fake", "custom_handler": engines}]
        deployments = [
            {
                "model_name": "chat",
                "litellm_params": {"model": f"fake/{engine.worker}"},
                "model_info": {"id": engine.worker},  # the worker of this deployment
            }
            for engine in fakes
        ]
        router = litellm.Router(model_list=deployments)
        if with_kvindex:
            litellm.callbacks = [KVAwareCallback(Router(client), tokenize)]
        chance = random.Random(1)
        for _ in range(200):
            messages = [{"role": "user", "content": chance.choice(CHATS)}]
            await router.acompletion(model="chat", messages=messages)
        return engines.hit_tokens / engines.prompt_tokens


for with_kvindex, name in ((False, "LiteLLM's shuffle"), (True, "with kvindex")):
    print(f"{name:<17} {asyncio.run(hit_rate(with_kvindex=with_kvindex)):6.1%} found cached")
