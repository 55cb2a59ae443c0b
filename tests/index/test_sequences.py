"""Sequences that break indexers (docs/wire.md), each by name, with what follows from the events."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    EventBatch,
    Index,
    Rank,
)
from kvindex.wire.quirks import EMPTY_TUPLE_HASH, content_hash
from tests.index.index_events import (
    SIZE,
    A,
    B,
    apply,
    index_of,
    located,
    matched,
    prompt,
    removed,
    restored,
    stored,
    tokens,
    told,
)

pytestmark = pytest.mark.unit

ALL = tuple(range(8))


# Holes, parents and orphans


@pytest.mark.parametrize("split_by_another_rank", [False, True])
def test_a_hole_that_is_filled_again_counts_as_if_it_had_never_been(
    split_by_another_rank: bool,
) -> None:
    index = Index()
    if split_by_another_rank:
        apply(index, B, stored(0, 1, 2, 3), stored(4, 5))
    apply(index, A, stored(*ALL), removed(3))
    assert matched(index, prompt(8)) == 3
    apply(index, A, stored(3))
    assert matched(index, prompt(8)) == 8


def test_a_store_after_a_filled_hole_finds_its_parent() -> None:
    index = index_of(stored(*ALL), removed(3), stored(3), stored(8))
    assert matched(index, prompt(9)) == 9


def test_a_store_behind_an_open_hole_counts_once_the_hole_is_filled() -> None:
    index = index_of(stored(*ALL), removed(3), stored(8))
    assert matched(index, prompt(9)) == 3
    apply(index, A, stored(3))
    assert matched(index, prompt(9)) == 9


def test_children_before_their_parents_match_nothing_and_then_everything() -> None:
    index = index_of(stored(4, 5, 6, 7))
    assert matched(index, prompt(8)) == 0
    assert matched(index, tokens(4, 5, 6, 7)) == 0, "re-rooted at the start"
    assert told(index)["orphans"] == 4
    apply(index, A, stored(0, 1, 2, 3))
    assert matched(index, prompt(8)) == 8
    assert (told(index)["orphans"], told(index)["orphans_attached"]) == (0, 4)


def test_answers_are_lower_bounds_while_a_blocks_place_is_unknown() -> None:
    index = index_of(stored(0), stored(2))
    assert index.match(prompt(3))[A].lower_bound
    assert index.match(tokens(9))[A].lower_bound, "where the rank holds nothing, too"
    assert index.match(prompt(3)).to_dict()["a/0"]["lower_bound"] is True
    assert restored(index).match(prompt(3))[A].lower_bound
    apply(index, A, stored(1))
    assert not index.match(prompt(3))[A].lower_bound
    assert not index.match(tokens(9))[A].lower_bound
    apply(index, A, stored(7), removed(7))
    assert not index.match(prompt(3))[A].lower_bound, "it is gone"


def test_answers_stay_lower_bounds_after_an_orphan_was_given_up_until_all_is_cleared() -> None:
    index = index_of(stored(5), max_orphans=0)
    assert index.match(prompt(1))[A].lower_bound
    assert restored(index).match(prompt(1))[A].lower_bound
    apply(index, A, AllBlocksCleared())
    assert not index.match(prompt(1))[A].lower_bound


def test_answers_are_lower_bounds_where_the_engine_tells_no_position() -> None:
    index = index_of(paged(3, parent=None))
    assert index.match(prompt(1))[A].lower_bound


def test_orphans_that_came_in_any_order_attach() -> None:
    index = index_of(stored(3), stored(2), stored(4), stored(1), stored(0))
    assert matched(index, prompt(5)) == 5


def test_a_removed_orphan_does_not_come_back_with_its_parent() -> None:
    index = index_of(stored(1, 2), removed(2), stored(0))
    assert matched(index, prompt(3)) == 2
    assert told(index)["removed_orphans"] == 1


def test_the_oldest_orphans_go_when_too_many_wait() -> None:
    index = index_of(stored(2), stored(4, 5, 6), max_orphans=3)
    assert (told(index)["orphans"], told(index)["orphans_dropped"]) == (3, 1)
    apply(index, A, stored(0, 1), stored(3))
    assert matched(index, prompt(7)) == 2


def test_a_known_block_in_an_orphaned_chain_gets_its_copy() -> None:
    index = index_of(stored(0, 1, 2, 3), removed(0, 1), stored(1, 2))
    assert told(index)["orphans"] == 1
    apply(index, A, removed(2), stored(0))
    assert matched(index, prompt(4)) == 4, "one of two copies of block 2 was removed"


def test_a_prompt_that_parts_and_meets_again_matches_to_where_it_parts() -> None:
    x, w, z, y = 1, 2, 3, 4
    index = index_of(stored(x, w, y, parent=None))
    assert matched(index, tokens(x, z, y)) == 1


def test_a_chain_in_one_event_equals_the_same_blocks_one_by_one() -> None:
    index = index_of(stored(0, 1, 2))
    apply(index, B, *(stored(block, base=500) for block in range(3)))
    match = index.match(prompt(3))
    assert (match[A].blocks, match[B].blocks) == (3, 3)
    assert index.statistics()["unique_blocks"] == 3


# Ranks apart


def test_removing_from_one_rank_leaves_the_other_alone() -> None:
    index = index_of(stored(*ALL))
    apply(index, B, stored(*ALL))
    apply(index, A, removed(*ALL))
    match = index.match(prompt(8))
    assert (match[A].blocks, match[B].blocks) == (0, 8)


def test_forty_ranks_hold_the_system_prompt() -> None:
    index = Index()
    ranks = [Rank("w", i) for i in range(40)]
    for rank in ranks:
        apply(index, rank, stored(0, 1, 2, base=100 * rank.dp_rank + 1))
    match = index.match(prompt(3))
    assert sum(found.blocks == 3 for found in match) == 40
    assert index.statistics()["unique_blocks"] == 3


def test_two_ranks_use_one_hash_for_different_blocks() -> None:
    index = index_of(stored(0, 1))
    apply(index, B, stored(5, 6, parent=None, block_hashes=[100, 101]))
    assert (matched(index, prompt(2)), matched(index, tokens(5, 6), B)) == (2, 2)
    assert matched(index, prompt(2), B) == 0


def test_a_restarted_engine_holds_only_its_new_contents() -> None:
    index = index_of(stored(*ALL))
    index.tree(A).clear()
    apply(index, A, stored(0, 1, base=900))
    assert matched(index, prompt(8)) == 2
    assert len(index) == 2


def test_a_block_under_two_labels_is_resident_until_both_are_gone() -> None:
    index = index_of(stored(0, 1), stored(0, 1, base=900), removed(0, 1))
    assert matched(index, prompt(2)) == 2
    apply(index, A, removed(0, 1, base=900))
    assert matched(index, prompt(2)) == 0


def test_a_restarted_engine_may_have_a_smaller_block_size_and_fewer_groups() -> None:
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    index = index_of(stored(0, 1), stored(0, 1, **window, kv_cache_spec_sliding_window=4))
    index.tree(A).clear()
    apply(index, A, stored(0, token_ids=tokens(0)[:2], block_size=2))
    assert index.match(prompt(1))[A].tokens == 2


def test_clear_and_new_stores_in_one_batch_leave_only_the_new() -> None:
    index = index_of(stored(*ALL))
    fresh = stored(20, 21, parent=None)
    index.apply(A, EventBatch(ts=1.0, events=[AllBlocksCleared(), fresh]))
    index.check()
    assert (matched(index, prompt(8)), matched(index, tokens(20, 21))) == (0, 2)


def tiers(**options: Any) -> Index:
    """Blocks on the device, on the host as vLLM and SGLang call it, and in storage."""
    index = Index()
    index.configure(A, CacheSettings(**options))
    apply(index, A, stored(0, 1, 2, 3), stored(4), stored(4), stored(20))
    apply(index, A, located(0, 1, medium="cpu"), located(20, medium="CPU"), located(30))
    apply(index, A, located(0, 1, 2, medium="STORAGE"), located(0, 1, 2, 3, medium="CPU_PINNED"))
    return index


def test_a_clear_leaves_what_vllm_holds_off_the_device_as_upper_bounds() -> None:
    index = tiers()
    apply(index, A, AllBlocksCleared())
    found = index.match(prompt(5))[A]
    assert (found.blocks, found.device_tokens, found.host_tokens) == (3, 0, 2 * SIZE)
    assert found.upper_bound
    assert (found.by_medium, told(index)["orphans"]) == ({"CPU": 2, "STORAGE": 3}, 1)
    apply(index, A, stored(0, 1, 2, 3))
    assert index.match(prompt(5))[A].device_tokens == 4 * SIZE
    apply(index, A, removed(*range(4)), removed(0, 1, medium="CPU"), removed(0, medium="STORAGE"))
    assert matched(index, prompt(5)) == 0


def test_a_reset_with_the_connector_leaves_only_what_lies_in_storage() -> None:
    index = tiers(resets_connector=True)
    index = restored(index)
    apply(index, A, AllBlocksCleared())
    found = index.match(prompt(5))[A]
    assert (found.blocks, found.host_tokens, found.by_medium) == (3, 0, {"STORAGE": 3})
    assert told(index)["orphans"] == 0


def test_clears_by_the_thousand_drop_all_tiers_rather_than_look_at_all_blocks_each_time() -> None:
    index = Index()
    many = 1 << 14
    index.apply(A, EventBatch(ts=0.0, events=[stored(*range(many)), located(0, medium="CPU")]))
    labels = range(10**6, 10**6 + many - 1)
    offloaded = BlockStored(block_hashes=[*labels], token_ids=[], block_size=0, medium="CPU")
    index.apply(A, EventBatch(ts=0.0, events=[AllBlocksCleared(), offloaded]))
    assert (told(index)["media"], told(index)["orphans"]) == ({"CPU": 1}, many - 1)
    clears = [AllBlocksCleared()] * ((1 << 23) // many)
    index.apply(A, EventBatch(ts=0.0, events=[*clears, *clears]))
    index.check()
    assert (len(index), told(index)["orphans"]) == (0, 0)


def test_a_clear_takes_all_tiers_of_sglang() -> None:
    index = index_of(stored(0, 1), located(0, 1, medium="CPU_PINNED"), located(0, medium="DISK"))
    apply(index, A, located(0, medium="EXTERNAL"), AllBlocksCleared())
    assert (matched(index, prompt(2)), len(index)) == (0, 0)


def test_a_clear_forgets_orphans_and_labels() -> None:
    index = index_of(stored(*ALL), stored(20, 21), AllBlocksCleared(), stored(8), stored(19))
    assert len(index) == 0
    assert told(index)["orphans"] == 2
    assert index.statistics()["runs"] == 0


# Namespaces


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


def test_the_numeric_lora_id_names_a_namespace_where_no_name_is_sent() -> None:
    index = index_of(stored(0, lora_id=3), stored(1, 2, parent=None, lora_id=0))
    assert (matched(index, prompt(1), lora=3), matched(index, prompt(1))) == (1, 0)
    assert matched(index, tokens(1, 2), lora=0) == matched(index, tokens(1, 2)) == 2


def test_a_child_in_another_namespace_than_its_parent_is_refused() -> None:
    index = index_of(stored(0), stored(1, 2, lora_name="a"))
    assert told(index)["ignored"] == {"parent_namespace": 2}
    apply(index, A, stored(6, lora_name="a"), stored(5, parent=100))
    assert told(index)["ignored"] == {"parent_namespace": 3}
    assert len(index) == 2


@pytest.mark.parametrize("root", [None, 0, EMPTY_TUPLE_HASH])
def test_every_way_to_name_the_root_is_the_root(root: int | None) -> None:
    index = index_of(stored(0, 1, parent=root), stored(2))
    assert matched(index, prompt(3)) == 3


def test_a_parent_zero_that_is_stored_is_that_block() -> None:
    index = index_of(stored(0, block_hashes=[0]), stored(1, parent=0))
    assert matched(index, prompt(2)) == 2


def test_labels_match_whatever_their_sign() -> None:
    index = index_of(stored(0, block_hashes=[2**64 - 5]), stored(1, parent=-5))
    assert matched(index, prompt(2)) == 2
    apply(index, A, BlockRemoved(block_hashes=[-5]))
    assert matched(index, prompt(2)) == 0


# Groups


def test_one_group_removes_a_hash_that_the_other_keeps() -> None:
    index = index_of(stored(0, group_idx=0), stored(0, group_idx=1))
    apply(index, A, removed(0, group_idx=1))
    assert [(block.group_idx, block.copies) for block in index.tree(A).walk()] == [(0, 1)]


def test_hybrid_model_answers_what_the_engine_would_hit() -> None:
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 2 * SIZE,
    }
    index = index_of(stored(*ALL, group_idx=0, kv_cache_spec_kind="full_attention"))
    apply(index, A, stored(*ALL, **window), removed(0, 1, 2, 3, 6, group_idx=1))
    assert matched(index, prompt(8)) == 6, "the last cut whose window is whole"


# Quirks of section 1.10, by number


def test_quirk_1_a_block_stored_twice_and_removed_once_is_still_resident() -> None:
    index = index_of(stored(*ALL), stored(5), removed(5))
    assert matched(index, prompt(8)) == 8
    apply(index, A, removed(5))
    assert matched(index, prompt(8)) == 5
    assert told(index)["duplicates"] == 1


def test_quirk_1_a_single_first_block_may_have_copies_too() -> None:
    index = index_of(stored(0), stored(0), removed(0))
    assert matched(index, prompt(1)) == 1


def test_quirk_2_a_prompt_announced_again_adds_no_copies_where_requests_announce() -> None:
    index = Index()
    index.configure(A, CacheSettings(report_mode="full"))
    apply(index, A, stored(0, 1, 2), stored(0, 1, 2), stored(0), removed(2))
    assert matched(index, prompt(3)) == 2
    assert told(index)["reannounced"] == 4
    apply(index, A, removed(0))
    assert matched(index, prompt(3)) == 0


def test_quirk_2_a_prompt_computed_again_adds_copies() -> None:
    index = index_of(stored(0, 1, 2), stored(0, 1, 2), removed(0, 1, 2))
    assert (matched(index, prompt(3)), told(index)["duplicates"]) == (3, 3)


def test_quirk_2_a_store_from_the_start_with_something_new_is_no_announcement() -> None:
    index = index_of(stored(0, 1), stored(0, 1, 2), removed(1))
    assert matched(index, prompt(3)) == 3


def test_quirk_3_an_unknown_removal_is_counted_and_the_later_store_counts() -> None:
    index = index_of(removed(0), stored(0), removed(0, medium="CPU"))
    assert matched(index, prompt(1)) == 1
    assert told(index)["removed_unknown"] == 2


def test_quirk_9_tokens_that_do_not_fit_their_hashes_are_left_out() -> None:
    index = index_of(stored(0, 1), stored(3, token_ids=tokens(2, 3)[:-1], parent=101))
    assert (matched(index, prompt(4)), told(index)["ignored"]) == (2, {"token_count": 1})


def test_quirk_9_a_label_among_the_tokens_of_several_blocks_waits_for_its_place() -> None:
    index = index_of(stored(0, 1), stored(3, token_ids=tokens(2, 3), parent=101))
    assert (matched(index, prompt(4)), told(index)["unplaced"]) == (2, 1)
    apply(index, A, stored(2, 3, group_idx=1))
    assert index.match(prompt(4))[A].by_medium == {"GPU": 2}, "group 0 holds 0, 1 and 3"


def test_quirk_9_a_label_without_tokens_is_a_further_place_of_a_known_block() -> None:
    index = index_of(stored(0, 1), located(1, medium="cpu"), removed(1))
    assert index.match(prompt(2))[A].by_medium == {"GPU": 1, "CPU": 1}


def test_quirk_9_a_label_without_tokens_waits_for_its_block() -> None:
    index = index_of(located(0, medium="STORAGE"))
    assert (len(index), told(index)["orphans"]) == (0, 1)
    apply(index, A, stored(0), removed(0))
    assert index.match(prompt(1))[A].by_medium == {"STORAGE": 1}


def test_quirk_10_a_partial_block_never_counts_and_its_promotion_does() -> None:
    partial = stored(1, token_ids=tokens(1)[:2], block_size=2, base=700, parent=100)
    index = index_of(stored(0), partial, removed(1, base=700), stored(1))
    assert matched(index, prompt(2)) == 2
    assert told(index)["ignored"] == {"partial_block": 1}
    assert told(index)["removed_unknown"] == 1


def test_quirk_14_salt_apart_and_salt_in_the_first_extra_key_are_one_identity() -> None:
    index = index_of(stored(0, 1, cache_salt="s"))
    apply(index, B, stored(0, 1, extra_keys=[("s",), None]))
    match = index.match(prompt(2), salt="s")
    assert (match[A].blocks, match[B].blocks) == (2, 2)
    assert index.statistics()["unique_blocks"] == 2


def test_quirk_14_a_salt_repeated_with_later_blocks_belongs_to_the_first() -> None:
    index = index_of(stored(0, cache_salt="s"), stored(1, cache_salt="s"))
    assert matched(index, prompt(2), salt="s") == 2


def test_quirk_16_pages_removed_by_a_split_are_not_answered_for() -> None:
    index = index_of(stored(0, 1, 2, 3), removed(2, 3), removed(2, 3), stored(5, 6))
    assert matched(index, prompt(4)) == 2
    assert (told(index)["removed_unknown"], told(index)["orphans"]) == (2, 2)


def paged(*pages: int, parent: int | None) -> BlockStored:
    """Store pages labelled by their own tokens only, as SGLang 0.4.8-0.5.5 does."""
    hashes = [content_hash(tokens(page)) for page in pages]
    return stored(*pages, parent=parent, block_hashes=hashes)


def page_hash(page: int) -> int:
    return content_hash(tokens(page))


def test_quirk_17_equal_pages_at_two_places_share_a_label_and_go_together() -> None:
    index = index_of(paged(0, 1, parent=EMPTY_TUPLE_HASH), paged(2, 1, parent=EMPTY_TUPLE_HASH))
    assert (matched(index, tokens(0, 1)), matched(index, tokens(2, 1))) == (2, 2)
    apply(index, A, BlockRemoved(block_hashes=[page_hash(1)]))
    assert (matched(index, tokens(0, 1)), matched(index, tokens(2, 1))) == (1, 1)
    assert (told(index)["ambiguous"], told(index)["removed_ambiguous"]) == (1, 1)


def test_quirk_17_a_parent_at_two_places_is_not_guessed() -> None:
    index = index_of(paged(0, 1, parent=EMPTY_TUPLE_HASH), paged(2, 1, parent=EMPTY_TUPLE_HASH))
    apply(index, A, paged(3, parent=page_hash(1)))
    assert (matched(index, tokens(0, 1, 3)), matched(index, tokens(2, 1, 3))) == (2, 2)
    assert told(index)["ignored"] == {"parent_ambiguous": 1}


def test_quirk_17_a_page_that_was_at_two_places_is_no_parent_again() -> None:
    index = index_of(paged(0, 1, parent=EMPTY_TUPLE_HASH), paged(2, 1, parent=EMPTY_TUPLE_HASH))
    apply(index, A, BlockRemoved(block_hashes=[page_hash(1)]), paged(0, parent=EMPTY_TUPLE_HASH))
    apply(index, A, paged(1, parent=page_hash(0)), paged(3, parent=page_hash(1)))
    assert matched(index, tokens(0, 1, 3)) == 2, "the child may belong to the other page"


def test_quirk_17_a_page_that_follows_itself_is_its_own_parent() -> None:
    index = index_of(paged(1, 1, 1, parent=EMPTY_TUPLE_HASH))
    assert matched(index, tokens(1, 1, 1, 1)) == 3
    apply(index, A, BlockRemoved(block_hashes=[page_hash(1)]))
    assert (len(index), index.statistics()["runs"]) == (0, 0)


def test_quirk_17_an_orphan_labelled_by_its_own_tokens_is_not_placed_by_chance() -> None:
    index = index_of(paged(1, parent=page_hash(0)), paged(7, 0, parent=EMPTY_TUPLE_HASH))
    assert matched(index, tokens(7, 0, 1)) == 2
    assert told(index)["ignored"] == {"position_unknown": 1}


def test_quirk_17_pages_without_a_parent_are_not_taken_for_the_start() -> None:
    index = index_of(paged(1, 2, parent=None), paged(3, parent=page_hash(2)))
    assert (len(index), matched(index, tokens(1, 2, 3))) == (0, 0)
    assert told(index)["ignored"] == {"position_unknown": 3}


def test_quirk_17_a_split_stores_both_halves_in_one_batch() -> None:
    index = index_of(paged(0, 1, 2, parent=EMPTY_TUPLE_HASH))
    gone = BlockRemoved(block_hashes=[page_hash(page) for page in (0, 1, 2)])
    halves = [paged(0, parent=EMPTY_TUPLE_HASH), paged(1, 2, parent=page_hash(0))]
    index.apply(A, EventBatch(ts=0.0, events=[gone, *halves]))
    assert matched(index, tokens(0, 1, 2)) == 3


def test_quirk_18_two_tiers_store_and_remove_on_their_own() -> None:
    index = index_of(stored(0, 1), stored(0, 1, medium="CPU_PINNED"), removed(0, 1))
    assert matched(index, prompt(2)) == 2
    assert matched(index, prompt(2), media="GPU") == 0
    assert matched(index, prompt(2), media=["gpu", "cpu_pinned"]) == 2
    apply(index, A, removed(0, 1, medium="CPU_PINNED"))
    assert matched(index, prompt(2)) == 0


def test_quirk_18_a_prefix_goes_on_from_the_device_to_the_host_and_never_back() -> None:
    index = index_of(stored(0, 1, 2, 3), stored(2, medium="CPU"), removed(2))
    found = index.match(prompt(4))[A]
    assert (found.blocks, found.by_medium) == (3, {"GPU": 2, "CPU": 1})


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
    assert (len(index), list(told(index)["ignored"])) == (0, [reason])


def test_a_publisher_that_invents_places_and_sizes_is_bounded() -> None:
    index = Index()
    for i in range(100):
        apply(index, A, stored(0, medium=f"tier-{i}"))
    assert told(index)["ignored"] == {"too_many_media": 36}
    for i in range(1, 41):
        apply(index, B, stored(0, token_ids=list(range(i)), block_size=i))
    assert told(index, B)["ignored"] == {"unit_changed": 16, "too_many_block_sizes": 24}


def test_unknown_event_tags_are_counted_by_name_up_to_a_bound() -> None:
    index = Index()
    tags = tuple(f"Tag{i}" for i in range(100))
    index.apply(A, EventBatch(ts=0.0, events=[], skipped=tags))
    skipped = told(index)["skipped"]
    assert (len(skipped), skipped["Tag0"], skipped["(other)"]) == (65, 1, 36)
