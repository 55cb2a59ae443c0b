"""What is kept follows from what is resident, and nothing leaks."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from kvindex import ConfigurationError, Index, Rank
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.index.reference.blocks import Block, Blocks, Budget, Place
from kvindex.index.reference.keys import KeyMaker
from kvindex.index.tokens import Namespace
from kvindex.wire import Event
from kvindex.wire.errors import InvariantError
from tests.index.index_events import CLEAR, A, B, apply, index_of, prompt, removed, stored
from tests.index.index_stories import Action, Scene, Story, cleared, counts, of, stories, totals

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


def shape(runs: int, blocks: int) -> Action:
    """Check the size of the tree; each block of the Python index is a run."""

    def check(index: BaseIndex) -> None:
        native = index.backend == "native"
        totals(runs=runs if native else blocks, unique_blocks=blocks)(index)

    return check


SIX = stored(*range(6))
SHAPES = {
    "one prompt is one run however long": Story(
        *(stored(block) for block in range(8)), shape(1, 8)
    ),
    "prompts split where they part and join when one goes": Story(
        Scene(SIX, stored(7, 8, 9, parent=102), shape(2, 9)),
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
        shape(2, 4)(index)


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


def test_the_runs_of_an_index_do_not_show_its_history() -> None:
    for seed in range(20):
        index = Index()
        for rank, event in history(seed):
            apply(index, rank, event)
        assert [entry.blocks for entry in index.match(prompt(12))] == [12, 5]
        shape(4, 14)(index)
        counts(orphans=0)(index)


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
