"""The audit's rules one by one: what is computed, what counts as held, what is only said."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict

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
    State,
)
from kvindex.tools.audit import Auditor, AuditReport, RankReport
from kvindex.tools.audit.blocks import Evicted, Histogram, Series
from kvindex.wire.quirks import content_hash
from tests.service.test_fleet_overview import status_of

pytestmark = pytest.mark.unit

A, B, C = Rank("a", 0), Rank("b", 0), Rank("a", 1)
SIZE = 4


Step = Any
"""(rank, *events), or an item of a stream."""


class Scene:
    """An auditor whose window is open, and a second that passes before each batch."""

    def __init__(self, *steps: Step, **options: Any) -> None:
        self.auditor = Auditor(**options)
        self.now = 1000.0
        self.auditor.begin(self.now)
        for step in steps:
            if isinstance(step, tuple) and isinstance(step[0], Rank):
                self.receive(step[0], *step[1:])
            else:
                self.auditor.receive(step, self.now)

    def receive(self, rank: Rank, *events: Event, replayed: bool = False, ago: float = 0.0) -> None:
        self.now += 1.0
        batch = EventBatch(self.now - ago, list(events))
        self.auditor.receive(RankBatch(rank, 0, 0, batch, replayed), self.now)

    def report(self) -> AuditReport:
        return self.auditor.report(self.now)

    def of(self, rank: Rank) -> RankReport:
        return next(report for report in self.report().ranks if report.rank == str(rank))


def stored(first: int, last: int, *, prompt: int = 0, **fields: Any) -> BlockStored:
    """Blocks `first` … `last` of a prompt, labelled by their numbers."""
    label = 1000 * (prompt + 1)
    return BlockStored(
        **{
            "block_hashes": [label + i for i in range(first, last + 1)],
            "parent_block_hash": label + first - 1 if first else None,
            "token_ids": [prompt * 10_000 + t for t in range(first * SIZE, (last + 1) * SIZE)],
            "block_size": SIZE,
            **fields,
        }
    )


def removed(*blocks: int, prompt: int = 0, medium: str | None = None) -> BlockRemoved:
    labels: list[int | bytes] = [1000 * (prompt + 1) + block for block in blocks]
    return BlockRemoved(block_hashes=labels, medium=medium)


Rule = tuple[list[Step], dict[Rank, dict[str, float]], str]
MOVED = BlockStored(block_hashes=[1000, 1001], token_ids=[], block_size=0, medium="CPU")
PART = BlockStored(block_hashes=[77], parent_block_hash=1000, token_ids=[4, 5], block_size=2)
PAGE = [1, 2, 3, 4]
LABEL = content_hash(PAGE)
OF_A_PAGE = BlockStored(block_hashes=[LABEL], token_ids=PAGE, block_size=4)
WINDOW: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
SQL: dict[str, Any] = {"lora_name": "sql"}

# What is received, the figures of some ranks then, and a part of what the report says of trust.
RULES: dict[str, Rule] = {
    "what another rank holds from the start on is elsewhere": (
        [(A, stored(0, 3)), (B, stored(0, 5))],
        {B: {"computed": 24, "elsewhere": 16, "other_worker": 16, "first": 8}},
        "",
    ),
    "a dp_rank of the same worker is no other worker": (
        [(A, stored(0, 1)), (B, stored(0, 1)), (C, stored(0, 1))],
        {B: {"other_worker": 8}, C: {"same_worker": 8}},
        "",
    ),
    "blocks behind a hole are held by nobody until it is filled": (
        [(A, stored(0, 3), removed(1)), (B, stored(0, 3)), (A, stored(1, 1)), (C, stored(0, 3))],
        {B: {"elsewhere": 4}, C: {"elsewhere": 16}},
        "",
    ),
    "an unreachable rank holds nothing meanwhile": (
        [
            *((A, stored(0, 3)), status_of(A, State.CONNECTING), (B, stored(0, 3))),
            *(status_of(A, State.LIVE), (C, stored(0, 3))),
        ],
        {A: {"away": 1.0}, B: {"elsewhere": 0}, C: {"elsewhere": 16}},
        "unreachable for up to 1 s",
    ),
    "an unknown parent makes unknown tokens, not guesses": (
        [(A, stored(0, 3)), (B, stored(2, 3))],
        {B: {"computed": 8, "unknown": 8, "elsewhere": 0, "resident": 8}},
        "8 of 24 computed tokens",
    ),
    "blocks of unknown prompts can be removed": (
        [(B, stored(2, 3)), (B, removed(2, 3))],
        {B: {"resident": 0}},
        "",
    ),
    "a loss drops what is held and what was evicted": (
        [
            *((A, stored(0, 3), removed(3)), RankLost(A, 0, "evicted", 5, 7, True)),
            *((B, stored(0, 3)), (A, stored(4, 4), stored(0, 0, prompt=1))),
        ],
        {B: {"elsewhere": 0}, A: {"unknown": 4, "losses": 1, "lost_batches": 3}},
        "a/0 lost batches",
    ),
    "a loss that is kept drops nothing": (
        [(A, stored(0, 3)), RankLost(A, 0, "evicted", 5, None, False), (B, stored(0, 3))],
        {B: {"elsewhere": 16}},
        "a/0 lost batches",
    ),
    "a second copy is computed, and one removal leaves the other": (
        [(A, stored(0, 1)), (A, stored(1, 1)), (A, removed(1)), (B, stored(0, 1))],
        {A: {"here": 4, "evicted": 0}, B: {"elsewhere": 8}},
        "",
    ),
    "copies on the host are no computation, and neither is their return": (
        [(A, stored(0, 1), MOVED, removed(0, 1)), (B, stored(0, 1)), (A, stored(0, 1))],
        # A router could have sent B's request to A.
        {A: {"computed": 8, "offloaded": 8, "returned": 8}, B: {"elsewhere": 8}},
        "",
    ),
    "report mode full announces, and computes nothing": (
        [
            RankAdded(A, CacheSettings(report_mode="full")),
            *((A, stored(0, 3)), (A, stored(0, 3), stored(4, 4))),
        ],
        {A: {"computed": 20, "reannounced": 16, "here": 0}},
        "",
    ),
    "without the setting announcements are pointed out": (
        [(A, stored(0, 3)), (A, stored(0, 3))],
        {A: {"here": 16}},
        "--report-mode full",
    ),
    "engines that state the same in other words share a prefix": (
        [
            (A, stored(0, 0, extra_keys=[("sql", "salt")], **SQL)),
            (B, stored(0, 0, cache_salt="salt", block_hashes=[-5], medium="GPU", **SQL)),
        ],
        {B: {"elsewhere": 4}},
        "",
    ),
    "the group that needs all blocks counts, and no other": (
        [
            (
                A,
                stored(0, 3, group_idx=0, **WINDOW),
                stored(0, 3, group_idx=1, kv_cache_spec_kind="full_attention"),
            )
        ],
        {A: {"computed": 16, "other_groups": 4}},
        "several KV cache groups",
    ),
    "a block that was not full counts when it is": (
        [(A, stored(0, 0)), (A, PART), (A, BlockRemoved(block_hashes=[77]), stored(1, 1))],
        {A: {"computed": 8, "partial_block": 1}},
        "1 blocks that were not full yet",
    ),
    "labels without their prefix place nothing, and splits compute nothing": (
        [(A, OF_A_PAGE), (A, BlockRemoved(block_hashes=[LABEL]), OF_A_PAGE)],
        {A: {"computed": 4, "unknown": 4, "moved": 4}},
        "SGLang before 0.5.6",
    ),
    "malformed stores are counted and hold nothing": (
        [
            (A, stored(0, 1, block_size=0), stored(0, 1, token_ids=[1, 2, 3])),
            (A, stored(0, 1, extra_keys=[None]), stored(0, 1, lookahead_token_ids=[[1], []])),
        ],
        {A: {"malformed": 8, "resident": 0, "computed": 0}},
        "8 blocks whose stores contradict themselves",
    ),
    "one label for two blocks is held as neither": (
        [
            (A, stored(0, 0)),
            (A, stored(0, 0, prompt=1, block_hashes=[1000])),
            (B, stored(0, 0), stored(0, 0, prompt=1)),
        ],
        {A: {"label_ambiguous": 1, "unplaced": 4}, B: {"elsewhere": 0}},
        "1 blocks whose label names another block",
    ),
    "what any rank evicted, an infinite cache would have held": (
        [(A, stored(0, 2)), (A, removed(2, 1)), (B, stored(0, 3))],
        {B: {"again": 12, "elsewhere": 4, "evicted": 0, "first": 12}},
        "",
    ),
    "what was before a clear is of no use to any cache": (
        [(A, stored(0, 2)), (A, removed(2), AllBlocksCleared()), (B, stored(0, 3))],
        {B: {"again": 0}},
        "",
    ),
    "renamed ranks keep what they hold and change their worker": (
        [
            *((A, stored(0, 3)), (B, stored(0, 0, prompt=1))),
            *(RanksRenamed(((A, B), (B, A))), (Rank("b", 1), stored(0, 3))),
        ],
        {Rank("b", 1): {"same_worker": 16}},
        "",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_what_is_computed_and_held(rule: str) -> None:
    steps, expected, trust = RULES[rule]
    scene = Scene(*steps)
    for rank, figures in expected.items():
        report = scene.of(rank)
        seen = {**asdict(report.tokens), **asdict(report), **report.counts}
        assert {name: seen[name] for name in figures} == figures, rank
    assert any(trust in line for line in scene.report().trust)


@pytest.fixture
def scene() -> Scene:
    return Scene()


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
    # A rank that comes anew has one room, not two.
    assert report.capacity.size == 8 * SIZE


def test_what_returns_shows_by_how_much_the_cache_was_too_small(scene: Scene) -> None:
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


def test_blocks_beyond_the_bound_are_computed_and_held_by_nobody() -> None:
    scene = Scene(max_blocks_per_rank=2)
    scene.receive(A, stored(0, 3))
    scene.receive(B, stored(0, 1))
    assert scene.of(A).counts["max_blocks_per_rank"] == 2
    assert (scene.of(A).tokens.computed, scene.of(B).tokens.elsewhere) == (16, 8)


def test_a_bounded_memory_of_evicted_blocks_counts_what_it_forgot() -> None:
    scene = Scene(max_evicted=1)
    scene.receive(A, stored(0, 2))
    scene.receive(A, removed(2, 1))
    scene.receive(A, stored(1, 2))
    report = scene.of(A)
    assert report.tokens.evicted == 4
    assert report.evicted_forgotten == 1
    assert any("1 evicted blocks were forgotten" in line for line in scene.report().trust)
    assert scene.report().capacity.forgotten == 1
    assert any("1 blocks that no rank held" in line for line in scene.report().trust)


def test_the_past_of_a_late_rank_is_known_but_not_counted(scene: Scene) -> None:
    scene.receive(A, stored(0, 3), replayed=True, ago=500.0)
    scene.receive(B, stored(0, 3))
    scene.receive(A, stored(4, 4), replayed=True)
    assert scene.of(A).tokens.computed == 4
    assert scene.of(B).tokens.elsewhere == 16


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


def test_a_histogram_never_counts_too_much() -> None:
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


@pytest.mark.parametrize("counts", [[0], None])
def test_a_removal_of_the_last_copy_ends_all_copies_of_a_block(counts: list[int] | None) -> None:
    scene = Scene((A, stored(0, 0), stored(0, 0), stored(0, 0)))
    if counts is None:
        scene.auditor.configure(A, CacheSettings(removals="last"))
    gone = BlockRemoved(block_hashes=[1000], remaining_copy_counts=counts)
    scene.receive(A, gone)
    scene.receive(B, stored(0, 0))
    assert scene.of(B).tokens.elsewhere == 0
