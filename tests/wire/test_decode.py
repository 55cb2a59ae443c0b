"""decode_batch: every layout that engines send, and what it refuses."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kvindex.index import read_batch
from kvindex.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    text_token,
)
from kvindex.wire.decode import MAX_BLOCKS, MAX_RARE_BYTES, MAX_SKIPPED, MAX_TAG
from kvindex.wire.errors import DecodeError

pytestmark = pytest.mark.unit

TOKENS = [10, 11, 12, 13]
BASE = ["BlockStored", [1, 2], 9, TOKENS, 2]
NAMED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": 9,
    "token_ids": TOKENS,
    "block_size": 2,
}


def stored(**others: Any) -> BlockStored:
    return BlockStored(
        block_hashes=[1, 2],
        parent_block_hash=9,
        token_ids=others.pop("token_ids", TOKENS),
        block_size=others.pop("block_size", 2),
        **others,
    )


def payload(*events: Any, ts: Any = 1.5, tail: tuple[Any, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), *tail])


def read_one(event: Any) -> Any:
    batch = decode_batch(payload(event))
    assert len(batch.events) == 1
    return batch.events[0]


def test_batch_has_timestamp_events_and_rank() -> None:
    batch = decode_batch(payload(["AllBlocksCleared"], ts=3, tail=(7,)))
    assert batch == EventBatch(3.0, [AllBlocksCleared()], 7)
    assert type(batch.ts) is float
    assert batch.dp_rank == batch.attn_dp_rank == 7


@pytest.mark.parametrize("tail", [(), (None,), (None, "later", {"x": 1})])
def test_missing_or_further_elements_of_the_batch_are_allowed(tail: tuple[Any, ...]) -> None:
    assert decode_batch(payload(tail=tail)) == EventBatch(1.5, [], None)


def named(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("read", [decode_batch, read_batch])
@pytest.mark.parametrize("rank", ["data_parallel_rank", "attn_dp_rank"])
def test_a_batch_may_be_a_map_by_names_in_any_order(read: Any, rank: str) -> None:
    batch = read(named(**{rank: 7}, later=[{"x": 1}], events=[BASE, NAMED], ts=3))
    assert (batch.ts, batch.dp_rank) == (3.0, 7)
    assert read(named(ts=1.5, events=[])).dp_rank is None
    assert decode_batch(named(events=[BASE, ["New"]], ts=1.5)).events == [stored()]
    assert decode_batch(named(events=[BASE, ["New"]], ts=1.5)).skipped == ("New",)


@pytest.mark.parametrize("read", [decode_batch, read_batch])
def test_of_a_name_that_stands_twice_in_a_batch_the_last_value_counts(read: Any) -> None:
    assert read(b"\x83\xa2ts\x01\xa6events\x90\xa2ts\x02").ts == 2.0
    assert read(named(ts=1, events=[], attn_dp_rank=1, data_parallel_rank=2)).dp_rank == 2


@pytest.mark.parametrize("read", [decode_batch, read_batch])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"events": []}, "ts is missing"),
        ({"ts": 1.5}, "events is missing"),
        ({"type": "Heartbeat", "seq": 7}, "ts is missing"),
        ({"ts": None, "events": []}, "ts is not a finite number"),
        ({"ts": 1.5, "events": {}}, "events is dict"),
        ({"ts": 1.5, "events": [], "attn_dp_rank": -1}, "dp_rank is -1"),
        (
            {"ts": 1.5, "events": [{"type": "BlockRemoved"}]},
            "event 0 of 1: block_hashes is missing",
        ),
    ],
)
def test_a_map_that_is_no_batch_says_why(read: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        read(named(**fields))


REMOVED = {"type": "BlockRemoved", "block_hashes": [1, 2]}


@pytest.mark.parametrize("read", [decode_batch, read_batch])
@pytest.mark.parametrize("counts", [1, "x", {}, [], [1], [1, 2, 3], [0, -1], [0, 2**31], [0, None]])
def test_copies_left_that_do_not_fit_their_blocks_refuse_the_batch(read: Any, counts: Any) -> None:
    for event in (
        {**REMOVED, "remaining_copy_counts": counts},
        {"remaining_copy_counts": counts} | REMOVED,
    ):
        with pytest.raises(DecodeError, match="event 0 of 1: remaining_copy_counts"):
            read(payload(event))


def test_copies_left_are_read_of_removals_only() -> None:
    removed = BlockRemoved(block_hashes=[1, 2], remaining_copy_counts=[0, 3])
    assert read_one({**REMOVED, "remaining_copy_counts": [0, 3]}) == removed
    assert read_one({**REMOVED, "remaining_copy_counts": None}) == read_one(REMOVED)
    assert read_one({**NAMED, "remaining_copy_counts": "x"}) == stored()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind: Any) -> None:
    assert decode_batch(kind(payload(BASE))).events == [stored()]


@pytest.mark.parametrize(
    ("tail", "fields"),
    [
        ([], {}),
        ([3], {"lora_id": 3}),
        ([None, "GPU"], {"medium": "GPU"}),
        ([1, "CPU", "a"], {"lora_id": 1, "medium": "CPU", "lora_name": "a"}),
        ([None, "GPU", None, [["s"], None]], {"medium": "GPU", "extra_keys": [("s",), None]}),
        ([None, "GPU", None, None, 4], {"medium": "GPU", "group_idx": 4}),
        (
            [None, "GPU", None, None, None, "sliding_window", 64],
            {
                "medium": "GPU",
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": 64,
            },
        ),
        ([None, None, None, None, 1, None, None, "new", [5]], {"group_idx": 1}),
    ],
)
def test_array_of_each_vllm_length(tail: list[Any], fields: dict[str, Any]) -> None:
    assert read_one([*BASE, *tail]) == stored(**fields)


def test_sglang_metadata_at_the_place_of_the_lora_name_gives_the_salt() -> None:
    event = read_one([*BASE, None, "GPU", {"cache_salt": "tenant", "later": 1}])
    assert event == stored(medium="GPU", cache_salt="tenant")


@pytest.mark.parametrize(
    ("tail", "group_idx"), [([3, "full_attention"], 3), ([[None, None], 3], 3), ([None, 3], 3)]
)
def test_position_nine_is_group_or_images_by_type(tail: list[Any], group_idx: int) -> None:
    assert read_one([*BASE, None, "GPU", None, None, *tail]).group_idx == group_idx


def test_images_of_the_dynamo_wrapper_become_extra_keys() -> None:
    images = [
        {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 5], [9, 12]]}]},
        {"mm_objects": [{"mm_hash": 8, "offsets": []}]},
    ]
    event = read_one([*BASE, None, "GPU", None, [["k"], None], images, 2])
    assert event.extra_keys == [("k", (7, 0), (7, 9)), ((8, None),)]
    assert event.group_idx == 2


def test_images_of_tensorrt_llm_become_extra_keys() -> None:
    key = {"type": "mm_key", "hash": "ab12", "start_offset": -3, "uuid": "u"}
    event = read_one({**NAMED, "mm_keys": [[], [key]]})
    assert event == stored(extra_keys=[None, (("ab12", -3),)])
    event = read_one({**NAMED, "mm_keys": [[], [key]], "extra_keys": [["a"], ["b"]]})
    assert event.extra_keys == [("a",), ("b", ("ab12", -3))]


def test_map_has_every_field_by_name() -> None:
    fields: dict[str, Any] = {
        "lora_id": 1,
        "medium": "DISK",
        "lora_name": "a",
        "group_idx": 0,
        "kv_cache_spec_kind": "mamba",
        "kv_cache_spec_sliding_window": 8,
        "locality": "REMOTE",
        "ownership": "tier-2",
        "session_id": "s",
        "lookahead_token_ids": [[12], [14]],
        "cache_salt": "x",
    }
    assert read_one({**NAMED, **fields, "unheard_of": [1]}) == stored(**fields)


def test_map_without_optional_keys_has_defaults() -> None:
    event = read_one({"block_hashes": [1], "token_ids": [], "block_size": 0, "type": "BlockStored"})
    assert event == BlockStored(block_hashes=[1], token_ids=[], block_size=0)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (["BlockRemoved", [1]], BlockRemoved(block_hashes=[1])),
        (["BlockRemoved", [1], None], BlockRemoved(block_hashes=[1])),
        (
            ["BlockRemoved", [1], "GPU", 2],
            BlockRemoved(block_hashes=[1], medium="GPU", group_idx=2),
        ),
        (["BlockRemoved", [1], "GPU", None, 5, {}], BlockRemoved(block_hashes=[1], medium="GPU")),
        (
            {"type": "BlockRemoved", "block_hashes": [1], "locality": "LOCAL", "ownership": "o"},
            BlockRemoved(block_hashes=[1], locality="LOCAL", ownership="o"),
        ),
        (["AllBlocksCleared"], AllBlocksCleared()),
        (["AllBlocksCleared", "GPU"], AllBlocksCleared()),
        ({"type": "AllBlocksCleared", "medium": "GPU"}, AllBlocksCleared()),
    ],
)
def test_removals_and_clears(event: Any, expected: Any) -> None:
    assert read_one(event) == expected


def test_arrays_and_maps_mix_in_one_batch() -> None:
    events = decode_batch(payload(BASE, NAMED, ["BlockRemoved", [1]])).events
    assert events == [stored(), stored(), BlockRemoved(block_hashes=[1])]


def test_unknown_tags_are_skipped_and_reported_up_to_a_bound() -> None:
    tag = "TierBlocksCleared" * 9
    batch = decode_batch(payload([tag, "GPU"], BASE, {"type": "Heartbeat", "n": 1}))
    assert batch.events == [stored()]
    assert batch.skipped == (tag[:MAX_TAG], "Heartbeat")
    many = decode_batch(payload(*[["New"]] * (MAX_SKIPPED + 5)))
    assert many.skipped == (*["New"] * MAX_SKIPPED, "(more)")


@pytest.mark.parametrize(
    "block_hash", [0, -1, -(2**63), 2**63, 2**64 - 1, b"\x00", b"d" * 32, b"d" * 64]
)
def test_block_hashes_come_as_they_are(block_hash: Any) -> None:
    event = read_one(["BlockStored", [block_hash], block_hash, [1], 1])
    assert event.block_hashes == [block_hash]
    assert event.parent_block_hash == block_hash
    assert read_one(["BlockRemoved", [block_hash, 5]]).block_hashes == [block_hash, 5]


def bigrams(*tokens: int) -> list[list[int]]:
    return [list(pair) for pair in pairwise(tokens)]


def test_bigrams_become_tokens_and_the_token_after_each_block() -> None:
    pairs = bigrams(1, 2, 3, 4, 5)
    expected = stored(token_ids=[1, 2, 3, 4], lookahead_token_ids=[[3], [5]])
    assert read_one(["BlockStored", [1, 2], 9, pairs, 2]) == expected
    assert read_one({**NAMED, "token_ids": pairs}) == expected


@pytest.mark.parametrize("block_size", [0, 1, 3])
def test_bigrams_that_are_not_whole_blocks_have_no_lookahead(block_size: int) -> None:
    event = read_one(["BlockStored", [1, 2], 9, bigrams(1, 2, 3, 4, 5), block_size])
    assert event == stored(token_ids=[1, 2, 3, 4], block_size=block_size)


def test_tokens_are_kept_whole_blocks_or_not_and_text_becomes_an_int() -> None:
    assert read_one(["BlockStored", [1, 2], 9, [1, 2, 3], 2]).token_ids == [1, 2, 3]
    event = read_one({**NAMED, "token_ids": [1, "sha:1", "sha:2", 4]})
    assert event.token_ids == [1, text_token("sha:1"), text_token("sha:2"), 4]


def test_extra_keys_become_hashable() -> None:
    sent = [None, [], ["a", 1, b"b", None, 1.5, True], [["id", -2], [["deep"]]]]
    event = read_one({**NAMED, "extra_keys": sent})
    assert event.extra_keys == [
        *(None, None, ("a", 1, b"b", None, 1.5, True)),
        (("id", -2), (("deep",),)),
    ]
    hash(tuple(event.extra_keys))


@pytest.mark.parametrize("odd", [1.5, True, ["x"], {"x": 1}, b"x"])
def test_odd_information_is_left_out(odd: Any) -> None:
    names = ["locality", "ownership", "session_id", "kv_cache_spec_kind"]
    event = {**NAMED, **dict.fromkeys(names, odd), "kv_cache_spec_sliding_window": odd}
    assert read_one(event) == stored()
    assert read_one({**NAMED, **dict.fromkeys(names, 1)}) == stored()
    for window in ("x", 2**63, 2**64 - 1):
        assert read_one({**NAMED, "kv_cache_spec_sliding_window": window}) == stored()


DEEP: list[Any] = ["leaf"]
for _ in range(8):
    DEEP = [DEEP]

EXT = msgspec.msgpack.Ext(1, b"")
WRONG: dict[str, list[Any]] = {
    "block_hashes": [
        *(None, 1, "x", {}, [None], [True], [1.0], ["h"], [[1]], [b""], [b"x" * 65]),
    ],
    "parent_block_hash": [True, 1.0, "h", [], b"", b"x" * 65],
    "token_ids": [
        *(None, 1, "x", b"x", {}, [None], [True], [1.0], [b"x"], [1, [2, 3]], [[1, 2], 2]),
        *([[]], [[1]], [[1, 2, 3]], [[1, None]], [[1, True]], [["a", "b"]], [[1, 2], [3, 4]]),
    ],
    "block_size": [None, -1, 2**31, 1.0, True, "2"],
    "lora_id": [True, 1.0, "1", []],
    "medium": [1, True, b"GPU", ["GPU"]],
    "lora_name": [1, b"a", ["a"], {"a": 1}],
    "extra_keys": [1, "x", {}, ["x"], [1], [{}], [[{}]], [DEEP], [[math.nan]], [[EXT]]],
    "group_idx": [-1, 2**31, True, 1.0, "0"],
    "lookahead_token_ids": [1, "x", {}, [1], [None], [["x"]], [[True]]],
    "cache_salt": [1, b"s", ["s"], {}],
    "mm_keys": [
        *(1, {}, ["x"], [["x"]], [[{}]], [None], [None] * 3),
        [None, [{"hash": [], "start_offset": 0}]],
        [None, [{"hash": "a", "start_offset": None}]],
    ],
    "block_mm_infos": [
        *(1, {}, ["x"], [{}], [{"mm_objects": [1]}], [None, {"mm_objects": [{"mm_hash": 1.5}]}]),
        [None, {"mm_objects": [{"mm_hash": 1, "offsets": None}]}],
        [None, {"mm_objects": [{"mm_hash": 1, "offsets": [[]]}]}],
        [None, {"mm_objects": [{"mm_hash": 1, "offsets": [["x"]]}]}],
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_field_of_a_known_event_refuses_the_batch(name: str, value: Any) -> None:
    event = {**NAMED, "extra_keys": [None, None], name: value}
    with pytest.raises(DecodeError, match="event 1 of 2") as caught:
        decode_batch(payload(["AllBlocksCleared"], event))
    assert caught.value.size == len(payload(["AllBlocksCleared"], event))


@pytest.mark.parametrize("name", ["block_hashes", "token_ids", "block_size"])
def test_a_missing_field_refuses_the_batch(name: str) -> None:
    event = {key: value for key, value in NAMED.items() if key != name}
    with pytest.raises(DecodeError, match=f"{name} is missing"):
        decode_batch(payload(event))


NO_EVENTS: list[Any] = [
    *(None, 1, "BlockStored", b"x", [], {}, [None], [1], {"type": None}, {"tag": "BlockStored"}),
    *([["BlockStored"]], ["BlockStored"], ["BlockStored", [1], None, []], ["BlockRemoved"]),
    *({"type": "BlockRemoved"}, ["BlockRemoved", 1], ["BlockRemoved", [1], 2]),
    *(["BlockRemoved", [1], "GPU", "0"], ["BlockRemoved", [1], "GPU", -1]),
    [*BASE, None, None, {"cache_salt": 1}],
]
NO_BATCHES: list[Any] = [
    *(None, 1, "x", {}, [], [1.0], [1.0, None], [1.0, {}], [1.0, "events"]),
    *([None, []], ["1", []], [True, []], [math.nan, []], [math.inf, []], [[], []]),
    *([1.0, [], -1], [1.0, [], 1.0], [1.0, [], True], [1.0, [], "0"], [1.0, [], 2**40]),
]
NO_MSGPACK = [
    *(b"", b"\xc1", payload(BASE)[:-1], payload(BASE) + b"\x00"),
    *(b"\x91" * 100_000, b"\x81" * 100_000, b"\x92\x01" + b"\xdd\x00\x00\xff\xff" * 20_000),
    *(b"\x92\x01" + size + b"\xff\xff\xff\xff" for size in (b"\xdd", b"\xdf", b"\xc6")),
    *(b"\x92\x01\x91\x81\xa1\xff\x01", b"\x92\x01\x91\x81\x81\x01\x01\x01"),
    b"\x92\x01\x91\xd6\xff\x01\x01\x01\x01",
]


@pytest.mark.parametrize(
    "data", [*map(payload, NO_EVENTS), *map(msgspec.msgpack.encode, NO_BATCHES), *NO_MSGPACK]
)
def test_what_is_no_batch_of_events_is_refused_with_its_size(data: bytes) -> None:
    with pytest.raises(DecodeError, match=f"{len(data)} bytes") as caught:
        decode_batch(data)
    assert caught.value.size == len(data)


@pytest.mark.parametrize("data", [None, 5, "text", [1], memoryview(bytes(8))[::2]])
def test_what_is_no_buffer_is_refused(data: Any) -> None:
    with pytest.raises(DecodeError):
        decode_batch(data)


# Bounds: what `read_batch` says is the same on both backends


def padded(event: Any) -> bytes:
    """A batch of this event that is longer than rare forms may be, by a field nobody knows."""
    named = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}
    return payload({**named, "pad": b"." * MAX_RARE_BYTES}, event)


@pytest.mark.parametrize("read", [decode_batch, read_batch])
@pytest.mark.parametrize(
    "event",
    [
        [],
        {},
        {**NAMED, "token_ids": ["a", 1, 2, 3]},
        {**NAMED, "mm_keys": [None, [{"hash": "a", "start_offset": 0}]]},
        {**NAMED, "block_mm_infos": [None, None]},
        {**NAMED, "medium": "f\u00fcr"},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "\u017f"},
        {"type": "BlockRemoved", "block_hashes": ["text"]},
    ],
    ids=str,
)
def test_what_is_malformed_or_rare_is_refused_in_a_long_payload(read: Any, event: Any) -> None:
    data = padded(event)
    with pytest.raises(DecodeError, match="it is malformed or of a rare form") as refused:
        read(data)
    assert refused.value.size == len(data)
    assert f"({len(data)} bytes)" in str(refused.value)
    assert f"up to {MAX_RARE_BYTES} bytes" in str(refused.value)
    read(padded(NAMED))


@pytest.mark.parametrize("read", [decode_batch, read_batch])
@pytest.mark.parametrize("keys", [[1] * 4097, [[1] * 4096], [[[1, 2]] * 1400]], ids=len)
def test_the_extra_keys_of_a_block_are_few(read: Any, keys: Any) -> None:
    read(payload({**NAMED, "extra_keys": [None, [1] * 4096]}))
    read(payload({**NAMED, "extra_keys": [None, [[[1, 2]] * 1300]]}))
    with pytest.raises(DecodeError, match="extra keys of one block hold more than 4096 values"):
        read(payload({**NAMED, "extra_keys": [None, keys]}))


def test_a_batch_of_a_stream_names_a_bounded_number_of_blocks() -> None:
    half = ["BlockRemoved", [1] * (MAX_BLOCKS // 2)]
    read_batch(payload(half, half))
    more = payload(half, half, ["BlockRemoved", [1]])
    with pytest.raises(DecodeError, match=f"name {MAX_BLOCKS + 1} blocks, over {MAX_BLOCKS}"):
        read_batch(more)
    assert len(decode_batch(more).events) == 3


@pytest.mark.parametrize("read", [decode_batch, read_batch])
def test_a_batch_has_a_bounded_number_of_tokens_that_are_text(read: Any) -> None:
    half = {**NAMED, "block_hashes": [1], "block_size": 16_384, "token_ids": ["a"] * 16_384}
    read(payload(half, half))
    with pytest.raises(DecodeError, match="more than 32768 tokens are text"):
        read(payload(half, half, {**NAMED, "token_ids": ["a"] * 4}))
