"""A router books what another one has reserved, without the prompt's tokens."""

from __future__ import annotations

import pytest

from kvindex import Index, Rank
from kvindex.routing import DuplicateBookingError, Load, Router
from kvindex.wire.errors import UnknownRankError

pytestmark = pytest.mark.unit


@pytest.fixture
def router() -> Router:
    index = Index()
    for name in "ab":
        index.add(Rank(name))
    return Router(index)


def test_the_load_is_that_of_the_router_that_chose(router: Router) -> None:
    booking = router.book(Rank("b"), 100, 36, request_id="r")
    assert router.load("b") == Load(queued_tokens=36, open_requests=1, decode_blocks=7)
    assert router.load("a") == Load()
    assert (booking.decision.tokens, booking.decision.new_tokens) == (64, 36)
    booking.first_token()
    booking.output(16)
    assert router.load("b") == Load(queued_tokens=0, open_requests=1, decode_blocks=8)
    router.booking("r").finish()
    assert router.load("b") == Load()


def test_the_funnel_is_of_what_was_decided_here(router: Router) -> None:
    for _ in range(40):  # the other router receives the engine's report
        router.book(Rank("a"), 100, 40).finish()
    router.reserve([1] * 40, ranks="a").finish(0)
    statistics = router.statistics()
    assert statistics["funnel"]["finished"]["requests"] == 1
    assert statistics["ranks"]["a/0"]["suspicion"] == ""


def test_what_another_router_chose_is_no_decision_of_this_one(router: Router) -> None:
    router.book(Rank("a"), 100, 40).finish()
    assert router.statistics()["decisions"] == 0
    router.place(Rank("a"), [1] * 40).finish()
    router.select([1] * 40)
    assert router.statistics()["decisions"] == 2


def test_an_unknown_rank_and_an_id_that_is_taken_are_refused(router: Router) -> None:
    with pytest.raises(UnknownRankError):
        router.book(Rank("c"), 10, 10)
    router.book(Rank("a"), 10, 10, request_id="r")
    with pytest.raises(DuplicateBookingError):
        router.book(Rank("b"), 10, 10, request_id="r")
    assert router.load("b") == Load()
