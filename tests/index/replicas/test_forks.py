"""Forks of a process with replicas: no message is half applied in the child."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from kvindex.index.replicas.copy import Copy
from kvindex.index.replicas.messages import (
    BatchApplied,
    Message,
    ReceivedMessage,
    decode_message,
    encode_message,
)
from kvindex.wire import BlockStored, EventBatch, encode_batch, forks
from kvindex.wire.forks import Fork, prepare_forks
from kvindex.wire.rank import Rank
from tests.children import in_child
from tests.live import PATIENCE

pytestmark = pytest.mark.unit

RANK = Rank("a", 0)


class Noted:
    """Notes each call."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        prepare_forks(self, Noted.prepare)

    def prepare(self, fork: Fork) -> None:
        self.calls.append("before")
        calls = self.calls
        fork.do_in_child(lambda: calls.append("child"))


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Leave out what other tests left."""
    gc.collect()
    kept = dict(forks._prepared)
    forks._prepared.clear()
    yield
    forks._prepared.update(kept)


def test_a_child_is_told_once_and_the_child_of_the_child_nothing() -> None:
    calls: list[str] = []
    noted = Noted(calls)

    def child() -> bool:
        return calls == ["before", "child"] and in_child(lambda: len(calls) == 2) == 0

    assert in_child(child) == 0
    assert noted.calls == ["before"]


def test_what_is_gone_is_not_told() -> None:
    calls: list[str] = []
    Noted(calls)
    gc.collect()
    assert in_child(lambda: True) == 0
    assert calls == []


def test_who_comes_while_a_fork_is_prepared_keeps_nobody_from_being_told() -> None:
    calls: list[str] = []
    noted = [Noted(calls) for _ in range(50)]
    done = threading.Event()

    def join() -> None:
        while not done.is_set():
            Noted([])

    joining = threading.Thread(target=join)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    joining.start()
    try:
        for _ in range(200):
            calls.clear()
            forks._before()
            forks._after(False)
            assert len(calls) == len(noted)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        joining.join()


class Interrupted:
    """Is interrupted while it waits for a second lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        prepare_forks(self, Interrupted.prepare)

    def prepare(self, fork: Fork) -> None:
        fork.hold(self.lock, PATIENCE)
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_lock_taken_and_the_others_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda args: said.append(args.exc_type))
    calls: list[str] = []
    interrupted, noted = Interrupted(), Noted(calls)
    assert in_child(lambda: calls == ["before", "child"] and not interrupted.lock.locked()) == 0
    assert not interrupted.lock.locked()
    assert (noted.calls, said) == (["before"], [KeyboardInterrupt])


def test_a_lock_that_is_not_to_be_had_stays_its_holders() -> None:
    class Impatient:
        lock = threading.Lock()

        def prepare(self, fork: Fork) -> None:
            fork.hold(self.lock, 0.0)

    impatient = Impatient()
    prepare_forks(impatient, Impatient.prepare)
    with impatient.lock:
        assert in_child(impatient.lock.locked) == 0
        assert impatient.lock.locked()


def message(number: int, block: int) -> ReceivedMessage:
    stored = BlockStored(
        block_hashes=[block], token_ids=list(range(block, block + 4)), block_size=4
    )
    batch = EventBatch(ts=float(number), events=[stored])
    body = encode_message(Message(number, 0.0, [BatchApplied(RANK, encode_batch(batch))]))
    return decode_message(body)


class Held:
    """Forks only when a copy is whole."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.asked = threading.Event()
        prepare_forks(self, Held.prepare)

    def prepare(self, fork: Fork) -> None:
        self.asked.set()
        fork.hold(self.copy.applying, PATIENCE)


def test_who_holds_a_copy_finds_whole_messages_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copy()
    copy.catchup.begin(0)
    copy.catchup.end(0)
    within, go_on = threading.Event(), threading.Event()
    follow = copy.catchup.follow

    def slow(number: int) -> bool:
        within.set()
        go_on.wait(PATIENCE)
        return follow(number)

    monkeypatch.setattr(copy.catchup, "follow", slow)
    follower = threading.Thread(target=copy.apply, args=(message(0, 1),))
    follower.start()
    held = Held(copy)
    assert within.wait(PATIENCE)

    def let_go() -> None:
        held.asked.wait(PATIENCE)
        go_on.set()

    releaser = threading.Thread(target=let_go)
    releaser.start()
    assert in_child(lambda: len(copy.index) == 1 and copy.applying.acquire(blocking=False)) == 0
    for thread in (follower, releaser):
        thread.join()
    assert not copy.applying.locked()
