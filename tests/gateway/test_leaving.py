"""Clients that leave or do not read, and engines that fall silent, at each stage of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.fronts import STREAM, Engine, Fronted, Hang, body_of, fronted
from tests.gateway.lives import JSON, WHOLE, event

pytestmark = pytest.mark.faults


async def left_at(served: Fronted, hang: Hang, *, resets: bool = False) -> dict[str, Any]:
    """Leave once `hang` is waited for; return the counters after the request has ended."""
    client = await served.begin()
    await hang.begun.wait()
    if resets:
        client.writer.transport.abort()
    else:
        client.writer.close()
    await served.ended()
    return served.access.statistics()


def ended_as_left(counted: dict[str, Any], status: int = 499) -> bool:
    asked = ("/v1/chat/completions", status, "client_left", 1)
    return (counted["requests"], counted["open"]) == ([asked], 0)


@pytest.mark.parametrize("stage", ["tokenizing", "queue"])
async def test_a_client_that_leaves_before_a_rank_is_reserved_takes_none(stage: str) -> None:
    async with fronted() as served:
        hang = Hang()
        setattr(served.scripted, stage, hang)
        assert ended_as_left(await left_at(served, hang))
        assert served.scripted.log == []


async def test_a_client_that_leaves_before_the_head_ends_the_sending_and_then_the_place() -> None:
    hang = Hang()
    async with fronted(Engine(fails=hang)) as served:
        assert ended_as_left(await left_at(served, hang))
        rank = served.scripted.ranks[0]
        assert served.scripted.log == [("reserve", rank), ("unsent",), ("cancel", rank)]


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("pieces", [0, 3])
async def test_a_client_that_leaves_amid_the_answer_closes_it_and_then_ends_the_place(
    pieces: int, resets: bool
) -> None:
    hang = Hang()
    async with fronted(Engine([*STREAM[:pieces], hang])) as served:
        counted = await left_at(served, hang, resets=resets)
        assert ended_as_left(counted, 200 if pieces else 499)
        assert served.scripted.log[-2:] == [("close",), ("cancel", served.scripted.ranks[0])]


async def test_a_client_that_leaves_after_the_last_event_counts_as_answered() -> None:
    hang = Hang()
    async with fronted(Engine([*STREAM, hang])) as served:
        counted = await left_at(served, hang)
        assert counted["requests"] == [("/v1/chat/completions", 200, "whole", 1)]
        assert served.scripted.log[-2:] == [("close",), ("finish", served.scripted.ranks[0], 7)]


async def test_a_client_that_leaves_at_once_leaves_no_request_behind() -> None:
    async with fronted(*[Engine()] * 20) as served:
        for _ in range(20):
            client = await served.begin()
            await client.writer.drain()
            client.writer.transport.abort()
        await served.until(lambda: not served.site.connections)
        await served.ended()
        log = served.scripted.log
        endings = [entry for entry in log if entry[0] in ("cancel", "finish")]
        assert len(endings) == len([entry for entry in log if entry[0] == "reserve"])


async def test_a_client_that_does_not_read_holds_back_its_own_engine_only() -> None:
    flood = Engine([event("x" * 100_000)] * 400)
    async with fronted(flood, Engine()) as served:
        slow = await served.connect()
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.post("/v1/chat/completions", body_of())
        await served.until(lambda: served.scripted.wires)
        wire, before = served.scripted.wires[0], -1
        while before != wire.sent:
            before = wire.sent
            for _ in range(100):
                await asyncio.sleep(0)
        assert 0 < wire.sent < 400
        assert (await served.ask())[0] == 200, "others are served meanwhile"
        assert before == wire.sent
        slow.writer.transport.abort()


async def test_an_engine_that_is_silent_before_its_first_event_is_tried_on_another_rank() -> None:
    async with fronted(Engine([Hang()]), Engine(), silent_within=0.01) as served:
        status, _, body = await served.ask()
        assert (status, body) == (200, b"".join(STREAM))
        assert served.access.statistics()["failures"] == {"silent": 1}


async def test_a_client_that_leaves_as_its_engine_falls_silent_is_sent_to_no_other_engine() -> None:
    hang = Hang()
    async with fronted(Engine([hang]), Engine()) as served:
        await served.begin()
        await hang.begun.wait()
        (connection,) = served.site.connections
        connection.transport.abort()
        await asyncio.sleep(0)  # the client's leaving is noticed, and its task not yet cancelled
        served.scripted.wires[0].answer.fail("silent", "nothing came")
        await served.ended()
        counted = served.access.statistics()
        assert ended_as_left(counted)
        assert counted["failures"] == {}
        assert len(served.scripted.sent) == 1


async def test_a_break_off_never_looks_like_a_whole_answer_of_http_1_0() -> None:
    async with fronted(Engine([*STREAM[:2], "reset"])) as served:
        client = await served.begin(version=b"1.0")
        await client.head()
        with pytest.raises(ConnectionResetError):  # its end would be the end of the answer
            await client.reader.read()


async def test_a_bug_of_the_gateway_is_an_answer_and_leaves_no_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fronted(Engine(fails="bug")) as served:
        served.scripted.engines = []  # `send` raises an IndexError
        assert (await served.ask())[0] == 500
        await served.ended()
        assert served.scripted.log[-1] == ("cancel", served.scripted.ranks[0])
        assert served.access.statistics()["requests"][0][2] == "failed"
    assert "failed" in caplog.text


async def test_a_small_whole_answer_that_breaks_off_is_tried_again() -> None:
    engines = Engine([WHOLE[:-1], "reset"], headers=JSON), Engine([WHOLE], headers=JSON)
    async with fronted(*engines) as served:
        assert (await served.ask(stream=False))[::2] == (200, WHOLE)
        await served.ended()
        second = served.scripted.ranks[1]
        assert served.scripted.log[-3:] == [
            *(("first_token", second), ("complete",), ("finish", second, 7)),
        ]
