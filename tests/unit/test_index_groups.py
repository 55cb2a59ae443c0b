"""The hit that a hybrid model's engine would get (docs/wire.md, "Predicting the hit")."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import GroupSpec, Index
from kvindex.index.groups import GroupCoverage, Spans, engine_hit
from tests.unit.index_events import SIZE, A, apply, index_of, matched, prompt, removed, stored, told

FULL = GroupSpec()


def window(tokens: int) -> GroupSpec:
    return GroupSpec("sliding_window", tokens)


def hit(*groups: tuple[GroupSpec, int, Spans]) -> int:
    return engine_hit([GroupCoverage(*group) for group in groups])


@pytest.mark.parametrize(
    ("spans", "tokens"), [([], 0), ([(0, 5)], 80), ([(0, 2), (3, 9)], 32), ([(1, 9)], 0)]
)
def test_full_attention_hits_what_is_resident_from_the_start(spans: Spans, tokens: int) -> None:
    assert hit((FULL, 16, spans)) == tokens


@pytest.mark.parametrize(
    ("width", "needed"), [(1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)]
)
def test_a_window_needs_the_blocks_that_its_last_tokens_reach(width: int, needed: int) -> None:
    assert window(width).needed_blocks(16) == needed


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
    assert hit((FULL, 16, [(0, 5)]), (FULL, 48, [(0, 2)])) == 48
    assert hit((FULL, 16, [(0, 5)]), (window(17), 24, [(0, 2), (3, 9)])) == 48


def test_without_full_attention_a_hit_may_follow_a_hole() -> None:
    assert hit((window(17), 16, [(0, 1), (5, 6)])) == 96
    assert hit((GroupSpec("mamba"), 16, [(5, 6)])) == 96


def test_a_mamba_state_at_the_cut_stands_for_all_before_it() -> None:
    mamba = GroupSpec("mamba")
    assert hit((FULL, 16, [(0, 8)]), (mamba, 16, [(4, 5)])) == 80
    assert hit((FULL, 16, [(0, 8)]), (mamba, 16, [])) == 0


@pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention"])
def test_groups_without_prefix_caching_take_no_part(kind: str) -> None:
    assert hit((FULL, 16, [(0, 2)]), (GroupSpec(kind), 16, [])) == 32
    assert hit((GroupSpec(kind), 16, [(0, 2)])) == 0


@pytest.mark.parametrize("kind", ["chunked_local_attention", "sink_full_attention", "of tomorrow"])
def test_kinds_that_nobody_knows_need_everything(kind: str) -> None:
    assert hit((GroupSpec(kind), 16, [(0, 2), (3, 4)])) == 32


# In an index

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
        "sliding_window": SIZE + 1,
        "block_size": SIZE,
    }
    apply(index, A, removed(0, 1, 5, group_idx=1))
    assert matched(index, prompt(6)) == 5


def test_a_window_may_lie_on_another_medium() -> None:
    index = hybrid()
    apply(index, A, removed(5, group_idx=1), stored(5, medium="CPU", **SWA))
    assert matched(index, prompt(6)) == 6
    assert matched(index, prompt(6), media="GPU") == 5


def test_groups_of_old_engines_are_told_by_the_user() -> None:
    index = index_of(stored(*range(6), group_idx=0), stored(*range(6), group_idx=1))
    apply(index, A, removed(0, 1, group_idx=1))
    assert matched(index, prompt(6)) == 0, "untold, every group needs everything"
    index.describe_groups(A, {1: window(SIZE + 1)})
    assert matched(index, prompt(6)) == 6


def test_what_the_user_told_outlives_a_restart_and_the_wire() -> None:
    index = Index()
    index.describe_groups(A, {1: window(SIZE + 1)})
    index.tree(A).clear()
    other = SWA | {"kv_cache_spec_sliding_window": 4 * SIZE}
    apply(index, A, stored(*range(6), group_idx=0), stored(*range(6), **other))
    apply(index, A, removed(0, 1, 2, 3, group_idx=1))
    assert matched(index, prompt(6)) == 6


def test_a_group_that_is_told_but_empty_holds_nothing() -> None:
    index = index_of(stored(*range(6), group_idx=0))
    index.describe_groups(A, {1: window(SIZE + 1)})
    assert matched(index, prompt(6)) == 0


def test_a_window_only_model_matches_behind_a_hole() -> None:
    index = index_of(stored(*range(6), **(SWA | {"group_idx": 0})), removed(0, 1, 2))
    found = index.match(prompt(6))[A]
    assert (found.blocks, found.by_medium) == (6, {"GPU": 3})


def test_groups_with_their_own_block_sizes_are_answered_in_tokens() -> None:
    wide = stored(0, 1, token_ids=prompt(4), block_size=2 * SIZE, base=500, group_idx=1)
    index = index_of(stored(*range(5), group_idx=0), wide)
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
