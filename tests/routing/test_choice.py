"""The router's choice: the rank, the reason, and policies of the user's own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvindex import ConfigurationError, Index, Rank, UnknownRankError
from kvindex.routing import Candidates, Choice, CostPolicy, Load, NoCandidateError, Router, Weights
from kvindex.wire.quirks import reads_cache
from tests.routing.fleet import BLOCK, PROMPT, A, B, C, Followed, fleet, hold, router_of

pytestmark = pytest.mark.unit


def test_the_rank_that_holds_the_prompt_is_chosen() -> None:
    decision = router_of({"a": 0, "b": 9, "c": 3}).select(PROMPT)
    assert decision.rank == B
    assert (decision.tokens, decision.new_tokens) == (9 * BLOCK, len(PROMPT) - 9 * BLOCK)
    assert decision.by_tier == {"device": 9 * BLOCK, "host": 0, "storage": 0}
    assert decision.cost == 3 * decision.new_tokens
    assert decision.attainable == decision.tokens


def test_a_request_whose_engine_reads_no_cache_goes_by_load_alone() -> None:
    router = router_of({"a": 10, "b": 0})
    router.reserve(PROMPT[:BLOCK], ranks="a")
    assert router.select(PROMPT).rank == A
    decision = router.reserve(PROMPT, reads_cache=False).decision
    assert (decision.rank, decision.tokens, decision.new_tokens) == (B, 0, len(PROMPT))
    assert [candidate.tokens for candidate in decision.candidates] == [0, 0]
    assert "b/0 costs least of 2 ranks: the engine reads no cache for these 161 tokens, " in (
        decision.reason
    )
    assert router.load(B) == Load(len(PROMPT), 1, 11)
    placed = router.place(A, PROMPT, reads_cache=False)  # others may have chosen so, too
    assert placed.decision.new_tokens == len(PROMPT)


def test_the_last_token_is_never_credited() -> None:
    router = router_of({"a": 10})
    assert router.select(PROMPT[: 10 * BLOCK]).tokens == 9 * BLOCK  # the tenth has the last token
    assert router.select(PROMPT).tokens == 10 * BLOCK


def test_equal_ranks_take_turns_by_the_tokens_that_they_were_given() -> None:
    router = router_of("ab")
    ranks = []
    for _ in range(6):
        with router.reserve(PROMPT) as booking:
            ranks.append(booking.rank)
    assert ranks == 3 * ranks[:2]
    assert set(ranks) == {A, B}


def test_the_blocks_of_a_rank_that_is_not_live_do_not_count() -> None:
    followed = Followed(fleet({"a": 9, "b": 3}))
    router = Router(followed)
    assert router.select(PROMPT).rank == A
    followed.live = frozenset([B])
    decision = router.select(PROMPT)
    assert decision.rank == B
    assert [(c.rank, c.live, c.tokens) for c in decision.candidates] == [
        (B, True, 3 * BLOCK),
        (A, False, 0),
    ]
    followed.live = frozenset()
    assert router.select(PROMPT).tokens == 0


def test_tiers_are_credited_less_the_further_they_are() -> None:
    index = fleet({"a": 2, "b": 2, "c": 2})
    hold(index, B, 6, first=2, medium="CPU")
    hold(index, C, 6, first=2, medium="DISK")
    decision = Router(index).select(PROMPT)
    assert decision.rank == B
    assert decision.by_tier == {"device": 2 * BLOCK, "host": 4 * BLOCK, "storage": 0}
    missing = len(PROMPT) - 2 * BLOCK
    costs = {candidate.rank: candidate.cost for candidate in decision.candidates}
    assert costs[A] == 3 * missing
    assert costs[B] == pytest.approx(3 * (missing - 0.8 * 4 * BLOCK))
    assert costs[C] == pytest.approx(3 * (missing - 0.3 * 4 * BLOCK))


def test_an_empty_fleet_is_an_error() -> None:
    with pytest.raises(NoCandidateError, match="no rank is known yet"):
        router_of("").select(PROMPT)


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


class Own:
    """A policy of the user's own, which makes always the same choice."""

    name = "own"

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    def choose(self, candidates: Candidates) -> Choice:
        return self.choice


def test_a_policy_of_the_users_own_decides() -> None:
    policy = Own(Choice(1, why="it is the last"))
    decision = router_of({"a": 9, "b": 0}, policy=policy).select(PROMPT)
    assert (decision.rank, decision.cost) == (B, None)
    assert decision.reason == "b/0: it is the last"
    assert decision.attainable == 9 * BLOCK


def test_a_policy_that_chooses_a_rank_that_is_not_usable_is_refused() -> None:
    router = router_of("ab", policy=Own(Choice(1)))
    router.drain("b")
    with pytest.raises(ConfigurationError, match="'own' chose row 1"):
        router.select(PROMPT)


def test_a_policy_may_return_its_costs_in_an_array() -> None:
    numpy = pytest.importorskip("numpy")
    costs = numpy.array([3.0, 1.0])
    decision = router_of("ab", policy=Own(Choice(costs.argmin(), costs))).select(PROMPT)
    assert (decision.rank, decision.cost) == (B, 1.0)
    assert [candidate.cost for candidate in decision.candidates] == [1.0, 3.0]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "the names are: kvindex, least-queued"),
        ({"expires_after": 0.0}, "expires_after"),
        ({"predict": 0.0}, "predict"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Router(Index(), **options)


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a weight of policy 'mine'"):
        CostPolicy("mine", Weights(new=math.nan))
