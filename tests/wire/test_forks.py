"""What a forked child lets go of, whatever the other threads of its parent were doing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import kvindex
from kvindex import AllBlocksCleared, BlockStored, ClosedError, EventBatch, Index, Rank
from kvindex.index import reference
from kvindex.routing import Router
from kvindex.wire import forks
from kvindex.wire.forks import disown_in_children
from tests.children import in_child
from tests.live import meanwhile
from tests.routing.fleet import PROMPT, router_of

pytestmark = pytest.mark.unit

A = Rank("a")


class Noted:
    """Notes in which process it was let go."""

    def __init__(self, calls: list[str], name: str = "child") -> None:
        self.calls, self.name = calls, name
        disown_in_children(self, Noted.disown)

    def disown(self) -> None:
        self.calls.append(self.name)


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Leave out what other tests left."""
    gc.collect()
    kept = dict(forks._disowned)
    forks._disowned.clear()
    yield
    forks._disowned.update(kept)


def test_a_child_lets_go_once_and_its_child_not_again() -> None:
    calls: list[str] = []
    noted = Noted(calls)

    def child() -> bool:
        return calls == ["child"] and in_child(lambda: calls == ["child"]) == 0

    assert in_child(child) == 0
    assert noted.calls == []


def test_what_was_dropped_before_the_fork_is_not_called() -> None:
    calls: list[str] = []
    Noted(calls)
    gc.collect()
    assert in_child(lambda: calls == []) == 0


def test_one_that_fails_keeps_no_other_from_being_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []

    def fail(_: object) -> None:
        raise RuntimeError

    kept = [Noted(calls), Noted(calls), Noted(calls)]
    disown_in_children(kept[1], fail)
    assert in_child(lambda: calls == ["child", "child"] and "Noted" in caplog.text) == 0


def refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(ClosedError, match="this process was forked; connect in the child"):
            call()


KINDS = {"python": reference.Index, kvindex.BACKEND: Index}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_index_refuses_in_the_child_whatever_another_thread_was_changing(
    kind: type[Index],
) -> None:
    tokens = list(range(5000))
    chain = BlockStored(block_hashes=[*range(5000)], token_ids=tokens, block_size=1)
    index = kind()
    index.add(A)

    def change() -> None:
        index.apply(A, EventBatch(ts=0.0, events=[chain]))
        index.apply(A, EventBatch(ts=0.0, events=[AllBlocksCleared()]))

    def child() -> None:
        refused(
            partial(index.match, tokens[:10]),
            partial(index.apply, A, EventBatch(ts=0.0, events=[])),
            partial(index.add, Rank("new")),
            partial(index.remove, A),
            partial(index.tree, A),
            index.statistics,
            index.check,
        )
        own = kind()
        own.apply(A, EventBatch(ts=0.0, events=[chain]))
        assert own.match(tokens)[A].blocks == 5000
        gc.collect()

    with meanwhile(change):
        assert [in_child(child) for _ in range(10)] == [0] * 10
    index.apply(A, EventBatch(ts=0.0, events=[chain]))
    assert index.match(tokens)[A].blocks == 5000
    index.check()


def test_a_router_and_its_bookings_refuse_in_the_child_while_other_threads_book() -> None:
    router: Router = router_of("ab")
    booking = router.reserve(PROMPT)

    def child() -> None:
        refused(
            partial(router.reserve, PROMPT),
            partial(router.select, PROMPT),
            partial(router.load, "a"),
            router.statistics,
            booking.first_token,
            booking.finish,
        )

    with meanwhile(lambda: router.reserve(PROMPT).finish()):
        assert [in_child(child) for _ in range(10)] == [0] * 10
    booking.finish()
