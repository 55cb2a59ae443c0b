"""What messages say: what a run is made of, what ends it, and what is reported of the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from kvindex.subscribe.receiving import (
    Damage,
    Event,
    Naming,
    Notes,
    Reader,
    ReplayEnd,
    Reply,
    Run,
    TopicCheck,
)
from kvindex.wire import live_frames
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank

pytestmark = pytest.mark.unit


class Note:
    """A batch of another making: `ts` or `ts@dp_rank`."""

    def __init__(self, payload: bytes) -> None:
        if payload == b"bad":
            raise DecodeError("a bad note")
        if payload == b"bug":
            raise RuntimeError("a planted bug")
        ts, _, dp_rank = payload.partition(b"@")
        self.ts = float(ts)
        self.data_parallel_rank = int(dp_rank) if dp_rank else None


def message(seq: int, payload: bytes | None = None, topic: bytes = b"kv@pod") -> list[bytes]:
    return live_frames(topic, seq, b"%d" % seq if payload is None else payload)


def reader_of(
    topic: bytes = b"kv", *, named: int | None = None, time_left: Callable[[], bool] = lambda: True
) -> Reader:
    reader = Reader(topic, Note, hash, Notes(Rank("engine", 0), lambda: 0.0), time_left)
    reader.topic.confirmed = True
    reader.named = named
    return reader


def read(*messages: list[bytes], named: int | None = None) -> list[Event]:
    return list(reader_of(named=named).live(deque(messages)))


def first_run(*messages: list[bytes], named: int | None = None) -> Run:
    run = next(reader_of(named=named).live(deque(messages)))
    assert isinstance(run, Run)
    return run


def test_what_follows_is_read_with_what_the_sequencer_needs() -> None:
    run = first_run(message(7), message(8, b"3.5"), message(9, topic=b"kv"))
    assert run.first_seq == 7
    assert run.timestamps == [batch.ts for batch in run.batches] == [7.0, 3.5, 9.0]
    assert run.fingerprints == [hash(b"7"), hash(b"3.5"), hash(b"9")]
    assert run.sizes == [1, 3, 1]


def test_a_run_ends_when_time_does_but_has_one_message_at_least() -> None:
    times = iter([True, True, False])
    reader = reader_of(time_left=lambda: next(times))
    messages = deque(message(seq) for seq in range(7, 20))
    run = next(reader.live(messages))
    assert isinstance(run, Run)
    assert run.timestamps == [7.0, 8.0, 9.0]
    assert len(messages) == 10, "the others wait for the next turn"


@pytest.mark.parametrize(
    "odd",
    [
        message(8),
        message(10),
        message(2**64 - 1),
        message(9, topic=b"other"),
        message(9, topic=b"k"),
        message(9, b"bad"),
        message(9, b"9.0@1"),
        [],
        [b"kv"],
        [b"kv", b""],
        [b"kv", b"", b"9"],
        [b"kv", b"\0" * 7 + b"\x09" + b"\0", b"9"],
        [*message(9), b"more"],
    ],
    ids=repr,
)
def test_the_first_message_that_is_not_ordinary_ends_the_run(odd: list[bytes]) -> None:
    run = first_run(message(7), message(8), odd, message(9))
    assert run.timestamps == [7.0, 8.0]
    assert len(run.batches) == len(run.fingerprints) == len(run.sizes) == 2


def test_after_a_jump_of_the_seq_another_run_begins() -> None:
    assert read() == []
    runs = read(message(7), message(8), message(10), message(11), message(11))
    assert [run.first_seq for run in runs if isinstance(run, Run)] == [7, 10, 11]


def test_damage_is_told_in_its_place_with_the_seq_where_that_is_legible() -> None:
    reader = reader_of()
    odd = [message(8, b"bad"), [b"kv", b"short", b"9"], message(9, topic=b"other")]
    events = list(reader.live(deque([message(7), *odd, message(9)])))
    assert events[1:3] == [Damage(8), Damage(None)]
    assert [type(event) for event in events] == [Run, Damage, Damage, Run]
    assert (reader.topic.filtered, reader._notes.counters["decode_failures"]) == (1, 2)


def test_the_first_batch_that_names_a_dp_rank_says_so_and_begins_a_run() -> None:
    messages = [message(7), message(8, b"8@3"), message(9, b"9@3")]
    events = read(*messages)
    assert events[1] == Naming(3)
    assert [run.timestamps for run in events if isinstance(run, Run)] == [[7.0], [8.0, 9.0]]
    assert first_run(*messages, named=3).timestamps == [7.0, 8.0, 9.0], "it is no news"


def test_until_the_topic_is_confirmed_every_message_is_looked_at() -> None:
    reader = reader_of()
    reader.topic.confirmed = False
    events = list(reader.live(deque([message(6, topic=b"other"), message(7), message(8)])))
    assert [run.first_seq for run in events if isinstance(run, Run)] == [7, 8]
    assert reader.topic.confirmed
    assert reader.topic.filtered == 1


def test_a_failure_that_is_no_refusal_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="a planted bug"):
        read(message(7), message(8, b"bug"))


def test_replies_are_told_with_their_request() -> None:
    reader = reader_of()
    replies = [[b"", *message(7, b"7@2")], [b"", *message(8, b"bad")[1:]], [b"odd"]]
    replies.append([b"", b"\xff" * 8, b""])
    events = [event for frames in replies for event in reader.reply(4, frames)]
    assert events[0] == Naming(2)
    assert isinstance(events[1], Reply)
    assert events[1].batch is not None
    assert (events[1].request, events[1].seq, events[1].batch.size) == (4, 7, 3)
    assert events[2:] == [Reply(4, 8, None), ReplayEnd(4, failed=False)]


# Whether a topic filters everything, or the engine is idle


def connected(topic: bytes) -> TopicCheck:
    check = TopicCheck(topic)
    check.connected(10.0)
    return check


def test_the_empty_topic_fits_everything_and_needs_no_proof() -> None:
    check = connected(b"")
    assert (check.confirmed, check.open, check.deadline) == (True, False, None)
    assert check.fits(b"anything")


def test_a_topic_is_open_until_a_message_confirms_it() -> None:
    check = connected(b"kv")
    assert check.open
    assert check.deadline is not None
    assert check.fits(b"kv-events")
    assert not check.open
    assert check.confirmed
    assert check.deadline is None


def test_a_relay_with_several_topics_is_no_contradiction() -> None:
    check = connected(b"kv@a")
    assert not check.fits(b"kv@b")
    assert check.fits(b"kv@a@model")
    assert not check.contradicted
    assert check.trouble() == ""


def test_silence_is_taken_for_consent_after_a_while() -> None:
    check = connected(b"kv")
    assert check.deadline is not None
    check.decide(check.deadline - 0.1)
    assert check.open
    check.decide(check.deadline)
    assert not check.open
    assert not check.contradicted


def test_hostile_topics_are_bounded() -> None:
    check = TopicCheck(b"kv")
    for number in range(1000):
        check.fits(b"x%d" % number)
    assert check.filtered == 1000
    assert len(check.trouble()) < 400
