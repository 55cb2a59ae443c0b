"""The audit's rules one by one: what is computed, what counts as held, what is only said."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    ConfigurationError,
    Event,
    EventBatch,
    Rank,
    RankAdded,
    RankBatch,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    State,
)
from kvindex.tools.audit import Auditor, RankReport, Report
from kvindex.tools.audit.blocks import Evicted
from kvindex.tools.audit.histogram import Histogram, Series
from kvindex.wire.quirks import content_hash

pytestmark = pytest.mark.unit

A, B, C = Rank("a", 0), Rank("b", 0), Rank("a", 1)
SIZE = 4


class Scene:
    """An auditor, and a second that passes before each thing that it takes."""

    def __init__(self, **options: object) -> None:
        self.auditor = Auditor(**options)  # type: ignore[arg-type]
        self.now = 1000.0
        self.auditor.begin(self.now)

    def receive(self, rank: Rank, *events: Event, replayed: bool = False, ago: float = 0.0) -> None:
        self.now += 1.0
        batch = EventBatch(self.now - ago, list(events))
        self.auditor.receive(RankBatch(rank, 0, 0, batch, replayed), self.now)

    def state(self, rank: Rank, state: State) -> None:
        status = RankStatus(
            rank=rank,
            state=state,
            reason="",
            epoch=0,
            seq=None,
            complete=True,
            lag=0,
            connected=True,
            endpoint="",
            replay_endpoint=None,
            last_event_age=None,
        )
        self.auditor.receive(status, self.now)

    def report(self) -> Report:
        return self.auditor.report(self.now)

    def of(self, rank: Rank) -> RankReport:
        return next(report for report in self.report().ranks if report.rank == str(rank))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def stored(first: int, last: int, *, prompt: int = 0, **fields: object) -> BlockStored:
    """Blocks `first` … `last` of a prompt, labelled by their numbers."""
    label = 1000 * (prompt + 1)
    return BlockStored(
        **{
            "block_hashes": [label + i for i in range(first, last + 1)],
            "parent_block_hash": label + first - 1 if first else None,
            "token_ids": [prompt * 10_000 + t for t in range(first * SIZE, (last + 1) * SIZE)],
            "block_size": SIZE,
            **fields,
        }  # type: ignore[arg-type]
    )


def removed(*blocks: int, prompt: int = 0, medium: str | None = None) -> BlockRemoved:
    labels: list[int | bytes] = [1000 * (prompt + 1) + block for block in blocks]
    return BlockRemoved(block_hashes=labels, medium=medium)


def test_what_another_rank_holds_from_the_start_on_is_elsewhere(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.receive(B, stored(0, 5))
    tokens = scene.of(B).tokens
    assert (tokens.computed, tokens.elsewhere, tokens.other_worker) == (24, 16, 16)
    assert tokens.first == 8


def test_a_dp_rank_of_the_same_worker_is_told_apart_from_another_worker(scene: Scene) -> None:
    scene.receive(A, stored(0, 1))
    scene.receive(B, stored(0, 1))
    scene.receive(C, stored(0, 1))
    assert (scene.of(B).tokens.other_worker, scene.of(C).tokens.same_worker) == (8, 8)


def test_blocks_behind_a_hole_are_held_by_nobody_until_it_is_filled(scene: Scene) -> None:
    scene.receive(A, stored(0, 3), removed(1))
    scene.receive(B, stored(0, 3))
    assert scene.of(B).tokens.elsewhere == 4
    scene.receive(A, stored(1, 1))
    scene.receive(C, stored(0, 3))
    assert scene.of(C).tokens.elsewhere == 16


def test_an_unreachable_rank_holds_nothing_meanwhile(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.state(A, State.CONNECTING)
    scene.receive(B, stored(0, 3))
    scene.state(A, State.LIVE)
    scene.receive(C, stored(0, 3))
    assert scene.of(B).tokens.elsewhere == 0
    assert scene.of(C).tokens.elsewhere == 16
    assert scene.of(A).away == 1.0
    assert any("unreachable for up to 1 s" in line for line in scene.report().trust)


def test_an_unknown_parent_makes_unknown_tokens_not_guesses(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.receive(B, stored(2, 3))
    tokens = scene.of(B).tokens
    assert (tokens.computed, tokens.unknown, tokens.elsewhere) == (8, 8, 0)
    scene.receive(B, removed(2, 3))
    assert scene.of(B).resident == 0


def test_a_loss_drops_what_is_held_and_what_was_evicted(scene: Scene) -> None:
    scene.receive(A, stored(0, 3), removed(3))
    scene.auditor.receive(RankLost(A, 0, "evicted", 5, 7, True), scene.now)
    scene.receive(B, stored(0, 3))
    scene.receive(A, stored(4, 4), stored(0, 0, prompt=1))
    assert scene.of(B).tokens.elsewhere == 0
    assert scene.of(A).tokens.unknown == 4
    assert scene.of(A).counts["losses"] == 1
    assert scene.of(A).counts["lost_batches"] == 3
    assert any(line.startswith("a/0 lost batches") for line in scene.report().trust)


def test_a_loss_that_is_kept_drops_nothing(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.auditor.receive(RankLost(A, 0, "evicted", 5, None, False), scene.now)
    scene.receive(B, stored(0, 3))
    assert scene.of(B).tokens.elsewhere == 16


@pytest.mark.parametrize("how", ["restart", "clear", "removal"])
def test_what_is_gone_with_the_whole_cache_was_not_evicted(scene: Scene, how: str) -> None:
    scene.receive(A, stored(0, 3))
    if how == "restart":
        scene.auditor.receive(RankRestarted(A, 1, "test"), scene.now)
    elif how == "clear":
        scene.receive(A, AllBlocksCleared())
    else:
        scene.auditor.receive(RankRemoved(A), scene.now)
    scene.receive(A, stored(0, 3))
    scene.receive(B, stored(0, 3))
    report = scene.report()
    assert report.tokens.evicted == 0
    assert report.tokens.first == 32
    assert scene.of(B).tokens.elsewhere == 16
    assert report.tokens.computed == 48


def test_what_returns_shows_how_long_and_by_how_much_the_cache_was_too_small(
    scene: Scene,
) -> None:
    scene.receive(A, stored(0, 1))
    scene.receive(A, removed(1), stored(0, 2, prompt=1))
    scene.receive(A, removed(0, prompt=1))
    scene.now += 5
    scene.receive(A, stored(1, 1))
    report = scene.report()
    assert report.tokens.evicted == 4
    # Two blocks more were needed: block 1 itself, and the block that was evicted after it.
    assert [saving.tokens for saving in report.savings] == [0, 4, 4, 4, 4, 4]
    assert [(round(bar.up_to, 3), bar.weight) for bar in report.ages] == [(7.336, 4)]


def test_a_second_copy_is_computed_and_one_removal_leaves_the_other(scene: Scene) -> None:
    scene.receive(A, stored(0, 1))
    scene.receive(A, stored(1, 1))
    scene.receive(A, removed(1))
    scene.receive(B, stored(0, 1))
    assert scene.of(A).tokens.here == 4
    assert scene.of(B).tokens.elsewhere == 8
    assert scene.of(A).tokens.evicted == 0


def test_copies_on_the_host_are_no_computation_and_neither_is_their_return(scene: Scene) -> None:
    moved = BlockStored(block_hashes=[1000, 1001], token_ids=[], block_size=0, medium="CPU")
    scene.receive(A, stored(0, 1), moved, removed(0, 1))
    scene.receive(B, stored(0, 1))
    scene.receive(A, stored(0, 1))
    tokens = scene.of(A).tokens
    assert (tokens.computed, tokens.offloaded, tokens.returned) == (8, 8, 8)
    assert scene.of(B).tokens.elsewhere == 8  # a router could have sent it there


def test_report_mode_full_announces_and_computes_nothing(scene: Scene) -> None:
    settings = CacheSettings(report_mode="full")
    scene.auditor.receive(RankAdded(A, settings), scene.now)
    scene.receive(A, stored(0, 3))
    scene.receive(A, stored(0, 3), stored(4, 4))
    tokens = scene.of(A).tokens
    assert (tokens.computed, tokens.reannounced, tokens.here) == (20, 16, 0)


def test_without_the_setting_announcements_are_pointed_out(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.receive(A, stored(0, 3))
    assert any("--report-mode full" in line for line in scene.report().trust)


def test_lora_salt_images_and_models_are_prompts_of_their_own() -> None:
    scene = Scene(models={"c": "another model"})
    kinds: list[dict[str, Any]] = [
        {},
        {"lora_name": "sql"},
        {"extra_keys": [("salt",)]},
        {"extra_keys": [(("image", 0),)]},
        {"lookahead_token_ids": [[7]]},
    ]
    for fields in kinds:
        scene.receive(A, stored(0, 0, **fields))
        scene.receive(A, removed(0))
    scene.receive(A, stored(0, 0))
    scene.receive(Rank("c"), stored(0, 0))
    assert scene.report().tokens.elsewhere == 0
    assert scene.of(A).tokens.evicted == 4  # the one without anything, again


def test_engines_that_say_the_same_in_other_words_share_a_prefix(scene: Scene) -> None:
    scene.receive(A, stored(0, 0, lora_name="sql", extra_keys=[("sql", "salt")]))
    other = stored(0, 0, lora_name="sql", cache_salt="salt", block_hashes=[-5], medium="GPU")
    scene.receive(B, other)
    assert scene.of(B).tokens.elsewhere == 4


def test_the_group_that_needs_all_blocks_counts_and_no_other(scene: Scene) -> None:
    window = stored(
        0, 3, group_idx=0, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8
    )
    full = stored(0, 3, group_idx=1, kv_cache_spec_kind="full_attention")
    scene.receive(A, window, full)
    assert scene.of(A).tokens.computed == 16
    assert scene.of(A).counts["other_groups"] == 4
    assert any("several KV cache groups" in line for line in scene.report().trust)


def test_a_block_that_was_not_full_counts_when_it_is(scene: Scene) -> None:
    scene.receive(A, stored(0, 0))
    part = BlockStored(
        block_hashes=[77], parent_block_hash=1000, token_ids=[4, 5], block_size=2, medium=None
    )
    scene.receive(A, part)
    scene.receive(A, BlockRemoved(block_hashes=[77]), stored(1, 1))
    assert scene.of(A).tokens.computed == 8
    assert scene.of(A).counts["partial_block"] == 1


def test_labels_without_their_prefix_place_nothing_and_splits_compute_nothing(
    scene: Scene,
) -> None:
    page = [1, 2, 3, 4]
    label = content_hash(page)
    event = BlockStored(block_hashes=[label], token_ids=page, block_size=4)
    scene.receive(A, event)
    scene.receive(A, BlockRemoved(block_hashes=[label]), event)
    tokens = scene.of(A).tokens
    assert (tokens.computed, tokens.unknown, tokens.moved) == (4, 4, 4)
    assert any("SGLang before 0.5.6" in line for line in scene.report().trust)


def test_malformed_stores_are_counted_and_hold_nothing(scene: Scene) -> None:
    scene.receive(A, stored(0, 1, block_size=0), stored(0, 1, token_ids=[1, 2, 3]))
    scene.receive(A, stored(0, 1, extra_keys=[None]), stored(0, 1, lookahead_token_ids=[[1], []]))
    assert scene.of(A).counts["malformed"] == 8
    assert scene.of(A).resident == scene.of(A).tokens.computed == 0


def test_one_label_for_two_blocks_is_held_as_neither(scene: Scene) -> None:
    scene.receive(A, stored(0, 0))
    scene.receive(A, stored(0, 0, prompt=1, block_hashes=[1000]))
    scene.receive(B, stored(0, 0), stored(0, 0, prompt=1))
    assert scene.of(B).tokens.elsewhere == 0
    assert scene.of(A).counts["label_ambiguous"] == 1
    assert scene.of(A).unplaced == 4


def test_blocks_beyond_the_bound_are_computed_and_held_by_nobody() -> None:
    scene = Scene(max_blocks_per_rank=2)
    scene.receive(A, stored(0, 3))
    scene.receive(B, stored(0, 1))
    assert scene.of(A).counts["max_blocks_per_rank"] == 2
    assert (scene.of(A).tokens.computed, scene.of(B).tokens.elsewhere) == (16, 8)


def test_a_bounded_memory_of_evicted_blocks_says_what_it_forgot() -> None:
    scene = Scene(max_evicted=1)
    scene.receive(A, stored(0, 2))
    scene.receive(A, removed(2, 1))
    scene.receive(A, stored(1, 2))
    report = scene.of(A)
    assert report.tokens.evicted == 4
    assert report.evicted_forgotten == 1
    assert any("1 evicted blocks were forgotten" in line for line in scene.report().trust)


def test_the_past_of_a_late_rank_is_known_but_not_counted(scene: Scene) -> None:
    scene.receive(A, stored(0, 3), replayed=True, ago=500.0)
    scene.receive(B, stored(0, 3))
    scene.receive(A, stored(4, 4), replayed=True)
    assert scene.of(A).tokens.computed == 4
    assert scene.of(B).tokens.elsewhere == 16


def test_renamed_ranks_keep_what_they_hold_and_change_their_worker(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.receive(B, stored(0, 0, prompt=1))
    scene.auditor.receive(RanksRenamed(((A, B), (B, A))), scene.now)
    scene.receive(Rank("b", 1), stored(0, 3))
    assert scene.of(Rank("b", 1)).tokens.same_worker == 16


def test_recordings_of_different_times_are_pointed_out(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.receive(A, stored(4, 4))
    assert not any("recordings" in line for line in scene.report().trust)
    scene.receive(B, stored(0, 3))
    assert scene.report().trust[0].startswith("Some recordings end before others begin")


def test_duplication_counts_each_prefix_by_its_ranks(scene: Scene) -> None:
    scene.receive(A, stored(0, 3))
    scene.receive(B, stored(0, 1))
    report = scene.report()
    assert report.duplication.by_ranks == [8, 8]
    assert (report.duplication.resident, report.duplication.unique) == (24, 16)
    (shared,) = report.shared
    assert (shared.tokens, shared.ranks, shared.names) == (8, 2, ["a/0", "b/0"])
    assert shared.first_tokens == list(range(8))
    assert report.without_tokens().shared[0].first_tokens == []


def test_of_shared_prefixes_that_begin_alike_the_largest_is_shown(scene: Scene) -> None:
    branch = stored(4, 4, block_hashes=[7], token_ids=[1, 2, 3, 4])
    other = stored(1, 3, prompt=1, parent_block_hash=1000)
    for rank in (A, B):
        scene.receive(rank, stored(0, 4), branch, other)
    assert [prefix.tokens for prefix in scene.report().shared] == [20, 16]


def test_a_report_needs_a_window_and_bounds_make_sense() -> None:
    with pytest.raises(ConfigurationError, match="call begin"):
        Auditor().report(0.0)
    with pytest.raises(ConfigurationError, match="max_evicted=0"):
        Auditor(max_evicted=0)


def test_evicted_blocks_stay_in_order_while_slots_are_closed_up() -> None:
    evicted = Evicted(limit=3000)
    for number in range(9999):
        evicted.add(b"%d" % number, float(number))
        if number % 3 == 0:
            evicted.discard(b"%d" % number)
    assert len(evicted) == 3000
    newest = evicted.find(b"9998")
    oldest = evicted.find(b"5500")
    assert newest is not None
    assert newest == (9998.0, 1)
    assert oldest is not None
    assert oldest.distance == 3000
    assert evicted.find(b"5498") is None


def test_a_histogram_never_says_too_much() -> None:
    histogram = Histogram()
    for value in range(1, 200):
        histogram.add(value, 1)
    for value in range(1, 200):
        assert value * 0.9 - 1 <= histogram.up_to(value) <= value
    histogram.add(float("nan"), 1)
    histogram.add(float("inf"), 1)
    assert histogram.total == 201
    assert sum(weight for _, weight in histogram.bars()) == 201


def test_a_series_keeps_its_sum_however_long_it_gets() -> None:
    series = Series(1, limit=4)
    for second in range(50):
        series.add(float(second), (1,))
    assert series.width == 16.0
    assert [row[0] for row in series.rows()] == [16, 16, 16, 2]
