"""Credits of remote readers: what a window admits, when a reader answers, and that both agree."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.errors import WriterDiedError
from kvindex.shm.remote.credits import ReadLedger, SendWindow


def window_of(*, messages: int = 8, size: int = 1000, first: int = 0) -> SendWindow:
    """The window of reader 0, whose first message is this one."""
    window = SendWindow(messages=messages, size=size)
    for _ in range(first):
        window.record(1)
    window.join(0)
    return window


def sent(count: int, *, first: int = 0) -> SendWindow:
    window = window_of(first=first)
    for _ in range(count):
        window.record(10)
    return window


def test_a_window_admits_so_many_messages() -> None:
    window = window_of(messages=3)
    for _ in range(3):
        assert window.admits(1)
        window.record(1)
    assert not window.admits(0)
    assert window.acknowledge(0, 1)
    assert window.admits(1)


def test_a_window_admits_so_many_bytes() -> None:
    window = window_of(messages=100, size=100)
    window.record(60)
    assert window.admits(40)
    assert not window.admits(41)


def test_a_message_larger_than_the_window_goes_alone() -> None:
    window = window_of(messages=4, size=100)
    assert window.admits(10_000)
    window.record(10_000)
    assert not window.admits(0)
    assert window.acknowledge(0, 1)
    assert window.admits(10_000)


def test_a_window_tells_what_is_unread() -> None:
    window = sent(5, first=100)
    assert window.acknowledge(0, 102)
    assert (window.unread, window.unread_bytes) == (3, 30)


@pytest.mark.parametrize(
    ("next_seq", "why"),
    [
        (106, "more messages than were sent"),
        (101, "messages went back"),
        (-1, "a negative number"),
        (2**64 - 1, "a hostile number"),
    ],
)
def test_an_impossible_acknowledgement_changes_nothing(next_seq: int, why: str) -> None:
    window = sent(5, first=100)
    assert window.acknowledge(0, 102)
    assert not window.acknowledge(0, next_seq), why
    assert (window.unread, window.unread_bytes) == (3, 30)


def test_a_repeated_acknowledgement_is_harmless() -> None:
    window = sent(5)
    assert window.acknowledge(0, 3)
    assert window.acknowledge(0, 3)
    assert window.unread == 2


def test_the_slowest_reader_decides_for_all() -> None:
    window = SendWindow(messages=3, size=1000)
    window.join(4)
    window.record(10)
    window.join(9)
    for size in (20, 30):
        window.record(size)
    assert window.slowest == 4
    assert (window.unread_by(4), window.unread_by(9)) == (3, 2)
    assert window.acknowledge(9, 3)
    assert not window.admits(0)
    assert window.acknowledge(4, 1)
    assert window.admits(0)
    assert (window.unread, window.unread_bytes) == (2, 50)
    window.leave(4)
    assert (window.slowest, window.unread, window.unread_bytes) == (9, 0, 0)
    window.leave(9)
    window.record(10)  # for nobody
    assert (window.next_seq, window.sent_bytes, window.unread) == (4, 70, 0)


def test_a_reader_owes_an_answer_for_each_quarter_of_the_messages() -> None:
    ledger = ReadLedger(10, messages=16, size=10**6)
    answers = []
    for seq in range(10, 30):
        ledger.take(seq, 1)
        if ledger.due:
            answers.append(ledger.acknowledge())
    assert answers == [14, 18, 22, 26, 30]
    assert not ledger.pending


def test_a_reader_owes_an_answer_for_each_quarter_of_the_bytes() -> None:
    ledger = ReadLedger(0, messages=1000, size=400)
    ledger.take(0, 99)
    assert not ledger.due
    assert ledger.pending
    ledger.take(1, 1)
    assert ledger.due


@pytest.mark.parametrize("messages", [1, 2, 3])
def test_a_reader_with_a_tiny_window_answers_each_message(messages: int) -> None:
    ledger = ReadLedger(0, messages=messages, size=1)
    ledger.take(0, 0)
    assert ledger.due


@pytest.mark.parametrize(
    ("seq", "message"),
    [
        (6, "message 5 is missing: message 6 came instead"),
        (9, "messages 5 to 8 are missing: message 9 came instead"),
        (4, "message 4 came again: message 5 was next"),
    ],
)
def test_a_reader_that_finds_a_hole_says_which(seq: int, message: str) -> None:
    ledger = ReadLedger(5, messages=8, size=100)
    with pytest.raises(WriterDiedError) as caught:
        ledger.take(seq, 1)
    assert str(caught.value) == message
    assert ledger.next_seq == 5
    assert not ledger.pending


@given(
    messages=st.integers(1, 20),
    size=st.integers(1, 200),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
)
def test_writer_and_reader_never_wait_for_each_other(
    messages: int, size: int, sizes: list[int], seed: int
) -> None:
    """Any interleaving delivers all, within the bounds: an idle reader frees the writer."""
    choose = random.Random(seed)
    window = window_of(messages=messages, size=size, first=7)
    ledger = ReadLedger(7, messages=messages, size=size)
    to_send, pipe, answers = deque(sizes), deque[tuple[int, int]](), deque[int]()
    seq = 7
    while to_send or pipe:
        moves = ["send"] * (bool(to_send) and window.admits(to_send[0]))
        moves += ["read" if pipe else "idle"] * bool(pipe or ledger.pending)
        moves += ["answer"] * bool(answers)
        assert moves, "both wait for ever"
        move = choose.choice(moves)
        if move == "send":
            pipe.append((seq, to_send.popleft()))
            window.record(pipe[-1][1])
            seq += 1
            assert window.unread <= messages
            assert window.unread_bytes <= size or window.unread == 1
        elif move == "read":
            ledger.take(*pipe.popleft())
            if ledger.due:
                answers.append(ledger.acknowledge())
        elif move == "idle":
            answers.append(ledger.acknowledge())
        else:
            assert window.acknowledge(0, answers.popleft())
    assert ledger.next_seq == 7 + len(sizes)
