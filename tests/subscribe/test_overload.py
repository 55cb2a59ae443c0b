"""More comes than can be taken, and engines are restarted meanwhile."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kvindex import EventBatch, Rank, RankStatus, State, Worker
from kvindex.subscribe import RankBatch, RankRemoved, StreamItem, Subscriber
from kvindex.subscribe.resumption import SavedCursor
from kvindex.testing import FakeEngine, ManualClock, Workload
from kvindex.wire import encode_batch
from tests.live import assert_true, caught_up, client_of, until, wait_status, worker_of
from tests.publish.publish_peers import Context
from tests.subscribe.peers import RawPublisher, batch_seqs, prompt

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
    with ExitStack() as stack:
        engines = [
            stack.enter_context(FakeEngine(f"engine-{n}", num_blocks=64, cpu_blocks=64))
            for n in range(4)
        ]
        client = stack.enter_context(client_of(*map(worker_of, engines)))
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(pour, engines, range(seed * 10, seed * 10 + len(engines))))
        silent, *others = engines
        silent.restart()
        wait_status(client, silent.rank, seq=None, state=State.LIVE)
        caught_up(client, *others)
        assert all(client.status(engine.rank).complete for engine in engines)
        prompts = [list(request.token_ids) for request in Workload(20, seed=seed)]
        assert_true(client, *engines, prompts=prompts)


EMPTY = encode_batch(EventBatch(1.0, []))


class Bench:
    """A subscriber to inproc publishers, where each batch of those in `slow` takes the sink 0.1 s.

    What was sent before the subscriber's thread is let go is all there when it looks.
    """

    def __init__(self, context: Context, names: Sequence[str], slow: Container[str]) -> None:
        self.clock = ManualClock()
        self.order: list[str] = []
        self.publishers = {name: RawPublisher(context, f"inproc://{name}") for name in names}
        self._slow = slow
        self.subscriber = Subscriber(
            [Worker(name, f"inproc://{name}") for name in names],
            sink=self._sink,
            context=context,
            clock=self.clock,
        )
        for publisher in self.publishers.values():
            publisher.wait_subscribed()

    def _sink(self, item: StreamItem) -> None:
        if isinstance(item, RankRemoved):
            self.order.append("call")
        elif isinstance(item, RankBatch):
            if not self.order:
                self.on_first_batch()
            self.order.append(f"{item.rank.worker} {item.seq}")
            self.clock.advance(0.1 * (item.rank.worker in self._slow))

    def on_first_batch(self) -> None:
        """What the sink does before its first batch."""

    def send_at_once(self, **seqs: range) -> None:
        """Send while the subscriber's thread is held."""

        def send() -> None:
            for name, numbers in seqs.items():
                self.publishers[name].send_batches(numbers, EMPTY)

        self.subscriber.call(send)

    def wait(self, **seqs: int) -> None:
        until(
            self.subscriber.statuses,
            lambda statuses: all(statuses[Rank(name, 0)].seq == seq for name, seq in seqs.items()),
        )

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.subscriber.close()


@pytest.fixture
def bench(context: Context) -> Iterator[Bench]:
    with Bench(context, ["slow", "good"], {"slow"}) as bench:
        bench.send_at_once(slow=range(1), good=range(1))
        bench.wait(slow=0, good=0)
        bench.order.clear()
        yield bench


def assert_each_had_its_turn(bench: Bench) -> None:
    assert [o for o in bench.order if o.startswith("slow")] == [f"slow {n}" for n in range(1, 50)]
    assert bench.order.index("good 3") <= 4, bench.order


def test_rank_whose_batches_take_long_leaves_the_others_their_turn(bench: Bench) -> None:
    bench.send_at_once(slow=range(1, 50), good=range(1, 4))
    bench.wait(slow=49, good=3)
    assert_each_had_its_turn(bench)


def test_gap_that_closes_on_much_that_is_held_leaves_the_others_their_turn(bench: Bench) -> None:
    slow = Rank("slow", 0)
    bench.send_at_once(slow=range(2, 50))
    until(bench.subscriber.statuses, lambda s: s[slow].state is State.REPAIRING)
    seen = []

    def look(statuses: Mapping[Rank, RankStatus]) -> bool:
        seen.append(statuses[slow])
        return statuses[slow].seq == 49

    bench.send_at_once(slow=range(1, 2), good=range(1, 4))
    until(bench.subscriber.statuses, look)
    bench.wait(good=3)
    assert_each_had_its_turn(bench)
    assert seen[-1].state is State.LIVE
    for status in seen:
        assert status.seq is not None
        if status.seq not in (0, 49):
            assert (status.state, status.lag) == (State.SYNCING, 49 - status.seq)


def test_what_is_asked_for_between_two_turns_stands_where_the_sink_does(
    engine: FakeEngine,
) -> None:
    clock = ManualClock()
    taken: list[int] = []

    def sink(item: StreamItem) -> None:
        if isinstance(item, RankBatch):
            taken.append(item.seq)
            clock.advance(1.0)

    for number in range(20):
        engine.serve(prompt(number))
    with Subscriber([worker_of(engine)], sink=sink, clock=clock) as subscriber:
        while len(taken) < engine.published:
            cursor, count = subscriber.call(lambda: (subscriber.cursor(engine.rank), len(taken)))
            if cursor is not None:
                assert SavedCursor.decode(cursor).cursor.seq == count - 1


def test_a_call_is_served_after_a_few_ranks_however_many_are_behind(context: Context) -> None:
    """Each batch takes the sink 0.1 s, and twelve ranks have five: 6 s, were it one turn."""
    names = [f"w{n}" for n in range(12)]

    class Calling(Bench):
        def on_first_batch(self) -> None:
            self.subscriber.remove("gone")  # a call that is carried out in the next turn

    with Calling(context, [*names, "gone"], names) as bench:
        bench.send_at_once(**dict.fromkeys(names, range(5)))
        bench.wait(**dict.fromkeys(names, 4))
    assert bench.order.index("call") <= 2
    first_round = [entry.split()[0] for entry in bench.order if entry != "call"][: len(names)]
    assert sorted(first_round) == sorted(names), "none is passed over"


def test_a_subscriber_receives_nothing_while_its_sink_has_no_room_and_serves_calls(
    engine: FakeEngine, other: FakeEngine
) -> None:
    items: list[StreamItem] = []
    room = 5  # the rank, and four batches
    for number in range(20):
        engine.serve(prompt(number))
    with Subscriber(
        [worker_of(engine)], sink=items.append, has_room=lambda: len(items) < room
    ) as subscriber:
        until(subscriber.statuses, lambda s: s[engine.rank].seq == 3)
        for _ in range(5):
            subscriber.add(worker_of(other))
            subscriber.remove("other")
        assert batch_seqs(items) == [0, 1, 2, 3]
        room = 100
        subscriber.wake()
        last = engine.published - 1
        until(subscriber.statuses, lambda s: s[engine.rank].seq == last)
    assert batch_seqs(items) == list(range(last + 1))
