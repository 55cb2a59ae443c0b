"""A long change of one rank lets others go first, and what they see follows from its events."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Index, Rank
from kvindex.index import guard, reference
from kvindex.index.api import BaseIndex
from kvindex.wire import CacheSettings
from kvindex.wire.events import Event as WireEvent
from tests.index.index_events import A, B, stored

pytestmark = pytest.mark.unit

LONG = 5 * guard.HOLD_BLOCKS
C = Rank("c")


def batch(*events: WireEvent) -> EventBatch:
    return EventBatch(ts=0.0, events=list(events))


def chain(blocks: int, **fields: Any) -> BlockStored:
    """One event that stores the first blocks of the long prompt, of one token each."""
    return BlockStored(
        block_hashes=list(range(1, blocks + 1)),
        token_ids=list(range(blocks)),
        block_size=1,
        **fields,
    )


def blocks_of(index: BaseIndex, rank: Rank) -> int:
    return index.match(list(range(LONG)))[rank].blocks


@pytest.fixture
def at_pauses(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What is done while a change in the Python index lets others go first."""
    calls: list[Callable[[], None]] = []

    let_others_go = guard.Guard._let_others_go

    def pause(paused: guard.Guard) -> None:
        let_others_go(paused)
        called = calls.copy()
        calls.clear()  # what they do may pause too
        for call in called:
            call()
        calls.extend(called)

    monkeypatch.setattr(guard.Guard, "_let_others_go", pause)
    return calls


def seen_during(
    index: BaseIndex, at_pauses: list[Callable[[], None]], *events: WireEvent
) -> list[int]:
    """How many blocks rank A matched at each pause while the events were applied to it."""
    seen: list[int] = []
    at_pauses.append(lambda: seen.append(blocks_of(index, A)))
    index.apply(A, batch(*events))
    index.check()
    return seen


def test_while_a_chain_is_stored_its_beginning_is_answered_for(at_pauses: Any) -> None:
    index = reference.Index()
    index.add(A)
    seen = seen_during(index, at_pauses, chain(LONG))
    assert seen == sorted(seen)
    assert set(seen) >= {guard.HOLD_BLOCKS * cut for cut in (1, 2, 3, 4)}
    assert blocks_of(index, A) == LONG


def test_while_blocks_are_removed_the_rest_is_answered_for(at_pauses: Any) -> None:
    index = reference.Index()
    index.apply(A, batch(chain(LONG)))
    seen = seen_during(index, at_pauses, BlockRemoved(block_hashes=list(range(LONG, 0, -1))))
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 3
    assert len(index) == 0


@pytest.mark.parametrize("clear", [AllBlocksCleared(), BlockRemoved(block_hashes=[7])], ids=str)
def test_while_one_small_event_drops_very_much_others_go_first(at_pauses: Any, clear: Any) -> None:
    index = reference.Index()
    index.apply(A, batch(chain(LONG)))
    if isinstance(clear, BlockRemoved):  # one label for all
        index.tree(A).clear()
        many = chain(LONG)
        many.block_hashes[:] = [7] * LONG
        index.apply(A, batch(many))
    seen = seen_during(index, at_pauses, clear)
    assert len(seen) > 3
    assert set(seen) <= set(range(LONG + 1))
    assert len(index) == 0


def test_between_two_pauses_other_ranks_change(at_pauses: Any) -> None:
    index = reference.Index()
    index.apply(B, batch(chain(10)))

    def others() -> None:
        index.apply(B, batch(BlockRemoved(block_hashes=[10]), chain(10)))
        index.apply(C, batch(chain(LONG // 4)))
        index.remove(C)
        assert blocks_of(index, B) == 10

    at_pauses.append(others)
    index.apply(A, batch(chain(LONG)))
    at_pauses.clear()
    index.check()
    assert (blocks_of(index, A), blocks_of(index, B)) == (LONG, 10)
    assert index.ranks == (A, B)


CHANGES: dict[str, Callable[[BaseIndex], Any]] = {
    "clear": lambda index: index.tree(A).clear(),
    "remove": lambda index: index.remove(A),
    "rename over it": lambda index: index.rename({B: A}),
    "configure": lambda index: index.configure(A, CacheSettings()),
    "dump": lambda index: index.dump(A),
    "restore": lambda index: index.restore(A, index.dump(B)),
    "apply": lambda index: index.apply(A, batch(AllBlocksCleared(), stored(0))),
    "walk": lambda index: list(index.tree(A).walk()),
    "check": lambda index: index.check(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_needs_the_rank_whole_waits_for_the_batch(at_pauses: Any, name: str) -> None:
    index = reference.Index()
    index.apply(B, batch(stored(0)))
    index.add(A)
    started = Event()

    def change() -> Any:
        started.set()
        return CHANGES[name](index)

    with ThreadPoolExecutor(1) as threads:
        changing: list[Any] = []

        def once() -> None:
            if not changing:
                changing.append(threads.submit(change))
                started.wait(10)
            assert not changing[0].done()

        at_pauses.append(once)
        index.apply(A, batch(chain(LONG)))
        at_pauses.clear()
        found = changing[0].result(timeout=30)
    index.check()
    after = len(index.tree(A)) if A in index.ranks else None
    expected = {"clear": 0, "remove": None, "rename over it": 1, "restore": 1, "apply": 1}
    assert after == expected.get(name, LONG)
    if name == "dump":
        copy = reference.Index(seed=index.seed)
        copy.restore(A, found)
        assert blocks_of(copy, A) == LONG
    if name == "walk":
        assert len(found) == LONG


def test_many_threads_change_one_rank_by_long_batches() -> None:
    index = Index()
    index.add(A)
    shorter, longer = chain(LONG - 3), chain(LONG)

    def work(number: int) -> None:
        for turn in range(4):
            if number == 0:
                index.apply(A, batch(AllBlocksCleared(), longer))
            elif number == 1:
                index.apply(A, batch(AllBlocksCleared(), shorter))
            elif number == 2:
                index.dump(A)
            else:
                index.tree(A).clear() if turn % 2 else index.check()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, number) for number in range(4)]:
            done.result(timeout=60)
    index.check()
    assert blocks_of(index, A) in {0, LONG - 3, LONG}
    index.apply(A, batch(AllBlocksCleared(), longer))
    assert len(index) == blocks_of(index, A) == LONG
    index.remove(A)
    assert (len(index), index.statistics()["unique_blocks"]) == (0, 0)
