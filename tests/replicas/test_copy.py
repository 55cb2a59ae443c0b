"""Applying messages: in native code, and entry by entry as any index does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvindex
from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, CacheSettings, EventBatch, Index
from kvindex.replicas.copy import Copy
from kvindex.replicas.messages import (
    BatchApplied,
    Entry,
    RingMessage,
    SectionRestored,
    StatusChanged,
    decode_message,
    encode_message,
)
from kvindex.subscribe import RankAdded, RankRemoved, RanksRenamed, RankStatus, State
from kvindex.wire import encode_batch
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank

pytestmark = [
    pytest.mark.property,
    pytest.mark.skipif(kvindex.BACKEND != "native", reason="it compares with native code"),
]

RANKS = [Rank("a", 0), Rank("a", 1), Rank("b" * 40, 0)]
UNUSUAL = encode_batch(EventBatch(ts=1.0, events=[AllBlocksCleared()]))[:-1] + b"\xc1"


def stored(first: int, blocks: int, parent: int | None) -> bytes:
    event = BlockStored(
        block_hashes=list(range(first, first + blocks)),
        parent_block_hash=parent,
        token_ids=list(range(first * 4, (first + blocks) * 4)),
        block_size=4,
    )
    return encode_batch(EventBatch(ts=float(first), events=[event]))


def removed(first: int) -> bytes:
    return encode_batch(EventBatch(ts=0.0, events=[BlockRemoved(block_hashes=[first])]))


PAYLOADS = st.one_of(
    st.builds(stored, st.integers(1, 40), st.integers(1, 400), st.none() | st.integers(1, 40)),
    st.builds(removed, st.integers(1, 40)),
    st.just(encode_batch(EventBatch(ts=0.0, events=[AllBlocksCleared()], data_parallel_rank=1))),
)
A_RANK = st.sampled_from(RANKS)
STATUSES = st.builds(
    RankStatus,
    rank=A_RANK,
    state=st.sampled_from(State),
    reason=st.sampled_from(["", "because"]),
    complete=st.booleans(),
    epoch=st.integers(0, 9),
    seq=st.none() | st.integers(0, 2**60),
    lag=st.integers(0, 9),
    last_event_age=st.none(),
)
ENTRIES = st.one_of(
    st.builds(BatchApplied, A_RANK, PAYLOADS),
    st.builds(BatchApplied, A_RANK, PAYLOADS),
    st.builds(BatchApplied, A_RANK, PAYLOADS),
    st.builds(StatusChanged, STATUSES),
    st.builds(RankAdded, A_RANK, st.just(CacheSettings())),
    st.builds(RankRemoved, A_RANK),
    st.just(RanksRenamed(((RANKS[0], RANKS[1]), (RANKS[1], RANKS[0])))),
)


def joined() -> Copy:
    """A copy of an empty index."""
    copy = Copy(seed=1)
    copy.begin(0)
    copy.catchup.end(0)
    return copy


def apply(copy: Copy, number: int, entries: list[Entry]) -> None:
    copy.apply(decode_message(encode_message(RingMessage(number, float(number), entries))))


def state(copy: Copy) -> dict[str, Any]:
    """All that a copy shows."""
    blocks = {
        rank: sorted((str(b.block_hash), b.depth) for b in copy.index.tree(rank).walk())
        for rank in copy.index.ranks
    }
    shown = {"statuses": copy.statuses, "names": copy.names, "changed": copy.changed}
    return {"blocks": blocks, **shown, "applied": copy.applied, "sent_at": copy.sent_at}


@given(st.lists(st.lists(ENTRIES, max_size=12), max_size=6))
def test_native_code_leaves_the_copy_that_entries_one_by_one_leave(
    messages: list[list[Entry]],
) -> None:
    native, plain = joined(), joined()
    plain.index.apply_entries = lambda entries: None  # type: ignore[method-assign]
    for number, entries in enumerate(messages):
        apply(native, number, entries)
        apply(plain, number, entries)
    assert state(native) == state(plain)


@pytest.mark.parametrize("payload", [b"", b"\xc1", UNUSUAL], ids=["empty", "no msgpack", "cut"])
def test_what_follows_a_batch_that_cannot_be_read_is_not_applied(payload: bytes) -> None:
    copy = joined()
    batches = [stored(1, 2, None), payload, stored(9, 2, None)]
    with pytest.raises(DecodeError):
        apply(copy, 0, [BatchApplied(RANKS[0], batch) for batch in batches])
    assert (len(copy.index), copy.applied) == (2, 1)


def test_a_restored_section_comes_before_the_batches_that_follow_it() -> None:
    source = Index(seed=1)
    source.add(RANKS[0])
    source.apply(RANKS[0], stored(1, 3, None))
    copy = joined()
    section = SectionRestored(RANKS[0], source.dump(RANKS[0]))
    apply(copy, 0, [section, BatchApplied(RANKS[0], removed(3))])
    assert sorted(block.depth for block in copy.index.tree(RANKS[0]).walk()) == [0, 1]


def test_entries_that_are_none_are_refused() -> None:
    for entries in (b"\x91", b"\x91\x80", b"\x91\x81\xa4type\xa1x", b"\xc0"):
        with pytest.raises(DecodeError):
            joined().apply(decode_message(b"\x93\x00\xcb" + bytes(8) + entries))
