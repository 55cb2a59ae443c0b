"""What is learned of a hybrid model's groups, and the hits that follow."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import CacheSettings, GroupSpec
from kvindex.index.api import BaseIndex
from tests.index.index_events import (
    CLEAR,
    SIZE,
    A,
    apply,
    both,
    counts_of,
    index_of,
    prompt,
    removed,
    stored,
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
    totals,
    walked,
)

pytestmark = pytest.mark.unit

FULL = GroupSpec()
IS_FULL: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
SWA: dict[str, Any] = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": SIZE + 1,
}
WINDOW_ONLY = SWA | {"group_idx": 0}
WIDER = SWA | {"kv_cache_spec_sliding_window": 3 * SIZE}
TWO_BLOCKS = {"kv_cache_spec_sliding_window": 2 * SIZE + 1}
DOUBLE: dict[str, Any] = {"token_ids": prompt(4), "block_size": 2 * SIZE}


def window(tokens: int) -> GroupSpec:
    return GroupSpec("sliding_window", tokens)


HYBRID = Scene(stored(*range(6), **IS_FULL), stored(*range(6), **SWA))
# Two blocks of double size, labelled by the single blocks at their ends.
DOUBLES = stored(1, 3, parent=None, **DOUBLE, **IS_FULL)

LEARNED = {
    "groups are learned from the events": Story(
        HYBRID,
        removed(0, 1, 5, group_idx=1),
        holds(5),
    ),
    "a hit ends at the last cut whose window is whole": Story(
        HYBRID, removed(0, 1, 2, 4, group_idx=1), holds(6), holds(4, prompt(5))
    ),
    "chunks need the blocks of the chunk that the cut is in": Story(
        configured(groups={0: FULL, 1: GroupSpec("chunked_local_attention", None, 4 * SIZE)}),
        Scene(stored(*range(7), group_idx=0), stored(*range(8), group_idx=1)),
        Scene(removed(0, 1, 2, 3, 7, group_idx=1), holds(7), removed(6, group_idx=1), holds(6)),
        Scene(stored(6, group_idx=1), removed(4, group_idx=1), holds(4)),
        Scene(removed(5, 6, group_idx=1), holds(4), stored(0, 1, 2, 3, group_idx=1), holds(4)),
        Scene(removed(0, 1, 2, 3, group_idx=1), stored(7, group_idx=0), holds(8)),  # a chunk's end
    ),
    "a state at the cut stands for all before it": Story(
        Scene(stored(*range(8), **IS_FULL), stored(4, group_idx=1, kv_cache_spec_kind="mamba")),
        Scene(holds(5), removed(4, group_idx=1), holds(0)),
    ),
    "windows lower each other's hits until all fit": Story(
        *(stored(*range(8), **group) for group in (IS_FULL, SWA, SWA | {"group_idx": 2})),
        Scene(removed(4, 5, group_idx=1), removed(3, 6, 7, group_idx=2), holds(3)),
    ),
    "a group removes a hash that another keeps": Story(
        stored(0, group_idx=0),
        stored(0, group_idx=1),
        removed(0, group_idx=1),
        walked((100, "GPU", 0, 0, 1)),
    ),
    "the device serves a prefix and the host goes on from there": Story(
        Scene(stored(0, 1, 2), stored(2, 3, 4, medium="CPU"), stored(5, 6)),
        answers(blocks=5, device_tokens=3 * SIZE, host_tokens=5 * SIZE, upper_bound=True),
        answers(by_medium={"GPU": 3, "CPU": 3}),
        answers(media="GPU", blocks=3, upper_bound=False),
    ),
    "storage goes on where the host ends": Story(
        Scene(stored(0), stored(1, 2, medium="CPU"), stored(3, 4, medium="DISK")),
        answers(device_tokens=SIZE, host_tokens=3 * SIZE, tokens=5 * SIZE),
    ),
    "what lies in storage only is no host's": Story(
        stored(0, 1, medium="DISK"), answers(device_tokens=0, host_tokens=0, tokens=2 * SIZE)
    ),
    "what lies on the host only is no device's": Story(
        stored(0, 1, medium="CPU"), answers(device_tokens=0, host_tokens=2 * SIZE)
    ),
    "a window on the host does not help a prefix on the device": Story(
        HYBRID,
        Scene(removed(5, group_idx=1), stored(5, medium="CPU", **SWA)),
        answers(blocks=5, device_tokens=5 * SIZE),
    ),
    "undescribed groups are answered by the one that reaches furthest, as an upper bound": Story(
        Scene(stored(*range(6), group_idx=0), stored(*range(6), group_idx=1)),
        Scene(removed(0, 1, group_idx=1), answers(blocks=6, upper_bound=True)),
        configured(groups={0: FULL, 1: window(SIZE + 1)}),
        answers(blocks=6, upper_bound=False),
        Scene(configured(groups={0: FULL, 1: FULL}), holds(0)),
    ),
    "an engine that reports only a part is answered with an upper bound": Story(
        configured(upper_bound=True), stored(0, 1), answers(blocks=2, upper_bound=True)
    ),
    "described groups outlive a restart and what events say": Story(
        Scene(configured(groups={1: window(SIZE + 1)}), cleared),
        Scene(stored(*range(6), **IS_FULL), stored(*range(6), **WIDER)),
        Scene(removed(0, 1, 2, 3, group_idx=1), holds(6)),
    ),
    "learned groups are learned anew": Story(
        Scene(stored(0, kv_cache_spec_kind="mamba"), stored(0, **IS_FULL)),
        Scene(stored(1, 2, **IS_FULL), holds(3), cleared, counts(groups={})),
    ),
    "a group that never stored a block takes no part": Story(
        stored(*range(6), group_idx=0), configured(groups={1: window(SIZE + 1)}), holds(6)
    ),
    "groups of encoders take no part: with full attention": Story(
        stored(0, 1, **IS_FULL),
        stored(0, group_idx=1, base=500, kv_cache_spec_kind="encoder_only_attention"),
        holds(2),
    ),
    "groups of encoders take no part: alone": Story(
        stored(0, group_idx=1, base=500, kv_cache_spec_kind="encoder_only_attention"), holds(0)
    ),
    "groups of encoders take no part: with a window": Story(
        Scene(stored(*range(6), **WINDOW_ONLY), removed(0, 1, 2)),
        stored(0, group_idx=1, base=500, kv_cache_spec_kind="cross_attention"),
        holds(6),
    ),
    "a window-only model matches behind a hole": Story(
        Scene(stored(*range(6), **WINDOW_ONLY), removed(0, 1, 2)),
        answers(blocks=6, by_medium={"GPU": 3}),
    ),
    "eagle drops the last block": Story(
        Scene(configured(eagle=True), stored(0, 1, 2)),
        Scene(holds(0, prompt(1)), holds(1, prompt(2)), holds(2, prompt(3)), holds(2, prompt(4))),
    ),
    "eagle needs one block more of a window": Story(
        Scene(configured(eagle=True), stored(*range(5), **(WINDOW_ONLY | TWO_BLOCKS))),
        Scene(holds(4), removed(0, 1), holds(4), removed(2), holds(0)),
    ),
    "eagle may drop the last block of some groups only": Story(
        Scene(HYBRID, removed(0, 1, 2, 3, group_idx=1), holds(6, prompt(7))),
        Scene(configured(eagle=True), holds(5, prompt(7))),
        Scene(configured(eagle=(0,)), holds(5, prompt(7))),
        Scene(configured(eagle=(1,)), holds(5, prompt(7)), removed(4, group_idx=1)),
        Scene(configured(eagle=(0,)), holds(0, prompt(7))),  # the window at block 4 is gone
    ),
}

SIZES = {
    "groups with their own block sizes are answered in tokens": Story(
        stored(*range(5), **IS_FULL),
        stored(0, 1, **DOUBLE, base=500, **(IS_FULL | {"group_idx": 1})),
        answers(prompt(5), tokens=4 * SIZE, blocks=4, block_size=SIZE),
    ),
    "groups of different block sizes meet at a common multiple": Story(
        stored(*range(5), **IS_FULL),
        stored(2, 5, parent=None, token_ids=prompt(6), block_size=3 * SIZE, group_idx=1),
        Scene(configured(groups={0: FULL, 1: FULL}), answers(prompt(6), tokens=3 * SIZE)),
    ),
    "a window with a block size of its own matches behind a hole": Story(
        Scene(stored(*range(4), group_idx=0), stored(0, 1, **DOUBLE, base=500, **SWA)),
        Scene(removed(0, base=500, group_idx=1), holds(4, prompt(4))),
    ),
    # vLLM labels a block by the hash at its end, in steps that divide all block sizes.
    "labels name prefixes whatever the size of the blocks": Story(
        together(DOUBLES, stored(*range(4), **SWA)),
        answers(prompt(4), tokens=4 * SIZE, blocks=2, block_size=2 * SIZE),
        Scene(removed(3, group_idx=0), answers(prompt(4), tokens=2 * SIZE)),
        Scene(removed(1, group_idx=1), answers(prompt(4), tokens=0)),
    ),
    "a new unit drops what was held by the old one and counts it": Story(
        Scene(DOUBLES, stored(*range(4), **SWA), counts(ignored={"unit_changed": 2})),
        Scene(DOUBLES, answers(prompt(4), tokens=4 * SIZE)),
    ),
}

SPARSE = {
    "sparse events place labels that a whole event has named": Story(
        Scene(HYBRID, removed(*range(6), group_idx=1), holds(0)),
        stored(*range(6), block_hashes=[105], **SWA),  # all tokens, one block
        Scene(holds(6), counts(ignored={})),
    ),
    "sparse labels wait for a whole event that names them": Story(
        Scene(stored(*range(6), block_hashes=[105], **SWA), holds(0), counts(unplaced=1)),
        Scene(stored(*range(6), **IS_FULL), holds(6), counts(orphans=0)),
        Scene(removed(5, group_idx=1), holds(0)),
    ),
    "a sparse event of no block teaches the group and nothing else": Story(
        stored(0, 1, block_hashes=[], **SWA),
        Scene(counts(ignored={}), totals(blocks=0)),
    ),
    # vLLM's connectors leave salts and images out of their events.
    "offloaded blocks without extra keys are those that the device named": Story(
        stored(0, 1, group_idx=0, extra_keys=[("secret",), None]),
        Scene(stored(0, 1, group_idx=0, medium="CPU"), removed(0, 1, group_idx=0)),
        Scene(holds(0), holds(2, salt="secret")),
        Scene(stored(7, 8, parent=None, group_idx=0, medium="CPU"), counts(unplaced=2)),
    ),
}

# Full attention in blocks of four units, reported first; then a window's events.
QUADRUPLES = stored(3, 7, parent=None, token_ids=prompt(8), block_size=4 * SIZE, **IS_FULL)
TAILS = {
    "a window's tail lies in a row before the label that a wider block names": Story(
        together(
            QUADRUPLES, stored(*range(8), block_hashes=[101, 102, 103, 105, 106, 107], **WIDER)
        ),
        Scene(answers(prompt(3), tokens=0), answers(prompt(4), tokens=4 * SIZE)),
        Scene(answers(prompt(7), tokens=4 * SIZE), answers(prompt(8), tokens=8 * SIZE)),
        walked(*((100 + n, "GPU", 1, n, 1) for n in (1, 2, 3, 5, 6, 7)), group=1),
        Scene(removed(6, group_idx=1), answers(prompt(8), tokens=4 * SIZE)),
    ),
    "a tail is not placed where a hit might have ended before": Story(
        together(QUADRUPLES, stored(0, block_hashes=[], **WIDER)),
        removed(3, group_idx=0),  # no event reports any more whether a tail ends there
        stored(*range(8), block_hashes=[102, 103, 107], **WIDER),
        counts(unplaced=2),
    ),
    "more labels than lie between two ends of hits are not placed": Story(
        together(QUADRUPLES, stored(*range(8), block_hashes=[101, 102, *range(104, 108)], **WIDER)),
        counts(unplaced=5),
    ),
}

BOTH = [stored(*range(3), **IS_FULL), stored(*range(3), **SWA)]
FULL_MODE = {
    "every store is a copy unless the user says that requests announce again": Story(
        Scene(configured(report_mode="full"), stored(0, 1, 2), stored(0, 1, 2), counts(advice=[])),
        Scene(removed(0, 1, 2), holds(0), counts(reannounced=3, advice=[])),
    ),
    "a store that no lookup would have found is a copy": Story(
        Scene(configured(report_mode="full"), *BOTH, removed(2, group_idx=1)),
        Scene(together(*BOTH), counts(reannounced=0)),  # computed, since the window was gone
        Scene(together(*BOTH), counts(reannounced=6)),  # found this time
    ),
    "blocks announced, removed and stored in one batch are resident": Story(
        Scene(configured(report_mode="full"), stored(0, 1)),
        together(stored(0, 1), removed(0, 1), stored(0, 1)),
        Scene(holds(2), counts(reannounced=2)),
    ),
    "blocks announced, cleared and stored in one batch are resident": Story(
        Scene(configured(report_mode="full"), stored(0, 1)),
        together(stored(0, 1), CLEAR, stored(0, 1)),
        Scene(holds(2), counts(reannounced=2)),
    ),
}


@stories(LEARNED | SIZES | SPARSE | TAILS | FULL_MODE)
def test_hits_follow_from_the_groups(story: Story, way: str) -> None:
    story.run(way)


def test_statistics_describe_the_groups() -> None:
    index = index_of(stored(0, 1, block_hashes=[], **SWA))
    window = {
        "kind": "sliding_window",
        "known": True,
        "sliding_window": SIZE + 1,
        "attention_chunk_size": None,
        "block_size": SIZE,
    }
    assert counts_of(index)["groups"] == {"1": window}


def test_settings_that_are_missing_are_advised_about() -> None:
    undescribed = index_of(stored(0, group_idx=0), stored(0, group_idx=1))
    assert not counts_of(undescribed)["groups"]["1"]["known"]
    assert "groups={...}" in counts_of(undescribed)["advice"][0]
    announcing = index_of()
    announcing.configure(A, CacheSettings(report_mode="full"))
    apply(announcing, A, stored(0, 1, 2), stored(0, 1, 2), removed(0, 1, 2), removed(0, 1, 2))
    assert 'report_mode="full"' in counts_of(announcing)["advice"][0], "they were copies"
    chunked: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "chunked_local_attention"}
    index = index_of(stored(0, 1, **IS_FULL), stored(0, 1, **chunked))
    assert "attention_chunk_size" in counts_of(index)["advice"][0]
    groups = {1: GroupSpec("chunked_local_attention", attention_chunk_size=8)}
    index.configure(A, CacheSettings(groups=groups))
    assert counts_of(index)["advice"] == []


@both
def test_a_hit_within_the_first_block_counts_although_no_whole_block_does(
    kind: type[BaseIndex],
) -> None:
    """Where Mamba states are kept at finer hashes, a hit may end before the first block does."""
    mamba: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    wide: dict[str, Any] = {"token_ids": prompt(4), "block_size": 4 * SIZE}
    index = kind()
    index.configure(A, CacheSettings(hash_block_size=SIZE))
    apply(index, A, stored(3, parent=None, **wide, **IS_FULL))
    apply(index, A, stored(0, block_hashes=[], **wide, **mamba))
    apply(index, A, removed(3), stored(0, **IS_FULL), stored(0, group_idx=1))
    match = index.match(prompt(3))
    assert (match[A].tokens, match[A].blocks) == (SIZE, 0)
    assert match.best == match[A]
