"""The fake engine's events, read by an obviously right model, give exactly what its cache holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.index import Index
from kvindex.testing import CacheOptions, FakeEngine, Group, PagedCache, Running, Workload
from kvindex.wire import (
    DIALECTS,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode_batch,
    encode_batch,
)
from kvindex.wire.errors import ConfigurationError

pytestmark = pytest.mark.property

Key = tuple[BlockHash, str, int | None]


class Model:
    """Copies of each (hash, medium, group), and where each hash was said to be."""

    def __init__(self) -> None:
        self.copies: Counter[Key] = Counter()
        self.prefixes: dict[BlockHash, tuple[int, ...]] = {}

    def read(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.copies.clear()
                continue
            assert event.medium is not None
            for block_hash in event.block_hashes:
                key = (block_hash, event.medium, event.group_idx)
                if isinstance(event, BlockRemoved):
                    assert self.copies[key] > 0, "removed, but never stored"
                    self.copies[key] -= 1
                else:
                    self.copies[key] += 1
            if isinstance(event, BlockStored) and event.token_ids:
                self._learn(event)

    def _learn(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        prefix: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            prefix = self.prefixes[event.parent_block_hash]
        for i, block_hash in enumerate(event.block_hashes):
            prefix += tuple(event.token_ids[i * size : (i + 1) * size])
            assert self.prefixes.setdefault(block_hash, prefix) == prefix

    @property
    def resident(self) -> dict[Key, int]:
        return {key: copies for key, copies in self.copies.items() if copies}


def agree(model: Model, cache: PagedCache) -> None:
    cache.check()
    model.read(cache.take_events())
    assert model.resident == cache.truth()
    for block in cache.resident_prefixes():
        assert model.prefixes[block.block_hash] == tuple(block.prefix)


options = st.builds(
    CacheOptions,
    groups=st.sampled_from(
        [(Group(),), (Group(), Group.window(6)), (Group(), Group.window(1), Group.window(9))]
    ),
    lookahead=st.integers(0, 2),
    offload=st.sampled_from(["store", "evict"]),
    placeholders=st.booleans(),
) | st.builds(
    CacheOptions,
    engine=st.just("sglang"),
    lookahead=st.integers(0, 1),
    single_hashes=st.booleans(),
)
caches = st.builds(
    PagedCache,
    num_blocks=st.integers(6, 40),
    block_size=st.sampled_from([1, 3, 4]),
    cpu_blocks=st.sampled_from([0, 0, 1, 7, 30]),
    hash_form=st.sampled_from(["u64", "i64", "bytes"]),
    options=options,
)
prompts = st.tuples(
    # few beginnings and few tokens, so that prefixes are shared often
    st.sampled_from([(), (0,) * 4, (0, 1) * 6, (1,) * 12]),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
).map(lambda parts: [*parts[0], *parts[1]])
namespaces = st.sampled_from(
    [{}, {"lora": "a"}, {"salt": "s"}, {"lora": "a", "salt": "s"}, {"extra_keys": [("img", 0)]}]
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), prompts, namespaces, st.lists(st.integers(0, 1), max_size=9)),
        st.tuples(st.just("begin"), prompts, namespaces),
        st.tuples(st.just("step"), st.integers(0, 9), st.lists(st.integers(0, 1), max_size=5)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


@given(caches, operations)
def test_events_give_the_truth_after_every_operation(
    cache: PagedCache, operations: list[tuple[object, ...]]
) -> None:
    model, running = Model(), list[Running]()
    for operation in operations:
        before = cache.truth()
        try:
            operate(cache, running, operation)
        except ConfigurationError:
            assert cache.truth() == before
            assert cache.take_events() == []
        agree(model, cache)


def operate(cache: PagedCache, running: list[Running], operation: tuple[object, ...]) -> None:
    match operation:
        case ("serve", list(tokens), dict(names), list(new)):
            hit = cache.hit(tokens, **names)
            assert cache.serve(tokens, new_tokens=new, **names).hit_tokens == hit
        case ("begin", list(tokens), dict(names)):
            running.append(cache.begin(tokens, **names))
        case ("step", int(i), list(tokens)) if i < len(running):
            cache.step(running[i], tokens)
        case ("finish", int(i)) if i < len(running):
            cache.finish(running.pop(i))
        case ("clear",):
            cache.clear()


@given(caches, st.lists(prompts, min_size=1, max_size=12), prompts)
def test_hit_and_lookup_follow_from_the_truth(
    cache: PagedCache, served: list[list[int]], asked: list[int]
) -> None:
    for prompt in served:
        try:
            cache.serve(prompt)
        except ConfigurationError:  # the prompt is longer than the whole cache
            continue
    blocks = leading_blocks(cache, asked)
    assert cache.lookup(asked).blocks == blocks
    before = cache.truth()
    assert cache.hit(asked) == leading_blocks(cache, asked, whole=False) * cache.block_size
    assert cache.truth() == before
    assert cache.hit(asked) < len(asked)


def leading_blocks(cache: PagedCache, prompt: list[int], *, whole: bool = True) -> int:
    """The largest cut that all groups can serve, tried one by one."""
    size = cache.block_size
    held = {
        (block.group_idx or 0, tuple(block.prefix), tuple(block.lookahead))
        for block in cache.resident_prefixes()
    }

    def has(group: int, i: int) -> bool:
        end = (i + 1) * size
        ahead = tuple(prompt[end : end + cache.options.lookahead])
        return (group, tuple(prompt[:end]), ahead) in held

    def fits(group: int, cut: int) -> bool:
        window = cache.options.groups[group].sliding_window
        first = 0 if window is None else max(0, cut - -(-(window - 1) // size))
        return all(has(group, i) for i in range(first, cut))

    most = (len(prompt) - (0 if whole else 1)) // size
    return max(
        cut
        for cut in range(most + 1)
        if all(fits(group, cut) for group in range(len(cache.options.groups)))
    )


@pytest.mark.parametrize("name", ["vllm-0.20.0", "vllm-0.33.0", "sglang-0.5.23", "sglang-0.5.9"])
def test_a_workload_survives_the_wire(name: str) -> None:
    dialect = DIALECTS[name]
    cache = PagedCache(num_blocks=60, options=CacheOptions(engine=dialect.engine))
    model = Model()
    for step, request in enumerate(Workload(120, seed=3, loras=["a"], salts=["x"])):
        cache.serve(
            request.token_ids, lora=request.lora, salt=request.salt, new_tokens=request.new_tokens
        )
        payload = encode_batch(EventBatch(float(step), cache.take_events(), 0), dialect)
        model.read(decode_batch(payload).events)
        assert model.resident == cache.truth()
    assert len(model.prefixes) > 200, "eviction was not reached"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"cpu_blocks": 60},
        {"cpu_blocks": 60, "options": CacheOptions(offload="evict")},
        {"cpu_blocks": 60, "options": CacheOptions(placeholders=False)},
        {"options": CacheOptions(groups=(Group(), Group.window(64)))},
        {"options": CacheOptions(lookahead=1)},
        {"dialect": "vllm-0.17.0"},
        {"dialect": "sglang-0.5.23"},
        {"dialect": "sglang-0.5.23-eagle"},
    ],
)
def test_the_index_answers_as_the_cache_does(engine: dict[str, Any], seed: int) -> None:
    fake = FakeEngine(publish=False, num_blocks=90, **engine)
    index = Index()
    requests = list(Workload(100, seed=seed, loras=["a"], salts=["s"]))
    rng = random.Random(seed)
    longest = 0
    for request in requests:
        index.apply(fake.rank, encode_batch(EventBatch(1.0, [*fake.events], 0), fake.dialect))
        asked = rng.choice(requests)
        tokens = fake.lookup(asked.token_ids, lora=asked.lora, salt=asked.salt).tokens
        match = index.match(list(asked.token_ids), lora=asked.lora, salt=asked.salt)
        assert match[fake.rank].tokens == tokens
        longest = max(longest, tokens)
        fake.run([request])
    assert longest > 100
