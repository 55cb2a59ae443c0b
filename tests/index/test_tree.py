"""What is kept follows from what is resident, and nothing leaks."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from kvindex import BACKEND, AllBlocksCleared, ConfigurationError, Index, Rank
from kvindex.index import reference
from kvindex.index.keys import Namespace
from kvindex.index.reference.blocks import Block, Blocks, Budget, Place
from kvindex.index.reference.keys import KeyMaker
from kvindex.wire import Event
from kvindex.wire.errors import InvariantError
from tests.index.index_events import A, B, apply, index_of, prompt, removed, stored

pytestmark = pytest.mark.unit

SPACE = Namespace(block_size=1, lora=None, lookahead=0)
GPU, CPU = Place("GPU", 0), Place("CPU", 0)


class Harness:
    """The blocks of one rank; contents are single letters, and labels are the prefixes."""

    def __init__(self) -> None:
        self.blocks = Blocks(KeyMaker(seed=1), Budget(None, None))

    def extend(self, text: str) -> list[Block]:
        return self.blocks.extend(None, SPACE, [letter.encode() for letter in text])

    def store(self, text: str, place: Place = GPU) -> None:
        for stop, block in enumerate(self.extend(text), 1):
            self.blocks.add(text[:stop].encode(), block, place)
        self.blocks.check()

    def remove(self, text: str, place: Place = GPU) -> None:
        (block,) = self.blocks.held_at(text.encode(), place)
        self.blocks.drop(text.encode(), block, place)
        self.blocks.check()

    @property
    def kept(self) -> tuple[int, int]:
        """How many blocks are kept, holes included, and how many of them are resident."""
        return len(self.blocks.block_keys()), len(self.blocks)


def test_prompts_share_what_they_begin_with() -> None:
    world = Harness()
    world.store("abcdef")
    world.store("abcxyz", CPU)
    assert world.kept == (9, 9)


def test_a_hole_keeps_its_position_only_while_something_is_behind_it() -> None:
    world = Harness()
    world.store("abcd")
    for text in ("ab", "abc", "a"):
        world.remove(text)
    assert world.kept == (4, 1)
    world.remove("abcd")
    assert world.kept == (0, 0)
    assert world.blocks.namespaces() == set()


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_removing_in_any_order_leaves_nothing(order: tuple[int, ...]) -> None:
    world = Harness()
    world.store("abcd")
    world.store("abxy", CPU)
    for i in order:
        world.remove("abcd"[: i + 1])
    assert world.kept == (4, 4)


def test_pruning_drops_what_nobody_holds() -> None:
    world = Harness()
    world.store("abcdef")
    world.blocks.prune(world.extend("abxy")[-1])
    world.blocks.check()
    assert world.kept == (6, 6)


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


def test_the_runs_of_an_index_do_not_show_its_history() -> None:
    shapes = set()
    for seed in range(20):
        index = Index()
        for rank, event in history(seed):
            apply(index, rank, event)
        assert [rank_match.blocks for rank_match in index.match(prompt(12))] == [12, 5]
        statistics = index.statistics()
        shapes.add((statistics["runs"], statistics["unique_blocks"]))
    assert shapes == {(3 if BACKEND == "native" else 12, 12)}


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
    assert index._ranks[A].blocks.namespaces() == set()


def test_the_python_index_says_that_prefixes_need_the_native_module() -> None:
    with pytest.raises(ConfigurationError, match="no prefixes: they need the native module"):
        reference.Index().prefixes()


def test_check_finds_each_broken_invariant() -> None:
    def fault() -> str:
        with pytest.raises(InvariantError) as raised:
            world.blocks.check()
        return str(raised.value)

    world = Harness()
    world.store("abc")
    first, middle, last = world.extend("abc")
    middle.depth = 7
    assert "stands at depth" in fault()
    middle.depth = 1
    places, last.places = last.places, {}
    assert "a hole that no block follows" in fault()
    last.places = places
    first.children = 2
    assert "1 blocks follow" in fault()
    first.children = 1
    world.blocks.resident[GPU] = 9
    assert "3 blocks at" in fault()
    world.blocks.resident[GPU] = 3
    middle.places[GPU] = 2
    assert "by its labels" in fault()
    middle.places[GPU] = 1
    world.blocks._size = 4
    assert "resident, counted" in fault()
