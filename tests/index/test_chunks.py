"""Chunks of several blocks off the device, as LMCache and vLLM's OffloadingConnector keep them."""

from __future__ import annotations

import gzip
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import BlockRemoved, BlockStored, CacheSettings, EventBatch, Index, RankMatch
from kvindex.index.api import BaseIndex
from kvindex.wire import BlockHash, Event
from tests.captures import CAPTURES
from tests.examples import examples
from tests.index.index_events import (
    CLEAR,
    SIZE,
    A,
    apply,
    both,
    counts_of,
    located,
    prompt,
    removed,
    restored,
    stored,
    tokens,
)
from tests.index.index_stories import (
    Scene,
    Story,
    answers,
    cleared,
    configured,
    counts,
    holds,
    stories,
    together,
    unknown,
)

pytestmark = pytest.mark.property

ALL = range(8)


def chunk(number: int, *, blocks: int = 4, **fields: Any) -> BlockStored:
    """Store a chunk of blocks of the one prompt under a label of its own, after the one before."""
    first = number * blocks
    options: dict[str, Any] = {
        "block_hashes": [900 + number],
        "parent": 899 + number if number else None,
        "block_size": blocks * SIZE,
        "medium": "CPU",
    }
    return stored(*range(first, first + blocks), **options | fields)


def no_chunk(*numbers: int) -> BlockRemoved:
    return removed(*numbers, base=900, medium="CPU")


DEVICE = stored(*ALL)
EVICTED = removed(*ALL)
CHUNKED = configured(offload_chunk=4 * SIZE)

STORIES = {
    "a chunk outlives the device's blocks": Story(
        Scene(DEVICE, chunk(0), chunk(1), answers(tokens=32, device_tokens=32), EVICTED),
        answers(tokens=32, device_tokens=0, host_tokens=32, by_medium={"CPU": 8}),
        answers(lower_bound=False, upper_bound=True),
    ),
    "a chunk goes on where the device ends, also amid it": Story(
        Scene(stored(0, 1), chunk(0), chunk(1), answers(tokens=32, device_tokens=8)),
        answers(by_medium={"GPU": 2, "CPU": 8}),
    ),
    "a chunk counts as a whole or not at all": Story(
        Scene(stored(0), chunk(0), holds(4, prompt(4)), holds(1, prompt(3))),
        holds(1, tokens(0, 1, 2, 9)),
    ),
    "removing a chunk takes all of it": Story(
        Scene(DEVICE, chunk(0), chunk(1), EVICTED, no_chunk(0), holds(0), no_chunk(1), holds(0)),
        counts(blocks=0, orphans=0, ignored={}),
    ),
    "each of a chunk's copies must be removed": Story(
        Scene(DEVICE, chunk(0), chunk(0), EVICTED, no_chunk(0), holds(4), no_chunk(0), holds(0))
    ),
    "a chunk's label may be that of its last block": Story(
        Scene(DEVICE, chunk(0, block_hashes=[103]), EVICTED, holds(4)),
        Scene(removed(3, medium="CPU"), holds(0), counts(blocks=0)),
    ),
    "a label of a block and of a chunk loses a copy of each with a removal": Story(
        Scene(DEVICE, stored(3, medium="CPU"), chunk(0, block_hashes=[103]), EVICTED, holds(4)),
        Scene(removed(3, medium="CPU"), holds(0), counts(blocks=0, removed_ambiguous=1)),
        Scene(DEVICE, stored(4), holds(8)),
    ),
    "chunks of several sizes join": Story(
        Scene(DEVICE, chunk(0, blocks=2), EVICTED, holds(2)),
        Scene(chunk(1, blocks=2, block_hashes=[950], parent=900), holds(4)),
        Scene(chunk(1, parent=950), holds(8), no_chunk(0), holds(0)),
    ),
    "a chunk of no whole blocks is left out": Story(
        Scene(DEVICE, chunk(0, token_ids=prompt(2)[:6], block_size=6)),
        Scene(counts(ignored={"partial_block": 1}), answers(blocks=8, lower_bound=True)),
    ),
    "a chunk of too many units is left out": Story(
        stored(0, token_ids=[1], block_size=1),
        chunk(0, token_ids=[*range(2000)], block_size=2000),
        counts(ignored={"too_many_units": 1}),
    ),
    "an event that states a chunk's size needs no tokens": Story(
        Scene(DEVICE, chunk(0, block_hashes=[103], token_ids=[]), EVICTED, holds(4)),
        Scene(removed(3, medium="CPU"), holds(0)),
    ),
    "a chunk whose parent comes later makes a lower bound until it comes again": Story(
        Scene(DEVICE, chunk(1), EVICTED, chunk(0), answers(blocks=4, lower_bound=True)),
        Scene(chunk(1), answers(blocks=8, lower_bound=False)),
    ),
    "no more blocks than allowed: a chunk counts as one, and has room as a whole or not": Story(
        Scene(stored(0), chunk(0), counts(blocks=2), chunk(1), holds(4)),
        Scene(counts(blocks=2, ignored={"max_blocks": 1}), answers(lower_bound=True)),
        max_blocks=2,
    ),
    "with a chunk's size set, labels without tokens name what ends there": Story(
        Scene(CHUNKED, DEVICE, located(3, medium="CPU"), EVICTED, holds(4)),
        Scene(located(7, medium="CPU"), holds(4)),  # its place is not known any more
        Scene(removed(3, medium="CPU"), holds(0)),
    ),
    "such a label may come before its block": Story(
        Scene(CHUNKED, located(3, medium="CPU"), DEVICE, EVICTED, holds(4))
    ),
    "with a chunk's size set, blocks off the device count as whole chunks": Story(
        Scene(CHUNKED, DEVICE, stored(0, 1, 2, 3, medium="CPU"), EVICTED, holds(4)),
        Scene(holds(0, prompt(3)), removed(1, medium="CPU"), holds(0)),
        Scene(DEVICE, holds(8)),
    ),
    "with a chunk's size set, the engine loads no less than that": Story(
        Scene(CHUNKED, DEVICE, located(3, medium="CPU"), removed(1, 2, 3, 4, 5, 6, 7)),
        Scene(answers(blocks=1, device_tokens=4, host_tokens=4, upper_bound=False)),
        Scene(located(3, medium="CPU"), DEVICE, located(7, medium="CPU"), removed(*ALL[1:])),
        Scene(answers(blocks=8, device_tokens=4, host_tokens=32, upper_bound=True)),
    ),
    "a chunk's size that is no multiple of the block has no effect": Story(
        configured(offload_chunk=6),
        Scene(DEVICE, located(0, medium="CPU"), EVICTED, holds(1)),
    ),
    "the device's clear leaves chunks": Story(
        Scene(DEVICE, chunk(0), CLEAR, holds(4), no_chunk(0), holds(0))
    ),
}

# What came before the device's first block is no part of a snapshot.
EARLY = {
    "chunks that come first hide no blocks, and are cut as these": Story(
        Scene(chunk(0), chunk(1), holds(2, block_size=16), DEVICE, answers(tokens=32)),
        Scene(EVICTED, answers(tokens=32, device_tokens=0, lower_bound=False)),
        Scene(no_chunk(1), holds(4), stored(*ALL, base=500), holds(8)),
        counts(stored=18, removed=9, ignored={}, duplicates=0),
    ),
    "blocks and chunks of one batch count in either order": Story(
        together(chunk(0), DEVICE),
        Scene(EVICTED, holds(4), cleared, together(DEVICE, chunk(0))),
        Scene(EVICTED, holds(4)),
    ),
    "what happened to chunks that came first happened": Story(
        Scene(chunk(0), chunk(1), no_chunk(1), unknown("CacheReset"), DEVICE, EVICTED),
        answers(blocks=4, upper_bound=True),
        counts(skipped={"CacheReset": 1}, removed=9),
    ),
    "a chunk that came first and does not fit the device's blocks is left out": Story(
        chunk(0, token_ids=prompt(2)[:6], block_size=6),
        Scene(DEVICE, counts(ignored={"partial_block": 1}), answers(lower_bound=True, blocks=8)),
    ),
    "a restart forgets chunks that came first": Story(
        Scene(chunk(0), cleared, DEVICE, EVICTED, holds(0))
    ),
    "a known size off the device in another group changes the unit, not the chunks": Story(
        Scene(chunk(0), chunk(0, blocks=2, group_idx=1, kv_cache_spec_kind="cross_attention")),
        Scene(stored(0, group_idx=2, kv_cache_spec_kind="cross_attention"), counts(ignored={})),
        answers(tokens=16),
    ),
}


@stories(STORIES)
def test_chunks_count_as_the_engine_loads_them(story: Story, way: str) -> None:
    story.run(way)


@stories(EARLY, restarts=False)
def test_chunks_that_come_first_count_as_if_they_came_later(story: Story, way: str) -> None:
    story.run(way)


@both
def test_of_what_comes_first_no_more_than_16_mib_is_kept(kind: type[BaseIndex]) -> None:
    index, tokens = kind(), [0] * 2**20
    for label in range(5):
        apply(index, A, chunk(0, block_hashes=[label], token_ids=tokens, block_size=len(tokens)))
    apply(index, A, DEVICE)
    assert counts_of(index)["ignored"] == {"unit_changed": 5}
    match = index.match(prompt(8))[A]
    assert (match.blocks, match.lower_bound) == (8, True)


@pytest.mark.skipif(Index.backend != "native", reason="snapshots are native only")
def test_a_restored_index_leaves_out_chunks_that_came_first_and_says_so() -> None:
    index = Index()
    apply(index, A, chunk(0))
    index = restored(index)
    apply(index, A, DEVICE, EVICTED)
    assert counts_of(index)["ignored"] == {"unit_changed": 1}
    assert index.match(prompt(8))[A].lower_bound


# vLLM's own chunks ------------------------------------------------------------------------


def asked(name: str, settings: CacheSettings) -> list[tuple[RankMatch, int]]:
    """What the index says to each request of a recording, and what the scheduler found."""
    index, answers = Index(), []
    index.configure(A, settings)
    with gzip.open(CAPTURES / "offload" / f"{name}.jsonl.gz") as lines:
        for line in map(json.loads, lines):
            if "payload" in line:
                index.apply(A, bytes.fromhex(line["payload"]))
            else:
                answers.append((index.match(line["tokens"], recomputed=1)[A], line["hit_tokens"]))
    return answers


@pytest.mark.parametrize("name", ["default", "self-describing"])
def test_hits_with_vllms_chunks_are_the_schedulers_own(name: str) -> None:
    answers = asked(name, CacheSettings(offload_chunk=64))
    assert [match.tokens for match, _ in answers] == [hit for _, hit in answers]
    assert sum(match.tokens > match.device_tokens for match, _ in answers) == 37
    assert len(answers) == 120


def test_without_the_size_of_vllms_chunks_answers_are_flagged_or_too_low() -> None:
    for match, hit in asked("default", CacheSettings()) + asked("self-describing", CacheSettings()):
        assert match.tokens <= hit or match.upper_bound


# Any chunks in any order, beside a set of what is where ----------------------------------------

TEXTS = ((0,) * 32, (0,) * 7 + (1,) * 25, (0,) * 16 + (2,) * 16)
CHUNKS = (1, 2, 4, 16)


class Move(NamedTuple):
    """Store or remove one block of the device (`size` 0), or a chunk of so many blocks."""

    text: int
    size: int
    number: int
    stores: bool

    @property
    def prefix(self) -> tuple[int, ...]:
        """The prompt up to the end of the block or chunk, a token to a block."""
        step = max(1, self.size)
        return TEXTS[self.text][: self.number % (32 // step) * step + step]

    def label(self, cut: int = 0) -> BlockHash:
        prefix = self.prefix[: len(self.prefix) - cut]
        return hash((self.size, prefix)) % 2**63

    def event(self) -> Event:
        step, medium = max(1, self.size), "CPU" if self.size else "GPU"
        if not self.stores:
            return BlockRemoved(block_hashes=[self.label()], medium=medium)
        return BlockStored(
            block_hashes=[self.label()],
            parent_block_hash=self.label(step) if len(self.prefix) > step else None,
            token_ids=list(self.prefix[-step:]),
            block_size=step,
            medium=medium,
        )


class Kept:
    """What an engine holds, as a set of prefixes for each size."""

    def __init__(self) -> None:
        self.prefixes: dict[int, set[tuple[int, ...]]] = {size: set() for size in (0, *CHUNKS)}

    def make(self, move: Move) -> None:
        of_size = self.prefixes[move.size]
        (of_size.add if move.stores else of_size.discard)(move.prefix)

    def hit(self, text: tuple[int, ...]) -> int:
        """First the device's blocks, then chunks, each loaded as a whole."""
        hit = 0
        while text[: hit + 1] in self.prefixes[0] and hit < len(text):
            hit += 1
        while ends := [end for end in range(hit + 1, len(text) + 1) if self.loads(text, hit, end)]:
            hit = max(ends)
        return hit

    def loads(self, text: tuple[int, ...], hit: int, end: int) -> bool:
        return any(text[:end] in self.prefixes[size] and end - size <= hit for size in CHUNKS)


moves = st.builds(
    Move,
    text=st.integers(0, len(TEXTS) - 1),
    size=st.sampled_from((0, 0, 0, *CHUNKS)),
    number=st.integers(0, 7),
    stores=st.sampled_from([True] * 4 + [False]),
)


def in_the_order_of_engines(made: list[Move]) -> list[Move]:
    """Leave out repeated stores, and blocks and chunks whose parents are not there."""
    kept, fitting = Kept(), []
    for move in made:
        prefixes, step = kept.prefixes[move.size], max(1, move.size)
        parent = move.prefix[:-step]
        if move.stores and (move.prefix in prefixes or (parent and parent not in prefixes)):
            continue
        kept.make(move)
        fitting.append(move)
    return fitting


@both
@examples(100)
@given(made=st.lists(moves, max_size=40), ordered=st.booleans())
def test_chunks_of_any_sizes_in_any_order_count_as_a_set_of_prefixes_does(
    kind: type[BaseIndex], made: list[Move], ordered: bool
) -> None:
    index, kept = kind(), Kept()
    exact = False  # until the device shows its size, smaller chunks than the first are left out
    for move in in_the_order_of_engines(made) if ordered else made:
        held = move.prefix in kept.prefixes[move.size]
        if held and move.stores:
            continue  # a second copy, which one removal would leave
        kept.make(move)
        exact = exact or (ordered and move.size == 0 and move.stores)
        index.apply(A, EventBatch(ts=0.0, events=[move.event()]))
        index.check()
        for text in TEXTS:
            for length in (32, 9):
                match = index.match(text[:length])[A]
                expected = kept.hit(text[:length])
                too_low = match.tokens < expected and match.lower_bound
                assert match.tokens == expected or (too_low and not exact)
                assert not (exact and match.lower_bound)
