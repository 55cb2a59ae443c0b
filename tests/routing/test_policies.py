"""Each policy by name: what it prefers, and when it gives that up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.routing.field import POLICIES, make_policy
from kvindex import Hits, Rank
from kvindex.routing import Candidates, Choice, CostPolicy, LoadColumns, Weights
from kvindex.routing.policies import choose_in_python

pytestmark = pytest.mark.unit

LENGTH = 1_000
BACKLOG = 100_000


def candidates(
    held: Sequence[int],
    *,
    queued: Sequence[float] = (),
    opened: Sequence[float] = (),
    decode: Sequence[float] = (),
    given: Sequence[float] = (),
    contexts: Sequence[float] = (),
    cache: Sequence[float] = (),
    usable: Sequence[int] = (),
    chance: float = 0.0,
) -> Candidates:
    rows = len(held)
    tokens = array("q", held)
    loads = (queued, opened, decode, given, contexts, cache)
    columns = (array("d", column or [0] * rows) for column in loads)
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


def choose(policy: str, held: Sequence[int], **columns: Any) -> Choice:
    return make_policy(policy).choose(candidates(held, **columns))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_its_name_and_chooses_among_usable_rows_only(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    for _ in range(3):
        assert policy.choose(candidates([900, 0, 900], usable=[0, 1, 0])).row == 1


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round-robin"}))
def test_every_policy_breaks_ties_by_what_was_given_and_then_by_chance(name: str) -> None:
    assert choose(name, [0, 0, 0], given=[2, 1, 2]).row == 1
    rows = {choose(name, [0, 0, 0], chance=chance).row for chance in (0.0, 0.5, 0.99)}
    assert rows == {0, 1, 2}


@pytest.mark.parametrize(
    ("policy", "held", "columns", "row"),
    [
        # The default takes a missing token for three that wait, and an open request for 256.
        ("kvindex", [900, 0], {"queued": [2_699, 0]}, 0),
        ("kvindex", [900, 0], {"queued": [2_701, 0]}, 1),
        ("kvindex", [0, 0], {"queued": [255, 0], "opened": [0, 1]}, 0),
        ("kvindex", [0, 0], {"queued": [257, 0], "opened": [0, 1]}, 1),
        # It values a hit more while every rank has a backlog, and counts usable ranks only.
        ("kvindex", [900, 0], {"queued": [BACKLOG + 2_701, BACKLOG]}, 0),
        ("kvindex", [900, 0], {"queued": [1.9 * BACKLOG + 2_701, BACKLOG]}, 1),
        ("kvindex", [900, 0, 0], {"queued": [BACKLOG + 2_701, BACKLOG, 0], "usable": [1, 1, 0]}, 0),
        # It spreads what no rank holds much of: else one idle rank would get all similar prompts.
        ("kvindex", [50, 0, 0], {"given": [0, 0, 0]}, 0),
        ("kvindex", [50, 0, 0], {"given": [2_000, 1_000, 1_500]}, 1),
        ("kvindex", [900, 0, 0], {"given": [3_000, 0, 0]}, 0),  # its home
        # It keeps a rank's cache for the sessions that pause there, as far as caches are known.
        ("kvindex", [50, 0], {"contexts": [7_000, 0], "cache": [10_000, 10_000]}, 0),
        ("kvindex", [50, 0], {"contexts": [7_600, 0], "cache": [10_000, 10_000]}, 1),
        ("kvindex", [900, 0], {"contexts": [9_999, 0], "cache": [10_000, 10_000]}, 0),  # its home
        ("kvindex", [50, 0], {"contexts": [99_999, 0], "cache": [-10_000, 0]}, 0),
        # The fewest tokens in flight among the homes, unless these are 18 s behind.
        ("llm-d", [900, 850, 0], {"decode": [10, 9, 0]}, 1),
        ("llm-d", [900, 0], {"decode": [18 * 1_000, 0]}, 1),
        # Load alone, or blocks alone.
        ("least-queued", [900, 0], {"queued": [1, 0], "opened": [0, 9]}, 1),
        ("least-requests", [900, 0], {"queued": [0, 9], "opened": [1, 0]}, 1),
        ("longest-prefix", [900, 0], {"queued": [10**6, 0]}, 0),
        # The holder, unless it has far more to do than the mean.
        ("smg-gate", [500, 0], {"opened": [10, 4]}, 0),
        ("smg-gate", [500, 0, 0, 0], {"opened": [40, 0, 0, 0], "queued": [900, 9, 8, 9]}, 2),
        ("smg-gate", [0, 0], {"queued": [9, 8]}, 1),
        # By load only while loads are far apart, or no rank holds over 0.3.
        ("two-tier", [500, 0], {"opened": [64, 0]}, 0),
        ("two-tier", [500, 0], {"opened": [65, 0]}, 1),
        ("two-tier", [500, 0], {"opened": [301, 200]}, 1),
        ("two-tier", [500, 0], {"opened": [300, 200]}, 0),
        ("two-tier", [300, 0], {"opened": [1, 0]}, 1),
    ],
)
def test_a_policy_weighs_blocks_and_loads(
    policy: str, held: list[int], columns: dict[str, Any], row: int
) -> None:
    assert choose(policy, held, **columns).row == row


@pytest.mark.parametrize(
    ("policy", "held", "columns", "costs"),
    [
        ("lmetric", [500, 0], {"queued": [100, 0], "opened": [1, 0]}, [600 * 2, 1_000]),
        ("dynamo", [500, 0], {"queued": [100, 0], "decode": [10, 0]}, [600 + 160, 1_000]),
        (
            "dynamo-agentic",
            [500, 400],
            {"queued": [100, 0], "opened": [1, 0]},
            [4 * 100 + 1_024, 4 * 200],
        ),
    ],
)
def test_the_costs_of_other_projects_policies(
    policy: str, held: list[int], columns: dict[str, Any], costs: list[int]
) -> None:
    assert list(choose(policy, held, **columns).costs) == costs


def test_dynamo_for_agents_credits_lower_tiers_as_dynamo_does() -> None:
    held = Hits(*(array("q", column) for column in ([100, 0], [300, 0], [500, 0], [16, 16])))
    of = candidates([500, 0])._replace(hits=held)
    for name, scale, device in (("dynamo", 1, 1.0), ("dynamo-agentic", 4, 2.0)):
        credit = device * 100 + 0.75 * 200 + 0.25 * 200
        assert make_policy(name).choose(of).costs[0] == scale * (1_000 - credit)


def test_the_spill_gate_explains_its_choice() -> None:
    choice = choose("smg-gate", [500, 0, 0, 0], opened=[40, 0, 0, 0])
    assert choice.why == "the rank that holds most has too much to do; here it waits least"


def test_a_load_that_is_no_number_makes_a_rank_the_dearest() -> None:
    # Of a board of the user's own.
    of = candidates([0, 0, 0], opened=[math.nan, 1, 1], given=[0, math.nan, 5])
    weights, costs = Weights(request=256.0), array("d", [0.0] * 3)
    choice = CostPolicy("mine", weights).choose(of)
    assert (choice.row, list(choice.costs)) == (2, [math.inf, 1_256, 1_256])
    row, *_ = choose_in_python(LENGTH, of.hits, of.loads, of.usable, weights, 0.0, costs)
    assert (row, costs) == (2, choice.costs)


def test_round_robin_takes_turns_among_the_usable() -> None:
    policy = make_policy("round-robin")
    of = candidates([0, 0, 0], usable=[1, 0, 1])
    assert [policy.choose(of).row for _ in range(4)] == [0, 2, 0, 2]
