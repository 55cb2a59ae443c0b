"""A publisher's live side: what belongs to which of its connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex.subscribe.receiving import Connected, Disconnected, LiveLink, Notes, TopicCheck
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank

pytestmark = pytest.mark.unit

Look = tuple[list[str], bool, list[bool]]  # messages, whether that was all, changes


class Scripted:
    """A connection that says at each look what it was told to."""

    def __init__(self, *looks: Look) -> None:
        self.looks = list(looks)
        self.drained = False
        self.connected = True
        self.closed = False
        self.socket: Any = SimpleNamespace(send_multipart=lambda *_: None)
        self.postponed_at: float | None = None
        self.again = 0

    def look_again(self) -> None:
        self.again += 1

    def close(self) -> None:
        self.closed = True

    def receive(self) -> list[list[bytes]]:
        assert not self.closed
        messages, self.drained, self.coming = self.looks.pop(0) if self.looks else ([], True, [])
        return [[message.encode()] for message in messages]

    def changes(self, now: float) -> Iterator[bool]:
        while self.coming:
            self.connected = self.coming.pop(0)
            yield self.connected

    def postpone(self, now: float) -> None:
        self.postponed_at = now


class Words:
    """A reader to which each message is a word, in place of what it says."""

    topic = TopicCheck(b"")

    def live(self, messages: deque[list[bytes]]) -> Iterator[str]:
        while messages:
            yield messages.popleft()[0].decode()


class Link:
    """A `LiveLink` over scripted connections, and what came of it."""

    def __init__(self, *connections: Scripted, bind: bool = False, hwm: int = 100) -> None:
        self.connections = list(connections)
        self._made: list[Scripted] = []
        self.notes = Notes(Rank("engine", 0), lambda: 0.0)
        self.counters = self.notes.counters
        make: Any = self._open
        reader: Any = Words()
        self.live = LiveLink(make, reader, self.notes, bind=bind, hwm=hwm, pause=2.0)

    @property
    def again(self) -> int:
        return sum(connection.again for connection in self._made)

    def take(self, now: float = 1.0, most: int = 1000) -> list[bool | str]:
        """Take what there is, up to so many words; connections as True, their ends as False."""
        events: list[bool | str] = []
        for event in self.live.take(now):
            what: Any = event
            if isinstance(event, (Connected, Disconnected)):
                what = isinstance(event, Connected)
            events.append(what)
            if sum(isinstance(word, str) for word in events) == most:
                break
        return events

    def _open(self, topics: tuple[bytes, ...]) -> Scripted:
        assert topics == (b"",)
        if not self.connections:
            raise ConfigurationError("no socket is to be had")
        self._made.append(self.connections.pop(0))
        return self._made[-1]


def test_messages_come_after_the_connection_that_brought_them() -> None:
    link = Link(Scripted((["a"], True, [True]), (["b"], False, [])))
    assert link.take() == [True, "a"]
    assert link.again == 0
    assert link.take() == ["b"]
    assert link.again == 1, "there may be more"


def test_what_a_broken_connection_brought_is_read_to_its_end_and_then_it_is_replaced() -> None:
    old = Scripted((["a"], True, [False]), (["b"], False, []), (["c"], True, []))
    new = Scripted((["n"], True, [True]))
    link = Link(old, new)
    assert link.take() == ["a"]
    assert link.again == 1, "what came after the look is still to be read"
    assert link.take() == ["b"]
    assert link.again > 1
    assert link.take() == ["c", False]
    assert (old.closed, link.counters["reopened"]) == (True, 1)
    assert link.take() == [True, "n"]
    assert link.counters["unread_dropped"] == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_unread_when_zeromq_has_connected_anew_is_dropped(at_once: bool) -> None:
    first: Look = (["a"], False, [False, True] if at_once else [False])
    old = Scripted(first, (["b", "c"], False, [True]))
    link = Link(old, Scripted((["n"], True, [True])))
    assert link.take() == ([False] if at_once else ["a"])
    if not at_once:
        assert link.take() == [False]
    assert old.closed
    assert link.counters["unread_dropped"] == (1 if at_once else 2)
    assert link.take() == [True, "n"]


def test_what_was_left_comes_first_and_before_the_end_of_its_connection() -> None:
    old = Scripted((["a", "b"], True, [False]), (["c"], True, []), ([], True, []))
    link = Link(old, Scripted((["n"], True, [True])))
    assert link.take(most=1) == ["a"]
    assert link.take() == ["b"]
    assert link.take() == ["c", False]
    assert link.take() == [True, "n"]


def test_what_was_left_is_dropped_with_its_socket() -> None:
    link = Link(Scripted((["a", "b", "c"], True, [])), Scripted((["n"], True, [True])))
    assert link.take(most=1) == ["a"]
    assert link.live.reopen(1.5)
    assert link.counters["unread_dropped"] == 2
    assert link.take() == [True, "n"]


def test_where_we_bind_the_socket_stays_and_what_is_unread_is_dropped() -> None:
    port = Scripted(
        (["a"], False, [False, True]), (["b", "c"], False, []), (["d"], True, []), (["n"], True, [])
    )
    link = Link(port, bind=True)
    assert link.take() == [False, True]
    assert (link.counters["unread_dropped"], port.closed) == (4, False)
    assert link.again == 2, "the looks that dropped may have taken a sign away"
    assert link.take() == ["n"]


def test_where_we_bind_nothing_is_dropped_of_a_publisher_that_left_before_the_next_came() -> None:
    port = Scripted(
        (["a"], True, [False]), (["b"], True, []), ([], True, []), (["n"], True, [True])
    )
    link = Link(port, bind=True)
    assert link.take() == ["a"]
    assert link.take() == ["b", False]
    assert link.take() == [True, "n"]
    assert link.counters["unread_dropped"] == 0


def test_a_flood_of_a_new_publisher_is_not_dropped_for_ever() -> None:
    flood: list[Look] = [(["x"] * 40, False, []) for _ in range(10)]
    port = Scripted((["a"], False, [False, True]), *flood)
    link = Link(port, bind=True)
    assert link.take() == [False, True]
    assert link.counters["unread_dropped"] == 1 + 3 * 40
    assert len(link.take()) == 40


def test_without_a_new_socket_the_old_one_goes_on_with_what_comes_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = Scripted((["a"], False, [False, True]), (["b"], True, []), (["n"], True, []))
    link = Link(old)
    assert link.take() == [False, True]
    assert link.counters["reopen_failures"] == 1
    assert "engine/0: no socket is to be had" in caplog.text
    assert (old.closed, old.postponed_at, link.counters["unread_dropped"]) == (False, 1.0, 2)
    assert link.take() == ["n"]


def test_a_link_closed_while_it_is_taken_from_opens_no_new_socket() -> None:
    old, new = Scripted((["a"], False, [False, True])), Scripted()
    link = Link(old, new)
    for event in link.live.take(1.0):
        if isinstance(event, Disconnected):
            link.live.close()
    assert (old.closed, link.connections) == (True, [new])


def test_after_a_connection_that_did_not_last_the_socket_stays_and_zeromq_makes_its_pauses() -> (
    None
):
    first = Scripted(([], True, [True, False]), (["a"], True, []))
    second = Scripted(
        ([], True, [True, False]), (["b"], True, []), (["c"], True, []), (["n"], True, [True])
    )
    third = Scripted((["n"], True, [True]))
    link = Link(first, second, third)
    assert link.take(10.0) == [True]
    assert link.take(10.0) == ["a", False]
    assert link.take(10.1) == [True]
    assert link.take(10.1) == ["b", False]
    assert (second.closed, link.counters["unread_dropped"]) == (False, 1), "c came meanwhile"
    assert link.take(11.0) == [True, "n"]
    second.looks = [([], True, [False]), ([], True, [])]
    link.take(12.1)
    assert link.take(12.1) == [False]
    assert second.closed, "it has been there for long enough"
    assert link.take(12.2) == [True, "n"]
    assert link.counters["reopened"] == 2


def test_a_socket_that_is_replaced_for_giving_up_takes_the_parting_along() -> None:
    old = Scripted((["a"], False, [False]))
    link = Link(old, Scripted((["n"], True, [True])))
    assert link.take() == ["a"]
    assert link.live.reopen(1.5)
    assert link.take() == [True, "n"]
