"""What one rank may cost: labels, units and blocks are bounded per rank."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvindex import (
    BACKEND,
    BlockRemoved,
    BlockStored,
    Client,
    ConfigurationError,
    EventBatch,
    Index,
    SnapshotError,
)
from kvindex.client.client import MAX_BLOCKS_PER_RANK
from tests.index.index_events import (
    A,
    B,
    apply,
    counts_of,
    index_of,
    matched,
    prompt,
    restored,
    stored,
)

pytestmark = pytest.mark.unit

ROUNDS = 10  # other processes lengthen some measurements; what costs too much does so in each


def chain(labels: list[Any], parent: int | None = None, **fields: Any) -> BlockStored:
    tokens = [number & 127 for number in range(len(labels))]
    return BlockStored(
        block_hashes=labels,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=1,
        **fields,
    )


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


@pytest.mark.skipif(BACKEND != "native", reason="the Python index has no snapshots")
def test_a_section_beyond_max_blocks_per_rank_is_refused_whole() -> None:
    index = index_of(stored(0, 1, 2))
    small = Index(seed=index.seed, max_blocks_per_rank=2)
    with pytest.raises(SnapshotError, match="max_blocks_per_rank leaves room for 2") as refused:
        small.restore(A, index.dump(A))
    assert (refused.value.reason, small.ranks) == ("room", ())
    with pytest.raises(SnapshotError):
        Index.from_bytes(index.to_bytes(), max_blocks_per_rank=2)
    assert len(Index.from_bytes(index.to_bytes(), max_blocks_per_rank=3)) == 3


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
