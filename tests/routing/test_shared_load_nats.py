"""Gateways that share their load over a real server, which dies, and beside peers that lie."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvindex.routing import Booking, Router, SharedLoad, shared_load
from kvindex.wire.nats import open_connection, parse_pool
from tests.children import Program
from tests.live import until
from tests.nats_server import NatsServer
from tests.routing.fleet import PROMPT, router_of

pytestmark = pytest.mark.faults


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path, jetstream=False) as server:
        yield server


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not renewed count no more after half the usual time."""
    monkeypatch.setattr(shared_load, "ROW_LIFE", 1.5)


def shared(server: NatsServer) -> SharedLoad:
    loads = SharedLoad(server.url, "p")
    until(lambda: loads.statistics()["sent"])
    return loads


def open_requests(router: Router, rank: str = "a") -> int:
    return router.load(rank).open_requests


def test_two_gateways_see_each_others_bookings_and_choose_by_them(server: NatsServer) -> None:
    with shared(server) as one, shared(server) as other:
        here, there = router_of("ab", loads=one), router_of("ab", loads=other)
        booking = here.reserve(PROMPT, ranks="a")
        until(lambda: there.load("a") == here.load("a"))
        assert there.reserve(PROMPT).rank.worker == "b"
        until(lambda: open_requests(here, "b") == 1)
        booking.finish()
        until(lambda: open_requests(there) == 0)
        load = there.statistics()["load"]
        assert load["connected"]
        assert (load["trouble"], load["gateways"], load["refused"]) == ("", 1, {})


@pytest.mark.usefixtures("forgetful")
def test_a_server_that_was_killed_loses_no_booking_and_sharing_goes_on(server: NatsServer) -> None:
    with shared(server) as one, shared(server) as other:
        here, there = router_of("a", loads=one), router_of("a", loads=other)
        here.reserve(PROMPT)
        until(lambda: open_requests(there) == 1)
        server.kill()
        until(lambda: not there.statistics()["load"]["connected"])
        assert there.statistics()["load"]["trouble"]
        second: Booking = there.reserve(PROMPT)  # it goes on with its own
        until(lambda: open_requests(there) == 1)  # the other's was not renewed
        server.start()
        until(lambda: (open_requests(here), open_requests(there)) == (2, 2))
        second.finish()
        until(lambda: open_requests(here) == 1)
        until(lambda: there.statistics()["load"]["trouble"] == "")


def test_a_server_that_stands_still_delays_nothing_but_the_sharing(server: NatsServer) -> None:
    with shared(server) as one, shared(server) as other:
        here, there = router_of("a", loads=one), router_of("a", loads=other)
        with server.stopped():
            here.reserve(PROMPT)
            assert open_requests(here) == 1
        until(lambda: open_requests(there) == 1)


GATEWAY = """
import sys
from kvindex import Index, Rank
from kvindex.routing import Router, SharedLoad
index = Index()
index.add(Rank("a"))
router = Router(index, loads=SharedLoad(sys.argv[1], "p"))
booking = router.reserve([1, 2, 3])
print("booked", flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("forgetful")
def test_the_load_of_a_gateway_that_was_killed_counts_no_more(server: NatsServer) -> None:
    with shared(server) as loads:
        router = router_of("a", loads=loads)
        with Program("-c", GATEWAY, server.url, stderr=None) as gateway:
            until(lambda: open_requests(router) == 1)
            os.kill(gateway.process.pid, signal.SIGKILL)
            until(lambda: open_requests(router) == 0)
        until(lambda: router.statistics()["load"]["gateways"] == 0)


def test_messages_of_strangers_are_counted_and_change_nothing(server: NatsServer) -> None:
    pool = parse_pool(server.url, "p", {})

    async def publish() -> None:
        client = await open_connection(pool, "stranger")
        for data in (b"", b"\xff" * 100, b"\x00" * 2_000_000, b"\x94\x02\x01\x01\x01"):
            await client.publish(pool.load_subject, data)
        await client.close()

    with shared(server) as one, shared(server) as other:
        here, there = router_of("a", loads=one), router_of("a", loads=other)
        here.reserve(PROMPT)
        until(lambda: open_requests(there) == 1)
        asyncio.run(publish())
        until(lambda: sum(there.statistics()["load"]["refused"].values()) == 4)
        assert there.statistics()["load"]["refused"] == {"malformed": 2, "size": 1, "version": 1}
        here.reserve(PROMPT)
        until(lambda: open_requests(there) == 2)


def test_a_board_that_is_dropped_ends_its_thread(server: NatsServer) -> None:
    loads = shared(server)
    thread = loads._courier.thread
    del loads
    until(lambda: not thread._thread.is_alive())
