"""Who holds which prefixes: what a walk of the native tree shows, leaves out and costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvindex import BACKEND, BlockStored, EventBatch, Index, Prefixes, Rank
from kvindex.index.api import BaseIndex
from kvindex.wire import BlockHash
from kvindex.wire.errors import ConfigurationError, UnknownRankError
from tests.index.index_events import SIZE, A, B, apply, index_of, removed, stored
from tests.live import meanwhile

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(BACKEND != "native", reason="the Python index shows no prefixes"),
]


def store(index: BaseIndex, rank: Rank, *prompts: str, **fields: Any) -> None:
    """Store prompts whose blocks are single letters, each from its start."""
    for prompt in prompts:
        hashes: list[BlockHash] = [1 + hash_of(prompt[: i + 1]) for i in range(len(prompt))]
        event = BlockStored(
            block_hashes=hashes,
            token_ids=[ord(letter) for letter in prompt],
            block_size=1,
            **fields,
        )
        index.apply(rank, EventBatch(ts=0.0, events=[event]))


def hash_of(prefix: str) -> int:
    return int.from_bytes(prefix.encode(), "big") % (2**63 - 25)


def lines(walk: Prefixes) -> list[tuple[int, int, int, int]]:
    """Parent, depth, blocks and how many ranks hold it, of each node."""
    return [(node.parent, node.depth, node.blocks, node.ranks) for node in walk.nodes]


def test_an_empty_index_has_no_nodes() -> None:
    index = Index()
    index.add(A)
    walk = index.prefixes()
    assert (walk.nodes, walk.ranks, walk.children, walk.unique_blocks) == ((), (A,), 0, 0)


def test_a_long_prompt_of_one_rank_is_one_node() -> None:
    index = Index()
    store(index, A, "x" * 300)
    assert lines(index.prefixes()) == [(-1, 0, 300, 1)]


def test_prompts_that_part_and_holders_that_differ_begin_nodes() -> None:
    index = Index()
    store(index, A, "systemAsk")
    store(index, B, "systemBuy")
    store(index, B, "sys")
    assert lines(index.prefixes()) == [(-1, 0, 6, 2), (0, 6, 3, 1), (0, 6, 3, 1)]
    store(index, A, "systemBu")
    assert lines(index.prefixes()) == [(-1, 0, 6, 2), (0, 6, 2, 2), (0, 6, 3, 1), (1, 8, 1, 1)]


def test_the_oldest_of_equal_siblings_comes_first() -> None:
    index = Index()
    store(index, A, "pabc", "pdef")
    store(index, B, "pdef", "pghi", "pabc")
    walk = index.prefixes(2)
    store(index, A, "pghi")
    assert [node.depth for node in walk.nodes] == [0, 1]
    assert index.prefixes(2).nodes[1] == walk.nodes[1]


def test_who_comes_back_is_the_youngest() -> None:
    index = Index()
    store(index, A, "pabc")
    store(index, B, "pdef")
    assert index.prefixes(2).nodes[1].rows == {"GPU": b"\x01"}
    gone = [1 + hash_of("pabc"[:stop]) for stop in (4, 3, 2)]
    apply(index, A, removed(*gone, base=0))
    store(index, A, "pabc")
    index.check()
    assert index.prefixes(2).nodes[1].rows == {"GPU": b"\x02"}


def test_a_hole_keeps_the_place_of_what_comes_after_it() -> None:
    index = index_of(stored(0, 1, 2, 3), removed(1, 2))
    walk = index.prefixes()
    assert lines(walk) == [(-1, 0, 1, 1), (0, 1, 2, 0), (1, 3, 1, 1)]
    assert not walk.nodes[1].rows
    assert not walk.nodes[1].by_medium
    assert walk.holders(walk.nodes[1]) == ()


def test_media_are_told_apart_and_groups_are_not() -> None:
    index = index_of(stored(0, 1, 2), stored(0, 1, medium="CPU"), rank=B)
    apply(index, A, stored(0, 1, 2, group_idx=0), stored(0, group_idx=1))
    walk = index.prefixes()
    assert lines(walk) == [(-1, 0, 2, 2), (0, 2, 1, 2)]
    first, last = walk.nodes
    assert first.by_medium == {"GPU": 2, "CPU": 1}
    assert first.rows == {"GPU": b"\x03", "CPU": b"\x02"}
    assert last.rows == {"GPU": b"\x03"}
    assert walk.holders(first) == (A, B)
    assert walk.holders(first, "CPU") == (B,)
    assert walk.holders(first, "DISK") == ()


def test_namespaces_are_told_apart() -> None:
    index = index_of(stored(0, 1), stored(0, lora_name="sql"), stored(0, lora_id=7))
    apply(index, A, stored(5, parent=None, cache_salt="s"))
    store(index, B, "xyz")
    walk = index.prefixes()
    shown = {
        (node.block_size, node.lora, node.salted, node.blocks, node.parent) for node in walk.nodes
    }
    assert shown == {
        (SIZE, None, False, 2, -1),
        (SIZE, "sql", False, 1, -1),
        (SIZE, 7, False, 1, -1),
        (SIZE, None, True, 1, -1),
        (1, None, False, 3, -1),
    }
    assert walk.children == 5


def test_what_does_not_fit_is_counted_where_it_is_left_out() -> None:
    index = Index()
    for rank in (A, B):
        store(index, rank, "shared", "shared12", "shared345")
    store(index, A, "shared6789", "own")
    walk = index.prefixes(2)
    assert lines(walk) == [(-1, 0, 6, 2), (0, 6, 3, 2)]
    assert (walk.children, walk.left_out, walk.left_out_blocks) == (2, 1, 3)
    top = walk.nodes[0]
    assert (top.children, top.left_out, top.left_out_blocks) == (3, 2, 2 + 4)
    everything = index.prefixes(5)
    assert len(everything.nodes) == 5
    assert everything.left_out == everything.nodes[0].left_out == 0


def test_short_nodes_that_nothing_follows_are_left_out() -> None:
    index = Index()
    store(index, A, "a1234", "a567", "b")
    walk = index.prefixes(min_blocks=4)
    assert lines(walk) == [(-1, 0, 1, 1), (0, 1, 4, 1)]
    assert (walk.left_out, walk.left_out_blocks) == (1, 1)
    assert (walk.nodes[0].left_out, walk.nodes[0].left_out_blocks) == (1, 3)


def test_only_what_the_ranks_hold_that_are_asked_for_is_shown() -> None:
    index = Index()
    store(index, A, "sharedA")
    store(index, B, "sharedB", "other")
    store(index, Rank("c"), "sharedA", "sh")
    walk = index.prefixes(ranks=["b"])
    assert walk.ranks == (B,)
    assert lines(walk) == [(-1, 0, 6, 1), (-1, 0, 5, 1), (0, 6, 1, 1)]
    assert (walk.nodes[0].children, walk.nodes[0].left_out) == (1, 0)
    both = index.prefixes(ranks=[Rank("c"), A, A])
    assert both.ranks == (Rank("c"), A)
    assert lines(both) == [(-1, 0, 6, 2), (0, 6, 1, 2)]
    with pytest.raises(UnknownRankError):
        index.prefixes(ranks=[Rank("nobody")])


def test_a_chain_without_end_is_cut() -> None:
    index = Index()
    event = BlockStored(block_hashes=[*range(1, 20_001)], token_ids=[*range(20_000)], block_size=1)
    index.apply(A, EventBatch(ts=0.0, events=[event]))
    walk = index.prefixes()
    most = 8192
    assert lines(walk) == [(-1, 0, most, 1), (0, most, most, 1), (1, 2 * most, 3616, 1)]


@pytest.mark.parametrize("asked", [{"max_nodes": 0}, {"max_nodes": 1.5}, {"min_blocks": 0}])
def test_a_walk_that_could_show_nothing_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(asked))):
        Index().prefixes(**asked)


def test_an_answer_is_plain_data() -> None:
    index = index_of(stored(0, 1, 2))
    walk = index.prefixes()
    assert msgspec.convert(msgspec.to_builtins(walk), Prefixes) == walk
    assert index.prefixes(2**70, min_blocks=2).nodes == walk.nodes


def wide(children: int) -> Index:
    """A shared block, and so many prompts after it."""
    index = Index()
    for child in range(children):
        store(index, A, "p" + chr(0x4E00 + child) + "tail")
    return index


def test_the_walk_does_not_cost_more_when_the_index_grows() -> None:
    looked_at = [wide(children).prefixes(4).looked_at for children in (400, 800, 1600)]
    most = 256 * 4
    assert looked_at == [1 + (most - 1) // 4 + 0] * 3
    deeper = Index()
    for child in range(400):  # the same children, each with much behind it
        store(
            deeper, A, *["p" + chr(0x4E00 + child) + "tail" + end for end in ("x" * 50, "y" * 50)]
        )
    assert deeper.prefixes(1).looked_at == wide(400).prefixes(1).looked_at


def test_a_wide_node_leaves_looks_for_the_others() -> None:
    index = wide(1600)
    store(index, B, "p")
    store(index, A, "quite long", "quite another")
    walk = index.prefixes(4)
    assert lines(walk) == [(-1, 0, 1, 2), (-1, 0, 6, 1), (1, 6, 7, 1), (0, 1, 5, 1)]
    wide_node = walk.nodes[0]
    assert (wide_node.children, wide_node.left_out) == (1600, 1599)
    assert wide_node.left_out_blocks < 1599 * 5, "not all were looked at"
    assert walk.nodes[1].left_out_blocks == 4, "all were looked at"


def test_a_walk_is_whole_while_others_change_the_index() -> None:
    index = wide(3000)

    def change() -> None:
        store(index, B, *["p" + chr(0x4E00 + child) + "more" for child in range(0, 3000, 7)])
        index.tree(B).clear()

    with meanwhile(change):
        for _ in range(5):
            walk = index.prefixes(50)
            for row, node in enumerate(walk.nodes):
                assert node.parent < row
                if node.parent >= 0:
                    before = walk.nodes[node.parent]
                    assert node.depth == before.depth + before.blocks
                assert node.blocks > 0
                assert 0 <= node.left_out <= node.children
    index.check()


def test_what_only_other_ranks_hold_is_not_counted_as_left_out() -> None:
    index = Index()
    store(index, A, "pabc", "pdef")
    store(index, B, "pxyz", "qrst", "uvw")
    of_a = index.prefixes(ranks=[A])
    assert (of_a.children, of_a.left_out, of_a.left_out_blocks) == (1, 0, 0)
    assert (of_a.nodes[0].children, of_a.nodes[0].left_out) == (2, 0)
    shown = index.prefixes(2, ranks=[A])
    assert (shown.nodes[0].left_out, shown.nodes[0].left_out_blocks) == (1, 3)
    assert index.prefixes().children == 3
