"""Many threads ask while one applies: each answer is one that some moment could give."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

from kvindex import EventBatch, Index
from tests.unit.index_events import A, B, prompt, removed, stored

READERS = 4
LENGTH = 12


def test_answers_during_changes_are_whole() -> None:
    index = Index()
    index.apply(B, EventBatch(ts=0.0, events=[stored(*range(LENGTH))]))
    grown = EventBatch(ts=0.0, events=[stored(*range(LENGTH))])
    cut = EventBatch(ts=0.0, events=[removed(*range(4, LENGTH))])
    regrown = EventBatch(ts=0.0, events=[stored(*range(4, LENGTH))])
    index.apply(A, grown)
    start, done = Barrier(READERS + 1), Event()

    def change() -> None:
        start.wait()
        for _ in range(300):
            index.apply(A, cut)
            index.apply(A, regrown)
        done.set()

    def ask() -> set[tuple[int, int]]:
        start.wait()
        answers = set()
        while not done.is_set():
            match = index.match(prompt(LENGTH))
            answers.add((match[A].blocks, match[B].blocks))
            assert len(index) in {4 + LENGTH, 2 * LENGTH}
        return answers

    with ThreadPoolExecutor(READERS + 1) as threads:
        readers = [threads.submit(ask) for _ in range(READERS)]
        threads.submit(change).result(timeout=30)
        answers = set().union(*(reader.result(timeout=30) for reader in readers))
    assert answers <= {(4, LENGTH), (LENGTH, LENGTH)}
    index.check()


def test_ranks_may_come_and_go_while_others_are_asked_for() -> None:
    index = Index()
    index.apply(B, EventBatch(ts=0.0, events=[stored(0, 1)]))
    start, done = Barrier(2), Event()

    def come_and_go() -> None:
        start.wait()
        for _ in range(500):
            index.apply(A, EventBatch(ts=0.0, events=[stored(0, 1, 2)]))
            index.remove(A)
        done.set()

    with ThreadPoolExecutor(1) as threads:
        going = threads.submit(come_and_go)
        start.wait()
        while not done.is_set():
            match = index.match(prompt(3))
            assert match[B].blocks == 2
            assert A not in match or match[A].blocks in {0, 3}
            assert set(index.ranks) <= {A, B}
        going.result(timeout=30)
    index.check()
    assert index.ranks == (B,)
