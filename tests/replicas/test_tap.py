"""What leaves the subscriber's thread: entries in order, packed, numbered, and never a hole."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex.replicas.messages import (
    BatchApplied,
    RingMessage,
    SectionRestored,
    StatusChanged,
    decode_entries,
    decode_message,
    encode_message,
    follow_names,
)
from kvindex.replicas.outflow import Patience, StreamTap
from kvindex.subscribe import RankAdded, RankLost, RankRemoved, RanksRenamed
from kvindex.subscribe.sequencer import State
from kvindex.testing import ManualClock
from kvindex.wire import CacheSettings, GroupSpec
from kvindex.wire.errors import ClosedError, DecodeError
from kvindex.wire.rank import Rank
from tests.subscribe.test_status_board import status

pytestmark = pytest.mark.unit

A, B = Rank("a", 0), Rank("a", 1)


def whole(body: bytes) -> RingMessage:
    """A message with its entries."""
    received = decode_message(body)
    return RingMessage(received.number, received.sent_at, decode_entries(received.entries))


class Sent:
    """An outflow that keeps what it is given."""

    chunk_bytes = 2000

    def __init__(self) -> None:
        self.messages: list[RingMessage] = []
        self.admitted = 0
        self.readers = 1
        self.closed = False
        self.error: Exception | None = None

    def send(self, body: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.messages.append(whole(body))

    def admit(self) -> None:
        self.admitted += 1

    def count_readers(self) -> int:
        return self.readers

    def close(self) -> None:
        self.closed = True


def tapped() -> tuple[StreamTap, Sent, list[str]]:
    sent, failures = Sent(), []
    tap = StreamTap(sent, lambda: failures.append("failed"), ManualClock(7.0))  # type: ignore[arg-type]
    tap.attend()
    return tap, sent, failures


def test_a_turn_is_one_message_with_the_statuses_last() -> None:
    tap, sent, _ = tapped()
    items: list[RankAdded | RankLost] = [
        RankAdded(A, CacheSettings(groups={1: GroupSpec("sliding_window", 32)})),
        RankLost(A, 0, "gap", 3, None, True),
    ]
    for item in items:
        tap.item(item)
    tap.batch(A, b"payload")
    tap.statuses([status(A)])
    assert sent.messages == [
        RingMessage(0, 7.0, [*items, BatchApplied(A, b"payload"), StatusChanged(status(A))])
    ]
    tap.statuses([])  # without news
    assert sent.messages[1:] == [RingMessage(1, 7.0, [])]
    assert tap.statistics() == {"entries": 4, "heartbeats": 1}


def test_messages_are_bounded_by_the_chunk_except_for_what_is_longer() -> None:
    tap, sent, _ = tapped()
    payloads = [b"x" * 900] * 5 + [b"y" * 5000] + [b"z" * 10]
    for payload in payloads:
        tap.batch(A, payload)
    tap.statuses([])
    assert [e.payload for m in sent.messages for e in m.entries] == payloads  # type: ignore[union-attr]
    sizes = [len(encode_message(m)) for m in sent.messages]
    assert [size > Sent.chunk_bytes for size in sizes] == [False, False, False, True, False]
    assert [m.number for m in sent.messages] == list(range(len(sizes)))


def test_what_a_rank_begins_with_goes_before_it_and_alone_where_it_is_long() -> None:
    tap, sent, _ = tapped()
    section = b"s" * Sent.chunk_bytes
    for rank in (A, B):
        tap.restored(rank, section)
        tap.item(RankAdded(rank))
    tap.statuses([])
    assert [m.entries for m in sent.messages] == [
        [SectionRestored(A, section)],
        [RankAdded(A)],
        [SectionRestored(B, section)],
        [RankAdded(B)],
    ]


def test_nothing_is_packed_while_nobody_reads() -> None:
    tap, sent, _ = tapped()
    sent.readers = 0
    tap.recount()
    tap.restored(A, b"section")
    tap.batch(A, b"payload")
    tap.statuses([status(A)])
    tap.item(RanksRenamed(((A, B),)))
    assert sent.messages == []
    assert (tap.number, tap.renames) == (0, 1)
    sent.readers = 1
    tap.recount()  # readers do not come by themselves
    tap.statuses([])
    assert sent.messages == []
    tap.attend()
    tap.statuses([])
    assert [m.number for m in sent.messages] == [0]


def test_what_is_left_goes_out_when_readers_come_and_when_the_thread_ends() -> None:
    tap, sent, failures = tapped()
    tap.batch(A, b"payload")
    tap.attend()
    assert (tap.number, sent.admitted) == (1, 2)
    tap.batch(A, b"payload")
    tap.stop()
    assert len(sent.messages) == 2
    assert sent.closed
    assert failures == []


def test_a_failure_ends_the_fan_out_instead_of_leaving_a_hole() -> None:
    tap, sent, failures = tapped()
    sent.error = OSError("gone")
    tap.batch(A, b"payload")
    tap.statuses([])
    assert sent.closed
    assert failures == ["failed"]
    assert tap.failure is not None
    sent.error = None
    tap.batch(A, b"payload")
    tap.statuses([])
    tap.stop()
    assert sent.messages == []
    assert failures == ["failed"]
    with pytest.raises(ClosedError, match="gone"):
        tap.attend()


def test_a_name_that_cannot_be_written_ends_it_too() -> None:
    tap, _, failures = tapped()
    tap.batch(Rank("\udc80"), b"payload")
    tap.statuses([])
    assert failures == ["failed"]


@pytest.mark.parametrize(
    "unencodable", [{"counters": {"lost_batches": 2**64}}, {"lag": 2**70}, {"reason": "\udc80"}]
)
def test_a_status_that_cannot_be_encoded_is_cut_and_ends_nothing(
    unencodable: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tap, sent, failures = tapped()
    bad = status(A, state=State.REPAIRING, complete=False, **unencodable)
    for _ in range(2):
        tap.batch(A, b"payload")
        tap.statuses([bad, status(B)])
    assert (failures, tap.failure) == ([], None)
    assert len(caplog.records) == 1
    assert tap.statistics() == {"entries": 6, "heartbeats": 0, "statuses_cut": 2}
    for message in sent.messages:
        first, cut, other = message.entries
        assert (first, other) == (BatchApplied(A, b"payload"), StatusChanged(status(B)))
        assert isinstance(cut, StatusChanged)
        assert cut.status.trust[:2] == bad.trust[:2]
        assert "could not be sent on" in cut.status.reason


def test_names_of_ports_follow_their_ranks() -> None:
    names: dict[Rank, Rank] = {}
    c = Rank("a", 9)
    for rank in (A, B):
        follow_names(names, RankAdded(rank))
    follow_names(names, RanksRenamed(((A, B), (B, A))))
    assert names == {A: B, B: A}
    follow_names(names, RanksRenamed(((A, c),)))
    assert names == {A: B, B: c}
    follow_names(names, RankRemoved(c))
    assert names == {A: B}, "a rank that stays keeps its port's name"
    follow_names(names, RankRemoved(B))
    assert names == {}


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x93\x00\xcb", encode_message(RingMessage(1, 0.0, []))[:-1], b"\x91" * 5000],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(DecodeError):
        whole(body)


def test_patience_is_used_up_and_comes_back_at_a_tenth() -> None:
    clock = ManualClock()
    allowance = Patience(2.0, clock)
    assert allowance.left() == 2.0
    clock.advance(1.5)
    assert allowance.spend()
    assert allowance.left() == pytest.approx(0.5)
    clock.advance(1.0)
    assert not allowance.spend()
    assert allowance.left() == 0.0
    clock.advance(5.0)  # without waiting
    assert allowance.left() == pytest.approx(0.5)
    clock.advance(1000.0)
    assert allowance.left() == 2.0
