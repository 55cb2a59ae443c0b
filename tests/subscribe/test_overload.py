"""More comes than can be taken, and engines are restarted meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import zmq

from kvindex import EventBatch, Rank, RankStatus, State, Worker
from kvindex.subscribe import RankBatch, RankRemoved, StreamItem, Subscriber
from kvindex.subscribe.resumption import SavedCursor
from kvindex.testing import FakeEngine, ManualClock, Workload
from kvindex.wire import encode_batch, live_frames
from tests.live import PATIENCE, assert_true, caught_up, client_of, wait_status, worker_of

pytestmark = pytest.mark.faults


def pour(engine: FakeEngine, seed: int) -> None:
    """Publish without a pause, and restart every now and then; the last restart may be the end."""
    rng = random.Random(seed)
    for _ in range(60):
        engine.run(Workload(10, seed=rng.randrange(10**6)))
        if rng.random() < 0.1:
            engine.restart()


@pytest.mark.parametrize("seed", range(3))
def test_overload_with_quick_restarts_nothing_of_a_former_life_is_left(seed: int) -> None:
    engines = [FakeEngine(f"engine-{n}", num_blocks=64, cpu_blocks=64) for n in range(4)]
    try:
        with client_of(*map(worker_of, engines)) as client:
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(pour, engines, range(seed * 10, seed * 10 + len(engines))))
            silent, *others = engines
            silent.restart()
            wait_status(client, silent.rank, seq=None, state=State.LIVE)
            caught_up(client, *others)
            assert all(client.status(engine.rank).complete for engine in engines)
            prompts = [list(request.token_ids) for request in Workload(20, seed=seed)]
            assert_true(client, *engines, prompts=prompts)
    finally:
        for engine in engines:
            engine.close()


class Bench:
    """A subscriber to two inproc publishers, where each batch of one takes the sink 0.1 s.

    What was sent before the subscriber's thread is let go is all there when it looks.
    """

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.clock = ManualClock()
        self.order: list[str] = []
        self.publishers = {}
        workers = []
        for name in ("slow", "good"):
            publisher = self.context.socket(zmq.XPUB)
            publisher.bind(f"inproc://{name}")
            self.publishers[name] = publisher
            workers.append(Worker(name, f"inproc://{name}"))
        self.subscriber = Subscriber(
            workers, sink=self._sink, context=self.context, clock=self.clock
        )
        for publisher in self.publishers.values():
            assert publisher.poll(int(PATIENCE * 1000))
            assert publisher.recv() == b"\x01"
            self._send(publisher, 0)
        self.wait(slow=0, good=0)
        self.order.clear()

    def _sink(self, item: StreamItem) -> None:
        if isinstance(item, RankBatch):
            self.order.append(f"{item.rank.worker} {item.seq}")
            self.clock.advance(0.1 * (item.rank.worker == "slow"))

    @staticmethod
    def _send(publisher: zmq.Socket[bytes], seq: int) -> None:
        publisher.send_multipart(live_frames(b"", seq, encode_batch(EventBatch(1.0, []))))

    def send_at_once(self, **seqs: Iterable[int]) -> None:
        """Send while the subscriber's thread is held."""

        def send() -> None:
            for name, numbers in seqs.items():
                for seq in numbers:
                    self._send(self.publishers[name], seq)

        self.subscriber.call(send)

    def wait(self, **seqs: int) -> None:
        assert self.subscriber.wait_for(
            lambda statuses: all(statuses[Rank(name, 0)].seq == seq for name, seq in seqs.items()),
            PATIENCE,
        ), self.subscriber.statuses()

    def close(self) -> None:
        self.subscriber.close()
        self.context.destroy(linger=0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_rank_whose_batches_take_long_leaves_the_others_their_turn(bench: Bench) -> None:
    bench.send_at_once(slow=range(1, 50), good=range(1, 4))
    bench.wait(slow=49, good=3)
    assert [o for o in bench.order if o.startswith("slow")] == [f"slow {n}" for n in range(1, 50)]
    assert bench.order.index("good 3") <= 4, bench.order


def test_gap_that_closes_on_much_that_is_held_leaves_the_others_their_turn(bench: Bench) -> None:
    slow = Rank("slow", 0)
    bench.send_at_once(slow=range(2, 50))
    assert bench.subscriber.wait_for(lambda s: s[slow].state is State.REPAIRING, PATIENCE)
    seen = []

    def look(statuses: Mapping[Rank, RankStatus]) -> bool:
        seen.append(statuses[slow])
        return statuses[slow].seq == 49

    bench.send_at_once(slow=[1], good=range(1, 4))
    assert bench.subscriber.wait_for(look, PATIENCE)
    bench.wait(good=3)
    assert [o for o in bench.order if o.startswith("slow")] == [f"slow {n}" for n in range(1, 50)]
    assert bench.order.index("good 3") <= 4, bench.order
    assert seen[-1].state is State.LIVE
    for status in seen:
        assert status.seq is not None
        if status.seq not in (0, 49):
            assert (status.state, status.lag) == (State.SYNCING, 49 - status.seq)


def test_what_is_asked_for_between_two_turns_stands_where_the_sink_does() -> None:
    clock = ManualClock()
    taken: list[int] = []

    def sink(item: StreamItem) -> None:
        if isinstance(item, RankBatch):
            taken.append(item.seq)
            clock.advance(1.0)

    with FakeEngine("engine") as engine:
        for number in range(20):
            engine.serve([number * 1000 + i for i in range(64)])
        with Subscriber([worker_of(engine)], sink=sink, clock=clock) as subscriber:
            while len(taken) < engine.published:
                cursor, count = subscriber.call(
                    lambda: (subscriber.cursor(engine.rank), len(taken))
                )
                if cursor is not None:
                    assert SavedCursor.decode(cursor).cursor.seq == count - 1


RANKS = [Rank(f"w{n}", 0) for n in range(12)]


def test_a_call_is_served_after_a_few_ranks_however_many_are_behind() -> None:
    """Each batch takes the sink 0.1 s, and twelve ranks have five: 6 s, were it one turn."""
    clock = ManualClock()
    taken: list[str] = []
    with zmq.Context() as context, ExitStack() as stack:
        publishers = [stack.enter_context(context.socket(zmq.XPUB)) for _ in RANKS]
        for rank, publisher in zip(RANKS, publishers, strict=True):
            publisher.bind(f"inproc://{rank.worker}")

        def sink(item: StreamItem) -> None:
            if isinstance(item, RankRemoved):
                taken.append("call")
            elif isinstance(item, RankBatch):
                if not taken:
                    subscriber.remove("gone")  # a call that is carried out in the next turn
                taken.append(item.rank.worker)
                clock.advance(0.1)

        workers = [Worker(rank.worker, f"inproc://{rank.worker}") for rank in RANKS]
        gone = Worker("gone", "inproc://gone")
        subscriber = stack.enter_context(
            Subscriber([*workers, gone], sink=sink, context=context, clock=clock)
        )
        for publisher in publishers:
            assert publisher.poll(int(PATIENCE * 1000))
            assert publisher.recv() == b"\x01"

        def send() -> None:
            for publisher in publishers:
                for seq in range(5):
                    publisher.send_multipart(live_frames(b"", seq, batch_bytes()))

        subscriber.call(send)
        assert subscriber.wait_for(
            lambda statuses: all(statuses[rank].seq == 4 for rank in RANKS), PATIENCE
        )
    assert taken.index("call") <= 2
    first_round = [name for name in taken if name != "call"][: len(RANKS)]
    assert sorted(first_round) == sorted(rank.worker for rank in RANKS), "none is passed over"


def batch_bytes() -> bytes:
    return encode_batch(EventBatch(1.0, []))


def test_a_subscriber_receives_nothing_while_its_sink_has_no_room_and_serves_calls() -> None:
    taken: list[int] = []
    room = [4]

    def sink(item: StreamItem) -> None:
        if isinstance(item, RankBatch):
            taken.append(item.seq)

    with FakeEngine("engine") as engine, FakeEngine("late") as late:
        for number in range(20):
            engine.serve([number * 1000 + i for i in range(64)])
        with Subscriber(
            [worker_of(engine)], sink=sink, has_room=lambda: len(taken) < room[0]
        ) as subscriber:
            assert subscriber.wait_for(lambda s: s[engine.rank].seq == 3, PATIENCE)
            for _ in range(5):
                subscriber.add(worker_of(late))
                subscriber.remove("late")
            assert taken == [0, 1, 2, 3]
            room[0] = 100
            subscriber.wake()
            last = engine.published - 1
            assert subscriber.wait_for(lambda s: s[engine.rank].seq == last, PATIENCE)
    assert taken == list(range(last + 1))
