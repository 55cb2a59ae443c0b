"""Messages that come many at a time, with all kinds of others between them, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvindex import DecodeError, Rank, RankStatus, ReplayPolicy, Worker
from kvindex.subscribe import RankAdded, RankBatch, RankLost, RanksRenamed, StreamItem, Subscriber
from kvindex.subscribe.sequencer import Sequencer
from kvindex.testing import FakeEngine
from kvindex.wire import encode_batch, live_frames
from tests.live import caught_up, client_of, until, worker_of
from tests.publish.publish_peers import Context
from tests.subscribe.peers import RANK, RawPublisher, batch_seqs, stored

pytestmark = pytest.mark.e2e

LAST = 299


def payload(number: int, dp_rank: int | None = None) -> bytes:
    return encode_batch(stored(number, dp_rank))


def message(number: int, topic: bytes = b"", dp_rank: int | None = None) -> list[bytes]:
    return live_frames(topic, number, payload(number, dp_rank))


@contextmanager
def subscribed(
    publisher: RawPublisher, items: list[StreamItem], **options: Any
) -> Iterator[Subscriber]:
    worker = Worker("engine", publisher.endpoint, topic=options.pop("topic", ""))
    replay = ReplayPolicy(timeout=0.3)
    with Subscriber([worker], sink=items.append, replay_policy=replay, **options) as subscriber:
        publisher.wait_subscribed()
        yield subscriber


def reached(subscriber: Subscriber, seq: int, rank: Rank = RANK) -> RankStatus:
    until(subscriber.statuses, lambda s: rank in s and s[rank].seq == seq)
    return subscriber.status(rank)


@pytest.fixture
def publisher(context: Context) -> RawPublisher:
    return RawPublisher(context)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the runs were that the sequencer took."""
    lengths: list[int] = []
    take = Sequencer.live_run

    def spy(self: Sequencer, *args: Any) -> int:
        lengths.append(take(self, *args))
        return lengths[-1]

    monkeypatch.setattr(Sequencer, "live_run", spy)
    return lengths


def test_a_burst_is_taken_in_runs_and_arrives_in_order(
    publisher: RawPublisher, runs: list[int]
) -> None:
    items: list[StreamItem] = []
    with subscribed(publisher, items) as subscriber:
        publisher.send(*(message(number) for number in range(LAST + 1)))
        status = reached(subscriber, LAST)
    batches = [item for item in items if isinstance(item, RankBatch)]
    assert [b.seq for b in batches] == list(range(LAST + 1))
    assert [b.batch.ts for b in batches] == [1_000.0 + number for number in range(LAST + 1)]
    assert {(b.rank, b.epoch, b.replayed) for b in batches} == {(RANK, 0, False)}
    assert (status.counters["live"], status.counters["delivered"]) == (LAST + 1, LAST + 1)
    assert sum(runs) == LAST  # all but the first, which begins the epoch
    assert status.last_event_age is not None


def test_what_is_not_ordinary_within_a_burst_is_counted_and_told_in_its_place(
    publisher: RawPublisher, runs: list[int]
) -> None:
    messages = [message(number) for number in range(LAST + 1) if number != 250]
    between: dict[int, list[bytes]] = {
        50: [b"heartbeat"],
        60: [b"", b"short", payload(60)],
        70: [*message(70), b"more"],
        80: [b""],
        90: [b"", b""],
        130: message(120),  # a duplicate
    }
    messages[100] = live_frames(b"", 100, b"\xc1")  # no msgpack
    for number in sorted(between, reverse=True):
        messages.insert(number + 1, between[number])
    items: list[StreamItem] = []
    with subscribed(publisher, items) as subscriber:
        publisher.send(*messages)
        status = reached(subscriber, LAST)
    assert batch_seqs(items) == [number for number in range(LAST + 1) if number not in (100, 250)]
    losses = [(i, item) for i, item in enumerate(items) if isinstance(item, RankLost)]
    assert [(loss.reason, loss.first_seq, loss.last_seq) for _, loss in losses] == [
        ("undecodable", 100, 100),
        ("gap_without_replay", 250, 250),
    ]
    for position, loss in losses:
        before, after = items[position - 1], items[position + 1]
        assert isinstance(before, RankBatch)
        assert isinstance(after, RankBatch)
        assert (before.seq, after.seq) == (loss.first_seq - 1, loss.first_seq + 1)
    counted = {name: status.counters.get(name) for name in ("bad_frames", "undecodable")}
    assert counted == {"bad_frames": 5, "undecodable": 1}
    assert (status.duplicates, status.gaps, status.losses, status.restarts) == (1, 1, 2, 0)
    assert sum(runs) >= 200


def test_a_rank_named_in_the_middle_of_a_burst_is_renamed_there(publisher: RawPublisher) -> None:
    items: list[StreamItem] = []
    with subscribed(publisher, items) as subscriber:
        publisher.send(*(message(n, dp_rank=3 if n >= 40 else None) for n in range(80)))
        reached(subscriber, 79, Rank("engine", 3))
    assert isinstance(items[0], RankAdded)
    renamed = next(i for i, item in enumerate(items) if isinstance(item, RanksRenamed))
    assert batch_seqs(items[:renamed]) == list(range(40))
    assert batch_seqs(items[renamed:]) == list(range(40, 80))
    ranks = {item.rank for item in items[renamed:] if isinstance(item, RankBatch)}
    assert ranks == {Rank("engine", 3)}


def test_a_restart_in_the_middle_of_a_burst_starts_a_new_epoch_there(
    publisher: RawPublisher,
) -> None:
    old = [message(number) for number in range(60)]
    new = [live_frames(b"", number, payload(1_000 + number)) for number in range(30)]
    items: list[StreamItem] = []
    with subscribed(publisher, items) as subscriber:
        publisher.send(*old, *new)
        until(subscriber.statuses, lambda all_: all_[RANK].epoch == 1)
        reached(subscriber, 29)
    epochs = [(item.epoch, item.seq) for item in items if isinstance(item, RankBatch)]
    assert epochs == [(0, number) for number in range(60)] + [(1, number) for number in range(30)]


def test_a_stream_that_replay_brought_to_life_still_waits_for_its_topic() -> None:
    # Replies of this version have no topic: the first live message confirms it, in no run.
    with FakeEngine("engine", topic="kv", dialect="vllm-0.10.2") as engine:
        engine.serve([1] * 64)
        # By its own thread: if the client were there before, the message would come live.
        until(lambda: engine.statistics()["sent"] == 1)
        with client_of(worker_of(engine, topic="kv")) as client:
            caught_up(client, engine)
            assert not client.subscriber._thread.roster.feeds[RANK].reader.topic.confirmed
            engine.serve([2] * 64)
            caught_up(client, engine)
            assert client.subscriber._thread.roster.feeds[RANK].reader.topic.confirmed


class Note:
    """A decoded batch of somebody else's making."""

    data_parallel_rank = None

    def __init__(self, payload: bytes) -> None:
        if payload == b"bad":
            raise DecodeError("a bad note")
        self.ts = float(payload)


def test_what_decode_returns_goes_to_on_batch_and_what_it_refuses_is_a_loss(
    publisher: RawPublisher,
) -> None:
    items: list[StreamItem] = []
    notes: list[tuple[Rank, float]] = []
    options = {"decode": Note, "on_batch": lambda rank, note: notes.append((rank, note.ts))}
    payloads = [b"bad" if number == 20 else b"%d" % number for number in range(50)]
    with subscribed(publisher, items, **options) as subscriber:
        publisher.send(*(live_frames(b"", seq, body) for seq, body in enumerate(payloads)))
        status = reached(subscriber, 49)
    assert notes == [(RANK, float(number)) for number in range(50) if number != 20]
    assert not any(isinstance(item, RankBatch) for item in items)
    assert (status.losses, status.decode_failures) == (1, 1)
