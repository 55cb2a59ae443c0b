"""The funnel: one denominator from asked to delivered, and suspicions of ranks that go wrong."""

from __future__ import annotations

import pytest

from kvindex import Rank
from kvindex.routing import Router
from kvindex.routing.funnel import Funnel
from tests.routing.fleet import BLOCK, PROMPT, fleet, router_of

pytestmark = pytest.mark.unit

HELD = 5 * BLOCK


def test_all_stages_count_the_same_finished_requests() -> None:
    router = router_of({"a": 5, "b": 10})
    router.reserve(PROMPT, ranks="a").finish(cached_tokens=HELD)
    router.reserve(PROMPT, ranks="b").finish()
    router.reserve(PROMPT).cancel()  # no answer, so it counts nowhere
    funnel = router.statistics()["funnel"]
    asked = len(PROMPT)
    assert funnel["finished"] == {
        "requests": 2,
        "asked": 2 * asked,
        "attainable": 5 * BLOCK + 10 * BLOCK,
        "chosen": 5 * BLOCK + 10 * BLOCK,
    }
    assert funnel["reported"] == {
        "requests": 1,
        "asked": asked,
        "attainable": HELD,
        "chosen": HELD,
        "delivered": HELD,
    }
    assert router.statistics()["ranks"]["a/0"]["funnel"]["reported"] == funnel["reported"]


def test_a_request_that_no_cache_could_help_is_not_in_the_funnel() -> None:
    router = router_of({"a": 5})
    for _ in range(30):
        router.reserve(PROMPT, reads_cache=False).finish(cached_tokens=0)
    statistics = router.statistics()
    assert statistics["bookings"]["finished"] == statistics["decisions"] == 30
    assert statistics["funnel"]["finished"]["requests"] == 0
    assert statistics["ranks"]["a/0"]["suspicion"] == ""


def test_a_request_of_another_router_is_in_that_routers_funnel() -> None:
    router = router_of({"a": 5})
    for _ in range(40):  # the other router receives the engine's report
        router.book("a/0", 100, 40).finish()
    router.reserve(PROMPT).finish(0)
    statistics = router.statistics()
    assert statistics["funnel"]["finished"]["requests"] == 1
    assert statistics["ranks"]["a/0"]["suspicion"] == ""


def test_the_blocks_of_another_rank_are_attainable_though_not_chosen() -> None:
    router = router_of({"a": 5, "b": 10}, policy="least-requests")
    router.reserve(PROMPT).finish(0)
    router.reserve(PROMPT).finish(0)
    finished = router.statistics()["funnel"]["finished"]
    assert finished["attainable"] == 2 * 10 * BLOCK
    assert finished["chosen"] == 15 * BLOCK


@pytest.mark.parametrize(
    ("delivered", "suspicion"),
    [
        (HELD, ""),
        (HELD - 10, ""),  # less than a fifth: nothing to worry about
        (None, "does not report how many tokens it found cached"),
        (0, "finds nothing cached"),
        (BLOCK, "finds less than its events reported"),
        (10 * BLOCK, "finds what other ranks hold"),
        (8 * BLOCK, "finds more than its events reported"),
    ],
)
def test_a_rank_whose_predictions_go_wrong_is_suspected_with_a_reason(
    delivered: int | None, suspicion: str
) -> None:
    router = router_of({"a": 5, "b": 10}, policy="round-robin")
    for _ in range(20):
        assert router.statistics()["ranks"]["a/0"]["suspicion"] == ""  # too few
        first, second = router.reserve(PROMPT), router.reserve(PROMPT)
        assert [booking.rank.worker for booking in (first, second)] == ["a", "b"]
        first.finish(delivered)
        second.finish(10 * BLOCK)
    ranks = router.statistics()["ranks"]
    assert suspicion in ranks["a/0"]["suspicion"]
    assert bool(ranks["a/0"]["suspicion"]) == bool(suspicion)
    assert ranks["b/0"]["suspicion"] == ""


def test_a_suspicion_ends_when_the_rank_does_right_again() -> None:
    router = router_of({"a": 5})
    for _ in range(100):
        router.reserve(PROMPT).finish(0)
    assert router.statistics()["ranks"]["a/0"]["suspicion"]
    for _ in range(300):
        router.reserve(PROMPT).finish(HELD)
    assert router.statistics()["ranks"]["a/0"]["suspicion"] == ""


def test_a_rank_is_suspected_after_a_hundred_thousand_requests_that_went_right() -> None:
    decision = router_of({"a": 5}).select(PROMPT)
    funnel = Funnel()
    for _ in range(100_000):
        funnel.count(decision, HELD)
    assert funnel.suspicion(decision.rank) == ""
    for _ in range(500):
        funnel.count(decision, 0)
    assert "finds nothing cached" in funnel.suspicion(decision.rank)


def test_the_funnel_of_a_rank_goes_with_it_and_its_sums_stay() -> None:
    index = fleet({"a": 5, "b": 0})
    router = Router(index)
    for _ in range(20):
        router.reserve(PROMPT, ranks="a").finish(0)
    index.remove(Rank("a"))
    assert router.statistics()["funnel"]["finished"]["requests"] == 20
    index.add(Rank("a"))
    for _ in range(20):
        router.reserve(PROMPT, ranks="a").finish(0)
    rank = router.statistics()["ranks"]["a/0"]
    assert rank["funnel"]["finished"]["requests"] == 20
    assert rank["suspicion"] == ""  # its restarted engine holds nothing, and was not expected to


def test_an_engine_that_finds_more_tokens_than_the_prompt_has_is_counted_and_said() -> None:
    router = router_of({"a": 5})
    for _ in range(20):
        router.reserve(PROMPT).finish(len(PROMPT) + 1)
    statistics = router.statistics()
    assert statistics["bookings"]["cached_above_prompt"] == 20
    reported = statistics["funnel"]["reported"]
    assert reported["delivered"] == reported["asked"] == 20 * len(PROMPT)
    suspicion = statistics["ranks"]["a/0"]["suspicion"]
    assert "more tokens cached than the matched prompt has" in suspicion
    assert "tokens may differ from those that were matched" in suspicion


@pytest.mark.parametrize("delivered", [0, BLOCK, 8 * BLOCK])
def test_a_suspicion_names_other_tokens_as_a_cause(delivered: int) -> None:
    router = router_of({"a": 5})
    for _ in range(20):
        router.reserve(PROMPT).finish(delivered)
    suspicion = router.statistics()["ranks"]["a/0"]["suspicion"]
    assert "tokens may differ from those that were matched (chat template, BOS" in suspicion
