"""Forks of a process with replicas: no message is half applied in the child."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from kvindex.fanout import forks
from kvindex.fanout.copy import Copy
from kvindex.fanout.entries import Applied, Message
from kvindex.fanout.forks import Afterwards, prepare_forks
from kvindex.rank import Rank
from kvindex.wire import BlockStored, EventBatch, encode_batch

RANK = Rank("a", 0)
PATIENCE = 20.0


class Noted:
    """Notes what it is told."""

    def __init__(self, told: list[str]) -> None:
        self.told = told
        prepare_forks(self, Noted.prepare)

    def prepare(self) -> Afterwards:
        self.told.append("before")
        told = self.told
        return lambda in_child: told.append("child" if in_child else "parent")


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Leave out what other tests left."""
    gc.collect()
    kept = dict(forks._prepared)
    forks._prepared.clear()
    yield
    forks._prepared.update(kept)


def forked(child: Callable[[], bool]) -> bool:
    """Return what a child says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if child() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_each_side_is_told_once_and_the_child_of_the_child_nothing() -> None:
    told: list[str] = []
    noted = Noted(told)
    assert forked(lambda: told == ["before", "child"] and forked(lambda: len(told) == 2))
    assert noted.told == ["before", "parent"]


def test_what_is_gone_is_not_told() -> None:
    told: list[str] = []
    Noted(told)
    gc.collect()
    assert forked(lambda: True)
    assert told == []


def message(number: int, block: int) -> Message:
    stored = BlockStored(
        block_hashes=[block], token_ids=list(range(block, block + 4)), block_size=4
    )
    batch = EventBatch(ts=float(number), events=[stored])
    return Message(number, 0.0, [Applied(RANK, encode_batch(batch))])


class Held:
    """Forks only when a copy is whole."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.asked = threading.Event()
        prepare_forks(self, Held.prepare)

    def prepare(self) -> Afterwards:
        self.asked.set()
        assert self.copy.applying.acquire(timeout=PATIENCE)
        return lambda _: self.copy.applying.release()


def test_who_holds_a_copy_finds_whole_messages_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copy()
    copy.catchup.begin(0)
    copy.catchup.end(0)
    within, go_on = threading.Event(), threading.Event()
    apply = copy.index.apply

    def slow(rank: Rank, batch: EventBatch) -> None:
        within.set()
        go_on.wait(PATIENCE)
        apply(rank, batch)

    monkeypatch.setattr(copy.index, "apply", slow)
    follower = threading.Thread(target=copy.apply, args=(message(0, 1),))
    follower.start()
    held = Held(copy)
    assert within.wait(PATIENCE)

    def let_go() -> None:
        held.asked.wait(PATIENCE)
        go_on.set()

    releaser = threading.Thread(target=let_go)
    releaser.start()
    assert forked(lambda: len(copy.index) == 1 and copy.applying.acquire(blocking=False))
    for thread in (follower, releaser):
        thread.join()
    assert not copy.applying.locked()
