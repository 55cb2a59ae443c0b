"""What the gateway's processes send each other, and their counters together."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from kvindex.gateway.access import Access
from kvindex.gateway.calls import CHAT, read_call
from kvindex.gateway.counting import added
from kvindex.gateway.exchange import Exchange
from kvindex.gateway.link import FromProxy, Link, Progress, Reserve, packed, unpacked

pytestmark = pytest.mark.unit


class Transport:
    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        pass


def link(received: list[Any]) -> tuple[Link, Transport]:
    made, transport = Link(FromProxy, received.append, lambda: None), Transport()
    made.connection_made(transport)  # type: ignore[arg-type]
    return made, transport


RESERVE = Reserve(
    number=1,
    model="m",
    token_ids=packed([1, 2, 1 << 31]),
    prompt_tokens=3,
    salt=None,
    reads_cache=True,
    exclude=[("a", 1)],
    request_id="r",
    within=1.0,
)


@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_messages_arrive_whole_whatever_the_pieces(size: int) -> None:
    received: list[Any] = []
    sender, transport = link([])
    sender.send(RESERVE)
    sender.send(Progress(1, "finish", 16))
    receiver, _ = link(received)
    sent = bytes(transport.sent)
    for at in range(0, len(sent), size):
        receiver.data_received(sent[at : at + size])
    assert [type(each) for each in received] == [Reserve, Progress]
    assert unpacked(received[0].token_ids) == array("I", [1, 2, 1 << 31])
    assert received[1] == Progress(1, "finish", 16)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\1x",
        b"\0\0\0\2\x81\xa0",
        b"\0\0\0\x16\x82\xa4type\xa8progress\xa4call\xa1\xff",
        b"\0\0\x27\x21\x82\xa4type\xa8progress\xa1x" + b"\x91" * 10_000,
    ],
    ids=["long", "text", "map", "no text", "deep"],
)
def test_what_is_no_message_closes_the_connection(data: bytes) -> None:
    receiver, transport = link([])
    receiver.data_received(data)
    assert (transport.is_aborted, receiver.is_open) == (True, False)
    receiver.send(RESERVE)
    assert not transport.sent


@pytest.mark.parametrize("token_ids", [["text"], [-1], [1 << 32], [0.5]])
def test_what_is_no_token_is_refused_before_it_is_sent(token_ids: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        packed(token_ids)


def test_counters_of_processes_are_added() -> None:
    async def one(number: int) -> dict[str, Any]:
        access = Access()
        for _ in range(number):
            access.begin()
            exchange = Exchange(read_call(CHAT, b'{"messages": [{}]}'), "id", 0.0)
            exchange.refused(503, 0.3)
            access.end(exchange)
        return access.statistics()

    three = asyncio.run(one(3))
    assert added([asyncio.run(one(1)), asyncio.run(one(2)), {}]) == three
    assert added([]) == {}
    assert added([{"is_on": True}, {"is_on": False}]) == {"is_on": False}
