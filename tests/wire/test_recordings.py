"""What real engines sent: read, understood, and written again to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from kvindex.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ReplayReply,
    decode_batch,
    dialect,
    encode_batch,
    parse_replay,
    read_recording,
)
from kvindex.wire.quirks import is_content_hash, is_root_parent
from tests.captures import CAPTURES, NAMES, live_payloads, truth

pytestmark = pytest.mark.conformance

DIALECT_OF = {
    "sglang-0.4.10": "sglang-0.4.8",
    "sglang-0.5.5": "sglang-0.4.8",
    "sglang-0.5.6": "sglang-0.4.8",
    "sglang-0.5.12-eagle": "sglang-0.5.9-eagle",
    "sglang-0.5.18": "sglang-0.5.18",
    "sglang-0.5.23": "sglang-0.5.23",
    "vllm-0.9.2": "vllm-0.9.1",
    "vllm-0.10.2": "vllm-0.10.2",
    "vllm-0.12.0-bytes": "vllm-0.10.2",
    "vllm-0.14.0": "vllm-0.14.0",
    "vllm-0.20.0": "vllm-0.20.0",
    "vllm-0.24.0": "vllm-0.24.0",
    "vllm-engine-cpu-0.32.0": "vllm-0.30.0",
    "vllm-0.33.0": "vllm-0.33.0",
    "vllm-0.33.0-bytes": "vllm-0.33.0",
    "vllm-0.33.0-dups": "vllm-0.33.0",
    "vllm-0.33.0-full": "vllm-0.33.0",
    "vllm-0.33.0-hybrid": "vllm-0.33.0",
    "vllm-0.33.0-lookahead": "vllm-0.33.0",
}

every_recording = pytest.mark.parametrize("name", DIALECT_OF)


@cache
def batches(name: str) -> tuple[EventBatch, ...]:
    return tuple(map(decode_batch, live_payloads(name)))


def replies(name: str) -> list[ReplayReply]:
    messages = read_recording(CAPTURES / f"{name}.frames")
    return [parse_replay(message.frames) for message in messages if message.kind == "replay"]


def stores(name: str) -> Iterator[BlockStored]:
    for batch in batches(name):
        for event in batch.events:
            if isinstance(event, BlockStored):
                yield event


def block_size_of(name: str) -> int:
    return int(truth(name)["block_size" if "block_size" in truth(name) else "page_size"])


def test_no_recording_is_left_out() -> None:
    assert sorted(DIALECT_OF) == NAMES


@every_recording
def test_encoded_again_gives_the_recorded_bytes(name: str) -> None:
    wanted = dialect(DIALECT_OF[name])
    for payload, batch in zip(live_payloads(name), batches(name), strict=True):
        assert encode_batch(batch, wanted) == payload


@every_recording
def test_events_are_as_many_as_the_engine_says(name: str) -> None:
    stats = truth(name)["stats"]
    events = [event for batch in batches(name) for event in batch.events]
    counted = Counter(type(event).__name__ for event in events)
    assert len(batches(name)) == stats["batches"] == truth(name)["last_seq"] + 1
    for kind in (BlockStored, BlockRemoved, AllBlocksCleared):
        assert counted[kind.__name__] == stats.get(kind.__name__, 0)
    assert all(batch.skipped == () for batch in batches(name))
    assert {batch.dp_rank for batch in batches(name)} == {truth(name)["dp_rank"]}


@every_recording
def test_replay_repeats_the_live_stream_and_ends(name: str) -> None:
    *repeated, end = replies(name)
    assert end.end
    assert [reply.payload for reply in repeated] == list(live_payloads(name))
    assert [reply.seq for reply in repeated] == list(range(len(repeated)))
    assert not any(reply.end for reply in repeated)
    has_topic = {reply.topic is not None for reply in (*repeated, end)}
    assert has_topic == {dialect(DIALECT_OF[name]).replay_topic}


@every_recording
def test_stores_are_whole_blocks_of_the_known_size(name: str) -> None:
    block_size = block_size_of(name)
    for event in stores(name):
        assert event.block_size == block_size
        assert len(event.token_ids) == len(event.block_hashes) * block_size
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)


@every_recording
def test_resident_tokens_were_announced(name: str) -> None:
    size = block_size_of(name)
    announced = {
        tuple(event.token_ids[start : start + size])
        for event in stores(name)
        for start in range(0, len(event.token_ids), size)
    }
    resident = {tuple(block["tokens"]) for block in truth(name)["cached"]}
    assert resident
    assert resident <= announced


def test_content_hashes_are_those_of_sglang_before_0_5_6() -> None:
    for name in ("sglang-0.4.10", "sglang-0.5.5"):
        assert all(is_content_hash(e.block_hashes[0], e.token_ids) for e in stores(name))
    for name in ("sglang-0.5.6", "sglang-0.5.18", "vllm-0.20.0"):
        assert not any(is_content_hash(e.block_hashes[0], e.token_ids) for e in stores(name))


def test_first_store_of_every_recording_is_at_a_root() -> None:
    for name in DIALECT_OF:
        assert is_root_parent(next(stores(name)).parent_block_hash)
    assert next(stores("sglang-0.4.10")).parent_block_hash == hash(())


def test_lookahead_of_vllm_is_the_one_that_the_engine_hashed() -> None:
    name = "vllm-0.33.0-lookahead"
    announced = {
        block_hash: lookahead
        for event in stores(name)
        for block_hash, lookahead in zip(
            event.block_hashes, event.lookahead_token_ids or [], strict=True
        )
    }
    for block in truth(name)["cached"]:
        assert announced[block["hash"]] == block["lookahead"]


def test_lookahead_of_eagle_is_the_first_token_of_the_next_page() -> None:
    name = "sglang-0.5.12-eagle"
    first_token = {event.block_hashes[0]: event.token_ids[0] for event in stores(name)}
    checked = 0
    after = {event.block_hashes[0]: event.lookahead_token_ids for event in stores(name)}
    for event in stores(name):
        parent = event.parent_block_hash
        if isinstance(parent, int) and parent in after:
            assert after[parent] == [[first_token[event.block_hashes[0]]]]
            checked += 1
    assert checked > 1000


def test_raw_digests_and_groups_and_windows_are_read() -> None:
    assert {len(e.block_hashes[0]) for e in stores("vllm-0.12.0-bytes")} == {32}  # type: ignore[arg-type]
    hybrid = {
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)
        for e in stores("vllm-0.33.0-hybrid")
    }
    assert len({group for group, _, _ in hybrid}) == 2
    assert {kind for _, kind, _ in hybrid} == {"full_attention", "sliding_window"}


def test_a_salt_of_vllm_is_in_the_first_blocks_extra_keys() -> None:
    salts = {block["salt"] for block in truth("vllm-0.20.0")["cached"]} - {None}
    roots = [e for e in stores("vllm-0.20.0") if is_root_parent(e.parent_block_hash)]
    seen = {key for e in roots if e.extra_keys for key in e.extra_keys[0] or ()}
    assert salts
    assert salts <= seen
