"""Ranks by what people write for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvindex.wire.errors import UnknownRankError
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankNames, find_rank, find_ranks

pytestmark = pytest.mark.unit

A0, A1, AN = Rank("a", 0), Rank("a", 1), Rank("a/1", 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (A0, [A0]),
        (("a", 1), [A1]),
        ("a/0", [A0]),
        ("a", [A0, A1]),
        ("a/1/0", [AN]),
    ],
)
def test_ranks_are_found(name: object, expected: list[Rank]) -> None:
    assert find_ranks(name, {A1, A0, AN}) == expected


@pytest.mark.parametrize(
    "name", ["a/2", "", "/", "a/", "a/00", "a/-0", 0, None, Rank("a", 2), b"a"]
)
def test_what_is_not_known_is_refused_with_its_type_and_what_is(name: object) -> None:
    with pytest.raises(UnknownRankError, match="is not known; known: a/0, a/1") as refused:
        find_ranks(name, {A0, A1})
    assert isinstance(name, Rank | str) or f"({type(name).__name__})" in str(refused.value)


def test_a_name_that_several_ranks_have_is_none_of_them() -> None:
    with pytest.raises(UnknownRankError, match=r"'a' stands for several: a/0, a/1; give"):
        find_rank("a", {A0, A1})
    with pytest.raises(UnknownRankError, match=r"'a/1' stands for several: a/1, a/1/0"):
        find_ranks("a/1", {A0, A1, AN})


@pytest.mark.parametrize("name", [A0, ("a", 1), "a/0", "a", "a/1/0", "a/1", "b", "", ["a", 0]])
def test_many_names_are_found_as_one_is(name: Any) -> None:
    known = {A1, A0, AN}

    def outcome(find: Callable[[Any], list[Rank]]) -> list[Rank] | str:
        try:
            return find(name)
        except UnknownRankError as error:
            return str(error)

    assert outcome(RankNames(known).find) == outcome(lambda text: find_ranks(text, known))
