"""What Ray's request router is told, in every order: each booking is given back once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex import Index, Rank
from kvindex.routing import Load, Router
from kvindex.routing.adapters.ray_bookings import RequestBookings
from kvindex.testing import ManualClock

pytestmark = pytest.mark.adapter

PROMPT = {"token_ids": list(range(100))}


class Fleet:
    """Two replicas of one rank each, and the requests that Ray would send them."""

    def __init__(self) -> None:
        self.replicas = {name: SimpleNamespace(replica_id=name) for name in ("a", "b", "strange")}
        index = Index()
        for name in "ab":
            index.add(Rank(name))
        self.clock = ManualClock()
        self.router = Router(index, clock=self.clock, expires_after=60.0)
        self.bookings = RequestBookings(self.router, 1e-3, self.ranks_of)

    def ranks_of(self, replica: Any) -> set[Rank]:
        return {Rank(replica.replica_id)} & set(self.router.ranks)

    def request(self, name: str = "r") -> Any:
        metadata = SimpleNamespace(internal_request_id=name)
        return SimpleNamespace(future=asyncio.get_running_loop().create_future(), metadata=metadata)

    def book(self, request: Any) -> str:
        """Book a request; return the replica that was chosen."""
        return self.bookings.book(request, PROMPT, self.router.ranks).rank.worker

    async def send(self, request: Any, replica: str) -> None:
        request.future.set_result(self.replicas[replica])
        await asyncio.sleep(0)  # the future's callbacks

    def open(self, replica: str) -> int:
        return self.router.load(replica).open_requests

    def assert_idle(self) -> None:
        assert [self.router.load(rank) for rank in self.router.ranks] == [Load()] * 2
        assert not self.bookings._chosen
        assert not self.bookings._sent


Case = Callable[[Fleet], Awaitable[None]]


async def served(fleet: Fleet) -> None:
    request = fleet.request()
    replica = fleet.book(request)
    await fleet.send(request, replica)
    assert fleet.router.load(replica) == Load(100, 1, 7)
    fleet.bookings.end(replica, "r")
    fleet.bookings.end(replica, "r")  # nobody has it any more


async def cancelled_before_it_was_sent(fleet: Fleet) -> None:
    request = fleet.request()
    replica = fleet.book(request)
    assert fleet.open(replica) == 1
    request.future.cancel()
    await asyncio.sleep(0)


async def asked_again_while_all_were_full(fleet: Fleet) -> None:
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
    request = fleet.request()
    fleet.book(request)
    await fleet.send(request, "strange")
    fleet.bookings.end("strange", "r")


async def refused_and_sent_again_to_the_same(fleet: Fleet) -> None:
    first = fleet.request()
    fleet.book(first)
    await fleet.send(first, "a")
    again = fleet.request()  # Ray resets the request's future before it tries again
    fleet.book(again)
    await fleet.send(again, "a")
    fleet.bookings.end("a", "r")  # of the one that was refused
    assert fleet.open("a") == 1
    fleet.bookings.end("a", "r")


async def two_calls_of_one_chain(fleet: Fleet) -> None:
    for replica in "ab":
        request = fleet.request()
        fleet.book(request)
        await fleet.send(request, replica)
    fleet.bookings.end("b", "r")
    assert (fleet.open("a"), fleet.open("b")) == (1, 0)
    fleet.bookings.end("a", "r")


async def lost_with_its_replica(fleet: Fleet) -> None:
    for name in ("r", "s"):
        request = fleet.request(name)
        fleet.book(request)
        await fleet.send(request, "a")
    assert fleet.open("a") == 2
    fleet.bookings.end_all("a")
    fleet.bookings.end("a", "s")  # its completion comes all the same


async def never_heard_of_again(fleet: Fleet) -> None:
    request = fleet.request()
    await fleet.send(request, fleet.book(request))
    fleet.clock.advance(61.0)
    later = fleet.request("later")
    replica = fleet.book(later)
    await fleet.send(later, replica)
    assert list(fleet.bookings._sent) == [(replica, "later")]
    fleet.bookings.end(replica, "later")


@pytest.mark.parametrize(
    "case",
    [
        served,
        cancelled_before_it_was_sent,
        asked_again_while_all_were_full,
        sent_to_another_replica,
        sent_to_a_replica_without_an_engine,
        refused_and_sent_again_to_the_same,
        two_calls_of_one_chain,
        lost_with_its_replica,
        never_heard_of_again,
    ],
    ids=lambda case: case.__name__,
)
def test_a_request_leaves_nothing_behind_when_it_is(case: Case) -> None:
    async def main() -> None:
        fleet = Fleet()
        await case(fleet)
        fleet.assert_idle()

    asyncio.run(main())


def test_the_prefill_ends_after_the_time_that_its_tokens_take() -> None:
    async def main() -> None:
        fleet = Fleet()
        fleet.bookings.prefill_rate = 1e6  # 0.1 ms for these
        request = fleet.request()
        replica = fleet.book(request)
        await fleet.send(request, replica)
        while fleet.router.load(replica).queued_tokens:
            await asyncio.sleep(0)
        assert fleet.open(replica) == 1
        fleet.bookings.end(replica, "r")
        fleet.assert_idle()

    asyncio.run(asyncio.wait_for(main(), 20.0))
