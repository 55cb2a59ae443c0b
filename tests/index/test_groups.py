"""The hit that a hybrid model's engine would get (docs/wire.md, "Predicting the hit")."""

from __future__ import annotations

from math import lcm
from typing import Any

import pytest

from kvindex import AllBlocksCleared, BlockStored, CacheSettings, EventBatch, GroupSpec, Index
from kvindex.index.reference.engine_hit import Cache, GroupCoverage, engine_hit
from kvindex.index.spans import Spans
from kvindex.wire import Event
from tests.index.index_events import (
    SIZE,
    A,
    apply,
    index_of,
    matched,
    prompt,
    removed,
    stored,
    told,
)

pytestmark = pytest.mark.unit

FULL = GroupSpec()


def window(tokens: int) -> GroupSpec:
    return GroupSpec("sliding_window", tokens)


def chunks(tokens: int) -> GroupSpec:
    return GroupSpec("chunked_local_attention", attention_chunk_size=tokens)


def hit(
    *groups: tuple[GroupSpec, int, Spans], length: int = 160, unit: int = 16, eagle: bool = False
) -> int:
    """The hit of groups whose spans are in units; all have the unit's size, or multiples of it."""
    cache = Cache(unit, lcm(*(size for _, size, _ in groups)))
    return engine_hit(cache, length, [GroupCoverage(*group, eagle) for group in groups])


@pytest.mark.parametrize(
    ("spans", "tokens"), [([], 0), ([(0, 5)], 80), ([(0, 2), (3, 9)], 32), ([(1, 9)], 0)]
)
def test_full_attention_hits_what_is_resident_from_the_start(spans: Spans, tokens: int) -> None:
    assert hit((FULL, 16, spans)) == tokens


@pytest.mark.parametrize(
    ("width", "needed"), [(1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)]
)
def test_a_window_needs_the_blocks_that_its_last_tokens_reach(width: int, needed: int) -> None:
    assert window(width).needed_from(160, 16) == 160 - needed * 16


@pytest.mark.parametrize(
    ("spans", "blocks"),
    [
        ([(0, 8)], 8),
        ([(6, 8)], 8),
        ([(7, 8)], 0),
        ([(4, 7)], 7),
        ([(0, 1)], 1),
        ([(0, 1), (4, 6)], 6),
        ([(0, 1), (5, 6)], 1),
        ([(1, 2)], 0),
        ([], 0),
    ],
)
def test_a_window_lowers_the_hit_to_a_cut_that_it_covers(spans: Spans, blocks: int) -> None:
    assert hit((FULL, 16, [(0, 8)]), (window(33), 16, spans)) == blocks * 16


def test_a_window_never_raises_the_hit() -> None:
    assert hit((FULL, 16, [(0, 3)]), (window(17), 16, [(0, 9)])) == 48


def test_windows_lower_each_other_until_all_fit() -> None:
    first, second = [(0, 4), (6, 8)], [(0, 3), (4, 6)]
    assert hit((FULL, 16, [(0, 8)]), (window(17), 16, first), (window(17), 16, second)) == 48


def test_groups_of_different_block_sizes_meet_at_a_common_multiple() -> None:
    assert hit((FULL, 16, [(0, 5)]), (FULL, 48, [(2, 3), (5, 6)])) == 48
    wide = (window(17), 24, [(2, 3), (5, 6)])  # in units of 8: blocks 0 and 1
    assert hit((FULL, 16, [(1, 2), (3, 4), (5, 6)]), wide, unit=8) == 48


def test_without_full_attention_a_hit_may_follow_a_hole() -> None:
    assert hit((window(17), 16, [(0, 1), (5, 6)])) == 96
    assert hit((GroupSpec("mamba"), 16, [(5, 6)])) == 96


def test_a_hit_never_exceeds_the_prompt() -> None:
    assert hit((FULL, 16, [(0, 9)]), length=47) == 32
    assert hit((window(17), 16, [(0, 9)]), length=47) == 32


@pytest.mark.parametrize(
    ("spans", "blocks"), [([(4, 7)], 7), ([(4, 6)], 6), ([(5, 7)], 4), ([], 4), ([(0, 4)], 4)]
)
def test_chunks_need_the_blocks_of_the_chunk_that_the_cut_is_in(spans: Spans, blocks: int) -> None:
    assert hit((FULL, 16, [(0, 7)]), (chunks(64), 16, spans)) == blocks * 16
    assert hit((FULL, 16, [(0, 8)]), (chunks(64), 16, [])) == 128, "nothing, at a chunk's end"


def test_eagle_drops_the_last_block_that_all_groups_matched() -> None:
    assert hit((FULL, 16, [(0, 5)]), eagle=True) == 64
    assert hit((FULL, 16, [(0, 1)]), eagle=True) == 0
    assert hit((window(33), 16, [(0, 5)]), eagle=True) == 64
    assert hit((window(33), 16, [(3, 5)]), eagle=True) == 0, "one block more must be there"
    assert hit((FULL, 16, [(0, 8)]), (window(17), 16, [(3, 5)]), eagle=True) == 64


def test_fine_hashes_let_a_mamba_hit_end_within_a_block() -> None:
    cache = Cache(unit=16, alignment=16)
    full = GroupCoverage(FULL, 64, [(3, 4), (5, 6)])  # one block, and 32 tokens of the next
    for state, tokens in (([(5, 6)], 96), ([(4, 5)], 80), ([(3, 4)], 64), ([(6, 7)], 0)):
        groups = [full, GroupCoverage(GroupSpec("mamba"), 64, state)]
        assert engine_hit(cache, 159, groups) == tokens


def test_a_mamba_state_at_the_cut_stands_for_all_before_it() -> None:
    mamba = GroupSpec("mamba")
    assert hit((FULL, 16, [(0, 8)]), (mamba, 16, [(4, 5)])) == 80
    assert hit((FULL, 16, [(0, 8)]), (mamba, 16, [])) == 0


@pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention"])
def test_groups_without_prefix_caching_take_no_part(kind: str) -> None:
    other = stored(0, group_idx=1, base=500, kv_cache_spec_kind=kind)
    full = stored(0, 1, group_idx=0, kv_cache_spec_kind="full_attention")
    assert matched(index_of(full, other), prompt(2)) == 2
    assert matched(index_of(other), prompt(2)) == 0


@pytest.mark.parametrize("kind", ["chunked_local_attention", "sink_full_attention", "of tomorrow"])
def test_kinds_that_nobody_knows_need_everything(kind: str) -> None:
    assert hit((GroupSpec(kind), 16, [(0, 2), (3, 4)])) == 32


# In an index

TOLD_FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
SWA: dict[str, Any] = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": SIZE + 1,
}


def hybrid() -> Index:
    full = stored(*range(6), group_idx=0, kv_cache_spec_kind="full_attention")
    return index_of(full, stored(*range(6), **SWA))


def test_groups_are_learned_from_the_events() -> None:
    index = hybrid()
    assert told(index)["groups"]["1"] == {
        "kind": "sliding_window",
        "known": True,
        "sliding_window": SIZE + 1,
        "attention_chunk_size": None,
        "block_size": SIZE,
    }
    apply(index, A, removed(0, 1, 5, group_idx=1))
    assert matched(index, prompt(6)) == 5


def test_the_device_serves_a_prefix_and_the_host_goes_on_from_there() -> None:
    index = index_of(stored(0, 1, 2), stored(2, 3, 4, medium="CPU"), stored(5, 6))
    found = index.match(prompt(7))[A]
    assert (found.blocks, found.device_tokens, found.upper_bound) == (5, 3 * SIZE, True)
    assert found.host_tokens == 5 * SIZE
    assert found.by_medium == {"GPU": 3, "CPU": 3}
    on_device = index.match(prompt(7), media="GPU")[A]
    assert (on_device.blocks, on_device.upper_bound) == (3, False)


def test_storage_goes_on_where_the_host_ends() -> None:
    index = index_of(stored(0), stored(1, 2, medium="CPU"), stored(3, 4, medium="DISK"))
    found = index.match(prompt(7))[A]
    assert (found.device_tokens, found.host_tokens) == (SIZE, 3 * SIZE)
    assert found.tokens == 5 * SIZE
    in_storage = index_of(stored(0, 1, medium="DISK")).match(prompt(7))[A]
    assert (in_storage.device_tokens, in_storage.host_tokens) == (0, 0)
    on_host = index_of(stored(0, 1, medium="CPU")).match(prompt(7))[A]
    assert (on_host.device_tokens, on_host.host_tokens) == (0, 2 * SIZE)


def test_a_window_on_the_host_does_not_help_a_prefix_on_the_device() -> None:
    index = hybrid()
    apply(index, A, removed(5, group_idx=1), stored(5, medium="CPU", **SWA))
    found = index.match(prompt(6))[A]
    assert (found.blocks, found.device_tokens) == (5, 5 * SIZE)


def test_untold_groups_are_answered_by_the_one_that_reaches_furthest_and_flagged() -> None:
    index = index_of(stored(*range(6), group_idx=0), stored(*range(6), group_idx=1))
    apply(index, A, removed(0, 1, group_idx=1))
    found = index.match(prompt(6))[A]
    assert (found.blocks, found.upper_bound) == (6, True)
    assert not told(index)["groups"]["1"]["known"]
    assert "groups={...}" in told(index)["advice"][0]
    index.configure(A, CacheSettings(groups={0: FULL, 1: window(SIZE + 1)}))
    found = index.match(prompt(6))[A]
    assert (found.blocks, found.upper_bound) == (6, False)
    index.configure(A, CacheSettings(groups={0: FULL, 1: FULL}))
    assert matched(index, prompt(6)) == 0


def test_an_engine_that_tells_only_a_part_is_answered_with_an_upper_bound() -> None:
    index = Index()
    index.configure(A, CacheSettings(upper_bound=True))
    apply(index, A, stored(0, 1))
    found = index.match(prompt(2))[A]
    assert (found.blocks, found.upper_bound) == (2, True)


def test_eagle_is_a_setting_that_drops_the_last_block() -> None:
    index = Index()
    index.configure(A, CacheSettings(eagle=True))
    apply(index, A, stored(0, 1, 2))
    assert [matched(index, prompt(count)) for count in (1, 2, 3, 4)] == [0, 1, 2, 2]


def test_eagle_may_drop_the_last_block_of_some_groups_only() -> None:
    index = hybrid()
    apply(index, A, removed(0, 1, 2, 3, group_idx=1))
    answers = {}
    for eagle in (False, True, (0,), (1,)):
        index.configure(A, CacheSettings(eagle=eagle))
        answers[eagle] = matched(index, prompt(7))
    assert answers == {False: 6, True: 5, (0,): 5, (1,): 5}
    apply(index, A, removed(4, group_idx=1))
    index.configure(A, CacheSettings(eagle=(0,)))
    assert matched(index, prompt(7)) == 0, "the window at block 4 is gone"


def test_what_the_user_told_outlives_a_restart_and_the_wire() -> None:
    index = Index()
    index.configure(A, CacheSettings(groups={1: window(SIZE + 1)}))
    index.tree(A).clear()
    other = SWA | {"kv_cache_spec_sliding_window": 4 * SIZE}
    apply(index, A, stored(*range(6), **TOLD_FULL), stored(*range(6), **other))
    apply(index, A, removed(0, 1, 2, 3, group_idx=1))
    assert matched(index, prompt(6)) == 6


def test_a_group_that_never_stored_a_block_takes_no_part() -> None:
    index = index_of(stored(*range(6), group_idx=0))
    index.configure(A, CacheSettings(groups={1: window(SIZE + 1)}))
    assert matched(index, prompt(6)) == 6


def test_a_window_only_model_matches_behind_a_hole() -> None:
    index = index_of(stored(*range(6), **(SWA | {"group_idx": 0})), removed(0, 1, 2))
    found = index.match(prompt(6))[A]
    assert (found.blocks, found.by_medium) == (6, {"GPU": 3})


def test_groups_with_their_own_block_sizes_are_answered_in_tokens() -> None:
    wide = stored(
        0, 1, token_ids=prompt(4), block_size=2 * SIZE, base=500, **(TOLD_FULL | {"group_idx": 1})
    )
    index = index_of(stored(*range(5), **TOLD_FULL), wide)
    found = index.match(prompt(5))[A]
    assert (found.tokens, found.blocks, found.block_size) == (4 * SIZE, 4, SIZE)


def test_a_window_with_a_block_size_of_its_own_matches_behind_a_hole() -> None:
    window_blocks = stored(0, 1, token_ids=prompt(4), block_size=2 * SIZE, base=500, **SWA)
    index = index_of(stored(*range(4), group_idx=0), window_blocks)
    apply(index, A, removed(0, base=500, group_idx=1))
    assert matched(index, prompt(4)) == 4


def test_a_group_that_nobody_caches_prefixes_for_does_not_stop_a_window() -> None:
    encoder = stored(0, group_idx=1, base=500, kv_cache_spec_kind="cross_attention")
    index = index_of(stored(*range(6), **(SWA | {"group_idx": 0})), removed(0, 1, 2), encoder)
    assert matched(index, prompt(6)) == 6


def test_chunks_without_a_size_are_advised_about() -> None:
    chunked: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "chunked_local_attention"}
    index = index_of(stored(0, 1, **TOLD_FULL), stored(0, 1, **chunked))
    assert "attention_chunk_size" in told(index)["advice"][0]
    index.configure(A, CacheSettings(groups={1: chunks(8)}))
    assert told(index)["advice"] == []


# Sparse events, and blocks of several units


def test_sparse_events_place_labels_that_a_whole_event_has_named() -> None:
    index = hybrid()
    apply(index, A, removed(*range(6), group_idx=1))
    assert matched(index, prompt(6)) == 0
    sparse = stored(*range(6), block_hashes=[105], **SWA)  # all tokens, one block
    apply(index, A, sparse)
    assert matched(index, prompt(6)) == 6
    assert told(index)["ignored"] == {}


def test_sparse_labels_wait_for_a_whole_event_that_names_them() -> None:
    index = index_of(stored(*range(6), block_hashes=[105], **SWA))
    assert (matched(index, prompt(6)), told(index)["unplaced"]) == (0, 1)
    apply(index, A, stored(*range(6), group_idx=0, kv_cache_spec_kind="full_attention"))
    assert (matched(index, prompt(6)), told(index)["orphans"]) == (6, 0)
    apply(index, A, removed(5, group_idx=1))
    assert matched(index, prompt(6)) == 0


WIDE_WINDOW = SWA | {"kv_cache_spec_sliding_window": 3 * SIZE}


def wide_and_narrow(*narrow: BlockStored) -> Index:
    """Full attention in blocks of four units, told first; then a window's events."""
    wide = stored(3, 7, parent=None, token_ids=prompt(8), block_size=4 * SIZE, **TOLD_FULL)
    index = Index()
    index.apply(A, EventBatch(ts=0.0, events=[wide, *narrow]))
    index.check()
    return index


def test_a_windows_tail_lies_in_a_row_before_the_label_that_a_wider_block_names() -> None:
    tails = stored(*range(8), block_hashes=[101, 102, 103, 105, 106, 107], **WIDE_WINDOW)
    index = wide_and_narrow(tails)
    assert [index.match(prompt(count))[A].tokens for count in (3, 4, 7, 8)] == [
        *[0, 4 * SIZE],
        *[4 * SIZE, 8 * SIZE],
    ]
    placed = {b.block_hash: b.depth for b in index.tree(A).walk() if b.group_idx == 1}
    assert placed == {101: 1, 102: 2, 103: 3, 105: 5, 106: 6, 107: 7}
    apply(index, A, removed(106, base=0, group_idx=1))
    assert index.match(prompt(8))[A].tokens == 4 * SIZE


def test_a_tail_is_not_placed_where_a_hit_might_have_ended_before() -> None:
    index = wide_and_narrow(stored(0, block_hashes=[], **WIDE_WINDOW))
    apply(index, A, removed(3, group_idx=0))  # whether a tail ends there nobody tells any more
    apply(index, A, stored(*range(8), block_hashes=[102, 103, 107], **WIDE_WINDOW))
    assert told(index)["unplaced"] == 2


def test_more_labels_than_lie_between_two_ends_of_hits_are_not_placed() -> None:
    index = wide_and_narrow(
        stored(*range(8), block_hashes=[101, 102, 104, 105, 106, 107], **WIDE_WINDOW)
    )
    assert told(index)["unplaced"] == 5


def test_a_sparse_event_of_no_block_teaches_the_group_and_nothing_else() -> None:
    index = index_of(stored(0, 1, block_hashes=[], **SWA))
    assert told(index)["groups"]["1"]["block_size"] == SIZE
    assert (len(index), told(index)["ignored"]) == (0, {})


def test_labels_name_prefixes_whatever_the_size_of_the_blocks() -> None:
    """vLLM labels a block by the hash at its end, in steps that divide all block sizes."""
    wide = stored(1, 3, parent=None, token_ids=prompt(4), block_size=2 * SIZE, **TOLD_FULL)
    index = Index()
    window_blocks = stored(*range(4), **SWA)
    index.apply(A, EventBatch(ts=0.0, events=[wide, window_blocks]))
    index.check()
    found = index.match(prompt(4))[A]
    assert (found.tokens, found.blocks, found.block_size) == (4 * SIZE, 2, 2 * SIZE)
    apply(index, A, removed(3, group_idx=0))
    assert index.match(prompt(4))[A].tokens == 2 * SIZE
    apply(index, A, removed(1, group_idx=1))
    assert index.match(prompt(4))[A].tokens == 0


def test_a_new_unit_drops_what_was_held_by_the_old_one_and_counts_it() -> None:
    index = index_of(
        stored(1, 3, parent=None, token_ids=prompt(4), block_size=2 * SIZE, **TOLD_FULL)
    )
    apply(index, A, stored(*range(4), **SWA))
    assert told(index)["ignored"] == {"unit_changed": 2}
    again = stored(1, 3, parent=None, token_ids=prompt(4), block_size=2 * SIZE, **TOLD_FULL)
    apply(index, A, again)
    assert index.match(prompt(4))[A].tokens == 4 * SIZE


def test_offloaded_blocks_without_extra_keys_are_those_that_the_device_named() -> None:
    """vLLM's connectors leave salts and images out of their events."""
    salted = stored(0, 1, group_idx=0, extra_keys=[("secret",), None])
    index = index_of(salted, stored(0, 1, group_idx=0, medium="CPU"), removed(0, 1, group_idx=0))
    assert matched(index, prompt(2)) == 0, "another request's salt"
    assert matched(index, prompt(2), salt="secret") == 2
    apply(index, A, stored(7, 8, parent=None, group_idx=0, medium="CPU"))
    assert told(index)["unplaced"] == 2, "nobody told what these are"


# Report mode "full"


def full_mode() -> Index:
    index = Index()
    index.configure(A, CacheSettings(report_mode="full"))
    return index


def test_every_store_is_a_copy_unless_the_user_says_that_requests_announce_again() -> None:
    index = index_of(stored(0, 1, 2), stored(0, 1, 2), removed(0, 1, 2))
    assert matched(index, prompt(3)) == 3
    announcing = full_mode()
    apply(announcing, A, stored(0, 1, 2), stored(0, 1, 2), removed(0, 1, 2))
    assert (matched(announcing, prompt(3)), told(announcing)["reannounced"]) == (0, 3)
    assert told(announcing)["advice"] == []
    apply(announcing, A, removed(0, 1, 2))  # they were copies
    assert 'report_mode="full"' in told(announcing)["advice"][0]


def test_a_store_that_no_lookup_would_have_found_is_a_copy_in_report_mode_full() -> None:
    index = full_mode()
    both: list[Event] = [stored(*range(3), **TOLD_FULL), stored(*range(3), **SWA)]
    apply(index, A, *both, removed(2, group_idx=1))
    index.apply(A, EventBatch(ts=0.0, events=both))  # computed, since the window was gone
    index.check()
    assert told(index)["reannounced"] == 0
    index.apply(A, EventBatch(ts=0.0, events=both))  # found this time
    assert told(index)["reannounced"] == 6


@pytest.mark.parametrize("gone", [removed(0, 1), AllBlocksCleared()], ids=["removed", "cleared"])
def test_blocks_announced_then_gone_then_stored_in_one_batch_are_resident(gone: Event) -> None:
    index = full_mode()
    apply(index, A, stored(0, 1))
    index.apply(A, EventBatch(ts=0.0, events=[stored(0, 1), gone, stored(0, 1)]))
    index.check()
    assert (matched(index, prompt(2)), told(index)["reannounced"]) == (2, 2)


def test_a_hit_within_the_first_block_counts_as_one_although_no_whole_block_does() -> None:
    """Where Mamba states are kept at finer hashes, a hit may end before the first block does."""
    mamba: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    index = Index()
    index.configure(A, CacheSettings(hash_block_size=SIZE))
    whole = stored(3, parent=None, token_ids=prompt(4), block_size=4 * SIZE, **TOLD_FULL)
    apply(
        index,
        A,
        whole,
        stored(0, block_hashes=[], token_ids=prompt(4), block_size=4 * SIZE, **mamba),
    )
    apply(index, A, removed(3), stored(0, **TOLD_FULL), stored(0, group_idx=1))
    match = index.match(prompt(3))
    assert (match[A].tokens, match[A].blocks) == (SIZE, 0)
    assert match.best == match[A]
