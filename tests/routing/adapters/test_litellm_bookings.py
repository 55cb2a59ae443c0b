"""The callback in LiteLLM's own SDK Router: each request's load, until its end of any kind."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("litellm", reason="the extra `litellm` is not installed")

import litellm
import openai

from kvindex.routing import Router
from kvindex.routing.adapters.litellm import KVAwareCallback
from tests.routing.adapters.litellm_fleet import HELD, PROMPT, Fleet, Start
from tests.routing.adapters.loop import until

pytestmark = pytest.mark.adapter


async def test_the_cached_tokens_that_engines_report_reach_the_funnel(start: Start) -> None:
    fleet = await start()
    for finished in (1, 2):
        await fleet.ask()
        await fleet.assert_ended(finished=finished)
        await fleet.follow()
    await fleet.read(stream_options={"include_usage": True})
    await fleet.assert_ended(finished=3)
    funnel = fleet.router.statistics()["funnel"]["reported"]
    assert funnel["requests"] == 3
    assert funnel["delivered"] == funnel["chosen"] == 2 * HELD


async def test_requests_that_read_no_cache_or_have_siblings_report_no_delivery(
    start: Start,
) -> None:
    fleet = await start()
    await fleet.ask(extra_body={"prompt_logprobs": 0})  # the engine reads no cache
    await fleet.assert_ended(finished=1)
    assert fleet.callback.counts == {"routed": 1}
    assert fleet.router.statistics()["funnel"]["finished"]["requests"] == 0
    await fleet.ask(n=2)  # the last answer finds the first one's blocks
    await fleet.assert_ended(finished=2)
    funnel = fleet.router.statistics()["funnel"]
    assert (funnel["finished"]["requests"], funnel["reported"]["requests"]) == (1, 0)


async def test_the_load_is_on_the_rank_until_the_answer_is_whole(start: Start) -> None:
    fleet = await start()
    fleet.hold()
    metadata = {"user": "shared by all calls"}
    requests = [asyncio.create_task(fleet.ask(metadata=metadata)) for _ in range(4)]
    for server in 2 * fleet.servers:  # an unknown prompt goes to all in turn
        await server.arrived.acquire()
    loads = [fleet.router.load(rank) for rank in fleet.client.ranks]
    assert [load.open_requests for load in loads] == [2, 2]
    assert [load.queued_tokens for load in loads] == [2 * len(PROMPT)] * 2
    fleet.release()
    await asyncio.gather(*requests)
    await fleet.assert_ended(finished=4)


async def test_the_first_chunk_of_a_stream_ends_its_prefill(start: Start) -> None:
    fleet = await start(1)
    fleet.hold()
    stream = await fleet.ask(stream=True)
    chunks = [await anext(stream)]
    load = fleet.router.load("vllm-0")
    assert (load.queued_tokens, load.open_requests) == (0, 1)
    fleet.release()
    chunks += [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "a b"
    await fleet.assert_ended(finished=1)


async def test_an_attempt_that_fails_releases_its_load_before_the_next_one(start: Start) -> None:
    fleet = await start()
    fleet.deploy(num_retries=3)
    for server in fleet.servers:
        server.failures = 1
    await fleet.ask()
    failed = sum(not server.failures for server in fleet.servers)
    assert fleet.bookings() == {"finished": 1, "cancelled": failed}


async def fails_for_good(fleet: Fleet) -> None:
    fleet.servers[0].failures = 9
    with pytest.raises(litellm.InternalServerError):
        await fleet.ask()


async def breaks_off(fleet: Fleet) -> None:
    fleet.hold()
    fleet.servers[0].breaks = 1
    stream = await fleet.ask(stream=True)
    await anext(stream)
    fleet.release()
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def is_cancelled(fleet: Fleet, *, stream: bool = False) -> None:
    fleet.hold()
    request = asyncio.create_task(fleet.read() if stream else fleet.ask())
    await fleet.servers[0].arrived.acquire()
    assert fleet.bookings() == {"open": 1}
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def is_cancelled_in_its_stream(fleet: Fleet) -> None:
    await is_cancelled(fleet, stream=True)


async def is_left(fleet: Fleet) -> None:
    fleet.hold()
    stream = await fleet.ask(stream=True)
    await anext(stream)
    await stream.aclose()
    assert fleet.bookings() == {"open": 1}


@pytest.mark.parametrize(
    "fate",
    [fails_for_good, breaks_off, is_cancelled, is_cancelled_in_its_stream, is_left],
    ids=lambda fate: fate.__name__,
)
async def test_no_load_is_left_of_a_request_that(
    start: Start, fate: Callable[[Fleet], Awaitable[None]]
) -> None:
    fleet = await start(1)
    await fate(fleet)
    gc.collect()  # a stream is part of a cycle
    await fleet.assert_ended(cancelled=1)


async def test_two_callbacks_of_one_process_are_each_notified_of_their_own_streams(
    start: Start,
) -> None:
    fleet = await start(1)
    # LiteLLM keeps one logger of several that it cannot distinguish.
    other = KVAwareCallback(Router(fleet.client), lambda request: None)
    litellm.callbacks = [other, fleet.callback]
    await fleet.read()
    await fleet.assert_ended(finished=1)


async def test_an_answer_of_litellms_own_cache_does_not_report_on_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start(1)
    monkeypatch.setattr(litellm, "cache", litellm.Cache(type="local"))
    await fleet.ask(caching=True)
    await fleet.assert_ended(finished=1)
    await fleet.ask(caching=True)
    await fleet.assert_ended(finished=1, cancelled=1)
    assert len(fleet.servers[0].ranks) == 1


async def test_many_requests_at_once_of_all_fates_leave_no_load(start: Start) -> None:
    fleet = await start(3)
    fates: Counter[str] = Counter()

    async def request(number: int) -> None:
        asking: Any = fleet.ask if number % 2 else fleet.read
        if number % 2 == 0 and number % 3 == 0:
            asking = lambda prompt: fleet.ask(prompt, stream=True)  # noqa: E731  # and never read
        task = asyncio.create_task(asking(f"{number % 7} {PROMPT}"))
        if number % 7 == 1:
            fleet.servers[number % 3].failures += 1
        if number % 4 == 0:
            await asyncio.sleep(0)
            task.cancel()
        try:
            await task
            fates["answered"] += 1
        except openai.APIError:
            fates["failed"] += 1
        except asyncio.CancelledError:
            fates["cancelled"] += 1

    await asyncio.gather(*map(request, range(60)))
    await until(lambda: gc.collect() >= 0 and "open" not in fleet.bookings())
    await fleet.assert_ended(**fleet.bookings())
    assert fates.total() == 60
    assert min(fates["answered"], fates["failed"], fates["cancelled"]) > 0
