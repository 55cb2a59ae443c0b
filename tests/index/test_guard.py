"""A Ctrl-C and a fork may come at any moment; a thread that waits in an index lets others run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest

import kvindex
from kvindex import (
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    Index,
    InvariantError,
    Rank,
    TokenError,
    UnknownRankError,
)
from kvindex.index import guard as guard_module
from kvindex.index import read_batch, reference
from kvindex.wire import encode_batch
from tests.children import in_child
from tests.index.index_events import A, B, prompt, stored
from tests.live import PATIENCE, meanwhile

pytestmark = pytest.mark.unit


def batch(*numbers: int) -> EventBatch:
    return EventBatch(ts=0.0, events=[stored(*numbers)])


def python_index() -> reference.Index:
    index = reference.Index()
    index.apply(A, batch(0, 1))
    return index


def test_a_change_that_a_ctrl_c_cuts_short_is_never_answered_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = python_index()
    index.add(B)
    blocks = index._ranks[B].blocks
    extend = blocks.extend

    def cut_short(*args: Any, **options: Any) -> None:
        extend(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "extend", cut_short)
    with pytest.raises(KeyboardInterrupt):
        index.apply(B, batch(0, 1, 2))
    for call in (partial(index.match, prompt(2)), partial(index.remove, B), index.statistics):
        with pytest.raises(InvariantError, match=r"KeyboardInterrupt .* make a new one"):
            call()


def test_a_refused_change_leaves_the_index_usable() -> None:
    index = python_index()
    with pytest.raises(TokenError):
        index.apply(A, EventBatch(ts=0.0, events=[stored(2, token_ids=[1.5] * 4)]))
    with pytest.raises(UnknownRankError):
        index.tree(B)
    assert index.match(prompt(2))[A].blocks == 2


def test_only_who_uses_an_index_keeps_it() -> None:
    index = Index()
    guard = weakref.ref(index._guard)
    del index
    gc.collect()
    assert guard() is None


# Forks -------------------------------------------------------------------------------------------


def test_children_have_the_index_as_it_was_though_another_thread_was_changing_it() -> None:
    index = Index()
    index.apply(B, batch(0, 1))
    grown = batch(*range(200))

    def change() -> None:
        index.apply(A, grown)
        index.remove(A)

    def child() -> None:
        match = index.match(prompt(200))
        assert match[B].blocks == 2
        assert A not in match or match[A].blocks in {0, 200}
        index.check()
        index.apply(Rank("new"), batch(0, 1, 2))  # another rank needs every lock there is
        index.remove(A)
        assert index.match(prompt(3))[Rank("new")].blocks == 3
        index.check()

    with meanwhile(change):
        for _ in range(20):
            assert in_child(child) == 0
    assert index.ranks == (B,)
    index.check()


PIECE = 1024  # blocks of a native change between which other threads go first


@pytest.mark.skipif(kvindex.BACKEND != "native", reason="a Python change is one piece")
def test_a_child_has_a_part_of_a_long_change_that_another_thread_was_making() -> None:
    blocks = 20 * PIECE
    tokens = list(range(blocks))
    chain = BlockStored(block_hashes=[*range(1, blocks + 1)], token_ids=tokens, block_size=1)
    for _ in range(5):
        index = Index()
        index.add(A)

        def child(index: Index = index) -> None:
            index.check()
            assert index.match(tokens)[A].blocks % PIECE == 0
            index.apply(A, EventBatch(ts=0.0, events=[AllBlocksCleared(), stored(0)]))
            assert len(index) == 1

        change = partial(index.apply, A, EventBatch(ts=0.0, events=[chain]))
        thread = threading.Thread(target=change)
        thread.start()
        while not len(index) and thread.is_alive():
            pass
        assert in_child(child) == 0
        thread.join()
        assert index.match(tokens)[A].blocks == blocks


def test_a_grandchild_has_the_index_too() -> None:
    index = Index()
    index.apply(A, batch(0, 1))

    def child() -> None:
        index.apply(A, batch(2))
        assert in_child(grandchild) == 0

    def grandchild() -> None:
        assert index.match(prompt(3))[A].blocks == 3

    assert in_child(child) == 0
    assert index.match(prompt(3))[A].blocks == 2


def test_a_fork_during_a_change_that_does_not_end_leaves_the_child_an_index_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard_module, "_PATIENCE", 0.0)
    index = python_index()
    index.add(B)
    within, end = threading.Event(), threading.Event()
    blocks = index._ranks[B].blocks
    extend = blocks.extend

    def stay(*args: Any, **options: Any) -> Any:
        within.set()
        end.wait(PATIENCE)
        return extend(*args, **options)

    monkeypatch.setattr(blocks, "extend", stay)

    def child() -> None:
        with pytest.raises(InvariantError, match="when this process was forked; make a new one"):
            index.match(prompt(2))
        assert python_index().match(prompt(2))[A].blocks == 2

    thread = threading.Thread(target=partial(index.apply, B, batch(0, 1, 2)))
    thread.start()
    try:
        assert within.wait(PATIENCE)
        assert in_child(child) == 0
    finally:
        end.set()
        thread.join()
    assert index.match(prompt(3))[B].blocks == 3


# Waiting -----------------------------------------------------------------------------------------

WAITERS = """
import threading
from kvindex import BlockStored, CacheSettings, EventBatch, Index, Rank
from kvindex.wire import encode_batch

A = Rank("a")
index = Index()
batch = EventBatch(ts=0.0, events=[BlockStored(block_hashes=[1], token_ids=[1, 2], block_size=2)])
index.apply(A, batch)
payload = encode_batch(batch)
calls = [
    lambda: index.apply(A, payload),
    lambda: index.apply(A, batch),
    lambda: index.add(Rank("b")),
    lambda: index.configure(A, CacheSettings()),
    lambda: index.rename({A: A}),
    lambda: index.match([1, 2]),
    lambda: index.match([1, 2], extra_keys=[["x"]]),
    lambda: len(index),
    lambda: len(index.tree(A)),
    lambda: index.statistics(),
    lambda: index.tree(A).statistics(),
    lambda: list(index.tree(A).walk()),
    lambda: index.check(),
    lambda: index.dump(A),
]
index._core.hold_for_fork()  # nothing can change, and whoever asks comes after those who would
threads = [threading.Thread(target=call) for call in calls]
for thread in threads:
    thread.start()
    thread.join(0.02)  # waiting by now, as a rule
assert threads[0].is_alive()
index._core.end_fork(False)
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(kvindex.BACKEND != "native", reason="the Python index waits as Python does")
def test_whoever_waits_for_the_index_lets_other_threads_run() -> None:
    # With the GIL held in any of these, the thread that is waited for never runs again.
    subprocess.run([sys.executable, "-c", WAITERS], check=True, timeout=PATIENCE)


@pytest.mark.skipif(kvindex.BACKEND != "native", reason="the Python index decodes in Python")
def test_other_threads_run_while_a_long_payload_is_decoded() -> None:
    payload = encode_batch(batch(*range(100_000)))
    steps = [0]

    def step() -> None:
        steps[0] += 1
        time.sleep(0)  # gives the GIL away, and has it again when somebody else does

    interval = sys.getswitchinterval()
    try:
        with meanwhile(step):
            sys.setswitchinterval(1000.0)  # whoever has the GIL is not asked for it
            for _ in range(50):
                before = steps[0]
                read_batch(payload)
                if steps[0] > before:
                    return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("no other thread had a turn while the payload was decoded")
