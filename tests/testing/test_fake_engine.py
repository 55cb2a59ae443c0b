"""The fake engine and its cache do what engines do, in their words."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvindex.testing import (
    CacheOptions,
    FakeEngine,
    Group,
    LaneFaults,
    ManualClock,
    PagedCache,
    Request,
    Workload,
)
from kvindex.testing.faults import Lane
from kvindex.wire import (
    DIALECTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
    parse_live,
    read_recording,
)
from kvindex.wire.errors import ClosedError, ConfigurationError, TokenError
from tests.testing.events import removals, stores

pytestmark = pytest.mark.unit

# The cache ---------------------------------------------------------------------------------------


HYBRID = CacheOptions(groups=(Group(), Group.window(9)))


def test_a_prompt_is_stored_as_one_chain_and_hit_the_next_time() -> None:
    cache = PagedCache(block_size=4)
    assert cache.serve(range(10)).hit_tokens == 0
    (first,) = stores(cache.take_events())
    assert (first.parent_block_hash, first.token_ids) == (None, list(range(8)))
    assert len(first.block_hashes) == 2
    assert cache.serve(range(14)).hit_tokens == 8
    (second,) = stores(cache.take_events())
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == [8, 9, 10, 11]


def test_a_block_aligned_prompt_sent_again_gets_a_second_copy_of_its_last_block() -> None:
    cache = PagedCache(num_blocks=3, block_size=4)
    cache.serve(range(8))
    assert cache.serve(range(8)).hit_tokens == 4
    last = stores(cache.take_events())[-1].block_hashes
    assert cache.truth()[last[0], "GPU", 0] == 2
    cache.serve([9, 9, 9, 9])
    assert [event.block_hashes for event in removals(cache.take_events())] == [last]
    assert cache.truth()[last[0], "GPU", 0] == 1


def test_the_end_of_the_oldest_prompt_is_evicted_first_and_before_the_stores() -> None:
    cache = PagedCache(num_blocks=4, block_size=2)
    cache.serve([1, 1, 2, 2])
    cache.serve([3, 3, 4, 4])
    old = stores(cache.take_events())[0].block_hashes
    cache.serve([5, 5])
    removed, stored = cache.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [old[1]]
    assert isinstance(stored, BlockStored)
    assert cache.lookup([1, 1, 2, 2]).blocks == 1


def test_a_hit_makes_blocks_recently_used() -> None:
    cache = PagedCache(num_blocks=4, block_size=2)
    cache.serve([1, 1, 2, 2])
    cache.serve([3, 3, 4, 4])
    cache.serve([1, 1, 2, 2, 9])  # hits both, and its partial block evicts one of the other
    assert cache.lookup([3, 3, 4, 4]).blocks == 1
    cache.serve([7])
    assert cache.lookup([3, 3, 4, 4]).blocks == 0
    assert cache.lookup([1, 1, 2, 2]).blocks == 2


def test_the_last_generated_token_is_not_cached() -> None:
    cache = PagedCache(block_size=4)
    cache.serve([1, 2], new_tokens=[3, 4])
    assert cache.truth() == {}
    cache.serve([1, 2], new_tokens=[3, 4, 5])
    assert cache.lookup([1, 2, 3, 4]).blocks == 1


def test_running_requests_keep_their_blocks() -> None:
    cache = PagedCache(num_blocks=3, block_size=2)
    running = cache.begin([1, 1, 2, 2])
    with pytest.raises(ConfigurationError, match="2 more blocks are needed and 1 of 3 are free"):
        cache.begin([3, 3, 4, 4])
    cache.step(running, [5])
    with pytest.raises(ConfigurationError, match="1 more blocks"):
        cache.step(running, [6, 7])
    with pytest.raises(ConfigurationError, match="1 requests are running"):
        cache.clear()
    cache.finish(running)
    cache.finish(running)
    with pytest.raises(ClosedError):
        cache.step(running, [8])
    assert cache.serve([3, 3, 4, 4]).hit_tokens == 0
    cache.check()


def test_lora_salt_and_images_are_namespaces_of_their_own() -> None:
    cache = PagedCache(block_size=2)
    names: list[dict[str, Any]] = [
        {},
        {"lora": "a"},
        {"lora": "b"},
        {"salt": "a"},
        {"extra_keys": [["image", 0]]},
    ]
    for name in names:
        assert cache.serve([1, 1, 2, 2, 3], **name).hit_tokens == 0
        assert cache.hit([1, 1, 2, 2, 3], **name) == 4
    assert len(cache.truth()) == 2 * len(names)
    events = stores(cache.take_events())
    assert events[3].extra_keys == [("a",), None]  # the salt is in the first block's keys only
    assert events[1].extra_keys == [("a",), ("a",)]
    assert events[4].extra_keys == [("image", 0), None]
    assert [event.lora_id for event in events] == [None, 1, 2, None, None]


def test_lookahead_tokens_are_part_of_a_blocks_identity() -> None:
    cache = PagedCache(block_size=2, options=CacheOptions(lookahead=1))
    cache.serve([1, 1, 2, 2])
    (stored,) = stores(cache.take_events())
    assert (stored.token_ids, stored.lookahead_token_ids) == ([1, 1], [[2]])
    assert cache.hit([1, 1, 2, 9]) == 2
    assert cache.hit([1, 1, 9, 9]) == 0


@pytest.mark.parametrize("offload", ["store", "evict"])
def test_the_cpu_tier_brings_blocks_back(offload: Any) -> None:
    options = CacheOptions(offload=offload)
    cache = PagedCache(num_blocks=2, block_size=2, cpu_blocks=4, options=options)
    cache.serve([1, 1, 2, 2])
    cache.serve([3, 3, 4, 4])
    assert cache.lookup([1, 1, 2, 2]).by_medium == {"CPU": 2}
    cache.take_events()
    served = cache.serve([1, 1, 2, 2])
    assert (served.hit_tokens, served.loaded_tokens) == (2, 2)
    again = [event for event in stores(cache.take_events()) if event.medium == "GPU"]
    assert [token for event in again for token in event.token_ids] == [1, 1, 2, 2]


def test_the_cpu_tier_announces_placeholders_or_payloads_and_evicts_its_own() -> None:
    bare = PagedCache(block_size=2, cpu_blocks=1)
    bare.serve([1, 1, 2, 2])
    events = bare.take_events()
    shapes = [(type(event).__name__, event.medium) for event in events if hasattr(event, "medium")]
    assert shapes == [
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "CPU"),
        ("BlockStored", "CPU"),
    ]
    assert [(s.token_ids, s.block_size) for s in stores(events)[1:]] == [([], 0), ([], 0)]
    full = PagedCache(block_size=2, cpu_blocks=1, options=CacheOptions(placeholders=False))
    full.serve([1, 1])
    assert [s.token_ids for s in stores(full.take_events())] == [[1, 1], [1, 1]]


def test_window_blocks_leave_before_those_of_full_attention() -> None:
    cache = PagedCache(num_blocks=14, block_size=4, options=HYBRID)
    cache.serve(range(16), new_tokens=range(100, 110))
    first, second = stores(cache.take_events())[:2]
    assert first.block_hashes == second.block_hashes
    assert (second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == ("sliding_window", 9)
    cache.serve(range(200, 208))
    gone = {event.group_idx for event in removals(cache.take_events())}
    assert gone == {1}
    # The window group lost its first blocks; a longer prompt needs only those of its window.
    assert cache.hit([*range(16), *range(100, 109)]) == 24
    assert cache.hit(range(9)) < 8


def test_clear_is_announced_with_the_next_step_and_may_leave_the_cpu_tier() -> None:
    engine = FakeEngine(publish=False, block_size=2)
    engine.serve([1, 1])
    engine.clear()
    assert engine.truth() == {}
    assert engine.published == 1
    engine.serve([2, 2])
    assert [type(event) for event in engine.events] == [AllBlocksCleared, BlockStored]
    engine.clear(flush=True)
    assert engine.events == (AllBlocksCleared(),)
    tiered = PagedCache(block_size=2, cpu_blocks=4)
    tiered.serve([1, 1])
    tiered.clear(gpu_only=True)
    assert {medium for _, medium, _ in tiered.truth()} == {"CPU"}


def test_check_finds_a_lost_block() -> None:
    cache = PagedCache(block_size=2)
    running = cache.begin([1, 1, 2])
    running.tables[0].pop()
    with pytest.raises(AssertionError, match="counts 1 users of 0"):
        cache.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedCache(num_blocks=0),
        lambda: PagedCache(hash_form="md5"),  # type: ignore[arg-type]
        lambda: CacheOptions(groups=()),
        lambda: CacheOptions(groups=(Group.window(4),)),
        lambda: CacheOptions(groups=(Group(), Group.window(0))),
        lambda: CacheOptions(lookahead=-1),
        lambda: CacheOptions(engine="sglang", groups=(Group(), Group())),
        lambda: FakeEngine(publish=False, dialect="vllm-0.9.1", cpu_blocks=4),
        lambda: FakeEngine(publish=False, dialect="vllm-0.17.0", options=HYBRID),
        lambda: FakeEngine(publish=False, dialect="sglang-0.5.23", options=HYBRID),
        lambda: FakeEngine(publish=False, dialect="vllm-0.30.0", options=CacheOptions(lookahead=1)),
        lambda: FakeEngine(publish=False, dialect="vllm-9.9.9"),
        lambda: FakeEngine(publish=False).endpoint,
        lambda: Workload(-1),
        lambda: Workload(resend=2.0),
        lambda: Workload(max_tokens=10),
        lambda: LaneFaults(drop=1.5),
        lambda: LaneFaults(max_delay=-1.0),
        lambda: ManualClock().advance(-1.0),
        lambda: ManualClock().advance(math.nan),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_no_tokens_are_refused() -> None:
    with pytest.raises(TokenError):
        PagedCache().serve([])


def test_hash_forms() -> None:
    for form, kind in (("u64", int), ("i64", int), ("bytes", bytes)):
        cache = PagedCache(block_size=1, hash_form=form)  # type: ignore[arg-type]
        cache.serve(range(60))
        hashes = [block_hash for block_hash, _, _ in cache.truth()]
        assert {type(value) for value in hashes} == {kind}
        if form == "i64":
            assert {isinstance(value, int) and value < 0 for value in hashes} == {True, False}
        if form == "bytes":
            assert {len(value) for value in hashes if isinstance(value, bytes)} == {32}


@pytest.mark.parametrize("call", ["serve", "hit", "lookup"])
def test_a_misspelt_key_is_refused(call: str) -> None:
    engine = FakeEngine(publish=False)
    with pytest.raises(TypeError, match="cache_salt"):
        getattr(engine, call)([1, 2], cache_salt="x")


# Events ------------------------------------------------------------------------------------------


CAPTURES = Path(__file__).parents[1] / "data" / "captures"


def test_a_restart_is_empty_and_has_other_hashes() -> None:
    clock = ManualClock(50.0)
    engine = FakeEngine(publish=False, block_size=2, clock=clock)
    engine.serve([1, 1], flush=False)
    batch = engine.flush()
    assert batch is not None
    assert (batch.ts, batch.data_parallel_rank) == (50.0, 0)
    assert engine.flush() is None
    before = engine.truth()
    engine.restart()
    assert (engine.truth(), engine.published) == ({}, 0)
    engine.serve([1, 1])
    assert engine.truth().keys() != before.keys()
    engine.restart(new_hash_seed=False)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.serve([1])


def test_sglang_begins_with_a_clear_and_has_one_copy_of_each_page() -> None:
    engine = FakeEngine(publish=False, dialect="sglang-0.5.23", block_size=2, num_blocks=6)
    assert engine.events == (AllBlocksCleared(),)
    engine.serve([1, 1, 2, 2], salt="x")
    engine.serve([1, 1, 2, 2], salt="x")
    assert set(engine.truth().values()) == {1}
    engine.serve([3] * 10)
    assert [len(event.block_hashes) for event in removals(engine.events)] == [1]
    assert stores(engine.events)[0].extra_keys is None


def test_a_step_that_changes_nothing_publishes_nothing() -> None:
    engine = FakeEngine(publish=False, block_size=2)
    engine.serve([1, 1, 2])
    assert engine.events
    engine.serve([1, 1, 2])
    assert (engine.events, engine.published) == ((), 1)


@pytest.mark.parametrize(("name", "counts"), [("sglang-0.5.9", [1, 1]), ("sglang-0.5.18", [2])])
def test_sglang_events_name_one_page_until_they_are_coalesced(name: str, counts: list[int]) -> None:
    engine = FakeEngine(publish=False, dialect=name, block_size=2, num_blocks=2)
    engine.serve([1, 1, 2, 2])
    assert [len(event.block_hashes) for event in stores(engine.events)] == counts
    engine.serve([3, 3, 4, 4])
    assert [len(event.block_hashes) for event in removals(engine.events)] == counts


RECORDED = {
    "vllm-0.9.2": "vllm-0.9.1",
    "vllm-0.10.2": "vllm-0.10.2",
    "vllm-0.12.0-bytes": "vllm-0.10.2",
    "vllm-0.14.0": "vllm-0.14.0",
    "vllm-0.20.0": "vllm-0.20.0",
    "vllm-0.24.0": "vllm-0.24.0",
    "vllm-0.33.0": "vllm-0.33.0",
    "vllm-0.33.0-hybrid": "vllm-0.33.0",
    "vllm-0.33.0-lookahead": "vllm-0.33.0",
    "sglang-0.5.5": "sglang-0.4.8",
    "sglang-0.5.18": "sglang-0.5.18",
    "sglang-0.5.12-eagle": "sglang-0.5.9-eagle",
    "sglang-0.5.23": "sglang-0.5.23",
}


@pytest.mark.parametrize("name", RECORDED)
def test_events_have_the_recorded_engines_shapes(name: str) -> None:
    recorded: Counter[object] = Counter()
    for message in read_recording(CAPTURES / f"{name}.frames"):
        if message.kind == "live":
            count_shapes(recorded, parse_live(message.frames).payload)
    fake: Counter[object] = Counter()
    for payload in fake_payloads(name):
        count_shapes(fake, payload)
    strange = set(fake) - set(recorded)
    assert not strange
    assert {"BlockStored", "BlockRemoved"} <= {shape[0] for shape in fake}  # type: ignore[index]


def fake_payloads(name: str) -> list[bytes]:
    """What the fake engine of that dialect sends for a workload like the recorded one."""
    options = None
    if name.endswith("hybrid"):
        options = CacheOptions(groups=(Group(), Group.window(64)))
    elif name.endswith("lookahead"):
        options = CacheOptions(lookahead=1)
    engine = FakeEngine(
        publish=False,
        dialect=RECORDED[name],
        num_blocks=80,
        hash_form="bytes" if name.endswith("bytes") else None,
        options=options,
    )
    # The recorded workloads with adapters are those of plain vLLM since it names them, 0.14.
    named = "lora_name" in DIALECTS[RECORDED[name]].stored and not name.startswith("sglang")
    loras = ("adapter-0",) if named and options is None else ()
    payloads = [encode_batch(EventBatch(1.0, list(engine.events), 0), engine.dialect)]
    for request in Workload(60, seed=2, loras=loras):
        engine.run([request])
        payloads.append(encode_batch(EventBatch(1.0, list(engine.events), 0), engine.dialect))
    return payloads


def count_shapes(shapes: Counter[object], payload: bytes) -> None:
    """Count each event's tag, fields in wire order, and the fields' types."""
    for event in msgspec.msgpack.decode(payload)[1]:
        if isinstance(event, dict):
            fields = [(key, kind(value)) for key, value in event.items() if key != "session_id"]
            shapes[event["type"], tuple(fields)] += 1
        else:
            shapes[event[0], tuple(kind(value) for value in event[1:])] += 1


def kind(value: object) -> object:
    """A value's type; lists with the types inside, since `[None]` and `["a"]` differ."""
    if isinstance(value, list):
        return ("list", *sorted({str(kind(item)) for item in value}))
    return type(value).__name__


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_played(name: str) -> None:
    engine = FakeEngine(publish=False, dialect=name, num_blocks=60)
    for request in Workload(20, loras=["a"], salts=["s"]):
        engine.run([request])
        decoded = decode_batch(encode_batch(EventBatch(1.0, list(engine.events), 0), name_of(name)))
        assert len(decoded.events) == len(engine.events)


def name_of(name: str) -> Any:
    return DIALECTS[name]


# Workloads and lanes -----------------------------------------------------------------------------


def test_a_workload_is_its_seed() -> None:
    requests = list(Workload(50, seed=1, loras=["a"], salts=["s"]))
    assert requests == list(Workload(50, seed=1, loras=["a"], salts=["s"]))
    assert requests != list(Workload(50, seed=2, loras=["a"], salts=["s"]))
    assert {request.lora for request in requests} == {None, "a"}
    assert {request.salt for request in requests} == {None, "s"}
    assert isinstance(requests[0], Request)
    engine = FakeEngine(publish=False)
    served = engine.run(requests)
    hit = sum(cost.hit_tokens for cost in served)
    assert hit > 0.3 * sum(cost.prompt_tokens for cost in served)
    assert max(engine.truth().values()) > 1


def test_a_manual_clock_moves_only_by_hand() -> None:
    clock = ManualClock(5.0)
    assert (clock(), clock.advance(0.5), clock.time) == (5.0, 5.5, 5.5)


def lane(**faults: float) -> tuple[Lane, Counter[str]]:
    counters: Counter[str] = Counter()
    made = Lane("live", LaneFaults(**faults), random=random.Random(1), counters=counters)
    return made, counters


def message(number: int) -> list[bytes]:
    return [b"topic", number.to_bytes(8, "big"), b"\x93payload"]


def test_a_lane_reorders_without_losing() -> None:
    swapping, counters = lane(reorder=0.3)
    out = [m for i in range(200) for m in swapping.push(message(i), 0.0)] + swapping.flush()
    assert sorted(out) == [message(i) for i in range(200)]
    assert out != sorted(out)
    assert max(abs(out.index(message(i)) - i) for i in range(200)) <= 20
    assert counters["live.reordered"] > 30


def test_a_lane_delays_until_due_and_gives_up_what_is_lost() -> None:
    waiting, counters = lane(delay=1.0, max_delay=2.0)
    assert waiting.push(message(1), 10.0) == []
    assert waiting.deadline is not None
    assert 10.0 <= waiting.deadline <= 12.0
    assert waiting.due(9.9) == []
    assert waiting.due(12.0) == [message(1)]
    waiting.push(message(2), 12.0)
    waiting.lose()
    assert not waiting.flush()
    assert counters["live.dropped"] == 1


def test_a_lane_holds_a_bounded_number() -> None:
    counters: Counter[str] = Counter()
    small = Lane(
        "live", LaneFaults(delay=1.0), random=random.Random(1), counters=counters, max_held=3
    )
    passed = [m for i in range(10) for m in small.push(message(i), 0.0)]
    assert len(passed) == counters["live.overflowed"] == 7
