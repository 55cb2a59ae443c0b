"""What `Index` and `TreeView` count, bound and refuse, apart from the events' meaning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvindex import (
    BACKEND,
    BlockRemoved,
    BlockStored,
    Client,
    EventBatch,
    Index,
    Rank,
)
from kvindex.client.client import MAX_BLOCKS_PER_RANK
from kvindex.index.api import BaseIndex
from kvindex.wire import encode_batch
from kvindex.wire.errors import ConfigurationError, DecodeError, UnknownRankError
from tests.index.index_events import (
    A,
    B,
    C,
    apply,
    both,
    counts_of,
    index_of,
    located,
    matched,
    prompt,
    removed,
    restored,
    stored,
    three_ranks,
)
from tests.index.index_stories import (
    Scene,
    Story,
    cleared,
    counts,
    holds,
    of,
    stories,
    totals,
    walked,
)

pytestmark = pytest.mark.unit

COUNTED = {
    "blocks are counted by LoRA and by whether they are salted": Story(
        Scene(stored(0, 1, 2), stored(0, 1, base=200, lora_name="sql")),
        Scene(stored(0, base=300, lora_id=7), stored(0, 1, base=400, cache_salt="s")),
        stored(2, 3, base=400),  # goes on after the salt, which only the first block has
        stored(0, 1, base=500, extra_keys=[("salt",), None]),
        stored(0, base=600, lora_name="sql", extra_keys=[("sql",)]),  # only the LoRA's own name
        counts(loras={"": 9, "sql": 3, "id 7": 1}, salted=6),
        Scene(removed(2, base=400), removed(0, base=300), removed(0, base=600)),
        Scene(counts(loras={"": 8, "sql": 2}, salted=5), cleared, counts(loras={}, salted=0)),
    ),
    "blocks are counted on each medium": Story(
        Scene(stored(0, 1, 2), stored(0, 1, medium="CPU"), stored(0, 1, base=200, lora_name="l")),
        Scene(counts(media={"CPU": 2, "GPU": 5}), removed(2), removed(0, 1, medium="CPU")),
        Scene(counts(media={"GPU": 4}), cleared, counts(media={})),
    ),
    "an orphan of a salted prompt is counted when it is placed": Story(
        Scene(stored(1), stored(2), counts(loras={}, salted=0)),
        Scene(stored(0, cache_salt="s"), counts(loras={"": 3}, salted=3)),
    ),
    "statistics count by reason": Story(
        Scene(stored(0, 1), stored(1), removed(1), removed(9), stored(5), located(8)),
        totals(blocks=2, orphans=2, unique_blocks=2),
        counts(stored=3, duplicates=1, removed=1, removed_unknown=1, orphaned=1, unplaced=1),
    ),
}

BOUNDED = {
    "max_blocks leaves out what does not fit and counts it": Story(
        Scene(stored(0, 1, 2), totals(blocks=2), holds(2), counts(ignored={"max_blocks": 1})),
        Scene(of(B, stored(0, 1)), totals(blocks=2), holds(0, rank=B)),
        Scene(stored(1), removed(1), removed(1), stored(1), holds(2)),
        max_blocks=2,
    ),
    "max_blocks counts each group: with tokens": Story(
        Scene(stored(0), stored(0, group_idx=1)),
        Scene(totals(blocks=1), counts(ignored={"max_blocks": 1})),
        max_blocks=1,
    ),
    "max_blocks counts each group: without tokens": Story(
        Scene(stored(0), located(0, group_idx=1)),
        Scene(totals(blocks=1), counts(ignored={"max_blocks": 1})),
        max_blocks=1,
    ),
    "max_blocks holds for orphans too": Story(
        Scene(stored(1, 2), stored(2, group_idx=1), stored(0)),
        Scene(totals(blocks=2), counts(orphans=0, ignored={"max_blocks": 2})),
        max_blocks=2,
    ),
    "max_blocks_per_rank leaves out what does not fit and counts it": Story(
        Scene(stored(0, 1, 2), totals(blocks=2), holds(2)),
        Scene(counts(ignored={"max_blocks_per_rank": 1}), of(B, stored(0, 1)), holds(2, rank=B)),
        Scene(stored(2, medium="CPU"), removed(1), stored(1), holds(2)),
        max_blocks_per_rank=2,
    ),
    "max_blocks_per_rank holds for orphans too": Story(
        Scene(stored(1, 2), stored(0), counts(ignored={"max_blocks_per_rank": 1})),
        max_blocks_per_rank=2,
    ),
}


@stories(COUNTED | BOUNDED)
def test_blocks_are_counted_and_bounded(story: Story, way: str) -> None:
    story.run(way)


def test_statistics_name_the_64_largest_loras_and_sum_up_the_others() -> None:
    index = Index()
    for n in range(70):
        blocks = range(2) if n < 60 else range(1)
        apply(index, A, stored(*blocks, base=1000 * n + 100, lora_name=f"lora-{n:02}"))
    loras = counts_of(index)["loras"]
    assert list(loras) == [f"lora-{n:02}" for n in range(64)] + ["(other)"]
    assert (loras["lora-00"], loras["lora-63"], loras["(other)"]) == (2, 1, 6)
    assert json.dumps(index.statistics())


# Ranks and trees


def test_ranks_are_known_from_their_first_event_or_by_name() -> None:
    index = Index()
    index.add(B)
    index.add(B)
    index.apply(A, EventBatch(ts=0.0, events=[]))
    assert index.ranks == (A, B)
    assert index.match(prompt(1))[B].blocks == 0


@both
def test_the_known_ranks_are_one_tuple_until_they_change(kind: type[BaseIndex]) -> None:
    index = kind()
    index.add(B)
    before = index.ranks
    index.apply(B, EventBatch(ts=0.0, events=[stored(0, 1)]))
    index.add(B)
    index.remove(A)
    index.tree(B).clear()
    assert index.ranks is before
    seen = [before]
    changes: list[Callable[[], None]] = [
        lambda: index.add(A),
        lambda: index.rename({A: C}),
        lambda: index.remove(B),
    ]
    if kind.backend == "native":
        changes.append(lambda: index.restore(A, index.dump(C)))
    for change in changes:
        change()
        seen.append(index.ranks)
    assert seen == [(B,), (A, B), (B, C), (C,), (A, C)][: len(seen)]
    assert len(seen) >= 4


def test_a_removed_rank_is_unknown_and_leaves_nothing() -> None:
    index = three_ranks()
    view = index.tree(B)
    index.remove(B)
    index.remove(B)
    index.check()
    assert (index.ranks, len(index)) == ((A, C), 3)
    for use in (view.__len__, view.clear, view.walk, lambda: index.tree(B)):
        with pytest.raises(UnknownRankError, match="b/0 is not known"):
            use()


def test_a_view_counts_walks_and_clears_one_rank() -> None:
    index = index_of(stored(0, 1, lora_name="l"), stored(1, medium="CPU", lora_name="l"))
    apply(index, B, stored(0))
    view = index.tree(A)
    assert (len(view), len(index)) == (2, 3)
    assert {block.lora for block in view.walk()} == {"l"}
    walked((100, "GPU", 0, 0, 1), (101, "GPU", 0, 1, 1), (101, "CPU", 0, 1, 1))(index)
    view.clear()
    index.check()
    assert (len(view), len(index), index.ranks) == (0, 1, (A, B))


def test_apply_reads_payloads_as_it_reads_batches_and_refuses_others_whole() -> None:
    payload = encode_batch(EventBatch(ts=0.0, events=[stored(0, 1), removed(1)]))
    for form in (payload, bytearray(payload), memoryview(payload)):
        index = Index()
        index.apply(A, form)
        assert matched(index, prompt(2)) == 1
    with pytest.raises(DecodeError):
        index.apply(A, b"\xff nonsense")
    assert matched(index, prompt(2)) == 1


# Options


@pytest.mark.parametrize(
    "options", [{"max_blocks": 0}, {"max_orphans": -1}, {"seed": -1}, {"seed": 1 << 128}], ids=str
)
def test_options_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        Index(**options)


def test_two_indexes_of_one_seed_and_two_of_their_own_agree() -> None:
    for index in (Index(seed=7), Index(seed=7), Index(), Index()):
        apply(index, A, stored(0, 1))
        assert matched(index, prompt(2)) == 2


@pytest.mark.skipif(BACKEND != "native", reason="the Python index sorts its ranks at each change")
def test_adding_ranks_costs_in_proportion_to_their_number() -> None:
    """Each rank once copied and sorted the directory of all: 4,000 took two seconds."""

    def seconds(ranks: int) -> float:
        best = float("inf")
        for _ in range(3):
            index, start = Index(), time.process_time()
            for number in range(ranks):
                index.add(Rank(f"worker-{number}"))
            best = min(best, time.process_time() - start)
            assert len(index.ranks) == ranks
        return best

    assert seconds(4_000) < 24 * seconds(500)


# What one rank may cost: labels, units and blocks -----------------------------------------------


ROUNDS = 10  # other processes lengthen some measurements; what costs too much does so in each


def chain(labels: list[Any], parent: int | None = None, **fields: Any) -> BlockStored:
    fields |= {"token_ids": [number & 127 for number in range(len(labels))], "block_size": 1}
    return stored(0, parent=parent, block_hashes=labels, **fields)


def test_a_second_label_costs_the_same_however_many_blocks_the_rank_holds() -> None:
    def seconds(blocks: int) -> float:
        times = []
        for _ in range(3):
            index = index_of(chain(list(range(1, blocks + 1))))
            started = time.thread_time()
            index.apply(A, EventBatch(ts=0.0, events=[chain([blocks + 1])]))
            times.append(time.thread_time() - started)
        return min(times)

    assert any(seconds(64_000) < 4 * seconds(2_000) + 0.002 for _ in range(ROUNDS))


@pytest.mark.parametrize("turned", range(6))
def test_each_label_of_a_block_has_copies_of_its_own(turned: int) -> None:
    copies = [(1, "GPU"), (2, "GPU"), (1, "GPU"), (2, "CPU"), (3, "CPU"), (1, "GPU")]
    index = index_of(*[chain([label], medium=medium) for label, medium in copies])
    assert (matched(index, range(1)), len(index)) == (1, 3)
    for label, medium in copies[turned:] + copies[:turned]:
        index = restored(index)
        assert matched(index, range(1)) == 1
        apply(index, A, BlockRemoved(block_hashes=[label], medium=medium))
        index.check()
    assert (matched(index, range(1)), len(index)) == (0, 0)
    assert counts_of(index)["removed_unknown"] == 0


def test_a_label_keeps_the_order_of_its_blocks_whatever_goes() -> None:
    index = index_of(chain([7] * 40))
    apply(index, A, BlockRemoved(block_hashes=[7], medium="CPU"))
    assert matched(index, range(40)) == 40
    apply(index, A, chain([8]), BlockRemoved(block_hashes=[7]))
    assert matched(index, range(40)) == 1  # under label 8
    assert counts_of(index)["removed_ambiguous"] == 39


# Units of one block


@pytest.mark.parametrize(("size", "blocks"), [(1024, 2), (1025, 0), (100_000, 0)])
def test_a_block_of_too_many_units_is_left_out_and_counted(size: int, blocks: int) -> None:
    index = index_of(chain([1]))  # the unit is one token from now on
    tokens = [token & 127 for token in range(2 * size)]
    wide = BlockStored(block_hashes=[8, 9], token_ids=tokens, block_size=size, group_idx=1)
    apply(index, A, wide)
    assert counts_of(index)["ignored"] == ({} if blocks else {"too_many_units": 2})
    in_tree = index.statistics()["unique_blocks"]
    assert (len(index), in_tree) == (1 + blocks, blocks * size or 1)


# Blocks of one rank


def test_one_rank_does_not_use_up_a_large_max_blocks() -> None:
    index = Index(max_blocks=20_000)
    apply(index, A, chain(list(range(1, 20_001))))
    assert counts_of(index)["ignored"] == {"max_blocks_per_rank": 2_000}
    apply(index, B, stored(0, 1))
    assert matched(index, prompt(2), B) == 2
    assert Index(max_blocks=20_000, max_blocks_per_rank=20_000).max_blocks_per_rank == 20_000
    assert Index(max_blocks=19_999).max_blocks_per_rank == 18_000


def test_a_client_makes_an_index_with_a_bound_of_each_rank() -> None:
    with Client() as client:
        assert client.index.max_blocks_per_rank == MAX_BLOCKS_PER_RANK
    with Client(max_blocks_per_rank=5) as client:
        assert client.index.max_blocks_per_rank == 5
    with Client(index=Index()) as client:
        assert client.index.max_blocks_per_rank is None
    with pytest.raises(ConfigurationError, match=r"Index\(max_blocks_per_rank=...\)"):
        Client(index=Index(), max_blocks_per_rank=5)
    with pytest.raises(ConfigurationError, match="max_blocks_per_rank must be at least 1 block"):
        Client(max_blocks_per_rank=0)
