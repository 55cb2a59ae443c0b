"""The hit of an engine from what its groups hold (docs/wire.md, "Predicting the hit")."""

from __future__ import annotations

from math import lcm

import pytest

from kvindex import GroupSpec
from kvindex.index.reference.engine_hit import Cache, GroupCoverage, engine_hit
from kvindex.index.views import Spans

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


@pytest.mark.parametrize("kind", ["chunked_local_attention", "sink_full_attention", "of tomorrow"])
def test_kinds_that_nobody_knows_need_everything(kind: str) -> None:
    assert hit((GroupSpec(kind), 16, [(0, 2), (3, 4)])) == 32
