"""Reports to Ray's request router, in every order: each booking is released once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex.routing import Load
from kvindex.routing.adapters.ray_replicas import RequestBookings
from kvindex.testing import ManualClock
from tests.routing.fleet import router_of

pytestmark = pytest.mark.adapter

PROMPT = {"token_ids": list(range(100))}


class Fleet:
    """Two replicas of one rank each, and the requests that Ray would send them."""

    def __init__(self, prefill_rate: float = 1e-3) -> None:
        self.clock = ManualClock()
        self.router = router_of("ab", clock=self.clock, expires_after=60.0)
        self.bookings = RequestBookings(self.router, prefill_rate, self.ranks_of)

    def ranks_of(self, replica: Any) -> list[Any]:
        return [rank for rank in self.router.ranks if rank.worker == replica.replica_id]

    def request(self, name: str = "r") -> Any:
        metadata = SimpleNamespace(internal_request_id=name)
        return SimpleNamespace(future=asyncio.get_running_loop().create_future(), metadata=metadata)

    def book(self, request: Any) -> str:
        """Book a request; return the replica that was chosen."""
        return self.bookings.book(request, PROMPT, self.router.ranks).rank.worker

    async def send(self, request: Any, replica: str) -> None:
        request.future.set_result(SimpleNamespace(replica_id=replica))
        await asyncio.sleep(0)  # the future's callbacks

    async def book_and_send(self, name: str = "r", replica: str | None = None) -> str:
        """Book a request; send it to a replica, by default the chosen one, and return that."""
        chosen = self.book(request := self.request(name))
        await self.send(request, replica or chosen)
        return replica or chosen

    def open(self, replica: str) -> int:
        return self.router.load(replica).open_requests

    def assert_idle(self) -> None:
        assert [self.router.load(rank) for rank in self.router.ranks] == [Load()] * 2
        assert not self.bookings._chosen
        assert not self.bookings._sent


async def served(fleet: Fleet) -> None:
    replica = await fleet.book_and_send()
    assert fleet.router.load(replica) == Load(100, 1, 7)
    for _ in range(2):  # the second finds no booking
        fleet.bookings.end(replica, "r")


async def cancelled_before_it_was_sent(fleet: Fleet) -> None:
    request = fleet.request()
    assert fleet.open(fleet.book(request)) == 1
    request.future.cancel()
    await asyncio.sleep(0)


async def booked_again_while_all_were_full(fleet: Fleet) -> None:
    request = fleet.request()
    for _ in range(3):
        replica = fleet.book(request)
    assert fleet.open("a") + fleet.open("b") == 1
    await fleet.send(request, replica)
    fleet.bookings.end(replica, "r")


async def sent_to_another_replica(fleet: Fleet) -> None:
    request = fleet.request()
    (other,) = {"a", "b"} - {fleet.book(request)}
    await fleet.send(request, other)
    assert (fleet.open(other), fleet.open("a") + fleet.open("b")) == (1, 1)
    fleet.bookings.end(other, "r")


async def sent_to_a_replica_without_an_engine(fleet: Fleet) -> None:
    await fleet.book_and_send(replica="strange")
    fleet.bookings.end("strange", "r")


async def refused_and_sent_again_to_the_same(fleet: Fleet) -> None:
    for _ in range(2):  # Ray resets the request's future before it tries again
        await fleet.book_and_send(replica="a")
    fleet.bookings.end("a", "r")  # of the attempt that was refused
    assert fleet.open("a") == 1
    fleet.bookings.end("a", "r")


async def two_calls_of_one_chain(fleet: Fleet) -> None:
    for replica in "ab":
        await fleet.book_and_send(replica=replica)
    fleet.bookings.end("b", "r")
    assert (fleet.open("a"), fleet.open("b")) == (1, 0)
    fleet.bookings.end("a", "r")


async def lost_with_its_replica(fleet: Fleet) -> None:
    for name in "rs":
        await fleet.book_and_send(name, replica="a")
    assert fleet.open("a") == 2
    fleet.bookings.end_all("a")
    fleet.bookings.end("a", "s")  # its completion is reported all the same


async def never_reported_again(fleet: Fleet) -> None:
    await fleet.book_and_send()
    fleet.clock.advance(61.0)
    replica = await fleet.book_and_send("later")
    assert list(fleet.bookings._sent) == [(replica, "later")]
    fleet.bookings.end(replica, "later")


@pytest.mark.parametrize(
    "case",
    [
        served,
        cancelled_before_it_was_sent,
        booked_again_while_all_were_full,
        sent_to_another_replica,
        sent_to_a_replica_without_an_engine,
        refused_and_sent_again_to_the_same,
        two_calls_of_one_chain,
        lost_with_its_replica,
        never_reported_again,
    ],
    ids=lambda case: case.__name__,
)
async def test_a_request_leaves_no_booking_when_it_is(
    case: Callable[[Fleet], Awaitable[None]],
) -> None:
    fleet = Fleet()
    await case(fleet)
    fleet.assert_idle()


async def test_the_prefill_ends_after_the_time_that_its_tokens_take() -> None:
    fleet = Fleet(prefill_rate=1e6)  # 0.1 ms for these
    replica = await fleet.book_and_send()
    while fleet.router.load(replica).queued_tokens:
        await asyncio.sleep(0)
    assert fleet.open(replica) == 1
    fleet.bookings.end(replica, "r")
    fleet.assert_idle()
