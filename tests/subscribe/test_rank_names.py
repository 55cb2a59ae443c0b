"""Naming ranks by what their batches say, whatever order they speak in."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.subscribe.resumption import Claim, settle

pytestmark = pytest.mark.unit

named = st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=1, max_size=5)


@given(named)
def test_names_differ_and_follow_the_batches_unless_two_name_the_same(
    words: list[int | None],
) -> None:
    names = settle([Claim(port, word) for port, word in enumerate(words)])
    assert len(set(names)) == len(words)
    if all(word is None for word in words):
        assert names == list(range(len(words)))
    if not any(word is not None and words.count(word) > 1 for word in words):
        assert all(word is None or name == word for word, name in zip(words, names, strict=True))


def test_ports_that_name_the_same_keep_their_own_names_and_permutations_are_sorted_out() -> None:
    assert settle([Claim(0, 0), Claim(1, 0)]) == [0, 1]
    assert settle([Claim(0, 1), Claim(1, 1)]) == [0, 1]
    assert settle([Claim(0, 0), Claim(1, 0), Claim(2, 1)]) == [0, 1, 2]
    for order in permutations(range(4)):
        assert settle([Claim(port, word) for port, word in enumerate(order)]) == list(order)
