"""Positions of one joiner, case by case; tests/replicas/test_join.py has all cases."""

from __future__ import annotations

import pytest

from kvindex.replicas.copy import Catchup
from kvindex.replicas.messages import BatchApplied, Entry, RingMessage
from kvindex.subscribe import RankAdded, RankRemoved, RanksRenamed
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank

pytestmark = pytest.mark.unit

A, B = Rank("a", 0), Rank("b", 0)


def message(number: int, *entries: Entry) -> RingMessage:
    return RingMessage(number, 0.0, list(entries))


def batches(number: int) -> RingMessage:
    return message(number, BatchApplied(A, b"%d" % number), BatchApplied(B, b"%d" % number))


def due_of(catchup: Catchup, message: RingMessage) -> list[Entry]:
    """What is due of the next message."""
    is_whole = catchup.follow(message.number)
    return message.entries if is_whole else catchup.due(message.number, message.entries)


def caught(catchup: Catchup, *messages: RingMessage) -> list[tuple[Rank, int]]:
    """Rank and message of each batch that is due."""
    return [
        (entry.rank, int(entry.payload))
        for one in messages
        for entry in due_of(catchup, one)
        if isinstance(entry, BatchApplied)
    ]


def joined(begin: int = 2, a: int = 3, b: int = 5, end: int = 6) -> Catchup:
    catchup = Catchup()
    catchup.begin(begin)
    catchup.place(A, a)
    catchup.place(B, b)
    catchup.end(end)
    return catchup


def test_each_rank_is_applied_from_its_position_on() -> None:
    catchup = joined()
    due = caught(catchup, *map(batches, range(1, 8)))
    assert [number for rank, number in due if rank == A] == [3, 4, 5, 6, 7]
    assert [number for rank, number in due if rank == B] == [5, 6, 7]
    assert catchup.passed == 6


def test_a_rank_that_came_back_before_its_section_is_not_applied_twice() -> None:
    catchup = joined(begin=0, a=3, b=5, end=6)
    due = caught(
        catchup,
        message(0, RankRemoved(B), RankAdded(B), BatchApplied(B, b"0")),
        *map(batches, range(1, 7)),
    )
    assert [number for rank, number in due if rank == B] == [5, 6]


def test_beginning_again_forgets_the_sections_before() -> None:
    catchup = Catchup()
    catchup.begin(0)
    catchup.place(A, 0)
    catchup.begin(3)
    catchup.end(6)
    due = caught(catchup, *map(batches, range(6)))
    assert due == []  # it was removed before its section could be taken again


@pytest.mark.parametrize("numbers", [[3], [1, 1], [1, 3]], ids=["a hole", "again", "a gap"])
def test_a_message_that_does_not_follow_is_refused(numbers: list[int]) -> None:
    catchup = joined(begin=2)
    *before, last = numbers
    for number in before:
        due_of(catchup, batches(number))
    with pytest.raises(DecodeError, match=f"message {last} came where 2 should follow"):
        due_of(catchup, batches(last))


def test_what_no_server_sends_is_refused() -> None:
    catchup = joined(begin=0, a=3, b=5, end=6)
    with pytest.raises(DecodeError, match="renamed in message 0"):
        due_of(catchup, message(0, RanksRenamed(((A, B),))))
    with pytest.raises(DecodeError, match="where none can be"):
        catchup.place(A, 7)
    catchup = Catchup()
    catchup.begin(5)
    with pytest.raises(DecodeError, match="where none can be"):
        catchup.place(A, 4)
    catchup.place(A, 8)
    with pytest.raises(DecodeError, match="before its sections"):
        catchup.end(7)
