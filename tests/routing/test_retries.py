"""What a gateway needs of a router: retries elsewhere, prompts without tokens, signs of life."""

from __future__ import annotations

import pytest

from kvindex import ConfigurationError, UnknownRankError
from kvindex.routing import Capacity, Load, NoCandidateError, Stage
from tests.routing.fleet import BLOCK, NOTHING, PROMPT, A, B, C, Clock, router_of

pytestmark = pytest.mark.unit

LENGTH = len(PROMPT)


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
    assert router.load(B) == Load(LENGTH - 4 * BLOCK, 1, 11)
    booking.first_token()
    booking.move(A)
    assert (router.load(A), router.load(B)) == (Load(0, 1, 11), NOTHING)
    booking.move(B)
    booking.finish(cached_tokens=4 * BLOCK)
    assert (router.load(A), router.load(B)) == (NOTHING, NOTHING)
    funnel = router.statistics()["ranks"]["b/0"]["funnel"]["reported"]
    sums = {"requests": 1, "asked": LENGTH, "attainable": 8 * BLOCK}
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


def test_a_touched_booking_does_not_expire() -> None:
    clock = Clock()
    router = router_of("a", clock=clock, expires_after=10.0)
    kept, lost = router.reserve(PROMPT), router.reserve(PROMPT)
    for _ in range(3):
        clock.now += 6.0
        kept.touch()
    router.select(PROMPT)
    assert (kept.stage, lost.stage) == (Stage.CHOSEN, Stage.EXPIRED)
    lost.touch()
    assert router.statistics()["bookings"]["late"] == 1
