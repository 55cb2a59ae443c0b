"""Bookings against a model that adds up the open ones: no drift of load, and nothing leaks."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvindex import Rank
from kvindex.routing import Booking, Load, NoCandidateError, Router, Stage
from tests.examples import examples
from tests.routing.fleet import BLOCK, PROMPT, Clock, fleet, hold

pytestmark = pytest.mark.property

WORKERS = ("a", "b", "c")
EXPIRES = 60.0


class BookingsMachine(RuleBasedStateMachine):
    """Bookings come, go, are forgotten, and their ranks with them."""

    bookings = Bundle("bookings")

    @initialize(blocks=st.tuples(*[st.integers(0, 10)] * 3), predict=st.sampled_from([None, 5.0]))
    def start(self, blocks: tuple[int, ...], predict: float | None) -> None:
        self.clock = Clock()
        self.index = fleet(dict(zip(WORKERS, blocks, strict=True)))
        self.router = Router(self.index, clock=self.clock, expires_after=EXPIRES, predict=predict)
        self.reported: dict[Booking, float] = {}  # when; of those that are open
        self.fetched: set[Booking] = set()  # whose prompts others prefill
        self.pinned: set[Booking] = set()  # whose blocks others fetch

    @rule(target=bookings, length=st.integers(1, len(PROMPT)))
    def reserve(self, length: int) -> object:
        try:
            booking = self.router.reserve(PROMPT[:length])
        except NoCandidateError:
            assert not self.index.ranks
            return multiple()
        self.reported[booking] = self.clock.now
        return booking

    @rule(booking=bookings)
    def first_token(self, booking: Booking) -> None:
        booking.first_token()
        self.note(booking)

    @rule(booking=bookings)
    def fetch(self, booking: Booking) -> None:
        if booking in self.reported and booking.stage is Stage.CHOSEN:
            self.fetched.add(booking)
        booking.fetch()
        self.note(booking)

    @rule(booking=bookings)
    def compute(self, booking: Booking) -> None:
        booking.compute()
        if booking in self.reported and booking.stage is Stage.CHOSEN:
            self.fetched.discard(booking)
        self.note(booking)

    @rule(booking=bookings)
    def pin(self, booking: Booking) -> None:
        booking.pin()
        self.pinned.add(booking)
        self.note(booking)

    @rule(booking=bookings, worker=st.sampled_from(WORKERS))
    def move(self, booking: Booking, worker: str) -> None:
        if Rank(worker) in booking.decision.ranks:
            booking.move(worker)
            self.fetched.discard(booking)
            self.note(booking)

    @rule(booking=bookings, tokens=st.integers(0, 40))
    def output(self, booking: Booking, tokens: int) -> None:
        booking.output(tokens)
        self.note(booking)

    @rule(booking=consumes(bookings), cached=st.none() | st.integers(0, 200))
    def finish(self, booking: Booking, cached: int | None) -> None:
        booking.finish(cached)
        self.reported.pop(booking, None)

    @rule(booking=bookings)
    def cancel(self, booking: Booking) -> None:
        booking.cancel()
        self.reported.pop(booking, None)

    @rule(seconds=st.sampled_from([0.1, 10.0, 59.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        now = self.clock.now
        self.reported = {b: at for b, at in self.reported.items() if now - at < EXPIRES}

    @rule(worker=st.sampled_from(WORKERS), blocks=st.integers(0, 10))
    def add(self, worker: str, blocks: int) -> None:
        hold(self.index, Rank(worker), blocks)

    @rule(worker=st.sampled_from(WORKERS))
    def remove(self, worker: str) -> None:
        self.index.remove(Rank(worker))

    def note(self, booking: Booking) -> None:
        if booking in self.reported:
            self.reported[booking] = self.clock.now

    @invariant()
    def loads_are_the_sums_of_the_open_bookings(self) -> None:
        if not hasattr(self, "router"):
            return
        for rank in self.index.ranks:
            mine = [booking for booking in self.reported if booking.rank == rank]
            own = [booking for booking in mine if booking not in self.fetched]
            waiting = (b.decision.new_tokens for b in own if b.stage is Stage.CHOSEN)
            lengths = (b.decision.prompt_tokens + b.output_tokens for b in mine)
            blocks = sum(-(-n // BLOCK) for n in lengths)
            expected = Load(sum(waiting), len(set(mine) - self.pinned), blocks)
            assert self.router.load(rank) == expected
        counts = self.router.statistics()["bookings"]
        assert counts["open"] == len(self.reported)

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for booking in list(self.reported):
            booking.finish()
        self.clock.now += 5.0
        for worker in WORKERS:
            hold(self.index, Rank(worker), 0)
        for worker in WORKERS:
            assert self.router.load(worker) == Load(0, 0, 0)
        assert self.router.statistics()["predictions"].get("blocks", 0) == 0


TestBookings = BookingsMachine.TestCase
TestBookings.settings = examples(50)


def test_ten_thousand_open_bookings_come_and_go_without_drift() -> None:
    clock = Clock()
    router = Router(fleet({"a": 10, "b": 5, "c": 0}), clock=clock, expires_after=100.0)
    rng = random.Random(1)
    opened: deque[Booking] = deque()
    for number in range(25_000):
        clock.now += 0.01
        opened.append(router.reserve(PROMPT[: rng.randrange(1, len(PROMPT))]))
        if len(opened) > 10_000:
            opened.rotate(rng.randrange(100))
            booking = opened.popleft()
            fate = number % 10
            if fate:  # one in ten is forgotten, and expires
                booking.output(fate)
            if fate == 1:
                booking.cancel()
            elif fate:
                booking.finish(0)
    clock.now += 100.0
    assert [router.load(worker) for worker in WORKERS] == [Load(0, 0, 0)] * 3
    bookings = router.statistics()["bookings"]
    assert bookings["open"] == 0
    assert bookings["finished"] + bookings["cancelled"] + bookings["expired"] == 25_000
    assert min(bookings["finished"], bookings["expired"], bookings["late"]) > 1_000
