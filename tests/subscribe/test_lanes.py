"""A feed with a lane does exactly what a feed without one does, whatever a publisher sends."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st

from kvindex import BACKEND, BlockStored, Client, EventBatch, Index, Rank, State, Worker
from kvindex.client.client import follow_item
from kvindex.index import Fingerprints, read_batch
from kvindex.subscribe import RankBatch, SequencerConfig, SocketOptions, StreamItem
from kvindex.subscribe import watch as lanes_module
from kvindex.subscribe.connection import Contexts
from kvindex.subscribe.delivery import Outlet
from kvindex.subscribe.feed import Feed, FeedSettings
from kvindex.subscribe.resumption import Resumption
from kvindex.subscribe.watch import Lanes, Watch
from kvindex.testing import FakeEngine, ManualClock
from kvindex.wire import encode_batch, live_frames
from kvindex.wire.frames import parse_replay_request, replay_end, replay_frames
from tests.live import PATIENCE, caught_up, client_of, until, worker_of

pytestmark = [
    pytest.mark.property,
    pytest.mark.skipif(BACKEND != "native", reason="lanes need the native index"),
]

RANK = Rank("engine", 0)
NAMES = count()


def test_there_are_lanes_where_the_module_is_built() -> None:
    """Else all that follows would compare two feeds without one."""
    with Client() as client:
        assert client.statistics()["thread"]["lanes"] == "in use"


class OwnIndex(Index):
    """A user's own kind of index, which may count or change what it applies."""


def test_a_client_of_a_users_own_index_has_no_lanes() -> None:
    with Client(index=OwnIndex()) as client:
        assert "native index" in client.statistics()["thread"]["lanes"]


def test_a_client_works_without_lanes_where_libzmq_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes_module, "_CALLS", ("msg_init", "no_such_function"))
    with FakeEngine("engine") as engine, client_of(worker_of(engine)) as client:
        engine.serve(range(64))
        caught_up(client, engine)
        thread = client.statistics()["thread"]
        assert "libzmq" in thread["lanes"]
        assert "lane_batches" not in thread


def test_what_lanes_take_is_counted_and_shown_though_nobody_waits() -> None:
    with FakeEngine("engine") as engine, client_of(worker_of(engine)) as client:
        engine.serve(range(64))
        caught_up(client, engine)
        for start in range(0, 6_400, 64):
            engine.serve(range(start, start + 64))
        until(lambda: client.status("engine").seq == engine.published - 1)
        assert client.statistics()["thread"]["lane_batches"] > 0
        counters = client.status("engine").counters
        assert counters["delivered"] == engine.published
        assert counters["live"] >= engine.published - 1  # the first may have come by replay


def test_a_context_that_its_owner_terminates_ends_and_the_rank_is_closed() -> None:
    """The lane's own reads fail, too: that once meant nothing, and the context waited for ever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = Publisher(context, replays=True)
    worker = Worker("engine", publisher.endpoint, replay=publisher.replay)
    with client_of(worker, context=context) as client, FakeEngine("engine-2") as engine:
        client.add(worker_of(engine))
        engine.serve(range(64))
        caught_up(client, engine)
        publisher.live.close(0)
        publisher.router.close(0)
        ending = threading.Thread(target=context.term, daemon=True)
        ending.start()
        ending.join(PATIENCE)
        assert not ending.is_alive()
        for name in ("engine", "engine-2"):
            status = until(partial(client.status, name), lambda s: s.state is State.CLOSED)
            assert "Context was terminated" in status.reason


class Publisher:
    """Sends whatever it is given, and answers replay requests from what it has published."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], replays: bool) -> None:
        name = next(NAMES)
        self.endpoint, self.replay = f"inproc://lanes-{name}", f"inproc://lanes-{name}-replay"
        self.live = context.socket(zmq.XPUB)
        self.live.bind(self.endpoint)
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(self.replay)
        self.replays = replays
        self.history: list[bytes] = []
        self.clock = 1_000.0
        self.blocks = 0

    def publish(self, *, send: bool = True, dp_rank: int | None = None, topic: bytes = b"") -> None:
        self.clock += 1.0
        self.blocks += 1
        stored = BlockStored(
            block_hashes=[self.blocks], token_ids=[self.blocks] * 16, block_size=16
        )
        self.history.append(encode_batch(EventBatch(self.clock, [stored], dp_rank)))
        if send:
            self.send(len(self.history) - 1, topic)

    def send(self, seq: int, topic: bytes = b"") -> None:
        self.live.send_multipart(live_frames(topic, seq, self.history[seq]))

    def restart(self) -> None:
        self.history = []

    def serve(self) -> bool:
        """Answer one request; return whether there was any."""
        while self.live.poll(0):
            self.live.recv()
        if not self.router.poll(0):
            return False
        identity, start = parse_replay_request(self.router.recv_multipart())
        for seq in range(start, len(self.history)):
            frames = replay_frames(identity, b"", seq, self.history[seq], with_topic=True)
            self.router.send_multipart(frames)
        self.router.send_multipart(replay_end(identity, with_topic=True))
        return True

    def close(self) -> None:
        self.live.close(0)
        self.router.close(0)


class Receiver:
    """One feed into an index of its own, moved by hand."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher, *, by_lane: bool
    ) -> None:
        self.clock = ManualClock(0.0)
        self.index = Index(seed=1)
        self.index.add(RANK)
        self.items: list[StreamItem] = []
        fingerprints = Fingerprints(1)
        core, number = self.index.lane_target()
        assert fingerprints.core is not None
        lanes = Lanes(core, number, fingerprints.core) if by_lane else None
        self.watch = Watch(lanes)
        self.counters: Counter[str] = Counter()
        replay = publisher.replay if publisher.replays else None
        worker = Worker(RANK.worker, publisher.endpoint, replay=replay, topic="kv")
        settings = FeedSettings(
            sequencer=SequencerConfig(has_replay=True),
            socket_options=SocketOptions(),
            decode=read_batch,
            fingerprints=fingerprints,
            clock=self.clock,
            contexts=Contexts(context),
            outlet=Outlet(self._put, self.index.apply, self.counters),
            counters=self.counters,
            lanes=lanes,
        )
        (address,) = worker.publishers()
        self.feed = Feed(worker, address, settings, self.watch, lambda _: None)
        self.feed.sequencer._stream._random = random.Random(1)
        self.feed.start(Resumption(0, None, "", False), self.clock())

    def _put(self, item: StreamItem) -> None:
        assert not isinstance(item, RankBatch)
        self.items.append(item)
        follow_item(self.index, item)

    def work(self) -> bool:
        """Do all that there is to do; return whether there was anything."""
        now, worked = self.clock(), False
        while True:
            owners = self.watch.wait(0.0)
            if not (owners or self.watch.taken):
                return worked
            worked = True
            self.feed.collect(now)  # so that whatever else its lane takes is reported
            if owners:
                self.feed.pump(now)

    def standing(self) -> dict[str, Any]:
        """What the feed and its index have come to."""
        self.feed.collect(self.clock())
        sequencer = self.feed.sequencer
        applied = {**vars(sequencer.applied)}
        return {
            "applied": applied,
            "state": sequencer.state,
            "lag": sequencer.lag,
            "counters": +sequencer.counters,
            "notes": +self.feed.notes.counters,
            "delivered": (self.feed.delivery.epoch, self.feed.delivery.seq),
            "named": self.feed.reader.named,
            "filtered": self.feed.reader.topic.filtered,
            "items": self.items,
            "held": sorted((b.block_hash, b.copies) for b in self.index.tree(RANK).walk()),
            "events": self.index.tree(RANK).statistics(),
        }

    def close(self) -> None:
        self.feed.close(self.clock())
        self.watch.close()


class Step(NamedTuple):
    kind: str
    number: int = 0
    look: bool = True  # whether the receivers work before the next step


KINDS = {
    "batches": 6,
    "flood": 1,
    "lost": 2,
    "again": 2,
    "late": 1,
    "old": 1,
    "damaged": 1,
    "few frames": 1,
    "many frames": 1,
    "short seq": 1,
    "last seq": 1,
    "other topic": 1,
    "named": 1,
    "restart": 1,
    "time": 2,
    "settle": 1,
}
STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([kind for kind, weight in KINDS.items() for _ in range(weight)]),
        st.integers(1, 20),
        st.booleans(),
    ),
    max_size=25,
)


def take(step: Step, publisher: Publisher, receivers: list[Receiver]) -> None:
    kind, number, _ = step
    history, live = publisher.history, publisher.live
    seq = len(history)
    payload = encode_batch(EventBatch(1.0, []))
    if kind in ("batches", "flood"):
        for _ in range(number * (40 if kind == "flood" else 1)):
            publisher.publish(topic=b"kv")
    elif kind == "lost":
        publisher.publish(send=False)
        publisher.publish(topic=b"kv")
    elif kind in ("again", "late") and history:
        publisher.send(max(0, seq - number), b"kv")
    elif kind == "old":
        live.send_multipart(live_frames(b"kv", seq, payload))
    elif kind == "damaged":
        live.send_multipart(live_frames(b"kv", seq, b"\xc1"))
    elif kind == "few frames":
        live.send_multipart([b"kv", seq.to_bytes(8, "big")])
    elif kind == "many frames":
        live.send_multipart([*live_frames(b"kv", seq, payload), b"more"])
    elif kind == "short seq":
        live.send_multipart([b"kv", b"\0" * 7, payload])
    elif kind == "last seq":
        live.send_multipart([b"kv", b"\xff" * 8, payload])
    elif kind == "other topic":
        publisher.live.send_multipart(live_frames(b"other", seq, payload))
    elif kind == "named":
        publisher.publish(topic=b"kv", dp_rank=number % 2)
    elif kind == "restart":
        publisher.restart()
        publisher.publish(topic=b"kv")
    elif kind == "time":
        for receiver in receivers:
            receiver.clock.advance(number)
            receiver.feed.tick(receiver.clock())
    elif kind == "settle":
        for receiver in receivers:
            receiver.feed.cursor(receiver.clock())  # it needs the stream in hand


@pytest.fixture(scope="module")
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.mark.parametrize("replays", [False, True], ids=["without replay", "with replay"])
@given(steps=STEPS)
@example(steps=[Step("flood", 7, False), Step("restart", 1, False), Step("time", 5, False)])
@example(steps=[Step("damaged", 1, False), Step("time", 5, False), Step("flood", 7, False)])
def test_a_lane_changes_nothing_but_the_way(
    context: zmq.Context[zmq.Socket[bytes]], replays: bool, steps: list[Step]
) -> None:
    publisher = Publisher(context, replays)
    receivers = [Receiver(context, publisher, by_lane=by_lane) for by_lane in (False, True)]

    def settle() -> None:
        while any([publisher.serve(), *(receiver.work() for receiver in receivers)]):
            pass

    try:
        settle()
        for step in [*steps, Step("batches", 3)]:
            # A lane reads more of a flood in one turn. So nothing else may be under way: an answer
            # to a replay request comes before or after what is left of the flood.
            is_flood = step.kind == "flood"
            if is_flood:
                settle()
            take(step, publisher, receivers)
            if step.look or is_flood:
                settle()
                plain, by_lane = (receiver.standing() for receiver in receivers)
                assert plain == by_lane
        settle()
        plain, by_lane = (receiver.standing() for receiver in receivers)
        assert plain == by_lane
    finally:
        for receiver in receivers:
            receiver.close()
        publisher.close()
