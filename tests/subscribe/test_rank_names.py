"""Naming ranks by what their batches say, whatever order they speak in."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.subscribe import subscriber_thread as roster
from kvindex.subscribe.resumption import Claim, settle
from kvindex.testing import FakeEngine
from tests.live import caught_up, client_of, worker_of

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


@given(named, st.integers(0, 4))
def test_a_publisher_that_names_the_rank_of_its_port_and_has_it_changes_no_name(
    words: list[int | None], port: int
) -> None:
    port %= len(words)
    words[port] = None
    names = settle([Claim(at, word) for at, word in enumerate(words)])
    if names[port] == port:
        words[port] = port
        assert settle([Claim(at, word) for at, word in enumerate(words)]) == names


def test_naming_every_rank_of_a_worker_as_its_port_settles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 ranks that settled all names 512 times took a fifth of the thread's first seconds."""

    def refuse(claims: object) -> list[int]:
        raise AssertionError("a name that is known was settled again")

    with FakeEngine("engine", dp_rank=0) as engine, client_of(worker_of(engine)) as client:
        monkeypatch.setattr(roster, "settle", refuse)
        engine.serve(range(64))
        caught_up(client, engine)
        assert client.statistics()["thread"].get("feed_failures", 0) == 0
