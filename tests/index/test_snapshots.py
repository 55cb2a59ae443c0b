"""Whatever happened to an index, what was restored from it answers and goes on as it does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import BACKEND, BlockStored, EventBatch, Index, KVIndexError, Rank
from kvindex.index.snapshot import open_section, seal_section
from kvindex.wire.errors import SnapshotError
from tests.examples import examples
from tests.index.index_queries import (
    SEED,
    SWEEP,
    Query,
    asked_about,
    counted,
    held,
    limits,
    queries,
)
from tests.index.index_steps import (
    RANKS,
    Call,
    Edit,
    Sent,
    calls,
    damaged,
    damages,
    sendings,
    themes,
)

pytestmark = [
    pytest.mark.property,
    pytest.mark.skipif(BACKEND != "native", reason="the Python index has no snapshots"),
]

many = examples(30)

histories = themes.flatmap(
    lambda theme: st.lists(st.one_of(*[sendings(theme)] * 9, calls), min_size=2, max_size=20)
)


ON_DEVICE = EventBatch(
    ts=0.0, events=[BlockStored(block_hashes=[2**40], token_ids=[1, 2], block_size=2)]
)


def take(index: Index, step: Sent | Call) -> None:
    if isinstance(step, Call):
        step.on(index)
        return
    try:
        index.apply(step.rank, step.payload())
    except KVIndexError:
        pass  # damaged


def answer(index: Index, query: Query) -> Any:
    try:
        match = index.match(query.tokens(), **query.options)
    except KVIndexError as error:
        return type(error)
    return list(match), match.best


def assert_equal(index: Index, copy: Index, asked: list[Query]) -> None:
    copy.check()
    assert copy.ranks == index.ranks
    assert counted(copy) == counted(index)
    assert held(copy) == held(index)
    for query in asked:
        assert answer(copy, query) == answer(index, query)


def refusal(index: Index, rank: Rank, section: bytes) -> str | None:
    """Restore a section; return why that was refused, if it was."""
    try:
        index.restore(rank, section)
    except SnapshotError as error:
        return error.reason
    return None


def copy_ranks(index: Index, copy: Index) -> None:
    """Restore every rank into the copy, and forget those that are gone."""
    for rank in set(copy.ranks) - set(index.ranks):
        copy.remove(rank)
    sections = {rank: index.dump(rank) for rank in index.ranks}
    while sections:  # for want of room, those that shrank may have to come first
        before = len(sections)
        for rank, section in list(sections.items()):
            refused = refusal(copy, rank, section)
            copy.check()
            assert refused in (None, "room")
            if refused is None:
                del sections[rank]
        if len(sections) == before:
            for rank in index.ranks:
                copy.remove(rank)


@many
@given(limits, histories, histories, queries)
def test_a_restored_index_answers_and_goes_on_as_the_dumped_one(
    limits: dict[str, Any],
    before: list[Sent | Call],
    after: list[Sent | Call],
    query: Query,
) -> None:
    index = Index(seed=SEED, **limits)
    for step in before:
        take(index, step)
    for rank in index.ranks:  # no snapshot has what a rank would apply again after this
        index.apply(rank, ON_DEVICE)
    copy = Index.from_bytes(index.to_bytes(), **limits)
    assert_equal(index, copy, [*SWEEP, query])
    for step in after:
        take(index, step)
        take(copy, step)
        assert_equal(index, copy, [query, *asked_about(step)])
    for rank in RANKS:
        copy.remove(rank)
    assert copy.statistics()["unique_blocks"] == len(copy) == 0


@many
@given(limits, themes.flatmap(lambda theme: st.lists(st.tuples(sendings(theme), st.booleans()))))
def test_a_replica_that_is_restored_now_and_then_is_whole_each_time(
    limits: dict[str, Any],
    steps: list[tuple[Sent, bool]],
) -> None:
    index, replica = Index(seed=SEED, **limits), Index(seed=SEED, **limits)
    for step, also in steps:
        take(index, step)
        if also:
            take(replica, step)
        elif step.rank in index.ranks:
            refused = refusal(replica, step.rank, index.dump(step.rank))
            assert refused in (None, "room")
            if refused is None:
                assert held(replica)[step.rank] == held(index)[step.rank]
        replica.check()
    copy_ranks(index, replica)
    assert_equal(index, replica, SWEEP)
    for rank in index.ranks:
        index.restore(rank, index.dump(rank))
    assert_equal(replica, index, SWEEP)


@examples(25, nightly=20_000)
@given(histories, histories, st.lists(damages, min_size=1, max_size=8))
def test_a_section_made_by_an_enemy_is_refused_or_restored_whole(
    before: list[Sent | Call],
    after: list[Sent | Call],
    changes: list[list[Edit]],
) -> None:
    index = Index(seed=SEED)
    for step in before:
        take(index, step)
    made_by = SEED, index._identity()
    for rank in index.ranks:
        body = bytes(open_section(index.dump(rank), *made_by))
        for change in changes:
            forged = damaged(body, change)
            copy = Index(seed=SEED)
            for step in after:
                take(copy, step)
            expected = (counted(copy), held(copy))
            refused = refusal(copy, rank, seal_section(forged, *made_by))
            assert refused in (None, "content")
            if refused:
                assert (counted(copy), held(copy)) == expected
            copy.check()
            for query in SWEEP:
                answer(copy, query)
            for step in after:
                take(copy, step)
            copy.check()
            for known in copy.ranks:
                copy.remove(known)
            assert copy.statistics()["unique_blocks"] == len(copy) == 0


@many
@given(histories, st.binary(max_size=64), st.lists(damages, min_size=1, max_size=4))
def test_damaged_snapshots_are_refused(
    before: list[Sent | Call],
    noise: bytes,
    changes: list[list[Edit]],
) -> None:
    index = Index(seed=SEED)
    for step in before:
        take(index, step)
    data = index.to_bytes()
    load = Index.from_bytes
    with pytest.raises(SnapshotError):
        load(noise)
    for change in changes:
        other = damaged(data, change)
        if other != data:
            with pytest.raises(SnapshotError):
                load(other)
    for size in range(0, len(data), 1 + len(data) // 40):
        with pytest.raises(SnapshotError):
            load(data[:size])
