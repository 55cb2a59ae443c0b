"""Many threads ask while one applies: each answer is one that some moment could give."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from threading import Barrier
from typing import Any

import pytest

from kvindex import DecodeError, EventBatch, Index, TokenError
from kvindex.wire import encode_batch
from tests.index.index_events import A, B, apply_together, prompt, removed, stored, tokens
from tests.live import PATIENCE, meanwhile

pytestmark = pytest.mark.unit

READERS = 4
LENGTH = 12


def ask_in_threads(ask: Callable[[], object], times: int) -> None:
    with ThreadPoolExecutor(READERS) as threads:
        for asking in [threads.submit(ask) for _ in range(READERS * times)]:
            asking.result(timeout=PATIENCE)


def test_answers_during_changes_are_whole() -> None:
    index = Index()
    for rank in (A, B):
        apply_together(index, rank, stored(*range(LENGTH)))
    cut = EventBatch(ts=0.0, events=[removed(*range(4, LENGTH))])
    grown = EventBatch(ts=0.0, events=[stored(*range(4, LENGTH))])

    def change() -> None:
        index.apply(A, cut)
        index.apply(A, grown)

    def ask() -> None:
        match = index.match(prompt(LENGTH))
        assert match[A].blocks in {4, LENGTH}
        assert match[B].blocks == LENGTH
        assert len(index) in {4 + LENGTH, 2 * LENGTH}

    with meanwhile(change):
        ask_in_threads(ask, 500)
    index.check()


def test_ranks_may_come_and_go_while_others_are_asked_for() -> None:
    index = Index()
    apply_together(index, B, stored(0, 1))

    def come_and_go() -> None:
        index.apply(A, EventBatch(ts=0.0, events=[stored(0, 1, 2)]))
        index.remove(A)

    def ask() -> None:
        match = index.match(prompt(3))
        assert match[B].blocks == 2
        assert A not in match or match[A].blocks in {0, 3}
        assert set(index.ranks) <= {A, B}

    with meanwhile(come_and_go):
        ask_in_threads(ask, 500)
    index.check()
    assert index.ranks == (B,)


def test_long_payloads_and_prompts_of_many_threads_do_not_meet() -> None:
    """Long ones are read without the interpreter's lock, each thread in memory of its own."""
    length = 600  # blocks: payloads and prompts beyond the sizes that are handled at once
    index = Index()
    start = Barrier(READERS)

    def serve(rank: int) -> list[int]:
        name, base = type(A)("worker", rank), 10_000 * rank
        mine = [token + rank for token in prompt(length)]
        whole = EventBatch(0.0, [stored(*range(length), token_ids=mine, base=base)])
        half = EventBatch(0.0, [removed(*range(length // 2, length), base=base)])
        payloads = [encode_batch(whole), encode_batch(half)]
        forms = [mine, tuple(mine), array("q", mine), array("I", mine)]
        start.wait()
        seen = []
        for turn in range(40):
            for payload in payloads:
                index.apply(name, payload)
                seen.append(index.match(forms[turn % len(forms)])[name].blocks)
            index.tree(name).clear()
        return seen

    with ThreadPoolExecutor(READERS) as threads:
        for seen in threads.map(serve, range(READERS)):
            assert seen == [length, length // 2] * 40
    index.check()
    assert len(index) == 0


@pytest.mark.parametrize("size", [40, 5_000])
def test_a_list_that_another_thread_changes_is_read_as_it_is_or_refused(size: int) -> None:
    index = Index()
    apply_together(index, A, stored(*range(LENGTH)))
    shared: list[Any] = tokens(*range(size))

    def shrink() -> None:
        del shared[len(shared) // 3 :]

    def grow() -> None:
        shared.extend(tokens(*range(len(shared) // 4, size)))

    def spoil() -> None:
        shared[-1:] = ["word", 2**70, None]

    changes = cycle([shrink, grow, shared.clear, grow, spoil, shrink, grow])

    def ask() -> None:
        try:
            assert index.match(shared)[A].blocks in range(LENGTH + 1)
        except TokenError:
            pass

    with meanwhile(lambda: next(changes)()):
        ask_in_threads(ask, 300)
    assert index.match(prompt(LENGTH))[A].blocks == LENGTH


@pytest.mark.parametrize("cut", [0, 1], ids=["good", "damaged"])
@pytest.mark.parametrize("length", [1, 600])
def test_a_payload_is_let_go_whatever_became_of_it(length: int, cut: int) -> None:
    index = Index()
    index.add(A)
    payload = bytearray(encode_batch(EventBatch(0.0, [stored(*range(length))])))
    del payload[len(payload) - cut :]
    try:
        index.apply(A, payload)
    except DecodeError:
        assert cut
    payload.append(0)  # a bytearray that somebody still reads refuses to grow


def test_a_prompt_is_let_go_once_it_is_answered() -> None:
    index = Index()
    buffer = array("q", prompt(2))
    assert len(index.match(buffer)) == 0
    buffer.append(3)  # as above
