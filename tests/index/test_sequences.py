"""Sequences that break indexers (docs/wire.md), each by name, with what follows from the events."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import BlockRemoved, BlockStored, EventBatch, Index, Rank
from kvindex.wire.quirks import EMPTY_TUPLE_HASH, content_hash
from tests.index.index_events import (
    CLEAR,
    SIZE,
    A,
    B,
    apply,
    apply_together,
    counts_of,
    index_of,
    located,
    matched,
    prompt,
    removed,
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
    of,
    stories,
    together,
    totals,
    unknown,
)

pytestmark = pytest.mark.unit

ALL = tuple(range(8))
SWA: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}


def page_hash(page: int) -> int:
    return content_hash(tokens(page))


def paged(*pages: int, parent: int | None = EMPTY_TUPLE_HASH) -> BlockStored:
    """Store pages labelled by their own tokens only, as SGLang 0.4.8-0.5.5 does."""
    return stored(*pages, parent=parent, block_hashes=[page_hash(page) for page in pages])


def unpaged(*pages: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[page_hash(page) for page in pages])


PLACES = {
    "a hole that is filled again counts as if it had never been": Story(
        stored(*ALL), removed(3), holds(3), stored(3), holds(8)
    ),
    "so does a hole in blocks that another rank's blocks split": Story(
        of(B, stored(0, 1, 2, 3), stored(4, 5)),
        Scene(stored(*ALL), removed(3), holds(3), stored(3), holds(8)),
    ),
    "a store after a filled hole finds its parent": Story(
        stored(*ALL), removed(3), stored(3), stored(8), holds(9)
    ),
    "a store behind an open hole counts once the hole is filled": Story(
        stored(*ALL), removed(3), stored(8), holds(3), stored(3), holds(9)
    ),
    "children before their parents match nothing and then everything": Story(
        Scene(stored(4, 5, 6, 7), holds(0), holds(0, tokens(4, 5, 6, 7)), counts(orphans=4)),
        Scene(stored(0, 1, 2, 3), holds(8), counts(orphans=0, orphans_attached=4)),
    ),
    "answers are lower bounds while a block's place is unknown": Story(
        Scene(stored(0), stored(2), answers(lower_bound=True)),
        answers(tokens(9), lower_bound=True),
        Scene(stored(1), answers(lower_bound=False), answers(tokens(9), lower_bound=False)),
        Scene(stored(7), removed(7), answers(lower_bound=False)),
    ),
    "answers stay lower bounds after an orphan was given up until all is cleared": Story(
        stored(5), answers(lower_bound=True), CLEAR, answers(lower_bound=False), max_orphans=0
    ),
    "answers are lower bounds where the engine reports no position": Story(
        paged(3, parent=None), answers(lower_bound=True)
    ),
    "answers are lower bounds where a block was left out until all is cleared": Story(
        Scene(stored(0), stored(1, block_size=0), answers(lower_bound=True), CLEAR),
        Scene(stored(0), answers(lower_bound=False)),
    ),
    "a block smaller than its group's whose parent no event names makes a lower bound": Story(
        stored(0),
        stored(1, parent=77, token_ids=tokens(1)[:2], block_size=2),
        answers(lower_bound=True),
    ),
    "an unknown event may have removed what is held until all is cleared": Story(
        Scene(stored(*ALL), unknown("TierBlocksCleared"), answers(upper_bound=True, blocks=8)),
        Scene(removed(7), stored(8), answers(upper_bound=True), CLEAR),
        Scene(stored(*ALL), answers(upper_bound=False)),
        Scene(unknown("BlocksEvicted"), cleared, stored(*ALL), answers(upper_bound=False)),
    ),
    "a clear that leaves the host's blocks leaves the doubt about them": Story(
        Scene(stored(*ALL), located(0, 1, medium="CPU"), unknown("BlocksEvicted"), CLEAR),
        answers(upper_bound=True, blocks=2),
    ),
    "an unknown event may have removed a block that waits for its parent": Story(
        Scene(stored(1), unknown("BlocksEvicted"), stored(0), answers(upper_bound=True, blocks=2))
    ),
    "an unknown event on an empty rank, or a harmless one, casts no doubt": Story(
        unknown("TierBlocksCleared"),
        Scene(stored(*ALL), unknown("BlockInactive"), answers(upper_bound=False)),
        counts(skipped={"TierBlocksCleared": 1, "BlockInactive": 1}),
    ),
    "orphans that came in any order attach": Story(
        stored(3), stored(2), stored(4), stored(1), stored(0), holds(5)
    ),
    "a removed orphan does not come back with its parent": Story(
        stored(1, 2), removed(2), stored(0), holds(2), counts(removed_orphans=1)
    ),
    "the oldest orphans go when too many wait": Story(
        Scene(stored(2), stored(4, 5, 6), counts(orphans=3, orphans_dropped=1)),
        Scene(stored(0, 1), stored(3), holds(2)),
        max_orphans=3,
    ),
    "siblings wait in the order in which they were reported last": Story(
        Scene(stored(1), stored(5, parent=100), stored(1), stored(0)),
        Scene(holds(2, tokens(0, 5)), holds(1, tokens(0, 1))),  # the first to come had room
        max_blocks=2,
    ),
    "a known block in an orphaned chain gets its copy": Story(
        Scene(stored(0, 1, 2, 3), removed(0, 1), stored(1, 2), counts(orphans=1)),
        Scene(removed(2), stored(0), holds(4)),  # one of two copies of block 2 was removed
    ),
    "a block without tokens waits until a parent has placed its block": Story(
        stored(1, 2), located(3), stored(0), stored(3), holds(4), counts(orphans_attached=2)
    ),
    "a prompt that parts and meets again matches to where it parts": Story(
        stored(1, 2, 4, parent=None), holds(1, tokens(1, 3, 4))
    ),
    "holes are joined where only another rank parted them": Story(
        Scene(stored(0, 1, 2, 3), of(B, stored(0, 1)), removed(0, 1, 2)),
        Scene(stored(0, 1, 2), holds(4)),
    ),
    "a chain in one event equals the same blocks one by one": Story(
        stored(0, 1, 2),
        of(B, *(stored(block, base=500) for block in range(3))),
        Scene(holds(3), holds(3, rank=B), totals(unique_blocks=3)),
    ),
    "removing from one rank leaves the other alone": Story(
        stored(*ALL), of(B, stored(*ALL)), removed(*ALL), holds(0), holds(8, rank=B)
    ),
    "two ranks use one hash for different blocks": Story(
        Scene(stored(0, 1), of(B, stored(5, 6, parent=None, block_hashes=[100, 101]))),
        Scene(holds(2), holds(2, tokens(5, 6), rank=B), holds(0, rank=B)),
    ),
    "a restarted engine holds only its new contents": Story(
        stored(*ALL), cleared, stored(0, 1, base=900), holds(2), totals(blocks=2)
    ),
    "a restarted engine may have a smaller block size and fewer groups": Story(
        Scene(stored(0, 1), stored(0, 1, **SWA, kv_cache_spec_sliding_window=4), cleared),
        Scene(stored(0, token_ids=tokens(0)[:2], block_size=2), answers(prompt(1), tokens=2)),
    ),
}

LABELS = {
    "a block under two labels is resident until both are gone": Story(
        Scene(stored(0, 1), stored(0, 1, base=900), removed(0, 1), holds(2)),
        Scene(removed(0, 1, base=900), holds(0)),
    ),
    "each copy and each label of a block goes by itself": Story(
        Scene(stored(0), stored(0), stored(0, base=900), removed(0), holds(1)),
        Scene(removed(0), holds(1), removed(0, base=900), holds(0)),
    ),
    "the newest block of a label is the one that is meant": Story(
        Scene(stored(5, parent=None, base=2), stored(3, parent=None, base=4)),  # both are 7
        located(7, base=0, medium="CPU"),
        Scene(holds(1, tokens(3), media="CPU"), holds(0, tokens(5), media="CPU")),
    ),
    "torn labels stay torn": Story(
        Scene(stored(5, parent=None, base=2), stored(3, parent=None, base=4)),
        Scene(located(7, base=0, medium="CPU"), removed(7, base=0), stored(9, parent=7)),
        counts(ignored={"parent_ambiguous": 1}),
    ),
    "every way to name the root is the root: 0": Story(stored(0, 1, parent=0), stored(2), holds(3)),
    "every way to name the root is the root: the empty tuple's hash": Story(
        stored(0, 1, parent=EMPTY_TUPLE_HASH), stored(2), holds(3)
    ),
    "a parent zero that is stored is that block": Story(
        stored(0, block_hashes=[0]), stored(1, parent=0), holds(2)
    ),
    "labels match whatever their sign": Story(
        Scene(stored(0, block_hashes=[2**64 - 5]), stored(1, parent=-5), holds(2)),
        Scene(BlockRemoved(block_hashes=[-5]), holds(0)),
    ),
    "the numeric LoRA id names a namespace where no name is sent": Story(
        Scene(stored(0, lora_id=3), stored(1, 2, parent=None, lora_id=0)),
        Scene(holds(1, lora=3), holds(0), holds(2, tokens(1, 2), lora=0), holds(2, tokens(1, 2))),
    ),
    "a child in another namespace than its parent is refused": Story(
        Scene(stored(0), stored(1, 2, lora_name="a"), counts(ignored={"parent_namespace": 2})),
        Scene(stored(6, lora_name="a"), stored(5, parent=100)),
        Scene(counts(ignored={"parent_namespace": 3}), totals(blocks=2)),
    ),
}

CLEARS = {
    "a clear and new stores in one batch leave only the new": Story(
        Scene(stored(*ALL), together(CLEAR, stored(20, 21, parent=None))),
        Scene(holds(0), holds(2, tokens(20, 21))),
    ),
    "a clear takes all tiers of SGLang": Story(
        Scene(stored(0, 1), located(0, 1, medium="CPU_PINNED"), located(0, medium="DISK")),
        Scene(located(0, medium="EXTERNAL"), CLEAR, holds(0), totals(blocks=0)),
    ),
    "a clear forgets orphans and labels": Story(
        Scene(stored(*ALL), stored(20, 21), CLEAR, stored(8), stored(19)),
        Scene(counts(orphans=2), totals(blocks=0, runs=0)),
    ),
}

QUIRKS = {
    "1: a block stored twice and removed once is still resident": Story(
        Scene(stored(*ALL), stored(5), removed(5), holds(8)),
        Scene(removed(5), holds(5), counts(duplicates=1)),
    ),
    "1: a single first block may have copies too": Story(
        stored(0), stored(0), removed(0), holds(1)
    ),
    "1: the engine's own number of copies left counts, and none ends a block": Story(
        Scene(stored(*ALL), stored(5), stored(5), removed(5, remaining_copy_counts=[0]), holds(5)),
        Scene(stored(5), removed(5, remaining_copy_counts=[2]), removed(5), holds(8)),
        Scene(removed(5, 6, remaining_copy_counts=[0, 1]), removed(6), holds(5)),
        counts(removed=6, removed_unknown=0),
    ),
    "1: the copies left of a block that waits, and of one with two labels": Story(
        Scene(stored(1), stored(1), removed(1, remaining_copy_counts=[0]), counts(orphans=0)),
        Scene(stored(0), stored(0, base=500), removed(0, remaining_copy_counts=[3]), holds(1)),
        Scene(removed(0), removed(0), removed(0), removed(0, base=500), holds(0)),
        counts(removed_orphans=1, removed=5),
    ),
    "1: where engines report the last copy's removal only, it ends the block": Story(
        configured(removals="last"),
        Scene(stored(*ALL), stored(5), stored(5), removed(5), holds(5)),
        Scene(stored(5), removed(5, remaining_copy_counts=[1]), holds(8), removed(5), holds(5)),
        Scene(cleared, stored(0), stored(0), removed(0), holds(0)),
        Scene(configured(), stored(0), stored(0), removed(0), holds(1)),
    ),
    "2: a prompt announced again adds no copies where requests announce": Story(
        configured(report_mode="full"),
        Scene(stored(0, 1, 2), stored(0, 1, 2), stored(0), removed(2), holds(2)),
        Scene(counts(reannounced=4), removed(0), holds(0)),
    ),
    "2: a prompt computed again adds copies": Story(
        stored(0, 1, 2), stored(0, 1, 2), removed(0, 1, 2), holds(3), counts(duplicates=3)
    ),
    "2: a store from the start with something new is no announcement": Story(
        stored(0, 1), stored(0, 1, 2), removed(1), holds(3)
    ),
    "3: an unknown removal is counted and the later store counts": Story(
        removed(0), stored(0), removed(0, medium="CPU"), holds(1), counts(removed_unknown=2)
    ),
    "9: tokens that do not fit their hashes are left out": Story(
        Scene(stored(0, 1), stored(3, token_ids=tokens(2, 3)[:-1], parent=101)),
        Scene(holds(2), counts(ignored={"token_count": 1})),
    ),
    "9: a label among the tokens of several blocks waits for its place": Story(
        Scene(stored(0, 1), stored(3, token_ids=tokens(2, 3), parent=101)),
        Scene(holds(2), counts(unplaced=1), stored(2, 3, group_idx=1)),
        answers(prompt(4), by_medium={"GPU": 2}),  # group 0 holds 0, 1 and 3
    ),
    "9: a label without tokens is a further place of a known block": Story(
        Scene(stored(0, 1), located(1, medium="cpu"), removed(1)),
        answers(prompt(2), by_medium={"GPU": 1, "CPU": 1}),
    ),
    "9: a label without tokens waits for its block": Story(
        Scene(located(0, medium="STORAGE"), totals(blocks=0), counts(orphans=1)),
        Scene(stored(0), removed(0), answers(by_medium={"STORAGE": 1})),
    ),
    "10: a partial block never counts and its promotion does": Story(
        stored(0),
        stored(1, token_ids=tokens(1)[:2], block_size=2, base=700, parent=100),
        Scene(removed(1, base=700), stored(1), holds(2)),
        counts(ignored={"partial_block": 1}, removed_unknown=1),
    ),
    "14: a salt apart and a salt in the first extra key are one identity": Story(
        Scene(stored(0, 1, cache_salt="s"), of(B, stored(0, 1, extra_keys=[("s",), None]))),
        Scene(holds(2, salt="s"), holds(2, rank=B, salt="s"), totals(unique_blocks=2)),
    ),
    "14: a salt repeated with later blocks belongs to the first": Story(
        stored(0, cache_salt="s"), stored(1, cache_salt="s"), holds(2, salt="s")
    ),
    "16: pages removed by a split are not answered for": Story(
        Scene(stored(0, 1, 2, 3), removed(2, 3), removed(2, 3), stored(5, 6)),
        Scene(holds(2), counts(removed_unknown=2, orphans=2)),
    ),
    "17: equal pages at two places share a label and go together": Story(
        Scene(paged(0, 1), paged(2, 1), holds(2, tokens(0, 1)), holds(2, tokens(2, 1))),
        Scene(unpaged(1), holds(1, tokens(0, 1)), holds(1, tokens(2, 1))),
        counts(ambiguous=1, removed_ambiguous=1),
    ),
    "17: a label of which the engine has no copy left is at no place": Story(
        Scene(paged(0, 1), paged(2, 1), paged(2, 1)),
        BlockRemoved(block_hashes=[page_hash(1)], remaining_copy_counts=[0]),
        Scene(holds(1, tokens(0, 1)), holds(1, tokens(2, 1)), counts(removed_ambiguous=0)),
        Scene(paged(1, parent=page_hash(0)), paged(3, parent=page_hash(1))),
        holds(3, tokens(0, 1, 3)),  # its label names one page again
    ),
    "17: a parent at two places is not guessed": Story(
        Scene(paged(0, 1), paged(2, 1), paged(3, parent=page_hash(1))),
        Scene(holds(2, tokens(0, 1, 3)), holds(2, tokens(2, 1, 3))),
        counts(ignored={"parent_ambiguous": 1}),
    ),
    "17: a page that was at two places is no parent again": Story(
        Scene(paged(0, 1), paged(2, 1), unpaged(1), paged(0)),
        Scene(paged(1, parent=page_hash(0)), paged(3, parent=page_hash(1))),
        holds(2, tokens(0, 1, 3)),  # the child may belong to the other page
    ),
    "17: a page that follows itself is its own parent": Story(
        Scene(paged(1, 1, 1), holds(3, tokens(1, 1, 1, 1))),
        Scene(unpaged(1), totals(blocks=0, runs=0)),
    ),
    "17: an orphan labelled by its own tokens is not placed by chance": Story(
        Scene(paged(1, parent=page_hash(0)), paged(7, 0), holds(2, tokens(7, 0, 1))),
        counts(ignored={"position_unknown": 1}),
    ),
    "17: pages without a parent are not taken for the start": Story(
        Scene(paged(1, 2, parent=None), paged(3, parent=page_hash(2)), totals(blocks=0)),
        Scene(holds(0, tokens(1, 2, 3)), counts(ignored={"position_unknown": 3})),
    ),
    "17: a split stores both halves in one batch": Story(
        paged(0, 1, 2),
        together(unpaged(0, 1, 2), paged(0), paged(1, 2, parent=page_hash(0))),
        holds(3, tokens(0, 1, 2)),
    ),
    "18: two tiers store and remove on their own": Story(
        Scene(stored(0, 1), stored(0, 1, medium="CPU_PINNED"), removed(0, 1), holds(2)),
        Scene(holds(0, media="GPU"), holds(2, media=["gpu", "cpu_pinned"])),
        Scene(removed(0, 1, medium="CPU_PINNED"), holds(0)),
    ),
    "18: a prefix goes on from the device to the host and never back": Story(
        Scene(stored(0, 1, 2, 3), stored(2, medium="CPU"), removed(2)),
        answers(blocks=3, by_medium={"GPU": 2, "CPU": 1}),
    ),
}


@stories(PLACES | LABELS | CLEARS | QUIRKS)
def test_the_index_follows_sequences_that_break_indexers(story: Story, way: str) -> None:
    story.run(way)


# Namespaces and many ranks


def test_forty_ranks_hold_the_system_prompt() -> None:
    index = Index()
    ranks = [Rank("w", i) for i in range(40)]
    for rank in ranks:
        apply(index, rank, stored(0, 1, 2, base=100 * rank.dp_rank + 1))
    match = index.match(prompt(3))
    assert sum(entry.blocks == 3 for entry in match) == 40
    assert index.statistics()["unique_blocks"] == 3


@pytest.mark.parametrize(
    "query",
    [{}, {"lora": "a"}, {"lora": "b"}, {"salt": "x"}, {"lora": "a", "salt": "x"}],
    ids=str,
)
def test_lora_and_salt_make_separate_prefixes(query: dict[str, Any]) -> None:
    lora, salt = query.get("lora"), query.get("salt")
    keys: list[tuple[Any, ...] | None] = [(salt, lora) if salt and lora else (lora or salt,), None]
    index = index_of(stored(0, 1, lora_name=lora, extra_keys=keys if query else None))
    other_queries: list[dict[str, Any]] = [{}, {"lora": "a"}, {"lora": "b"}, {"salt": "x"}]
    assert matched(index, prompt(2), **query) == 2
    for other in other_queries:
        assert matched(index, prompt(2), **other) == (2 if other == query else 0)


# Clears and what lies off the device


def tiers(**options: Any) -> Story:
    """Blocks on the device, on the host as vLLM and SGLang call it, and in storage."""
    return Story(
        configured(**options),
        Scene(stored(0, 1, 2, 3), stored(4), stored(4), stored(20)),
        Scene(located(0, 1, medium="cpu"), located(20, medium="CPU"), located(30)),
        Scene(located(0, 1, 2, medium="STORAGE"), located(0, 1, 2, 3, medium="CPU_PINNED")),
        CLEAR,
    )


TIERS = {
    "what vLLM holds off the device stays as upper bounds": Story(
        *tiers().steps,
        answers(blocks=3, device_tokens=0, host_tokens=2 * SIZE, upper_bound=True),
        Scene(answers(by_medium={"CPU": 2, "STORAGE": 3}), counts(orphans=1)),
        Scene(stored(0, 1, 2, 3), answers(prompt(5), device_tokens=4 * SIZE)),
        Scene(removed(*range(4)), removed(0, 1, medium="CPU"), removed(0, medium="STORAGE")),
        holds(0),
    ),
    "a reset with the connector leaves only what lies in storage": Story(
        *tiers(resets_connector=True).steps,
        Scene(answers(blocks=3, host_tokens=0, by_medium={"STORAGE": 3}), counts(orphans=0)),
    ),
}


@stories(TIERS)
def test_a_clear_leaves_the_tiers_that_the_engine_leaves(story: Story, way: str) -> None:
    story.run(way)


def test_clears_by_the_thousand_drop_all_tiers_rather_than_look_at_all_blocks_each_time() -> None:
    index = Index()
    many = 1 << 14
    index.apply(A, EventBatch(ts=0.0, events=[stored(*range(many)), located(0, medium="CPU")]))
    labels = range(10**6, 10**6 + many - 1)
    offloaded = BlockStored(block_hashes=[*labels], token_ids=[], block_size=0, medium="CPU")
    index.apply(A, EventBatch(ts=0.0, events=[CLEAR, offloaded]))
    assert (counts_of(index)["media"], counts_of(index)["orphans"]) == ({"CPU": 1}, many - 1)
    apply_together(index, A, *[CLEAR] * (2 * (1 << 23) // many))
    assert (len(index), counts_of(index)["orphans"]) == (0, 0)


# What makes no sense


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": -4}, "block_size"),
        ({"block_size": 5}, "token_count"),
        ({"extra_keys": [None]}, "extra_keys_count"),
        ({"lookahead_token_ids": [[1]]}, "lookahead_count"),
        ({"lookahead_token_ids": [[1], [1, 2]]}, "lookahead_count"),
        ({"kv_cache_spec_kind": "sliding_window"}, "group_kind"),
    ],
)
def test_a_store_that_makes_no_sense_is_left_out_and_counted(
    fields: dict[str, Any], reason: str
) -> None:
    index = index_of(stored(0, 1, **fields))
    assert (len(index), list(counts_of(index)["ignored"])) == (0, [reason])


def test_a_publisher_that_invents_places_and_sizes_is_bounded() -> None:
    index = Index()
    for i in range(100):
        apply(index, A, stored(0, medium=f"tier-{i}"))
    assert counts_of(index)["ignored"] == {"too_many_media": 36}
    for i in range(1, 41):
        apply(index, B, stored(0, token_ids=list(range(i)), block_size=i))
    assert counts_of(index, B)["ignored"] == {"unit_changed": 16, "too_many_block_sizes": 24}


def test_unknown_event_tags_are_counted_by_name_up_to_a_bound() -> None:
    index = Index()
    tags = tuple(f"Tag{i}" for i in range(100))
    index.apply(A, EventBatch(ts=0.0, events=[], skipped=tags))
    skipped = counts_of(index)["skipped"]
    assert (len(skipped), skipped["Tag0"], skipped["(other)"]) == (65, 1, 36)
