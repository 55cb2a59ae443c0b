"""The tree's shape follows from what is resident, and nothing leaks."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from kvindex import Index, Rank
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.index.keys import Namespace
from kvindex.index.reference.keys import KeyMaker
from kvindex.index.reference.tree import Block, Owner, RadixTree
from kvindex.wire import Event
from kvindex.wire.errors import InvariantError
from tests.index.index_events import CLEAR, A, B, apply, index_of, prompt, removed, stored
from tests.index.index_stories import Action, Scene, Story, cleared, counts, of, stories, totals

pytestmark = pytest.mark.unit


def shape(runs: int, blocks: int, native: int | None = None) -> Action:
    """Check the size of the tree; the native index has other runs where prompts part."""

    def check(index: BaseIndex) -> None:
        number = runs if native is None or index.backend == "python" else native
        totals(runs=number, unique_blocks=blocks)(index)

    return check


SIX = stored(*range(6))
SHAPES = {
    "one prompt is one run however long": Story(
        *(stored(block) for block in range(8)), shape(1, 8)
    ),
    "prompts split where they part and join when one goes": Story(
        Scene(SIX, stored(7, 8, 9, parent=102), shape(3, 9, native=2)),
        Scene(removed(7, 8, 9), shape(1, 6)),
    ),
    "owners split where they part and join when they agree": Story(
        Scene(SIX, of(B, stored(0, 1, 2)), shape(2, 6)),
        Scene(of(B, stored(3, 4, 5)), shape(1, 6)),
        Scene(of(B, removed(3, 4, 5)), shape(2, 6), of(B, removed(0, 1, 2)), shape(1, 6)),
    ),
    "a hole splits in three and filling it joins again": Story(
        Scene(SIX, removed(2), shape(3, 6), stored(2), shape(1, 6))
    ),
    "a hole keeps its place only while something is behind it": Story(
        Scene(SIX, removed(*range(5)), shape(2, 6)),  # a run of holes and the last block
        Scene(removed(5), shape(0, 0)),
    ),
    "blocks that are left out leave no run": Story(
        Scene(SIX, stored(7, 8, parent=101), shape(1, 6)), max_blocks=6
    ),
}

MUCH = Scene(
    Scene(stored(0, 1, 2, 3), stored(2, medium="CPU"), stored(9, lora_name="l")),
    Scene(stored(30, 31, parent=None, lora_name="l"), stored(1)),
)
NOTHING = Scene(totals(runs=0, unique_blocks=0, blocks=0, orphans=0))
LEFT = {
    "nothing is left after removals": Story(
        Scene(MUCH, removed(0, 3, 2, 1), removed(2, medium="CPU"), removed(1)),
        Scene(removed(31, 30, 9), NOTHING),
    ),
    "nothing is left after a clear of the device and a removal on the host": Story(
        Scene(MUCH, CLEAR, removed(2, medium="CPU"), NOTHING)
    ),
    "nothing is left after the tree is cleared": Story(Scene(MUCH, cleared, NOTHING)),
    "nothing is left after the rank is removed": Story(
        Scene(MUCH, lambda index: index.remove(A), NOTHING)
    ),
}


@stories(SHAPES | LEFT)
def test_runs_follow_from_what_is_resident(story: Story, way: str) -> None:
    story.run(way)


def test_removals_in_any_order_leave_nothing() -> None:
    for order in permutations(range(4)):
        index = index_of(stored(0, 1, 2, 3))
        apply(index, B, stored(0, 1), stored(7, 8, parent=101))
        apply(index, A, *(removed(block) for block in order))
        shape(1, 4, native=2)(index)


def history(seed: int) -> list[tuple[Rank, Event]]:
    """Stores of blocks 0…11 and of a branch, in some order, and then a removal of 5 and 6."""
    random = Random(seed)
    cuts = sorted(random.sample(range(1, 12), 3))
    parts = list(zip([0, *cuts], [*cuts, 12], strict=True))
    events: list[tuple[Rank, Event]] = []
    for rank in (A, B):
        stores = [*(stored(*range(*part)) for part in parts), stored(20, 21, parent=102)]
        random.shuffle(stores)
        events += [(rank, event) for event in stores]
    return [*events, (A, removed(6, 5) if seed % 2 else removed(5, 6))]


def test_the_runs_of_an_index_do_not_tell_its_history() -> None:
    for seed in range(20):
        index = Index()
        for rank, event in history(seed):
            apply(index, rank, event)
        assert [entry.blocks for entry in index.match(prompt(12))] == [12, 5]
        shape(5, 14, native=4)(index)
        counts(orphans=0)(index)


def test_no_namespace_is_left_once_everything_is_gone() -> None:
    index = reference.Index()
    apply(index, A, stored(0, 1), stored(9, lora_name="l"), removed(1, 0, 9))
    assert index._tree.namespaces() == []


def three_blocks() -> tuple[RadixTree, list[Block], Owner]:
    tree, owner = RadixTree(KeyMaker(seed=1)), Owner(A, "GPU", 0)
    blocks = tree.extend(None, Namespace(block_size=1, lora=None, lookahead=0), [b"a", b"b", b"c"])
    tree.own(blocks, owner)
    tree.check()
    return tree, blocks, owner


def test_check_finds_each_broken_invariant() -> None:
    tree, blocks, _ = three_blocks()
    blocks[1].depth = 7
    with pytest.raises(InvariantError, match="stands at depth"):
        tree.check()

    tree, blocks, _ = three_blocks()
    blocks[0].run.owners = frozenset()
    with pytest.raises(InvariantError, match="a leaf without owners"):
        tree.check()

    tree, blocks, _ = three_blocks()
    tree.block_count += 1
    with pytest.raises(InvariantError, match="3 blocks, counted 4"):
        tree.check()

    tree, blocks, _ = three_blocks()
    tree._split(blocks[0].run, 1)
    with pytest.raises(InvariantError, match="two runs that could be one"):
        tree.check()

    tree, _, owner = three_blocks()
    owner.resident = 9
    with pytest.raises(InvariantError, match="owns 3 blocks"):
        tree.check()
