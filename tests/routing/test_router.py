"""The router: what it chooses, what it books, and when it gives back."""

from __future__ import annotations

import math
import os
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from kvindex import (
    BlockStored,
    ConfigurationError,
    EventBatch,
    Index,
    Rank,
    TokenError,
    UnknownRankError,
)
from kvindex.routing import (
    Candidates,
    Capacity,
    Choice,
    CostPolicy,
    DuplicateBookingError,
    FilterRequest,
    Labels,
    Load,
    LoraLoaded,
    NoCandidateError,
    OnlyLive,
    Prefer,
    Router,
    Stage,
    UnknownBookingError,
    Weights,
    reads_cache,
)
from kvindex.wire import text_token
from tests.children import in_child
from tests.routing.routing_fleet import BLOCK, PROMPT, Clock, FollowedIndex, fleet, hold

pytestmark = pytest.mark.unit

A, B, C = Rank("a"), Rank("b"), Rank("c")
NOTHING = Load(0, 0, 0)


def test_the_rank_that_holds_the_prompt_is_chosen() -> None:
    decision = Router(fleet({"a": 0, "b": 9, "c": 3})).select(PROMPT)
    assert decision.rank == B
    assert (decision.tokens, decision.new_tokens) == (9 * BLOCK, len(PROMPT) - 9 * BLOCK)
    assert decision.by_tier == {"device": 9 * BLOCK, "host": 0, "storage": 0}
    assert decision.cost == 3 * decision.new_tokens
    assert decision.attainable == decision.tokens


def test_a_request_whose_engine_reads_no_cache_goes_by_load_alone() -> None:
    router = Router(fleet({"a": 10, "b": 0}))
    router.reserve(PROMPT[:BLOCK], ranks="a")
    assert router.select(PROMPT).rank == A
    booking = router.reserve(PROMPT, reads_cache=False)
    decision = booking.decision
    assert (decision.rank, decision.tokens, decision.new_tokens) == (B, 0, len(PROMPT))
    assert [candidate.tokens for candidate in decision.candidates] == [0, 0]
    assert "b/0 costs least of 2 ranks: the engine reads no cache for these 161 tokens, " in (
        decision.reason
    )
    assert router.load(B) == Load(len(PROMPT), 1, 11)
    placed = router.place(A, PROMPT, reads_cache=False)  # others may have chosen so, too
    assert placed.decision.new_tokens == len(PROMPT)


def test_what_an_engine_caches_without_reading_it_is_predicted_for_those_that_read() -> None:
    router = Router(fleet({"a": 0, "b": 0}), predict=5.0)
    first = router.reserve(PROMPT, reads_cache=False)
    again = router.select(PROMPT, reads_cache=False)
    assert (again.rank != first.rank, again.tokens, again.predicted_tokens) == (True, 0, 0)
    sibling = router.select(PROMPT)
    assert (sibling.rank, sibling.predicted_tokens) == (first.rank, 160)


def test_the_last_token_is_never_credited() -> None:
    whole = PROMPT[: 10 * BLOCK]
    decision = Router(fleet({"a": 10})).select(whole)
    assert decision.tokens == 9 * BLOCK  # the tenth block has the token that must be computed
    assert Router(fleet({"a": 10})).select(PROMPT).tokens == 10 * BLOCK


def test_select_books_nothing() -> None:
    router = Router(fleet({"a": 0}))
    router.select(PROMPT)
    assert router.load(A) == NOTHING


def test_reserve_books_until_the_first_token_and_the_end() -> None:
    router = Router(fleet({"a": 4}))
    booking = router.reserve(PROMPT)
    assert router.load(A) == Load(len(PROMPT) - 4 * BLOCK, 1, 11)
    booking.first_token()
    assert router.load(A) == Load(0, 1, 11)
    booking.output(BLOCK)
    assert router.load(A) == Load(0, 1, 12)
    booking.finish()
    assert router.load(A) == NOTHING


def test_what_comes_after_the_end_changes_nothing() -> None:
    router = Router(fleet({"a": 0}))
    booking = router.reserve(PROMPT)
    booking.finish()
    for late in (booking.first_token, booking.output, booking.finish, booking.cancel):
        late()
    assert router.load(A) == NOTHING
    assert booking.stage is Stage.FINISHED
    assert router.statistics()["bookings"]["finished"] == 1


def test_output_ends_the_prefill() -> None:
    router = Router(fleet({"a": 0}))
    router.reserve(PROMPT).output()
    assert router.load(A).queued_tokens == 0


def test_an_output_of_no_tokens_does_not_end_the_prefill() -> None:
    router = Router(fleet({"a": 0}))
    booking = router.reserve(PROMPT)
    booking.output(0)  # such as a first chunk that has the role only
    assert (booking.stage, router.load(A).queued_tokens) == (Stage.CHOSEN, len(PROMPT))


class NoIndex:
    """As a numpy array of several numbers: it has the method, and no one number."""

    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


@pytest.mark.parametrize("tokens", [-1, math.nan, math.inf, "5", NoIndex()])
def test_numbers_of_tokens_that_are_none_are_refused_and_leave_the_load_whole(tokens: Any) -> None:
    router = Router(fleet({"a": 0}))
    booking = router.reserve(PROMPT)
    with pytest.raises(ConfigurationError, match="output of"):
        booking.output(tokens)
    assert router.load(A) == Load(len(PROMPT), 1, 11)
    with pytest.raises(ConfigurationError, match="cached_tokens is"):
        booking.finish(tokens)
    assert (booking.stage, router.load(A)) == (Stage.FINISHED, NOTHING)
    funnel = router.statistics()["funnel"]
    assert (funnel["finished"]["requests"], funnel["reported"]["requests"]) == (1, 0)


def test_news_of_a_booking_calls_nothing_slow_of_the_typing_module() -> None:
    router = Router(fleet({"a": 0}))
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_globals["__name__"])

    with router.reserve(PROMPT) as booking:
        sys.setprofile(note)
        try:
            booking.output(1)
            booking.finish()
        finally:
            sys.setprofile(None)
    assert "kvindex.routing.bookings" in called
    assert "typing" not in called  # a runtime protocol takes 10 µs, for each token


def test_a_booking_is_finished_by_its_with_and_cancelled_by_an_exception() -> None:
    router = Router(fleet({"a": 0}))
    with router.reserve(PROMPT) as done:
        pass
    with pytest.raises(KeyError), router.reserve(PROMPT) as failed:
        raise KeyError
    assert (done.stage, failed.stage) == (Stage.FINISHED, Stage.CANCELLED)
    assert router.load(A) == NOTHING


def test_a_burst_of_reservations_spreads_where_selections_herd() -> None:
    router = Router(fleet({"a": 0, "b": 0, "c": 0}))
    booked = [router.reserve(PROMPT).rank for _ in range(6)]
    assert all(booked.count(rank) == 2 for rank in (A, B, C))


def test_reservations_of_many_threads_at_once_spread_evenly() -> None:
    router = Router(fleet({"a": 0, "b": 0, "c": 0}))
    with ThreadPoolExecutor(8) as pool:
        bookings = list(pool.map(lambda _: router.reserve(PROMPT), range(300)))
    assert [router.load(rank).open_requests for rank in (A, B, C)] == [100, 100, 100]
    for booking in bookings:
        booking.finish()
    assert [router.load(rank) for rank in (A, B, C)] == [NOTHING] * 3


def test_a_rank_that_holds_enough_keeps_the_request_though_another_is_cheaper() -> None:
    router = Router(fleet({"a": 9, "b": 0}), policy="affinity")
    router.reserve([7] * 1_000, ranks="a")  # queued on a: more than b would have to prefill
    decision = router.select(PROMPT)
    assert decision.rank == A
    assert "the 1 rank that hold enough" in decision.reason


def test_affinity_ends_where_the_holder_is_seconds_of_prefill_behind() -> None:
    router = Router(fleet({"a": 9, "b": 0}), policy="affinity")
    router.reserve([7] * 100_000, ranks="a")  # over 5 s at 16,000 tokens a second
    decision = router.select(PROMPT)
    assert decision.rank == B
    assert "too far behind" in decision.reason


def test_equal_ranks_take_turns_by_what_they_were_given() -> None:
    router = Router(fleet({"a": 0, "b": 0}))
    first = router.reserve(PROMPT)
    first.finish()
    for _ in range(5):
        booking = router.reserve(PROMPT)
        assert booking.rank != first.rank
        booking.finish()
        first = booking


def test_a_rank_that_is_not_live_counts_for_nothing_held() -> None:
    followed = FollowedIndex(fleet({"a": 9, "b": 3}), frozenset([A, B]))
    router = Router(followed)
    assert router.select(PROMPT).rank == A
    followed.live = frozenset([B])
    decision = router.select(PROMPT)
    assert decision.rank == B
    assert [(one.rank, one.live, one.tokens) for one in decision.candidates] == [
        (B, True, 3 * BLOCK),
        (A, False, 0),
    ]
    followed.live = frozenset()
    assert router.select(PROMPT).tokens == 0


def test_a_rank_that_is_not_connected_is_chosen_only_if_no_other_may_be() -> None:
    followed = FollowedIndex(fleet({"a": 0, "b": 0}), frozenset([B]))
    followed.connected = frozenset([B])
    router = Router(followed)
    assert {router.reserve(PROMPT).rank for _ in range(5)} == {B}
    assert router.statistics()["refused"] == {"disconnected": 5}
    assert router.select(PROMPT, ranks="a").rank == A
    followed.connected = frozenset()
    assert router.reserve(PROMPT).rank == A


def test_ranks_come_and_go_and_their_load_comes_back_with_them() -> None:
    index = fleet({"a": 0})
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


def test_tiers_are_credited_less_the_further_they_are() -> None:
    index = fleet({"a": 2, "b": 2, "c": 2})
    hold(index, B, 6, first=2, medium="CPU")
    hold(index, C, 6, first=2, medium="DISK")
    decision = Router(index).select(PROMPT)
    assert decision.rank == B
    assert decision.by_tier == {"device": 2 * BLOCK, "host": 4 * BLOCK, "storage": 0}
    costs = {one.rank: one.cost for one in decision.candidates}
    assert costs[A] == 3 * (len(PROMPT) - 32)
    assert costs[B] == pytest.approx(3 * (len(PROMPT) - 32 - 0.8 * 64))
    assert costs[C] == pytest.approx(3 * (len(PROMPT) - 32 - 0.3 * 64))


def test_no_rank_is_an_error_that_says_so() -> None:
    with pytest.raises(NoCandidateError, match="no rank is known yet"):
        Router(Index()).select(PROMPT)


def test_drained_ranks_get_nothing_new_and_keep_what_is_open() -> None:
    router = Router(fleet({"a": 9, "b": 0}))
    booking = router.reserve(PROMPT)
    router.drain("a")
    assert router.drained == {A}
    assert router.select(PROMPT).rank == B
    assert router.load(A).open_requests == 1
    booking.finish()
    router.drain("b")
    with pytest.raises(NoCandidateError, match="drained refuses 2") as caught:
        router.select(PROMPT)
    assert caught.value.refused == {"drained": 2}
    router.undrain("a")
    assert router.select(PROMPT).rank == A
    assert router.statistics()["refused"] == {"drained": 4}


def test_ranks_narrow_the_choice() -> None:
    router = Router(fleet({"a": 9, "b": 0}))
    assert router.select(PROMPT, ranks=["b/0"]).rank == B
    assert router.select(PROMPT, ranks="b").rank == B
    assert router.select(PROMPT, ranks=B).rank == B
    with pytest.raises(UnknownRankError):
        router.select(PROMPT, ranks="nobody")


def test_labels_decide_where_the_request_asks_for_them() -> None:
    labels = Labels({"a": {"zone": "1", "gpu": "h100"}, "b/0": {"zone": "2"}})
    router = Router(fleet({"a": 9, "b": 0}), filters=[labels])
    assert router.select(PROMPT).rank == A
    assert router.select(PROMPT, labels={"zone": "2"}).rank == B
    assert router.select(PROMPT, labels={"zone": "1", "gpu": "h100"}).rank == A
    with pytest.raises(NoCandidateError, match="labels refuses 2"):
        router.select(PROMPT, labels={"zone": "3"})
    near = Router(fleet({"a": 9, "b": 0}), filters=[Prefer(labels)])
    assert near.select(PROMPT, labels={"zone": "2"}).rank == B
    assert near.select(PROMPT, labels={"zone": "3"}).rank == A


def test_a_wish_that_leaves_no_rank_is_not_heard() -> None:
    labels = Labels({"a": {"zone": "1"}, "b": {"zone": "2"}})
    followed = FollowedIndex(fleet({"a": 9, "b": 0}), frozenset([A, B]))
    router = Router(followed, filters=[Prefer(labels), Capacity(open_requests=1)])
    followed.connected = frozenset([B])
    assert router.select(PROMPT, labels={"zone": "1"}).rank == B  # a's engine is probably down
    followed.connected = frozenset([A, B])
    booking = router.reserve(PROMPT, labels={"zone": "1"})
    assert booking.rank == A
    assert router.select(PROMPT, labels={"zone": "1"}).rank == B  # a is full
    booking.finish()
    router.drain("a")
    assert router.select(PROMPT, labels={"zone": "1"}).rank == B
    assert router.select(PROMPT, ranks="b", labels={"zone": "1"}).rank == B


def test_a_request_with_a_lora_goes_where_it_is_loaded() -> None:
    loaded = LoraLoaded({"a": {"french"}, "b/0": {"german"}})
    router = Router(fleet({"a": 9, "b": 0}), filters=[loaded])
    assert router.select(PROMPT, lora="german").rank == B
    assert router.select(PROMPT).rank == A


def test_full_ranks_are_left_out() -> None:
    router = Router(fleet({"a": 9, "b": 0}), filters=[Capacity(open_requests=1)])
    assert [router.reserve(PROMPT).rank for _ in range(2)] == [A, B]
    with pytest.raises(NoCandidateError, match="capacity refuses 2"):
        router.reserve(PROMPT)
    for limit in ({"queued_tokens": 100}, {"decode_blocks": 10}):
        router = Router(fleet({"a": 0, "b": 0}), filters=[Capacity(**limit)])
        assert {router.reserve(PROMPT).rank for _ in range(2)} == {A, B}
        with pytest.raises(NoCandidateError):
            router.reserve(PROMPT)
    with pytest.raises(ConfigurationError):
        Capacity()


def test_only_live_ranks_are_chosen_where_that_is_asked() -> None:
    followed = FollowedIndex(fleet({"a": 9, "b": 0}), frozenset([B]))
    assert Router(followed, filters=[OnlyLive()]).select(PROMPT).rank == B


def test_a_forgotten_booking_expires_and_its_late_news_is_counted() -> None:
    clock = Clock()
    router = Router(fleet({"a": 0}), clock=clock, expires_after=60.0)
    forgotten, alive = router.reserve(PROMPT), router.reserve(PROMPT)
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
    }


def test_bookings_are_found_by_their_request() -> None:
    router = Router(fleet({"a": 0}))
    booking = router.reserve(PROMPT, request_id="r1")
    assert router.booking("r1") is booking
    with pytest.raises(DuplicateBookingError, match="'r1' has an open booking"):
        router.reserve(PROMPT, request_id="r1")
    booking.cancel()
    with pytest.raises(UnknownBookingError, match="no open booking of request 'r1'"):
        router.booking("r1")
    assert router.reserve(PROMPT, request_id="r1") is not booking


def test_an_id_that_is_made_up_is_none_that_a_user_has_given() -> None:
    router = Router(fleet({"a": 0}))
    given = router.reserve(PROMPT, request_id="kvindex-1")
    made_up = router.reserve(PROMPT)
    assert router.booking("kvindex-1") is given
    given.finish()
    made_up.finish()
    assert router.load(A) == NOTHING


def test_the_id_of_a_booking_that_has_expired_is_free_again() -> None:
    clock = Clock()
    router = Router(fleet({"a": 0}), clock=clock, expires_after=60.0)
    router.reserve(PROMPT, request_id="r")
    clock.now += 60.0
    with pytest.raises(UnknownBookingError):
        router.booking("r")
    router.reserve(PROMPT, request_id="r")
    clock.now += 60.0
    assert router.reserve(PROMPT, request_id="r").stage is Stage.CHOSEN
    assert router.load(A).open_requests == 1


def test_a_filter_that_books_under_the_same_id_leaks_no_load() -> None:
    class Booking:
        name = "booking"
        books = True

        def keeps(self, request: FilterRequest) -> Iterable[object]:
            if self.books:
                self.books = False
                router.book("a/0", 10, 10, request_id="r")
            return request.live

    router = Router(fleet({"a": 0}), filters=[Booking()])
    with pytest.raises(DuplicateBookingError):
        router.reserve(PROMPT, request_id="r")
    router.booking("r").finish()
    assert router.load(A) == NOTHING


def test_a_request_that_others_placed_is_booked_where_they_say() -> None:
    router = Router(fleet({"a": 9, "b": 0}))
    router.drain("b")
    booking = router.place("b/0", PROMPT)
    assert (booking.rank, booking.decision.policy) == (B, "placed")
    assert router.load(B).queued_tokens == len(PROMPT)


def test_gauges_correct_the_load_for_a_tenth_of_a_second() -> None:
    clock = Clock()
    router = Router(fleet({"a": 0, "b": 0}), clock=clock)
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
    for gauge in (-1, math.nan, math.inf):
        with pytest.raises(ConfigurationError, match="a gauge is"):
            router.report("a", queued_tokens=gauge)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="age"):
        router.report("a", age=-1.0)


def test_the_prefill_rate_is_measured_on_first_tokens() -> None:
    clock = Clock()
    router = Router(fleet({"a": 0}), clock=clock)
    for _ in range(200):
        booking = router.reserve(list(range(10_000)))
        clock.now += 0.2
        booking.first_token()
        booking.finish()
    assert router.statistics()["prefill_rate"] == pytest.approx(50_000, rel=0.05)


def test_predictions_keep_siblings_together_and_apart_from_what_is_held() -> None:
    clock = Clock()
    index = fleet({"a": 0, "b": 0})
    router = Router(index, clock=clock, predict=5.0)
    first = router.reserve(PROMPT)
    sibling = router.reserve(PROMPT)
    assert sibling.rank == first.rank
    assert (sibling.decision.tokens, sibling.decision.predicted_tokens) == (160, 160)
    assert index.match(PROMPT).best is None  # a fact is what an event told
    first.finish()
    sibling.cancel()
    clock.now += 4.9
    assert router.select(PROMPT).predicted_tokens == 160
    clock.now += 0.2
    assert router.select(PROMPT).predicted_tokens == 0
    assert router.statistics()["predictions"] == {"made": 2, "blocks": 0}


def test_a_prediction_ends_with_its_cancelled_booking() -> None:
    router = Router(fleet({"a": 0}), predict=5.0)
    router.reserve(PROMPT).cancel()
    assert router.select(PROMPT).tokens == 0


def test_a_rank_that_is_not_live_is_predicted_to_hold_nothing() -> None:
    followed = FollowedIndex(fleet({"a": 0, "b": 0}), frozenset([A, B]))
    router = Router(followed, predict=5.0)
    router.reserve(PROMPT, ranks="a")
    assert router.select(PROMPT, ranks="a").predicted_tokens == 160
    followed.live = frozenset([B])
    decision = router.select(PROMPT, ranks="a")
    assert (decision.tokens, decision.predicted_tokens) == (0, 0)


def test_what_was_sent_to_a_rank_that_went_is_forgotten() -> None:
    clock = Clock()
    index = fleet({"a": 0})
    router = Router(index, clock=clock, predict=5.0)
    first, second = router.reserve(PROMPT), router.reserve(PROMPT)
    index.remove(A)
    hold(index, B, 0)
    assert router.select(PROMPT).rank == B
    assert router.statistics()["predictions"] == {"made": 2, "blocks": 0}
    first.finish()
    second.cancel()
    clock.now += 6.0
    index.add(A)
    assert router.select(PROMPT, ranks="a").tokens == 0  # it has been restarted


DIGEST = "sha256:ab"  # TensorRT-LLM has the digests of images among its tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [DIGEST, *range(1, 33)],
        [*range(32), DIGEST],  # only the last token, which nobody looks up, is text
        [2**63 + 5, *range(32)],
        [-1, *range(32)],
        deque(range(33)),
        array("I", [2**32 - 1, *range(32)]),
        memoryview(array("Q", [2**64 - 1, *range(32)])),
    ],
    ids=["text", "text at the end", "large", "negative", "deque", "4 bytes", "8 bytes"],
)
def test_every_prompt_that_is_routed_is_predicted_too(tokens: Any) -> None:
    index = fleet({"a": 0, "b": 0})
    stored = BlockStored(
        block_hashes=[1], token_ids=[text_token(DIGEST), *range(101, 116)], block_size=BLOCK
    )
    index.apply(A, EventBatch(ts=0.0, events=[stored]))
    router = Router(index, predict=5.0)
    router.reserve(PROMPT)  # so that the predictions are asked, though they have seen no text
    first, second = router.reserve(tokens), router.reserve(tokens)
    assert second.decision.predicted_tokens == 32
    assert second.rank == first.rank


def test_a_prompt_that_cannot_be_predicted_leaks_no_load() -> None:
    router = Router(fleet({"a": 0}), predict=5.0)
    unread = [*range(5_000), 2**64, *range(32)]  # the index looks at the beginning: nobody holds it
    assert router.select(unread).rank == A
    with pytest.raises(TokenError, match="does not fit into 64 bits"):
        router.reserve(unread)
    assert router.load(A) == NOTHING


def test_predictions_tell_loras_salts_and_extra_keys_apart() -> None:
    router = Router(fleet({"a": 9}), predict=5.0)
    extra = [None, (("image", 3),)]
    for options in ({"lora": "french"}, {"salt": "s"}, {"lora": 3}, {"extra_keys": extra}):
        router.reserve(PROMPT, **options)
        assert router.select(PROMPT, **options).tokens == 160
    assert router.select(PROMPT).predicted_tokens == 0
    assert router.select(PROMPT, lora="german").tokens == 0


def test_a_policy_of_ones_own_decides() -> None:
    class Last:
        name = "last"

        def choose(self, candidates: Candidates) -> Choice:
            return Choice(candidates.rows()[-1], why="it is the last")

    decision = Router(fleet({"a": 9, "b": 0}), policy=Last()).select(PROMPT)
    assert (decision.rank, decision.cost) == (B, None)
    assert decision.reason == "b/0: it is the last"
    assert decision.attainable == 9 * BLOCK


def test_a_policy_that_chooses_what_it_may_not_is_refused() -> None:
    class Wrong:
        name = "wrong"

        def choose(self, candidates: Candidates) -> Choice:
            return Choice(1)

    router = Router(fleet({"a": 0, "b": 0}), policy=Wrong())
    router.drain("b")
    with pytest.raises(ConfigurationError, match="'wrong' chose row 1"):
        router.select(PROMPT)


def test_a_policy_may_give_its_costs_in_an_array() -> None:
    numpy = pytest.importorskip("numpy")

    class Cheapest:
        name = "cheapest"

        def choose(self, candidates: Candidates) -> Choice:
            costs = numpy.array([3.0, 1.0])
            return Choice(costs.argmin(), costs)

    decision = Router(fleet({"a": 0, "b": 0}), policy=Cheapest()).select(PROMPT)
    assert (decision.rank, decision.cost) == (B, 1.0)
    assert [one.cost for one in decision.candidates] == [1.0, 3.0]


@pytest.mark.parametrize("kept", [[A], [True] * 3, b"\1"])
def test_a_filter_that_does_not_answer_for_each_rank_is_refused(kept: Any) -> None:
    class Wrong:
        name = "wrong"

        def keeps(self, request: FilterRequest) -> Iterable[object]:
            return kept  # type: ignore[no-any-return]

    router = Router(fleet({"a": 0, "b": 0}), filters=[Wrong()])
    with pytest.raises(ConfigurationError, match=r"'wrong' returned [13] values"):
        router.reserve(PROMPT)


def test_the_name_of_a_worker_with_several_ranks_is_no_rank() -> None:
    index = Index()
    for dp_rank in (0, 1):
        index.add(Rank("a", dp_rank))
    router = Router(index)
    for call in (
        lambda: router.place("a", PROMPT),
        lambda: router.book("a", 10, 10),
        lambda: router.report("a", queued_tokens=1_000),
        lambda: router.load("a"),
    ):
        with pytest.raises(UnknownRankError, match="a/0, a/1"):
            call()
    assert router.place("a/1", PROMPT).rank == Rank("a", 1)


def test_a_filter_that_calls_the_router_while_ranks_change_mixes_no_rows() -> None:
    class Caller:
        name = "caller"

        def keeps(self, request: FilterRequest) -> Iterable[object]:
            if B in request.ranks:
                index.remove(B)
                hold(index, Rank("0"), 0)
                assert router.load("a").open_requests == 0
            return request.live

    index = fleet({"a": 9, "b": 0})
    router = Router(index, filters=[Caller()])
    decision = router.select(PROMPT, ranks=iter(["a"]))
    assert (decision.rank, decision.tokens) == (A, 9 * BLOCK)
    assert [candidate.rank for candidate in decision.candidates] == [A, B]
    assert router.select(PROMPT, ranks="0").rank == Rank("0")


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "prompt_logprobs": None, "logprobs": 1}, True),
        ({"prompt": "a", "prompt_logprobs": 0}, False),  # 0: of the prompt's own tokens alone
        ({"prompt": "a", "prompt_logprobs": 1}, False),
        ({"prompt": "a", "echo": True}, True),
        ({"prompt": "a", "echo": True, "logprobs": 0}, False),
        ({"prompt": "a", "echo": False, "logprobs": 1}, True),
        ({"messages": [], "logprobs": True, "top_logprobs": 1}, True),
        ({"messages": [], "echo": True}, False),  # top_logprobs is 0 by default
        ({"messages": [], "echo": True, "top_logprobs": None}, True),
    ],
)
def test_a_body_shows_whether_its_engine_reads_the_cache(body: Any, reads: bool) -> None:
    assert reads_cache(body) is reads


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the names are: kvindex, affinity"):
        Router(Index(), policy="best")
    with pytest.raises(ConfigurationError, match="expires_after"):
        Router(Index(), expires_after=0.0)
    with pytest.raises(ConfigurationError, match="a weight of policy 'mine'"):
        CostPolicy("mine", Weights(new=math.nan))
    with pytest.raises(ConfigurationError, match="predict"):
        Router(Index(), predict=0.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_is_forked_while_threads_book_routes_by_the_load_of_that_moment() -> None:
    router = Router(fleet({"a": 0, "b": 0}))
    is_over = threading.Event()

    def book() -> None:
        while not is_over.is_set():
            router.reserve(PROMPT).finish()

    def check() -> bool:
        before = [router.load(rank).open_requests for rank in (A, B)]
        router.reserve(PROMPT)
        after = [router.load(rank).open_requests for rank in (A, B)]
        return sum(after) == sum(before) + 1

    threads = [threading.Thread(target=book) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [in_child(check) for _ in range(10)] == [0] * 10
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
