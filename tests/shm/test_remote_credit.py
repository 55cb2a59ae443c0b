"""Credits of remote readers: what a window admits, when a reader answers, and that both agree."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.shm.remote.sender import SendWindow

pytestmark = pytest.mark.unit


def window_of(*, messages: int = 8, size: int = 1000, first: int = 0) -> SendWindow:
    """The window of reader 0, whose first message is this one."""
    window = SendWindow(messages=messages, size=size)
    for _ in range(first):
        window.record(1)
    window.join(0)
    return window


@pytest.mark.parametrize(
    ("messages", "size", "sent", "admitted", "refused"),
    [(3, 1000, [1, 1, 1], None, 0), (100, 100, [60], 40, 41), (4, 100, [10_000], None, 0)],
    ids=["messages", "bytes", "a message larger than the window goes alone"],
)
def test_a_window_admits_so_much(
    messages: int, size: int, sent: list[int], admitted: int | None, refused: int
) -> None:
    window = window_of(messages=messages, size=size)
    for each in sent:
        assert window.admits(each)
        window.record(each)
    assert admitted is None or window.admits(admitted)
    assert not window.admits(refused)
    assert window.acknowledge(0, 1)
    assert window.admits(sent[0])


@pytest.mark.parametrize("next_seq", [106, 101, -1, 2**64 - 1])
def test_an_impossible_acknowledgement_changes_nothing(next_seq: int) -> None:
    window = window_of(first=100)
    for _ in range(5):
        window.record(10)
    for _ in range(2):  # a repeated one is harmless
        assert window.acknowledge(0, 102)
    assert not window.acknowledge(0, next_seq)
    assert (window.unread, window.unread_bytes) == (3, 30)


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


@given(
    messages=st.integers(1, 20),
    size=st.integers(1, 200),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
)
def test_a_reader_that_acknowledges_when_it_is_idle_gets_all_within_the_bounds(
    messages: int, size: int, sizes: list[int], seed: int
) -> None:
    choose = random.Random(seed)
    window = window_of(messages=messages, size=size, first=7)
    to_send, pipe = deque(sizes), deque[int]()
    read = acknowledged = 7
    while to_send or pipe:
        moves = ["send"] * (bool(to_send) and window.admits(to_send[0]))
        moves += ["read" if pipe else "idle"] * bool(pipe or read > acknowledged)
        assert moves, "both wait for ever"
        move = choose.choice(moves)
        if move == "send":
            pipe.append(to_send.popleft())
            window.record(pipe[-1])
            assert window.unread <= messages
            assert window.unread_bytes <= size or window.unread == 1
        elif move == "read":
            pipe.popleft()
            read += 1
        else:
            acknowledged = read
            assert window.acknowledge(0, acknowledged)
    assert read == window.next_seq == 7 + len(sizes)
