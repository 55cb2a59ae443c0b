"""Where KV may be pulled from: which rank a decision names, and what that changes of the choice."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import ConfigurationError
from kvindex.routing import Capacity, Ejection, Labels, Router
from tests.routing.fleet import BLOCK, PROMPT, A, B, C, Clock, Followed, fleet, hold, router_of

pytestmark = pytest.mark.unit

ZONE = {"zone": "1"}


def test_the_rank_that_holds_most_of_the_prompt_is_named_with_what_it_holds() -> None:
    index = fleet({"a": 2, "b": 6, "c": 0})
    hold(index, B, 10, medium="CPU", first=6)
    decision = Router(index, min_tokens=BLOCK, policy="round-robin").select(PROMPT)
    source = decision.source
    assert decision.rank == A
    assert source is not None
    assert (source.rank, source.tokens, source.more) == (B, 10 * BLOCK, 8 * BLOCK)
    assert source.by_tier == {"device": 6 * BLOCK, "host": 4 * BLOCK, "storage": 0}
    assert source.why == "b/0 holds 160 tokens, 128 more than the chosen rank"


@pytest.mark.parametrize(("least", "found"), [(128, True), (129, False)])
def test_a_source_holds_enough_more_than_the_chosen_rank(least: int, found: bool) -> None:
    router = router_of({"a": 2, "b": 10}, policy="round-robin", min_tokens=least)
    assert (router.select(PROMPT).source is not None) is found
    assert router.select(PROMPT).source is None, "it was b's turn, which holds most itself"


def test_of_ranks_that_hold_as_much_the_one_with_fewest_requests_is_named() -> None:
    router = router_of({"a": 10, "b": 10, "c": 0}, min_tokens=1)
    router.place("a", PROMPT)
    source = router.place("c", PROMPT).decision.source
    assert source is not None
    assert source.rank == B


def test_what_a_rank_is_only_predicted_to_hold_is_no_source() -> None:
    router = router_of("ab", min_tokens=1, predict=60.0)
    router.place("b", PROMPT)
    decision = router.place("a", PROMPT).decision
    assert max(candidate.tokens for candidate in decision.candidates) == 10 * BLOCK
    assert decision.source is None


@pytest.mark.parametrize(
    ("filters", "options", "found"),
    [
        ([Capacity(open_requests=1)], {}, True),  # no room for a request, but it has the blocks
        ([Labels({"a": ZONE})], {"labels": ZONE}, False),
        (
            [Capacity(open_requests=1), Labels({"a": {"zone": "1"}})],
            {"labels": {"zone": "1"}},
            False,
        ),
        ([Ejection(clock=Clock())], {}, False),
        ([], {"exclude": "b"}, False),  # it was tried, and has failed
        ([], {"ranks": ["a", "c"]}, False),
        ([], {"reads_cache": False}, False),
    ],
)
def test_a_source_is_a_rank_that_may_serve_the_request_but_for_its_room(
    filters: Any, options: Any, found: bool
) -> None:
    for ejection in filters:
        if isinstance(ejection, Ejection):
            ejection.failed("b", is_down=True)
    router = router_of({"a": 0, "b": 10, "c": 0}, min_tokens=1, filters=filters)
    router.place("b", PROMPT)
    decision = router.select(PROMPT, **options)
    source = decision.moved(A).source
    assert (None if source is None else source.rank) == (B if found else None)


def test_a_rank_that_is_not_live_is_no_source() -> None:
    followed = Followed(fleet({"a": 0, "b": 10}))
    followed.live = frozenset([A])
    router = Router(followed, min_tokens=1)
    assert router.place("a", PROMPT).decision.source is None


def test_a_drained_rank_is_no_source() -> None:
    router = router_of({"a": 0, "b": 10}, min_tokens=1)
    router.drain("b")
    assert router.select(PROMPT).source is None


# The choice ---------------------------------------------------------------------------------------


def _busy(**options: Any) -> Router:
    """b holds the prompt and has much to do; `longest-prefix` would go there in any case."""
    router = router_of({"a": 0, "b": 10}, min_tokens=BLOCK, seed=1, **options)
    router.book("b", 2_000, 200)
    return router


def test_without_a_pull_rate_a_source_changes_no_choice_and_no_cost() -> None:
    named, unnamed = _busy(), _busy()
    unnamed._min_tokens = 1 << 40
    assert named.select(PROMPT).source is None  # b is chosen
    for router in (named, unnamed):
        assert router.select(PROMPT).rank == B
    shown = [[c.cost for c in r.select(PROMPT).candidates] for r in (named, unnamed)]
    assert shown[0] == shown[1]


def test_with_a_pull_rate_load_can_win_and_the_prefix_is_not_lost() -> None:
    decision = _busy(pull_rate=16_000.0 * 8).select(PROMPT)
    source = decision.source
    assert decision.rank == A
    assert source is not None
    assert source.rank == B
    # The true hits are shown, not the discount.
    assert (decision.tokens, decision.attainable) == (0, 10 * BLOCK)


def test_what_a_full_rank_holds_can_be_pulled_and_is_not_attainable() -> None:
    router = _busy(pull_rate=16_000.0 * 8, filters=[Capacity(open_requests=1)])
    decision = router.select(PROMPT)
    assert decision.source is not None
    assert (decision.rank, decision.source.rank, decision.attainable) == (A, B, 0)


def test_a_pull_that_takes_longer_than_computing_changes_nothing() -> None:
    slow, without = _busy(pull_rate=1_000.0), _busy()
    costs = [[c.cost for c in router.select(PROMPT).candidates] for router in (slow, without)]
    assert costs[0] == costs[1]


def test_a_token_that_can_be_pulled_costs_the_time_of_that() -> None:
    # The first guess of the prefill rate is 16,000 tokens/s.
    options = {"min_tokens": 1, "policy": "longest-prefix"}
    half = router_of({"a": 2, "b": 10}, pull_rate=32_000.0, **options).select(PROMPT)
    costs = {candidate.rank: candidate.cost for candidate in half.candidates}
    assert costs == {A: len(PROMPT) - 2 * BLOCK - 4 * BLOCK, B: 1}


@pytest.mark.parametrize(
    "options", [{"min_tokens": 0}, {"pull_rate": 0.0}, {"pull_rate": float("nan")}]
)
def test_values_that_cannot_work_are_refused(options: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        router_of("a", **options)


# What became of it --------------------------------------------------------------------------------


def _told(cached_tokens: int | None, times: int = 1) -> dict[str, Any]:
    router = router_of({"a": 2, "b": 10}, min_tokens=1)
    for _ in range(times):
        booking = router.place("a", PROMPT)
        assert booking.pull() == booking.decision.source
        booking.finish(cached_tokens)
    return router.statistics()


@pytest.mark.parametrize(
    ("cached_tokens", "outcome"),
    [
        (10 * BLOCK, "pulled"),
        (6 * BLOCK, "pulled"),  # half of what a did not hold
        (6 * BLOCK - 1, "not_pulled"),
        (2 * BLOCK, "not_pulled"),
        (0, "not_pulled"),
        (1 << 40, "pulled"),  # an engine that lies is believed, and counted as such
        (None, "unknown"),
    ],
)
def test_the_funnel_counts_by_the_engines_report_whether_it_pulled(
    cached_tokens: int | None, outcome: str
) -> None:
    statistics = _told(cached_tokens)
    wanted = {"pulled": 0, "not_pulled": 0, "unknown": 0, outcome: 1}
    assert statistics["funnel"]["sources"] == wanted
    assert statistics["ranks"]["a/0"]["funnel"]["sources"] == wanted
    assert statistics["bookings"]["cached_above_prompt"] == (cached_tokens == 1 << 40)


def test_what_is_pulled_makes_a_rank_no_suspect_and_what_is_not_does_not_hide_one() -> None:
    assert _told(10 * BLOCK, times=30)["ranks"]["a/0"]["suspicion"] == ""
    assert "finds nothing" in _told(0, times=30)["ranks"]["a/0"]["suspicion"]
    assert "does not report" in _told(None, times=30)["ranks"]["a/0"]["suspicion"]


def test_a_source_that_nobody_told_the_engine_of_is_not_counted() -> None:
    router = router_of({"a": 2, "b": 10}, min_tokens=1)
    router.place("a", PROMPT).finish(2 * BLOCK)
    assert sum(router.statistics()["funnel"]["sources"].values()) == 0


def test_a_request_that_another_rank_serves_is_not_counted() -> None:
    router = router_of({"a": 2, "b": 10, "c": 0}, min_tokens=1)
    booking = router.place("a", PROMPT)
    booking.pull()
    booking.move(C)
    booking.finish(0)
    assert sum(router.statistics()["funnel"]["sources"].values()) == 0


def test_a_first_token_after_a_pull_says_nothing_of_the_prefill_rate() -> None:
    clock = Clock()
    router = router_of({"a": 0, "b": 10}, min_tokens=1, clock=clock)
    prompt, guess = PROMPT[:-1] + [7] * 100_000, router.statistics()["prefill_rate"]
    rates = []
    for is_told in (True, False):
        with router.place("a", prompt) as booking:
            if is_told:
                booking.pull()
            clock.now += 1.0
            booking.first_token()
        rates.append(router.statistics()["prefill_rate"])
    assert rates[0] == guess < rates[1]
