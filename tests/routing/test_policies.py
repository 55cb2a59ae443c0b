"""Each policy by name: what it prefers, and when it gives that up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest

from benchmarks.routing.field import POLICIES, make_policy
from kvindex import Hits, Rank
from kvindex.routing import Candidates, Choice, CostPolicy, LoadColumns, Weights
from kvindex.routing.policies import choose_in_python

pytestmark = pytest.mark.unit

LENGTH = 1_000


def candidates(
    held: Sequence[int],
    *,
    queued: Sequence[int] = (),
    opened: Sequence[int] = (),
    decode: Sequence[int] = (),
    given: Sequence[int] = (),
    usable: Sequence[int] = (),
    chance: float = 0.0,
) -> Candidates:
    rows = len(held)
    tokens = array("q", held)
    columns = (array("d", column or [0] * rows) for column in (queued, opened, decode, given))
    return Candidates(
        ranks=[Rank(f"w{row}") for row in range(rows)],
        prompt_tokens=LENGTH,
        hits=Hits(tokens, tokens, tokens, array("q", [16] * rows)),
        loads=LoadColumns(*columns),
        usable=bytes(usable or [1] * rows),
        block_size=16,
        prefill_rate=10_000.0,
        chance=chance,
    )


def choose(policy: str, of: Candidates) -> Choice:
    return make_policy(policy).choose(of)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_its_name_and_chooses_among_usable_rows_only(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    for _ in range(3):
        assert policy.choose(candidates([900, 0, 900], usable=[0, 1, 0])).row == 1


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round-robin"}))
def test_every_policy_breaks_ties_by_what_was_given_and_then_by_chance(name: str) -> None:
    assert choose(name, candidates([0, 0, 0], given=[2, 1, 2])).row == 1
    rows = {choose(name, candidates([0, 0, 0], chance=chance)).row for chance in (0.0, 0.5, 0.99)}
    assert rows == {0, 1, 2}


def test_the_default_takes_a_missing_token_for_three_that_wait() -> None:
    assert choose("kvindex", candidates([900, 0], queued=[2_699, 0])).row == 0
    assert choose("kvindex", candidates([900, 0], queued=[2_701, 0])).row == 1
    assert choose("kvindex", candidates([0, 0], queued=[255, 0], opened=[0, 1])).row == 0
    assert choose("kvindex", candidates([0, 0], queued=[257, 0], opened=[0, 1])).row == 1


def test_the_default_values_a_hit_more_while_every_rank_has_a_backlog() -> None:
    backlog = 100_000
    assert choose("kvindex", candidates([900, 0], queued=[backlog + 2_701, backlog])).row == 0
    far = backlog + 2_701 + int(0.9 * backlog)
    assert choose("kvindex", candidates([900, 0], queued=[far, backlog])).row == 1
    # A rank that may not be chosen does not shorten it.
    of = candidates([900, 0, 0], queued=[backlog + 2_701, backlog, 0], usable=[1, 1, 0])
    assert choose("kvindex", of).row == 0


def test_the_default_spreads_what_no_rank_holds_much_of() -> None:
    # Nobody has anything to do, and all prompts begin alike: without this, one rank gets them all.
    assert choose("kvindex", candidates([50, 0, 0], given=[0, 0, 0])).row == 0
    assert choose("kvindex", candidates([50, 0, 0], given=[2_000, 1_000, 1_500])).row == 1
    assert choose("kvindex", candidates([900, 0, 0], given=[3_000, 0, 0])).row == 0  # its home


def test_affinity_keeps_a_home_until_it_is_five_seconds_behind() -> None:
    assert choose("affinity", candidates([900, 0], queued=[40_000, 0])).row == 0
    assert choose("affinity", candidates([900, 0], queued=[51_000, 0])).row == 1
    assert choose("affinity", candidates([799, 0], queued=[2_000, 0])).row == 1  # below 0.8
    assert choose("affinity", candidates([900, 850], queued=[1_000, 0])).row == 1  # both are homes


def test_affinity_weighs_an_open_request_as_256_tokens() -> None:
    assert choose("affinity", candidates([0, 0], queued=[255, 0], opened=[0, 1])).row == 0
    assert choose("affinity", candidates([0, 0], queued=[257, 0], opened=[0, 1])).row == 1


def test_lmetric_multiplies_the_prefill_by_the_batch() -> None:
    choice = choose("lmetric", candidates([500, 0], queued=[100, 0], opened=[1, 0]))
    assert list(choice.costs) == [600 * 2, 1_000]


def test_dynamo_adds_the_blocks_that_decode() -> None:
    choice = choose("dynamo", candidates([500, 0], queued=[100, 0], decode=[10, 0], opened=[5, 0]))
    assert list(choice.costs) == [600 + 160, 1_000]
    choice = choose("dynamo-agentic", candidates([500, 400], queued=[100, 0], opened=[1, 0]))
    assert list(choice.costs) == [4 * 100 + 1_024, 4 * 200]


def test_dynamo_for_agents_credits_lower_tiers_as_dynamo_does() -> None:
    held = Hits(*(array("q", column) for column in ([100, 0], [300, 0], [500, 0], [16, 16])))
    of = candidates([500, 0])._replace(hits=held)
    for name, scale, device in (("dynamo", 1, 1.0), ("dynamo-agentic", 4, 2.0)):
        credit = device * 100 + 0.75 * 200 + 0.25 * 200
        assert choose(name, of).costs[0] == scale * (1_000 - credit)


def test_llm_d_takes_the_fewest_tokens_in_flight_among_the_homes() -> None:
    assert choose("llm-d", candidates([900, 850, 0], decode=[10, 9, 0])).row == 1
    assert choose("llm-d", candidates([900, 0], decode=[18 * 1_000, 0])).row == 1  # 18 s behind


def test_load_alone_ignores_what_is_held() -> None:
    assert choose("least-queued", candidates([900, 0], queued=[1, 0], opened=[0, 9])).row == 1
    assert choose("least-requests", candidates([900, 0], queued=[0, 9], opened=[1, 0])).row == 1
    assert choose("longest-prefix", candidates([900, 0], queued=[10**6, 0])).row == 0


def test_the_spill_gate_leaves_a_holder_that_has_far_more_than_the_mean() -> None:
    assert choose("smg-gate", candidates([500, 0], opened=[10, 4])).row == 0
    choice = choose(
        "smg-gate", candidates([500, 0, 0, 0], opened=[40, 0, 0, 0], queued=[900, 9, 8, 9])
    )
    assert (choice.row, choice.why) == (
        2,
        "the rank that holds most has too much to do; here it waits least",
    )
    assert choose("smg-gate", candidates([0, 0], queued=[9, 8])).row == 1


def test_two_tier_goes_by_load_only_while_loads_are_far_apart() -> None:
    assert choose("two-tier", candidates([500, 0], opened=[64, 0])).row == 0
    assert choose("two-tier", candidates([500, 0], opened=[65, 0])).row == 1
    assert choose("two-tier", candidates([500, 0], opened=[301, 200])).row == 1
    assert choose("two-tier", candidates([500, 0], opened=[300, 200])).row == 0
    assert choose("two-tier", candidates([300, 0], opened=[1, 0])).row == 1  # not over 0.3


def test_a_load_that_is_no_number_makes_a_rank_the_dearest() -> None:
    nan = math.nan  # of a board of somebody's own
    of = candidates([0, 0, 0], opened=[nan, 1, 1], given=[0, nan, 5])  # type: ignore[list-item]
    weights, costs = Weights(request=256.0), array("d", [0.0] * 3)
    choice = CostPolicy("mine", weights).choose(of)
    assert (choice.row, list(choice.costs)) == (2, [math.inf, 1_256, 1_256])
    row, *_ = choose_in_python(LENGTH, of.hits, of.loads, of.usable, weights, 0.0, costs)
    assert (row, costs) == (2, choice.costs)


def test_round_robin_takes_turns_among_the_usable() -> None:
    policy = make_policy("round-robin")
    of = candidates([0, 0, 0], usable=[1, 0, 1])
    assert [policy.choose(of).row for _ in range(4)] == [0, 2, 0, 2]
