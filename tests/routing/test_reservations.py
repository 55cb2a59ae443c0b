"""Reservations: a request's load from its booking to its end, and what retries need of them."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from kvindex import ConfigurationError, UnknownRankError
from kvindex.routing import (
    Capacity,
    DuplicateBookingError,
    Load,
    NoCandidateError,
    Router,
    Stage,
    UnknownBookingError,
)
from tests.routing.fleet import BLOCK, NOTHING, PROMPT, A, B, C, Clock, fleet, hold, router_of

pytestmark = pytest.mark.unit

LOAD = Load(len(PROMPT), 1, 11)  # of a request whose prompt is new


def test_a_reservation_is_load_until_its_first_token_and_its_end() -> None:
    router = router_of({"a": 4})
    router.select(PROMPT)
    assert router.load(A) == NOTHING
    booking = router.reserve(PROMPT)
    assert router.load(A) == Load(len(PROMPT) - 4 * BLOCK, 1, 11)
    booking.output(0)  # such as a first chunk that has the role only
    assert booking.stage is Stage.CHOSEN
    booking.first_token()
    assert router.load(A) == Load(0, 1, 11)
    booking.output(BLOCK)
    assert router.load(A) == Load(0, 1, 12)
    booking.finish()
    assert router.load(A) == NOTHING


def test_a_prompt_that_another_rank_prefills_waits_for_nothing_and_measures_nothing() -> None:
    clock = Clock()
    router, long = router_of("a", clock=clock), list(range(5_000))

    def served() -> dict[str, Any]:
        booking = router.reserve(long)
        booking.fetch()
        assert router.load(A) == Load(0, 1, 313)
        clock.now += 10.0
        booking.first_token()
        booking.fetch()  # too late
        assert router.load(A) == Load(0, 1, 313)
        booking.finish(4_096)
        return router.statistics()

    before = router.statistics()
    apart = served()
    assert (apart["prefill_rate"], apart["funnel"]) == (before["prefill_rate"], before["funnel"])


def test_a_prompt_that_its_rank_prefills_after_all_counts_from_then_on() -> None:
    def served(*, is_tried_apart: bool) -> tuple[Any, ...]:
        clock = Clock()
        router = router_of("a", clock=clock)
        booking = router.reserve(list(range(5_000)))
        if is_tried_apart:
            booking.fetch()
            clock.now += 100.0
            booking.compute()
            booking.compute()
        loads = router.load(A), router._loads.columns(1_000.0).given.tolist()
        clock.now += 10.0
        booking.first_token()
        booking.compute()  # too late
        assert router.load(A) == Load(0, 1, 313)
        booking.finish(4_096)
        statistics = router.statistics()
        return loads, statistics["prefill_rate"], statistics["funnel"]

    assert served(is_tried_apart=True) == served(is_tried_apart=False)


def test_reports_after_the_end_change_nothing() -> None:
    router = router_of("a")
    booking = router.reserve(PROMPT)
    booking.output()  # ends the prefill
    assert router.load(A).queued_tokens == 0
    booking.finish()
    for late in (booking.first_token, booking.output, booking.finish, booking.cancel):
        late()
    assert (router.load(A), booking.stage) == (NOTHING, Stage.FINISHED)
    assert router.statistics()["bookings"]["finished"] == 1


class NoIndex:
    """As a numpy array of several numbers: it has the method, and no single number."""

    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


@pytest.mark.parametrize("tokens", [-1, math.nan, math.inf, "5", NoIndex()])
def test_numbers_of_tokens_that_are_none_are_refused_and_leave_the_load_whole(tokens: Any) -> None:
    router = router_of("a")
    booking = router.reserve(PROMPT)
    with pytest.raises(ConfigurationError, match="output of"):
        booking.output(tokens)
    assert router.load(A) == LOAD
    with pytest.raises(ConfigurationError, match="cached_tokens is"):
        booking.finish(tokens)
    assert (booking.stage, router.load(A)) == (Stage.FINISHED, NOTHING)
    funnel = router.statistics()["funnel"]
    assert (funnel["finished"]["requests"], funnel["reported"]["requests"]) == (1, 0)


def test_reports_on_a_booking_call_nothing_slow_of_the_typing_module() -> None:
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_globals["__name__"])

    with router_of("a").reserve(PROMPT) as booking:
        sys.setprofile(note)
        try:
            booking.output(1)
            booking.finish()
        finally:
            sys.setprofile(None)
    assert "kvindex.routing.bookings" in called
    assert "typing" not in called  # a runtime protocol takes 10 µs, for each token


def test_a_booking_is_finished_by_its_with_and_cancelled_by_an_exception() -> None:
    router = router_of("a")
    with router.reserve(PROMPT) as done:
        pass
    with pytest.raises(KeyError), router.reserve(PROMPT) as failed:
        raise KeyError
    assert (done.stage, failed.stage) == (Stage.FINISHED, Stage.CANCELLED)
    assert router.load(A) == NOTHING


def test_reservations_of_many_threads_at_once_spread_evenly() -> None:
    router = router_of("abc")
    with ThreadPoolExecutor(8) as pool:
        bookings = list(pool.map(lambda _: router.reserve(PROMPT), range(300)))
    assert [router.load(rank).open_requests for rank in (A, B, C)] == [100, 100, 100]
    for booking in bookings:
        booking.finish()
    assert [router.load(rank) for rank in (A, B, C)] == [NOTHING] * 3


def test_the_load_of_a_removed_rank_returns_with_it() -> None:
    index = fleet("a")
    router = Router(index)
    booking = router.reserve(PROMPT)
    hold(index, B, 0)
    assert router.select(PROMPT).rank == B
    index.remove(A)
    assert router.ranks == (B,)
    with pytest.raises(UnknownRankError):
        router.load(A)
    index.add(A)
    assert router.load(A).open_requests == 1
    index.remove(A)
    booking.finish()
    index.add(A)
    assert router.load(A) == NOTHING


def test_a_forgotten_booking_expires_and_its_late_reports_are_counted(clock: Clock) -> None:
    router = router_of("a", clock=clock, expires_after=60.0)
    forgotten, alive = router.reserve(PROMPT, request_id="r"), router.reserve(PROMPT)
    clock.now += 59.0
    alive.output()
    clock.now += 1.0
    assert router.load(A).open_requests == 1
    assert (forgotten.stage, alive.stage) == (Stage.EXPIRED, Stage.DECODING)
    forgotten.finish()
    assert router.load(A).open_requests == 1
    assert router.statistics()["bookings"] == {
        "open": 1,
        "finished": 0,
        "cancelled": 0,
        "expired": 1,
        "late": 1,
        "cached_above_prompt": 0,
    }
    with pytest.raises(UnknownBookingError):
        router.booking("r")
    router.reserve(PROMPT, request_id="r")  # its id is free again
    clock.now += 60.0
    assert router.reserve(PROMPT, request_id="r").stage is Stage.CHOSEN
    assert router.load(A).open_requests == 1


def test_bookings_are_found_by_the_id_of_their_request() -> None:
    router = router_of("a")
    booking = router.reserve(PROMPT, request_id="r1")
    assert router.booking("r1") is booking
    with pytest.raises(DuplicateBookingError, match="'r1' has an open booking"):
        router.reserve(PROMPT, request_id="r1")
    booking.cancel()
    with pytest.raises(UnknownBookingError, match="no open booking of request 'r1'"):
        router.booking("r1")
    assert router.reserve(PROMPT, request_id="r1") is not booking


def test_a_new_id_differs_from_those_of_users() -> None:
    router = router_of("a")
    own = router.reserve(PROMPT, request_id="kvindex-1")
    new = router.reserve(PROMPT)
    assert router.booking("kvindex-1") is own
    own.finish()
    new.finish()
    assert router.load(A) == NOTHING


def test_a_request_that_others_placed_is_booked_on_their_rank() -> None:
    router = router_of({"a": 9, "b": 0})
    router.drain("b")
    booking = router.place("b/0", PROMPT)
    assert (booking.rank, booking.decision.policy) == (B, "placed")
    assert router.load(B) == LOAD


def test_a_booking_of_another_router_is_its_load_and_no_decision() -> None:
    router = router_of("ab")
    booking = router.book(B, 100, 36, request_id="r")
    assert router.load(B) == Load(queued_tokens=36, open_requests=1, decode_blocks=7)
    assert (booking.decision.tokens, booking.decision.new_tokens) == (64, 36)
    booking.first_token()
    booking.output(BLOCK)
    assert router.load(B) == Load(queued_tokens=0, open_requests=1, decode_blocks=8)
    with pytest.raises(UnknownRankError):
        router.book(C, 10, 10)
    with pytest.raises(DuplicateBookingError):
        router.book(A, 10, 10, request_id="r")
    with pytest.raises(ConfigurationError, match="11 of 10 tokens cannot be new"):
        router.book(A, 10, 11)
    router.booking("r").finish()
    assert [router.load(rank) for rank in (A, B)] == [NOTHING] * 2
    assert router.statistics()["decisions"] == 0
    router.place(A, PROMPT).finish()
    router.select(PROMPT)
    assert router.statistics()["decisions"] == 2


def test_gauges_correct_the_load_for_a_tenth_of_a_second(clock: Clock) -> None:
    router = router_of("ab", clock=clock)
    booking = router.reserve(PROMPT, ranks="a")
    router.report("a", queued_tokens=1_161, open_requests=3)
    assert router.load(A) == Load(1_161, 3, 11)
    router.reserve(PROMPT, ranks="a")  # what we book meanwhile comes on top
    assert router.load(A) == Load(1_322, 4, 22)
    router.report("b", open_requests=9, age=0.2)  # too old
    assert router.load(B) == NOTHING
    clock.now += 0.1
    assert router.load(A) == Load(322, 2, 22)
    router.report("a", queued_tokens=0, age=0.05)
    booking.finish()
    assert router.load(A).queued_tokens == 0  # never below
    assert router.statistics()["old_gauges"] == 1


@pytest.mark.parametrize(
    ("gauge", "message"),
    [
        ({"queued_tokens": -1}, "a gauge is"),
        ({"queued_tokens": math.nan}, "a gauge is"),
        ({"open_requests": math.inf}, "a gauge is"),
        ({"age": -1.0}, "age"),
    ],
)
def test_gauges_that_are_no_numbers_from_0_are_refused(gauge: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        router_of("a").report("a", **gauge)


def test_the_prefill_rate_is_measured_on_first_tokens(clock: Clock) -> None:
    router = router_of("a", clock=clock)
    for _ in range(200):
        with router.reserve(list(range(10_000))) as booking:
            clock.now += 0.2
            booking.first_token()
    assert router.statistics()["prefill_rate"] == pytest.approx(50_000, rel=0.05)


def test_an_excluded_rank_is_not_chosen() -> None:
    router = router_of({"a": 8, "b": 4, "c": 0})
    assert router.select(PROMPT).rank == A
    assert router.select(PROMPT, exclude=A).rank == B
    assert router.reserve(PROMPT, exclude=["a", B]).rank == C
    with pytest.raises(NoCandidateError) as caught:
        router.select(PROMPT, ranks=[A, B], exclude=["b/0", A])
    assert caught.value.refused == {"ranks": 1, "excluded": 2}
    assert router.statistics()["refused"]["excluded"] == 5


def test_a_rank_that_is_not_known_cannot_be_excluded() -> None:
    with pytest.raises(UnknownRankError):
        router_of("a").select(PROMPT, exclude="z")


def test_a_prompt_without_tokens_counts_by_its_length_and_no_rank_holds_it() -> None:
    router = router_of({"a": 8, "b": 0}, filters=[Capacity(queued_tokens=99)])
    booking = router.reserve([], prompt_tokens=100)
    decision = booking.decision
    assert (decision.tokens, decision.new_tokens, decision.reads_cache) == (0, 100, False)
    assert router.load(booking.rank) == Load(100, 1, -(-100 // BLOCK))
    assert router.select([], prompt_tokens=100).rank != booking.rank
    booking.finish(cached_tokens=0)
    assert router.statistics()["funnel"]["finished"]["requests"] == 0, "nothing was predicted"


def test_further_prompts_of_a_request_are_load_and_nobody_holds_them() -> None:
    router = router_of({"a": 8})
    more = len(PROMPT) + 100
    booking = router.reserve(PROMPT, prompt_tokens=more)
    assert (booking.decision.tokens, booking.decision.prompt_tokens) == (8 * BLOCK, more)
    assert router.load(A).queued_tokens == more - 8 * BLOCK
    booking.finish(cached_tokens=3, counts=False)
    assert router.statistics()["funnel"]["finished"]["requests"] == 0
    assert router.load(A) == NOTHING


@pytest.mark.parametrize(("tokens", "length"), [(PROMPT, 5), ([], -1), ([], 1.5), ([], "5")])
def test_a_length_beside_tokens_or_that_is_none_is_refused(tokens: list[int], length: int) -> None:
    with pytest.raises(ConfigurationError, match="prompt_tokens"):
        router_of("a").reserve(tokens, prompt_tokens=length)


def test_a_moved_booking_is_load_where_it_is_served() -> None:
    router = router_of({"a": 8, "b": 4})
    booking = router.reserve(PROMPT)
    booking.move("b")
    assert booking.rank == B
    assert router.load(A) == NOTHING
    assert router.load(B) == Load(len(PROMPT) - 4 * BLOCK, 1, 11)
    booking.first_token()
    booking.move(A)
    assert (router.load(A), router.load(B)) == (Load(0, 1, 11), NOTHING)
    booking.move(B)
    booking.finish(cached_tokens=4 * BLOCK)
    assert (router.load(A), router.load(B)) == (NOTHING, NOTHING)
    funnel = router.statistics()["ranks"]["b/0"]["funnel"]["reported"]
    sums = {"requests": 1, "asked": len(PROMPT), "attainable": 8 * BLOCK}
    assert funnel == {**sums, "chosen": 4 * BLOCK, "delivered": 4 * BLOCK}
    assert router.statistics()["bookings"]["cancelled"] == 0


def test_a_booking_moves_to_ranks_of_its_decision_only() -> None:
    router = router_of("ab")
    booking = router.reserve(PROMPT)
    with pytest.raises(UnknownRankError):
        booking.move("z")
    booking.cancel()
    booking.move(B if booking.rank == A else A)
    assert (router.load(A), router.load(B)) == (NOTHING, NOTHING)


def test_a_touched_booking_does_not_expire(clock: Clock) -> None:
    router = router_of("a", clock=clock, expires_after=10.0)
    kept, lost = router.reserve(PROMPT), router.reserve(PROMPT)
    for _ in range(3):
        clock.now += 6.0
        kept.touch()
    router.select(PROMPT)
    assert (kept.stage, lost.stage) == (Stage.CHOSEN, Stage.EXPIRED)
    lost.touch()
    assert router.statistics()["bookings"]["late"] == 1
