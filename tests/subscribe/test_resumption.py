"""Which publisher has which name, and goes on from which cursor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.subscribe import subscriber_thread as roster
from kvindex.subscribe.resumption import (
    Claim,
    SavedRanks,
    check_saved,
    plan_resumption,
    resume_ranks,
    settle,
)
from kvindex.testing import FakeEngine
from kvindex.wire.rank import Rank
from tests.live import caught_up, client_of, worker_of
from tests.subscribe.peers import saved_cursor

pytestmark = pytest.mark.unit

MINE = "nh64:1"


cursor = partial(saved_cursor, fingerprints=MINE)


@pytest.mark.parametrize(
    ("dp_ranks", "cursors", "expected"),
    [
        # A first start.
        ([0, 1], {}, [(0, None, "no_cursor", False), (1, None, "no_cursor", False)]),
        # Each port has its own cursor.
        ([0, 1], {0: cursor(0), 1: cursor(1)}, [(0, 0, "", True), (1, 1, "", True)]),
        # A rank keeps the name that its batches gave it.
        (
            [0, 1],
            {0: cursor(1, named=0), 1: cursor(0, named=1)},
            [(1, 0, "", True), (0, 1, "", True)],
        ),
        ([0], {5: cursor(0, named=5)}, [(5, 0, "", True)]),
        # A port without a cursor gets a name that is left, and nothing that was restored.
        ([0, 1], {1: cursor(0, named=1)}, [(1, 0, "", True), (0, None, "no_cursor", False)]),
        # Two cursors of one port: saved while two ranks changed names.
        (
            [0, 1],
            {0: cursor(0), 1: cursor(0)},
            [(0, 0, "", True), (1, None, "no_cursor", True)],
        ),
        # The port of a cursor is gone.
        ([0], {0: cursor(0), 1: cursor(1)}, [(0, 0, "", True)]),
        # Fingerprints of another function cannot be compared.
        (
            [0],
            {0: cursor(0, fingerprints="blake2b:1")},
            [(0, 0, "other_fingerprints", True)],
        ),
        # A rank without a cursor begins anew.
        ([0, 1], {0: None, 1: cursor(1)}, [(0, None, "no_cursor", True), (1, 1, "", True)]),
        # An unreadable cursor gives way to one that names its port.
        ([0], {0: b"?"}, [(0, None, "unreadable_cursor", True)]),
        (
            [0, 1],
            {0: b"?", 1: cursor(0, named=1)},
            [(1, 0, "", True), (0, None, "no_cursor", True)],
        ),
    ],
)
def test_each_port_goes_on_from_its_cursor_or_begins_anew_with_the_reason(
    dp_ranks: list[int],
    cursors: Mapping[int, bytes | None],
    expected: list[tuple[int, int | None, str, bool]],
) -> None:
    plan = plan_resumption(dp_ranks, cursors, MINE)
    assert [
        (r.dp_rank, r.saved.cursor.seq if r.saved else None, r.refused, r.restored) for r in plan
    ] == expected


# What the sink held, taken up with the cursors ----------------------------------------------------

ZERO, ONE, TWO = (Rank("a", dp_rank) for dp_rank in range(3))


class Saved(SavedRanks):
    """Saved ranks that note what is asked of them."""

    def __init__(self, cursors: Mapping[int, bytes | None], failing: Mapping[Rank, str]) -> None:
        self.saved = cursors
        self.failing = failing
        self.asked: list[tuple[str, Mapping[Rank, str]]] = []

    def cursors(self, worker: str) -> Mapping[int, bytes | None]:
        return self.saved

    def restore(self, worker: str, refused: Mapping[Rank, str]) -> Mapping[Rank, str]:
        self.asked.append((worker, dict(refused)))
        return self.failing


def test_ranks_with_a_publisher_are_taken_up_and_the_others_are_in_vain() -> None:
    saved = Saved({0: cursor(0), 1: b"?", 2: cursor(2)}, {})
    taken, unused = resume_ranks(saved, "a", [0, 1], MINE)
    assert saved.asked == [("a", {ZERO: "", ONE: "unreadable_cursor"})]
    assert [(r.dp_rank, r.refused) for r in taken] == [(0, ""), (1, "unreadable_cursor")]
    assert unused == [TWO]


def test_what_has_no_publisher_yet_is_not_in_vain_if_it_is_kept_for_one() -> None:
    saved = Saved({0: cursor(0), 1: cursor(1)}, {})
    saved.patient = True
    assert resume_ranks(saved, "a", [0], MINE)[1] == []


def test_a_publisher_that_comes_later_takes_no_name_of_those_present() -> None:
    cursors: dict[int, bytes | None] = {0: cursor(1, named=0), 2: cursor(2)}
    later = plan_resumption([1, 2, 5], cursors, MINE, {0: 1, 7: 0})
    assert [(r.dp_rank, r.refused, r.restored) for r in later] == [
        (7, "no_cursor", False),  # its port's name and its saved one are both taken
        (2, "", True),
        (5, "no_cursor", False),
    ]


def test_a_rank_that_could_not_be_restored_does_not_go_on() -> None:
    saved = Saved({0: cursor(0), 1: cursor(1)}, {ONE: "room"})
    taken, unused = resume_ranks(saved, "a", [0, 1], MINE)
    assert [(r.dp_rank, r.refused, r.restored) for r in taken] == [(0, "", True), (1, "room", True)]
    assert unused == []


def test_a_worker_of_which_nothing_was_saved_is_taken_up_too() -> None:
    saved = Saved({}, {})
    taken, unused = resume_ranks(saved, "a", [0], MINE)
    assert saved.asked == [("a", {})]
    assert [r.refused for r in taken] == ["no_cursor"]
    assert unused == []


def test_cursors_alone_are_those_of_their_worker() -> None:
    saved = check_saved({ONE: b"1", ("b", 0): b"b"})
    assert saved.cursors("a") == {1: b"1"}
    assert saved.cursors("b") == {0: b"b"}
    assert saved.restore("a", {ONE: ""}) == {}
    assert saved.cursors("a") == {1: b"1"}, "the sink keeps account"


# Names: by what batches say, whatever order they speak in

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
