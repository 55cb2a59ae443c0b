"""The native arithmetic of cost policies, and the Python one that explains it, side by side.

Collected only where the native module was built (conftest.py here).
"""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvindex import Hits
from kvindex.routing import LoadColumns, Weights
from kvindex.routing.policies import choose_in_python
from kvindex.wire._native import choose as choose_natively

pytestmark = pytest.mark.property

PLAIN = Weights()


class Question(NamedTuple):
    """All that a choice depends on."""

    prompt_tokens: int
    hits: Hits
    loads: LoadColumns
    usable: bytes | bytearray
    weights: Weights
    chance: float


def question(
    held: list[tuple[int, int, int]],
    loads: list[tuple[float, ...]],
    usable: bytes | bytearray,
    weights: Weights = PLAIN,
    *,
    prompt_tokens: int = 1000,
    chance: float = 0.0,
) -> Question:
    hits = [array("q", [row[tier] for row in held]) for tier in range(3)]
    columns = [array("d", [row[kind] for row in loads]) for kind in range(6)]
    sizes = array("q", [16] * len(held))
    return Question(
        prompt_tokens, Hits._make([*hits, sizes]), LoadColumns(*columns), usable, weights, chance
    )


class Answer(NamedTuple):
    """The answer of both."""

    row: int
    attainable: int
    costs: list[float]


def answer_of(query: Question) -> Answer:
    native, python = (array("d", bytes(8 * len(query.usable))) for _ in range(2))
    answer, (row, attainable) = choose_natively(*query, native), choose_in_python(*query, python)
    assert native.tolist() == pytest.approx(python.tolist())
    # From Python 3.12 on sum() rounds otherwise than C++ does, so that equals may differ by a bit.
    assert row == answer[0] or native[row] == pytest.approx(native[answer[0]])
    assert attainable == answer[1]
    return Answer(*answer, native.tolist())


# Few different values, so that many rows cost the same.
tokens = st.sampled_from([0, 16, 16, 512, 800, 1000]) | st.integers(0, 2**40)
loads = st.sampled_from([0.0, 0.0, 1.0, 2.0, 1000.0]) | st.floats(0, 1e12)
weights = st.sampled_from([0.0, 1.0, 1.0, 0.8, 0.1, 2.0, 256.0]) | st.floats(-1e6, 1e6)
row = st.tuples(
    st.tuples(tokens, tokens, tokens).map(lambda held: tuple(sorted(held))),
    st.tuples(loads, loads, loads, loads, loads, loads),
    st.sampled_from([0, 1, 1, 255]),
)
questions = st.builds(
    lambda rows, prompt_tokens, weights, chance, mask: question(
        [held for held, _, _ in rows],
        [load for _, load, _ in rows],
        mask(usable for _, _, usable in rows),
        weights,
        prompt_tokens=prompt_tokens,
        chance=chance,
    ),
    st.lists(row, max_size=40),
    tokens,
    st.builds(
        Weights,
        *[weights] * 6,
        *[st.sampled_from([0.0, 1.0, -2.0]) | st.floats(-1e6, 1e6)] * 4,
    ),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([bytes, bytearray]),
)


@given(questions)
@example(question([], [], b""))
@example(
    question([(0, 0, 0)] * 2, [(0.0, 0.0, 0.0, 5e-324, 0.0, 0.0), (0.0,) * 6], b"\1\1")
)  # no mean
def test_both_choose_the_same_row_at_the_same_cost(query: Question) -> None:
    chosen = answer_of(query)
    usable = [row for row, may_be in enumerate(query.usable) if may_be]
    assert (chosen.row in usable) if usable else chosen.row == -1
    for row, cost in enumerate(chosen.costs):
        assert (row in usable) == math.isfinite(cost)


@pytest.mark.parametrize(
    ("chance", "row"), [(0.0, 0), (0.33, 0), (0.34, 2), (0.67, 3), (1 - 2**-53, 3)]
)
def test_chance_decides_among_equals(chance: float, row: int) -> None:
    query = question(
        [(0, 0, 0)] * 5,
        [(5.0, 1.0, 2.0, given, 0.0, 0.0) for given in (3, 4, 3, 3, 3)],
        bytes([1, 1, 1, 1, 0]),
    )
    assert answer_of(query._replace(chance=chance)).row == row


GOOD = question([(0, 0, 0)] * 2, [(0.0,) * 6] * 2, b"\1\1")


def hits(**column: Any) -> dict[str, Any]:
    return {"hits": GOOD.hits._replace(**column)}


def loads_with(**column: Any) -> dict[str, Any]:
    return {"loads": GOOD.loads._replace(**column)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"usable": b"\1"}, "column of 1 numbers"),
        ({"usable": b"\1\1\1"}, "hits.device must be a column of 3"),
        (hits(host=array("q", [0])), "hits.host must be a column of 2"),
        (hits(tokens=array("i", [0] * 4)), "hits.tokens"),
        (hits(tokens=array("d", [0] * 2)), "hits.tokens"),
        (hits(tokens=[0, 0]), "hits.tokens"),
        (loads_with(given=array("d", [0.0] * 3)), r"loads.given must be a column of 2 numbers, "),
        (loads_with(open=array("f", [0.0] * 4)), r"loads.open must .* such as array\('d'\)"),
        ({"hits": GOOD.hits[:2]}, "3 columns"),
        ({"loads": GOOD.loads[:5]}, "6 columns"),
        ({"weights": GOOD.weights[:9]}, "10 values"),
        ({"chance": 1.0}, "chance"),
        ({"chance": math.nan}, "chance"),
    ],
)
def test_columns_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_natively(*GOOD._replace(**wrong), array("d", [0.0] * 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_is_chosen_whatever_the_loads_are(bad: float) -> None:
    query = question([(0, 0, 0)] * 2, [(bad,) * 6] * 2, b"\0\1", PLAIN)
    assert answer_of(query).row == 1
