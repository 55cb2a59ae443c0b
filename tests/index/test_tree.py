"""The tree's shape follows from what is resident, and nothing leaks."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from kvindex import AllBlocksCleared, Index, Rank
from kvindex.index import reference
from kvindex.index.keys import Namespace
from kvindex.index.reference.keys import KeyMaker
from kvindex.index.reference.tree import Block, Owner, RadixTree
from kvindex.wire import Event
from kvindex.wire.errors import InvariantError
from tests.index.index_events import A, B, apply, index_of, prompt, removed, stored

pytestmark = pytest.mark.unit

SPACE = Namespace(block_size=1, lora=None, lookahead=0)


class Harness:
    """A tree with three owners; contents are single letters."""

    def __init__(self) -> None:
        self.tree = RadixTree(KeyMaker(seed=1))
        self.a, self.b, self.c = (Owner(Rank(name), "GPU", 0) for name in "abc")

    def own(self, text: str, owner: Owner) -> list[Block]:
        """Own all the blocks of a prompt."""
        blocks = self.tree.extend(None, SPACE, [letter.encode() for letter in text])
        self.tree.own(blocks, owner)
        self.tree.check()
        return blocks

    def disown(self, blocks: list[Block], owner: Owner) -> None:
        self.tree.disown(blocks, owner)
        self.tree.check()

    @property
    def shape(self) -> tuple[int, int]:
        return self.tree.run_count, self.tree.block_count


def test_one_prompt_is_one_run_however_long() -> None:
    world = Harness()
    for stop in range(1, 9):
        world.own("abcdefgh"[:stop], world.a)
    assert world.shape == (1, 8)


def test_prompts_split_where_they_part_and_join_when_one_goes() -> None:
    world = Harness()
    world.own("abcdef", world.a)
    branch = world.own("abcxyz", world.a)
    assert world.shape == (3, 9)
    world.disown(branch[3:], world.a)
    assert world.shape == (1, 6)


def test_owners_split_where_they_part_and_join_when_they_agree() -> None:
    world = Harness()
    world.own("abcdef", world.a)
    few = world.own("abc", world.b)
    assert world.shape == (2, 6)
    many = world.own("abcdef", world.b)
    assert world.shape == (1, 6)
    world.disown(many, world.b)
    assert world.shape == (1, 6)
    assert few[0].run.owners == {world.a}


def test_a_hole_splits_in_three_and_filling_it_joins_again() -> None:
    world = Harness()
    blocks = world.own("abcdef", world.a)
    world.disown([blocks[2]], world.a)
    assert world.shape == (3, 6)
    world.tree.own([blocks[2]], world.a)
    world.tree.check()
    assert world.shape == (1, 6)


def test_a_hole_keeps_its_place_only_while_something_is_behind_it() -> None:
    world = Harness()
    blocks = world.own("abcdef", world.a)
    world.disown(blocks[:5], world.a)
    assert world.shape == (2, 6), "one run of holes and the last block"
    world.disown(blocks[5:], world.a)
    assert world.shape == (0, 0)
    assert world.tree.namespaces() == []


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_disowning_in_any_order_leaves_nothing(order: tuple[int, ...]) -> None:
    world = Harness()
    blocks = world.own("abcd", world.a)
    world.own("abxy", world.b)
    for i in order:
        world.disown([blocks[i]], world.a)
    assert world.shape == (1, 4)


def test_pruning_takes_back_what_nobody_owns() -> None:
    world = Harness()
    world.own("abcdef", world.a)
    world.tree.prune(world.tree.extend(None, SPACE, [b"a", b"b", b"x", b"y"])[-1])
    world.tree.check()
    assert world.shape == (1, 6)


def test_the_same_residents_have_the_same_shape_in_whatever_order_they_came() -> None:
    texts = ["abcdef", "abcxyz", "abc", "abq", "zz"]
    shapes = set()
    for seed in range(20):
        world = Harness()
        random = Random(seed)
        stores = [(text, owner) for text in texts for owner in (world.a, world.b)]
        stores.append(("abcdefgh", world.c))
        random.shuffle(stores)
        for text, owner in stores:
            world.own(text, owner)
        noise = world.own("abcdXY", world.c)
        world.disown(noise[4:], world.c)
        shapes.add(world.shape)
    assert len(shapes) == 1


def history(seed: int) -> list[tuple[Rank, Event]]:
    """Stores of blocks 0…11 by two ranks, one removal of 5 and 6, in some order that is allowed."""
    random = Random(seed)
    cuts = sorted(random.sample(range(1, 12), 3))
    parts = list(zip([0, *cuts], [*cuts, 12], strict=True))
    events: list[tuple[Rank, Event]] = []
    for rank in (A, B):
        random.shuffle(parts)
        events += [(rank, stored(*range(*part))) for part in parts]
    return [*events, (A, removed(6, 5) if seed % 2 else removed(5, 6))]


def test_the_runs_of_an_index_do_not_tell_its_history() -> None:
    shapes = set()
    for seed in range(20):
        index = Index()
        for rank, event in history(seed):
            apply(index, rank, event)
        assert [found.blocks for found in index.match(prompt(12))] == [12, 5]
        statistics = index.statistics()
        shapes.add((statistics["runs"], statistics["unique_blocks"]))
    assert shapes == {(3, 12)}


@pytest.mark.parametrize("way", ["removals", "clear event", "clear tree", "remove rank"])
def test_nothing_is_left_once_everything_is_gone(way: str) -> None:
    index = index_of(stored(0, 1, 2, 3), stored(2, medium="CPU"), stored(9, lora_name="l"))
    apply(index, A, stored(30, 31, parent=None, lora_name="l"), stored(1))
    if way == "removals":
        gone = [removed(0, 3, 2, 1), removed(2, medium="CPU"), removed(1), removed(31, 30, 9)]
        apply(index, A, *gone)
    elif way == "clear event":
        apply(index, A, AllBlocksCleared(), removed(2, medium="CPU"))  # the host is not cleared
    elif way == "clear tree":
        index.tree(A).clear()
    else:
        index.remove(A)
    index.check()
    statistics = index.statistics()
    assert (statistics["runs"], statistics["unique_blocks"], statistics["blocks"]) == (0, 0, 0)
    assert (statistics["orphans"], len(index)) == (0, 0)


def test_no_namespace_is_left_once_everything_is_gone() -> None:
    index = reference.Index()
    apply(index, A, stored(0, 1), stored(9, lora_name="l"), removed(1, 0, 9))
    assert index._tree.namespaces() == []


def test_check_finds_each_broken_invariant() -> None:
    def broken(text: str) -> tuple[Harness, list[Block]]:
        world = Harness()
        return world, world.own(text, world.a)

    world, blocks = broken("abc")
    blocks[1].depth = 7
    with pytest.raises(InvariantError, match="stands at depth"):
        world.tree.check()

    world, blocks = broken("abc")
    blocks[0].run.owners = frozenset()
    with pytest.raises(InvariantError, match="a leaf without owners"):
        world.tree.check()

    world, blocks = broken("abc")
    world.tree.block_count += 1
    with pytest.raises(InvariantError, match="3 blocks, counted 4"):
        world.tree.check()

    world, blocks = broken("abc")
    world.tree._split(blocks[0].run, 1)
    with pytest.raises(InvariantError, match="two runs that could be one"):
        world.tree.check()

    world, blocks = broken("abc")
    world.a.resident = 9
    with pytest.raises(InvariantError, match="owns 3 blocks"):
        world.tree.check()
