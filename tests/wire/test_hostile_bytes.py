"""Whatever the bytes are, decoding gives a batch or DecodeError, and the batch is well-formed."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from math import isfinite
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    parse_live,
    parse_replay,
    parse_replay_request,
)
from kvindex.wire.errors import DecodeError
from tests.captures import live_payloads

pytestmark = pytest.mark.property

NAMES = ["sglang-0.5.12-eagle", "sglang-0.5.23", "vllm-0.20.0", "vllm-0.33.0", "vllm-0.12.0-bytes"]

FIELDS = [
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality", "ownership"),
    *("kv_cache_spec_sliding_window", "session_id", "lookahead_token_ids", "cache_salt"),
    *("mm_keys", "block_mm_infos", "later"),
]
TAGS = ["BlockStored", "BlockRemoved", "AllBlocksCleared", "Later"]

ints = st.integers(-(2**63), 2**64 - 1)
leaves = st.one_of(
    *(st.none(), st.booleans(), ints, st.integers(0, 4), st.floats(), st.text(max_size=5)),
    *(st.binary(max_size=70), st.sampled_from(["GPU", "BlockStored"])),
    st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=4)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.integers(0, 2**33), max_size=8),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=12,
)
array_events = st.builds(
    lambda tag, tail: [tag, *tail], st.sampled_from(TAGS), st.lists(values, max_size=13)
)
map_events = st.builds(
    lambda tag, named: {"type": tag, **named},
    st.sampled_from(TAGS),
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=10),
)


@st.composite
def nearly_stored(draw: st.DrawFn) -> dict[str, Any]:
    """A correct store with one field replaced: past the first checks, into the deep ones."""
    n = draw(st.integers(1, 3))
    pairs = [[token, token + 1] for token in range(2 * n)]
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(n)),
        "parent_block_hash": None,
        "token_ids": draw(st.sampled_from([list(range(2 * n)), pairs, ["a"] * 2 * n])),
        "block_size": 2,
        "extra_keys": [None] * n,
    }
    event[draw(st.sampled_from(FIELDS))] = draw(values)
    return event


events = st.one_of(array_events, map_events, nearly_stored(), values)


@cache
def real_payloads() -> tuple[bytes, ...]:
    """A few short payloads of each recording."""
    chosen: list[bytes] = []
    for name in NAMES:
        short = sorted(set(live_payloads(name)), key=lambda payload: (len(payload), payload))
        chosen += short[:: max(1, len(short) // 6)][:6]
    return tuple(chosen)


def is_hash(value: object) -> bool:
    return type(value) is int or (type(value) is bytes and 1 <= len(value) <= 64)


def check_stored(event: BlockStored) -> None:
    assert all(map(is_hash, event.block_hashes))
    assert event.parent_block_hash is None or is_hash(event.parent_block_hash)
    assert all(type(token) is int for token in event.token_ids)
    assert 0 <= event.block_size < 2**31
    hash((event.lora_id, event.medium, event.lora_name, event.group_idx, event.cache_salt))
    if event.extra_keys is not None:
        hash(tuple(event.extra_keys))
        assert all(keys is None or (type(keys) is tuple and keys) for keys in event.extra_keys)
    for lookahead in event.lookahead_token_ids or []:
        assert all(type(token) is int for token in lookahead)


def check_decoded(data: bytes) -> EventBatch | None:
    try:
        batch = decode_batch(data)
    except DecodeError as error:
        refused = error
    else:
        check_batch(batch)
        return batch
    assert refused.size == len(data)
    assert len(str(refused)) < 1000
    return None


def check_batch(batch: EventBatch) -> None:
    assert isfinite(batch.ts)
    assert batch.dp_rank is None or batch.dp_rank >= 0
    for event in batch.events:
        if isinstance(event, BlockStored):
            check_stored(event)
        elif isinstance(event, BlockRemoved):
            assert all(map(is_hash, event.block_hashes))
        else:
            assert isinstance(event, AllBlocksCleared)


@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    check_decoded(data)


@given(st.lists(values, max_size=4))
def test_arbitrary_batches(raw: list[Any]) -> None:
    check_decoded(msgspec.msgpack.encode(raw))


@given(st.lists(events, max_size=4), st.floats(), st.one_of(st.none(), values))
def test_arbitrary_events(raw: list[Any], ts: float, dp_rank: Any) -> None:
    check_decoded(msgspec.msgpack.encode([ts, raw, dp_rank]))


@given(st.lists(nearly_stored(), min_size=1, max_size=2))
def test_nearly_correct_events(raw: list[Any]) -> None:
    check_decoded(msgspec.msgpack.encode([1.0, raw, 0]))


@given(st.data())
def test_mutated_real_payloads(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(real_payloads())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload)))
        cut = data.draw(st.integers(0, 3))
        payload[at : at + cut] = data.draw(st.binary(max_size=4))
    check_decoded(bytes(payload))


@given(st.data())
def test_every_truncation_of_a_real_payload_is_refused(data: st.DataObject) -> None:
    payload = data.draw(st.sampled_from(real_payloads()))
    cut = payload[: data.draw(st.integers(0, len(payload) - 1))]
    assert check_decoded(cut) is None


@given(
    st.sampled_from([parse_live, parse_replay, parse_replay_request]),
    st.lists(st.one_of(st.just(b""), st.just(b"\xff" * 8), st.binary(max_size=9)), max_size=6),
)
def test_arbitrary_frames(parse: Any, frames: list[bytes]) -> None:
    with suppress(DecodeError):
        assert parse(frames) is not None
