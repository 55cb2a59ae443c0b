"""The fake engine's cache does what engines' caches do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvindex.testing import (
    CacheOptions,
    FakeEngine,
    Group,
    LaneFaults,
    ManualClock,
    PagedCache,
    Workload,
)
from kvindex.wire import AllBlocksCleared, BlockRemoved, BlockStored
from kvindex.wire.errors import ClosedError, ConfigurationError, TokenError
from tests.testing.events import removals, stores

pytestmark = pytest.mark.unit

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


def test_blocks_loaded_around_one_that_stayed_are_two_chains() -> None:
    prompt = [1, 1, 2, 2, 3, 3, 4]
    cache = PagedCache(num_blocks=8, block_size=2, cpu_blocks=16)
    cache.serve(prompt)
    middle = cache._pool.find(0, cache._chain(prompt).links[1])
    assert middle is not None
    cache._pool.touch(middle)
    cache.serve(range(100, 114))  # takes every block but that one
    cache._pool.release([middle])
    hashes = stores(cache.take_events())[0].block_hashes
    served = cache.serve(prompt)
    assert (served.hit_tokens, served.loaded_tokens) == (6, 4)
    again = [event for event in stores(cache.take_events()) if event.medium == "GPU"]
    assert [event.block_hashes for event in again] == [[hashes[0]], [hashes[2]]]
    assert [event.parent_block_hash for event in again] == [None, hashes[1]]


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
