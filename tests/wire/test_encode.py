"""encode_batch: the bytes of each dialect, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvindex.wire import (
    DIALECTS,
    LATEST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    dialect,
    encode_batch,
)
from kvindex.wire.errors import ConfigurationError, EncodeError

pytestmark = pytest.mark.unit

STORED = BlockStored(
    block_hashes=[1, 2],
    parent_block_hash=9,
    token_ids=[10, 11, 12, 13],
    block_size=2,
    lora_id=3,
    medium="GPU",
    lora_name="a",
    extra_keys=[("a", ("img", 0)), None],
    group_idx=4,
    kv_cache_spec_kind="full_attention",
    kv_cache_spec_sliding_window=64,
    locality="LOCAL",
    ownership="tier",
    session_id="s",
    lookahead_token_ids=[[12], [14]],
    cache_salt="x",
)
BARE = BlockStored(block_hashes=[1], token_ids=[5], block_size=1)
REMOVED = BlockRemoved(
    block_hashes=[1], medium="GPU", group_idx=4, locality="LOCAL", ownership="tier"
)
BARE_REMOVED = BlockRemoved(block_hashes=[1])


def raw(name: str, *events: Any, dp_rank: int | None = 0) -> list[Any]:
    batch = EventBatch(1.5, list(events), dp_rank)
    decoded: list[Any] = msgspec.msgpack.decode(encode_batch(batch, dialect(name)))
    return decoded


@pytest.mark.parametrize(
    ("name", "n_stored", "n_removed"),
    [
        *(("vllm-0.9.0", 6, 2), ("vllm-0.9.1", 6, 2), ("vllm-0.10.2", 7, 3)),
        *(("vllm-0.14.0", 8, 3), ("vllm-0.17.0", 9, 3), ("vllm-0.20.0", 10, 4)),
        *(("vllm-0.22.0", 12, 4), ("sglang-0.4.6", 6, 2), ("sglang-0.4.8", 6, 2)),
        *(("sglang-0.5.9", 7, 3), ("sglang-0.5.18", 7, 3)),
    ],
)
def test_arrays_have_every_slot_of_the_version(name: str, n_stored: int, n_removed: int) -> None:
    _, events, *_ = raw(name, BARE, BARE_REMOVED, AllBlocksCleared())
    assert events[0] == ["BlockStored", [1], None, [5], 1, *[None] * (n_stored - 5)]
    assert events[1] == ["BlockRemoved", [1], *[None] * (n_removed - 2)]
    assert events[2] == ["AllBlocksCleared"]


def test_array_fields_are_in_the_order_of_the_wire() -> None:
    _, events, _ = raw("vllm-0.22.0", STORED, REMOVED)
    keys = [["a", ["img", 0]], None]
    assert events[0][5:] == [3, "GPU", "a", keys, 4, "full_attention", 64]
    assert events[1] == ["BlockRemoved", [1], "GPU", 4]


@pytest.mark.parametrize("name", DIALECTS)
def test_only_the_oldest_batches_lack_the_rank(name: str) -> None:
    assert len(raw(name, dp_rank=3)) == (2 if name in ("vllm-0.9.0", "sglang-0.4.6") else 3)


BASE = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"}
REMOVAL = {"type", "block_hashes", "medium"}
VLLM = {"medium", "lora_name"}  # in every store
KINDS = {"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}
GAINED: dict[str, set[str]] = {
    "vllm-0.24.0": set(),
    "vllm-0.26.0": {"locality"},
    "vllm-0.29.0": {"locality", "ownership"},
    "vllm-0.30.0": {"locality", "ownership", "session_id"},
    "vllm-0.33.0": {"locality", "ownership", "session_id", "lookahead_token_ids"},
    "sglang-0.5.20": set(),
    "sglang-0.5.22": {"lora_name"},
    "sglang-0.5.23": {"lora_name"},
}


@pytest.mark.parametrize("name", GAINED)
def test_maps_gain_fields_by_version(name: str) -> None:
    gained = GAINED[name]
    _, events, _ = raw(name, STORED, BARE, REMOVED, BARE_REMOVED)
    keys = [event.keys() for event in events]
    if name.startswith("vllm"):
        removed = REMOVAL | {"group_idx"} | (gained & {"locality", "ownership"})
        assert keys == [BASE | VLLM | KINDS | gained, BASE | VLLM, removed, REMOVAL]
    else:
        salted = BASE | {"medium", "cache_salt", "session_id"} | gained
        assert keys == [salted, BASE, REMOVAL, REMOVAL - {"medium"}]


def test_sglang_0_5_18_puts_the_salt_into_a_map_after_the_fields() -> None:
    _, events, _ = raw("sglang-0.5.18", STORED)
    assert events[0][6:] == ["GPU", {"cache_salt": "x"}]


def test_eagle_writes_each_token_with_its_successor() -> None:
    batch = EventBatch(1.5, [STORED], 0)
    data = encode_batch(batch, dialect("sglang-0.5.23-eagle"))
    _, events, _ = msgspec.msgpack.decode(data)
    assert events[0]["token_ids"] == [[10, 11], [11, 12], [12, 13], [13, 14]]
    assert decode_batch(data).events[0].lookahead_token_ids == [[12], [14]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        *({"lookahead_token_ids": value} for value in (None, [], [[12], []], [[12], [14, 15]])),
        *({"lookahead_token_ids": value} for value in ([[14]], [[11], [14]])),
        *({"block_size": value} for value in (0, 3)),
    ],
)
def test_eagle_needs_the_token_after_each_block(changes: dict[str, Any]) -> None:
    event = msgspec.structs.replace(STORED, **changes)
    with pytest.raises(EncodeError, match="lookahead_token_ids"):
        encode_batch(EventBatch(1.5, [event]), dialect("sglang-0.5.23-eagle"))


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "event",
    [
        BlockStored(block_hashes=[b"d" * 32], token_ids=[], block_size=0),
        BlockStored(block_hashes=[1], parent_block_hash=b"d", token_ids=[], block_size=0),
        BlockRemoved(block_hashes=[b"d" * 32]),
    ],
)
def test_raw_hashes_need_vllm_from_0_10_2(name: str, event: Any) -> None:
    if dialect(name).has_bytes_hashes:
        data = encode_batch(EventBatch(1.5, [event]), dialect(name))
        assert decode_batch(data).events[0].block_hashes == event.block_hashes  # type: ignore[union-attr]
    else:
        with pytest.raises(EncodeError, match="bytes"):
            encode_batch(EventBatch(1.5, [event]), dialect(name))
    assert dialect(name).has_bytes_hashes == (
        name.startswith("vllm") and name not in ("vllm-0.9.0", "vllm-0.9.1")
    )


WRONG: dict[str, list[Any]] = {
    "block_hashes": [
        *(None, "x", [1.0], [True], [2**64], [-(2**63) - 1], [b""], [b"x" * 65]),
    ],
    "parent_block_hash": ["x", 2**64, True],
    "token_ids": [None, "x", [1.0], [True], [2**64], [[1, 2]]],
    "block_size": [None, -1, 1.0, 2**31],
    "lora_id": ["1", 2**64],
    "medium": [1],
    "lora_name": [1],
    "cache_salt": [1],
    "group_idx": [-1, "0"],
    "extra_keys": ["x", ["x"], [(object(),)], [(2**64,)], [({},)]],
    "lookahead_token_ids": [1, [1], [["x"]]],
    "session_id": ["\ud800"],
    "locality": [object()],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_value_that_cannot_be_read_back_is_refused(name: str, value: Any) -> None:
    event = msgspec.structs.replace(STORED, **{name: value})
    with pytest.raises(EncodeError):
        encode_batch(EventBatch(1.5, [event]))


WRONG_BATCHES: list[tuple[Any, Any, Any]] = [
    *((ts, [], None) for ts in (math.nan, math.inf, "1", None)),
    *((1.5, [], dp_rank) for dp_rank in (-1, "0", True)),
    *((1.5, [event], None) for event in (None, "x", 1)),
    (1.5, [msgspec.structs.replace(REMOVED, medium=1)], None),
    (1.5, [msgspec.structs.replace(REMOVED, block_hashes=None)], None),
]


@pytest.mark.parametrize(("ts", "events", "dp_rank"), WRONG_BATCHES)
def test_a_batch_that_cannot_be_read_back_is_refused(ts: Any, events: Any, dp_rank: Any) -> None:
    with pytest.raises(EncodeError):
        encode_batch(EventBatch(ts, events, dp_rank))


def test_latest_is_the_default_and_the_newest_of_vllm() -> None:
    batch = EventBatch(1.5, [STORED], 0)
    assert encode_batch(batch) == encode_batch(batch, LATEST)
    assert [name for name in DIALECTS if name.startswith("vllm")][-1] == LATEST.name


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects_know_their_name_engine_form_and_replay_shape(name: str) -> None:
    known = dialect(name)
    version = tuple(map(int, name.split("-")[1].split(".")))
    form_since, topic_since = {
        "vllm": ((0, 24, 0), (0, 26, 0)),
        "sglang": ((0, 5, 20), (0, 5, 22)),
    }[known.engine]
    assert known.name == name
    assert name.startswith(known.engine)
    assert known.form == ("map" if version >= form_since else "array")
    assert known.replay_topic == (version >= topic_since)
    assert known.bigrams == name.endswith("-eagle")


def test_unknown_dialect_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"'vllm-1'.*vllm-0\.9\.0.*sglang-0\.5\.23"):
        dialect("vllm-1")


def test_dialects_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        DIALECTS["mine"] = LATEST  # type: ignore[index]
