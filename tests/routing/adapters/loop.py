"""The one event loop of all asynchronous tests here: LiteLLM's logging lives in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

from tests.live import PATIENCE


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return _loop().run_until_complete(asyncio.wait_for(test, PATIENCE))


async def until(reached: Callable[[], object]) -> None:
    async def poll() -> None:
        while not reached():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), PATIENCE)
