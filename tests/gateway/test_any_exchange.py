"""Whatever happens in whatever order: each place is ended once, and the end is the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvindex import Rank
from kvindex.gateway.request_life import MOST_TRIES, End, Exchange, Stage
from tests.examples import examples
from tests.gateway.lives import (
    DONE,
    HEAD,
    JSON,
    ROLE,
    USAGE,
    LoggedAnswer,
    LoggedReservation,
    call_of,
    event,
)

pytestmark = pytest.mark.property

PIECES = st.sampled_from([ROLE, event("x"), USAGE, DONE, ROLE[:9], b": c\n\n", b"x" * 70_000])
STATUSES = st.sampled_from([200, 200, 200, 400, 500, 502, 503])


class AnyLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange(call_of(), "id", 0.0)
        self.log: list[tuple[Any, ...]] = []
        self.ranks: list[Rank] = []
        self.answers: list[list[tuple[Any, ...]]] = []
        self.now = 0.0
        self.is_forwarded = False

    def tick(self) -> float:
        self.now += 0.3
        return self.now

    @rule()
    def reserve(self) -> None:
        self.ranks.append(Rank("e", len(self.ranks)))
        self.exchange.reserved(LoggedReservation(self.log, self.ranks[-1]), self.tick())

    @rule(status=STATUSES, headers=st.sampled_from([HEAD, HEAD, JSON]))
    def answer(self, status: int, headers: Any) -> None:
        self.exchange.answered(LoggedAnswer(self.log, status, headers), self.tick())

    def forward(self, data: bytes, was: Stage) -> None:
        if data:
            assert was in (Stage.KEPT, Stage.FORWARDED)
            assert self.exchange.stage in (Stage.FORWARDED, Stage.ENDED)
            assert self.exchange.status
            self.is_forwarded = True

    @rule(piece=PIECES)
    def receive(self, piece: bytes) -> None:
        was = self.exchange.stage
        self.forward(self.exchange.received(piece, self.tick()), was)

    @rule()
    def complete(self) -> None:
        was = self.exchange.stage
        self.forward(self.exchange.completed(self.tick()), was)

    @rule(reason=st.sampled_from(["reset", "refused", "silent"]))
    def fail(self, reason: str) -> None:
        was = self.exchange.stage
        self.forward(self.exchange.failed(reason, self.tick()), was)

    @precondition(lambda self: self.exchange.failures)
    @rule()
    def give_up(self) -> None:
        self.exchange.given_up(self.tick())

    @rule()
    def go_on(self) -> None:
        """Do what a request does that meets no trouble: else most lives would be short."""
        stage = self.exchange.stage
        if stage is Stage.WAITING:
            self.reserve()
        elif stage is Stage.SENT:
            self.answer(200, HEAD)
        else:
            self.receive(event("x"))

    @rule(end=st.sampled_from([End.REFUSED, End.FAILED, End.LEFT, *[None] * 9]))
    def end(self, end: End | None) -> None:
        if end is End.LEFT:
            self.exchange.left(self.tick())
        elif end is not None:
            self.exchange.refused(429, self.tick(), end)

    @rule()
    def begin_elsewhere(self) -> None:
        self.is_forwarded |= self.exchange.stage is Stage.SENT
        self.exchange.begun(self.tick())

    @rule(end=st.sampled_from([End.WHOLE, End.BROKEN, *[None] * 9]))
    def report(self, end: End | None) -> None:
        if end is not None:
            self.exchange.reported(end, 200, None, self.tick())

    @invariant()
    def what_is_forwarded_is_never_tried_again(self) -> None:
        if self.is_forwarded:
            assert self.exchange.stage in (Stage.FORWARDED, Stage.ENDED)
        assert self.exchange.tries <= MOST_TRIES

    @invariant()
    def only_the_last_place_is_open(self) -> None:
        ended = [entry[1] for entry in self.log if entry[0] in ("finish", "cancel")]
        assert len(set(ended)) == len(ended)
        is_booked = self.exchange.stage in (Stage.SENT, Stage.KEPT, Stage.FORWARDED)
        assert len(self.ranks) - len(ended) == is_booked

    @invariant()
    def nothing_is_reported_of_a_place_that_has_ended(self) -> None:
        ended: set[Rank] = set()
        for what, *details in self.log:
            if what != "close":
                assert details[0] not in ended
            if what in ("finish", "cancel"):
                ended.add(details[0])

    @invariant()
    def an_end_has_a_status(self) -> None:
        is_ended = self.exchange.stage is Stage.ENDED
        assert is_ended == (self.exchange.end is not None)
        assert not is_ended or self.exchange.status >= 200

    def teardown(self) -> None:
        self.exchange.left(self.tick())
        self.only_the_last_place_is_open()
        assert self.exchange.stage is Stage.ENDED


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(examples(25), stateful_step_count=20)
