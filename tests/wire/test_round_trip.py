"""What is encoded in a dialect decodes to the same, but for what the dialect cannot carry."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.wire import (
    DIALECTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Dialect,
    Event,
    EventBatch,
    decode_batch,
    encode_batch,
)

pytestmark = pytest.mark.property

ints = st.integers(-(2**63), 2**64 - 1)
small = st.integers(0, 2**31 - 1)
texts = st.text(max_size=6)
media = st.sampled_from(["GPU", "CPU", "cpu", "DISK", "cuda:0"])
leaves = st.one_of(
    *(st.none(), st.booleans(), ints, texts, st.binary(max_size=6)),
    st.floats(allow_nan=False),
)
extra_keys = st.lists(st.one_of(leaves, st.tuples(texts, ints)), min_size=1, max_size=3).map(tuple)
names = st.sampled_from(sorted(DIALECTS))


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


def hashes(dialect: Dialect) -> st.SearchStrategy[int | bytes]:
    if dialect.has_bytes_hashes:
        return st.one_of(ints, st.binary(min_size=1, max_size=64))
    return ints


@st.composite
def stores(draw: st.DrawFn, dialect: Dialect) -> BlockStored:
    n_blocks, block_size = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    n_tokens = n_blocks * block_size
    token_ids = draw(st.lists(ints, min_size=n_tokens, max_size=n_tokens))
    if dialect.bigrams:
        after = [*token_ids[block_size::block_size], draw(ints)]
        lookahead = [[token] for token in after] if n_blocks else None
    else:
        each = st.lists(ints, max_size=2)
        lookahead = draw(optional(st.lists(each, min_size=n_blocks, max_size=n_blocks)))
    block_hashes = st.lists(hashes(dialect), min_size=n_blocks, max_size=n_blocks)
    keys = st.lists(optional(extra_keys), min_size=n_blocks, max_size=n_blocks)
    return BlockStored(
        block_hashes=draw(block_hashes),
        parent_block_hash=draw(optional(hashes(dialect))),
        token_ids=token_ids,
        block_size=block_size,
        lora_id=draw(optional(ints)),
        medium=draw(optional(media)),
        lora_name=draw(optional(texts)),
        extra_keys=draw(optional(keys)),
        group_idx=draw(optional(small)),
        kv_cache_spec_kind=draw(optional(texts)),
        # Beyond 64 bits with a sign it is as good as none.
        kv_cache_spec_sliding_window=draw(optional(st.integers(-(2**63), 2**63 - 1))),
        locality=draw(optional(texts)),
        ownership=draw(optional(texts)),
        session_id=draw(optional(texts)),
        lookahead_token_ids=lookahead,
        cache_salt=draw(optional(texts)),
    )


def removes(dialect: Dialect) -> st.SearchStrategy[BlockRemoved]:
    return st.builds(
        BlockRemoved,
        block_hashes=st.lists(hashes(dialect), max_size=4),
        medium=optional(media),
        group_idx=optional(small),
        locality=optional(texts),
        ownership=optional(texts),
    )


def batches(dialect: Dialect) -> st.SearchStrategy[EventBatch]:
    event = st.one_of(stores(dialect), removes(dialect), st.just(AllBlocksCleared()))
    ts = st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(EventBatch, ts, st.lists(event, max_size=4), optional(small))


def carried(event: Event, dialect: Dialect) -> Event:
    """The event without the fields that the dialect does not have."""
    if isinstance(event, AllBlocksCleared):
        return event
    kept = set(dialect.stored if isinstance(event, BlockStored) else dialect.removed)
    if dialect.has_salt_metadata:
        kept.add("cache_salt")
    if dialect.bigrams:
        kept.add("lookahead_token_ids")
    names = {name for name in event.__struct_fields__ if name not in kept}
    return msgspec.structs.replace(event, **dict.fromkeys(names))


@given(st.data(), names)
def test_round_trip_in_every_dialect(data: st.DataObject, name: str) -> None:
    dialect = DIALECTS[name]
    batch = data.draw(batches(dialect))
    expected = EventBatch(
        batch.ts,
        [carried(event, dialect) for event in batch.events],
        batch.dp_rank if dialect.has_dp_rank else None,
    )
    payload = encode_batch(batch, dialect)
    assert decode_batch(payload) == expected
    assert encode_batch(decode_batch(payload), dialect) == payload


@given(st.data(), names, names)
def test_events_of_two_engines_mix_in_one_batch(
    data: st.DataObject, first: str, second: str
) -> None:
    parts = [data.draw(batches(DIALECTS[name])) for name in (first, second)]
    payloads = [
        encode_batch(part, DIALECTS[name])
        for part, name in zip(parts, (first, second), strict=True)
    ]
    raw = [msgspec.msgpack.decode(payload) for payload in payloads]
    mixed = msgspec.msgpack.encode([1.0, raw[0][1] + raw[1][1]])
    assert decode_batch(mixed).events == [
        event for payload in payloads for event in decode_batch(payload).events
    ]


@given(st.data(), names, st.lists(leaves, max_size=3), st.dictionaries(texts, leaves, max_size=3))
def test_what_later_versions_may_add_changes_nothing(
    data: st.DataObject, name: str, tail: list[Any], named: dict[str, Any]
) -> None:
    payload = encode_batch(data.draw(batches(DIALECTS[name])), DIALECTS[name])
    ts, events, *rest = msgspec.msgpack.decode(payload)
    longer: list[Any] = [["Later", *tail]]
    for event in events:
        if isinstance(event, dict):
            longer.append({**{f"later_{key}": value for key, value in named.items()}, **event})
        else:
            n_known = {"BlockStored": 12, "BlockRemoved": 4, "AllBlocksCleared": 1}[event[0]]
            padded = [*event, *[None] * (n_known - len(event))]
            longer.append([*padded, *tail])
    rank = [*rest, None][:1]
    batch = decode_batch(msgspec.msgpack.encode([ts, longer, *rank, *tail]))
    known = decode_batch(payload)
    assert batch == msgspec.structs.replace(known, skipped=("Later",))
