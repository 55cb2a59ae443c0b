"""What is kept follows from what is resident, and nothing leaks."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from kvindex import ConfigurationError, Rank
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.wire import Event
from kvindex.wire.errors import InvariantError
from tests.index.index_events import CLEAR, A, B, apply, both, prompt, removed, stored
from tests.index.index_stories import Action, Scene, Story, cleared, counts, of, stories, totals

pytestmark = pytest.mark.unit


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


@both
def test_removals_in_any_order_leave_nothing(kind: type[BaseIndex]) -> None:
    for order in permutations(range(4)):
        index = kind()
        apply(index, A, stored(0, 1, 2, 3))
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


@both
def test_the_runs_of_an_index_do_not_show_its_history(kind: type[BaseIndex]) -> None:
    for seed in range(20):
        index = kind()
        for rank, event in history(seed):
            apply(index, rank, event)
        assert [entry.blocks for entry in index.match(prompt(12))] == [12, 5]
        shape(4, 14)(index)
        counts(orphans=0)(index)


def test_the_python_index_says_that_prefixes_need_the_native_module() -> None:
    with pytest.raises(ConfigurationError, match="no prefixes: they need the native module"):
        reference.Index().prefixes()


def test_check_finds_each_broken_invariant() -> None:
    def fault() -> str:
        with pytest.raises(InvariantError) as raised:
            index.check()
        return str(raised.value)

    index = reference.Index()
    apply(index, A, stored(0, 1, 2))
    blocks = index._ranks[A].blocks
    first, middle, last = (block for label in (100, 101, 102) if (block := blocks.get(label)))
    (place,) = last.places
    for owner, name, wrong, message in (
        (middle, "depth", 7, "stands at depth"),
        (last, "places", {}, "a hole that no block follows"),
        (middle, "places", {place: 2}, "by its labels"),
        (first, "children", 2, "1 blocks follow"),
        (blocks, "resident", {place: 9}, "3 blocks at"),
        (blocks, "_size", 4, "resident, counted"),
        (index._budget, "used", 4, "3 blocks resident, counted 4"),
    ):
        right = getattr(owner, name)
        setattr(owner, name, wrong)
        assert message in fault()
        setattr(owner, name, right)
    index.check()
