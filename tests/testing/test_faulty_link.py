"""A faulty link between real sockets: each fault does what its name says, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults, ManualClock
from kvindex.wire import decode_batch, parse_live, parse_replay, replay_request
from kvindex.wire.errors import ClosedError, ConfigurationError, DecodeError
from tests.live import PATIENCE, until

pytestmark = pytest.mark.e2e


class Sockets:
    """A ZeroMQ context that keeps its sockets until the test is over."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._made: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        self._made.append(self._context.socket(kind))
        return self._made[-1]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def context() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(block_size=4, num_blocks=1000) as made:
        yield made


@pytest.fixture
def link(engine: FakeEngine) -> Iterator[FaultyLink]:
    with FaultyLink(engine.endpoint, engine.replay_endpoint, seed=1) as made:
        yield made


class Reader:
    """A subscriber without any cleverness."""

    def __init__(self, context: Sockets, link: FaultyLink, topic: bytes = b"") -> None:
        self._context = context
        self._link = link
        self.live = context.socket(zmq.SUB)
        self.live.reconnect_ivl = 10
        self.live.subscribe(topic)
        self.live.connect(link.endpoint)

    def next(self, timeout: float = PATIENCE) -> list[bytes] | None:
        if not self.live.poll(int(timeout * 1000)):
            return None
        return self.live.recv_multipart()

    def seq(self) -> int:
        frames = self.next()
        assert frames is not None, "nothing arrived"
        return parse_live(frames).seq

    def seqs(self, count: int) -> list[int]:
        return [self.seq() for _ in range(count)]

    def joined(self, engine: FakeEngine) -> int:
        """Publish until something arrives: only then is the subscription known to be in force."""
        return self.until(engine, lambda frames: True)

    def until(self, engine: FakeEngine, wanted: Callable[[list[bytes]], bool]) -> int:
        """Publish until a wanted message arrives, and read what was published; return the last."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            publish(engine)
            frames = self.next(timeout=0.02)
            if frames is not None and wanted(frames):
                last = parse_live(frames).seq
                while last < engine.published - 1:
                    last = self.seq()
                return last
        raise AssertionError("nothing wanted arrived")

    def asker(self) -> zmq.Socket[bytes]:
        """A socket that asks for a replay from 0."""
        asker = self._context.socket(zmq.DEALER)
        assert self._link.replay_endpoint is not None
        asker.connect(self._link.replay_endpoint)
        asker.send_multipart(replay_request(0))
        return asker

    def replay_of(self, count: Callable[[dict[str, int]], int]) -> list[list[bytes]]:
        """Return the replies once as many came as follows from the link's statistics."""
        asker, replies = self.asker(), list[list[bytes]]()

        def come() -> int:
            if asker.poll(5):
                replies.append(asker.recv_multipart())
            return len(replies)

        until(come, lambda number: number == count(self._link.statistics()))
        asker.close()
        return replies

    def replay(self, timeout: float = PATIENCE) -> list[list[bytes]]:
        """Ask from 0; return the replies until the end marker, or until none comes any more."""
        asker, replies = self.asker(), list[list[bytes]]()
        while asker.poll(int(timeout * 1000)):
            replies.append(asker.recv_multipart())
            if readable(replies[-1]) and parse_replay(replies[-1]).end:
                break
        asker.close()
        return replies


def readable(frames: list[bytes]) -> bool:
    try:
        parse_replay(frames)
    except DecodeError:
        return False
    return True


def from_seq(first: int) -> Callable[[list[bytes]], bool]:
    return lambda frames: parse_live(frames).seq >= first


def publish(engine: FakeEngine, count: int = 1) -> None:
    """Publish batches, each of a prompt not seen before."""
    for _ in range(count):
        engine.serve([engine.published] * 4)


def test_without_faults_everything_passes_unchanged(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    reader = Reader(context, link)
    last = reader.joined(engine)
    publish(engine, 50)
    assert reader.seqs(50) == list(range(last + 1, last + 51))
    replies = [parse_replay(frames) for frames in reader.replay()]
    assert [reply.seq for reply in replies[:-1]] == list(range(last + 51))
    assert replies[-1].end
    assert decode_batch(replies[0].payload).events
    assert link.statistics()["replay.forwarded"] == len(replies)


def test_topics_pass_through_to_the_publisher(context: Sockets) -> None:
    with FakeEngine(topic="kv@a", block_size=4) as engine, FaultyLink(engine.endpoint) as link:
        assert link.replay_endpoint is None
        stranger = Reader(context, link, b"kv@b")
        reader = Reader(context, link, b"kv@")
        reader.joined(engine)
        assert stranger.next(timeout=0.0) is None


def test_drop_next_drops_exactly_so_many(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    reader = Reader(context, link)
    last = reader.joined(engine)
    link.drop_next(3)
    publish(engine, 5)
    assert reader.seqs(2) == [last + 4, last + 5]
    assert link.statistics()["live.dropped"] == 3
    assert len(reader.replay()) == last + 7, "dropped live messages can be replayed"


def test_duplicated_messages_arrive_twice(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    reader = Reader(context, link)
    last = reader.joined(engine)
    link.set_faults(Faults(live=LaneFaults(duplicate=1.0)))
    publish(engine, 2)
    assert reader.seqs(4) == [last + 1, last + 1, last + 2, last + 2]


def test_reordered_and_delayed_messages_all_arrive(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    reader = Reader(context, link)
    last = reader.joined(engine)
    link.set_faults(Faults(live=LaneFaults(reorder=0.4, delay=0.4, max_delay=0.02)))
    publish(engine, 100)
    seqs = reader.seqs(100)
    assert sorted(seqs) == list(range(last + 1, last + 101))
    assert seqs != sorted(seqs)


def test_a_delay_follows_the_given_clock(context: Sockets, engine: FakeEngine) -> None:
    clock = ManualClock()
    with FaultyLink(engine.endpoint, clock=clock) as link:
        reader = Reader(context, link)
        last = reader.joined(engine)
        link.set_faults(Faults(live=LaneFaults(delay=1.0, max_delay=60.0)))
        publish(engine)
        assert reader.next(timeout=0.05) is None
        clock.advance(60.0)
        assert reader.seq() == last + 1


def test_quiesce_sends_on_what_is_held(context: Sockets, engine: FakeEngine) -> None:
    with FaultyLink(engine.endpoint, clock=ManualClock()) as link:
        reader = Reader(context, link)
        last = reader.joined(engine)
        link.set_faults(Faults(live=LaneFaults(delay=1.0, max_delay=60.0)))
        publish(engine, 10)
        until(lambda: link.statistics().get("live.delayed") == 10)
        link.quiesce()
        assert sorted(reader.seqs(10)) == list(range(last + 1, last + 11))
        publish(engine)
        assert reader.seq() == last + 11


def test_corrupted_messages_can_be_recognized(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    reader = Reader(context, link)
    reader.joined(engine)
    link.set_faults(Faults(live=LaneFaults(corrupt=1.0)))
    publish(engine, 40)
    for _ in range(40):
        frames = reader.next()
        assert frames is not None
        with pytest.raises(DecodeError):
            decode_batch(parse_live(frames).payload)


def test_replay_has_faults_of_its_own(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    publish(engine, 100)
    link.set_faults(Faults(replay=LaneFaults(drop=0.3)))
    reader = Reader(context, link)
    replies = reader.replay_of(lambda met: 101 - met.get("replay.dropped", 0))
    assert 30 < len(replies) < 95
    link.set_faults(Faults(replay=LaneFaults(corrupt=0.5, duplicate=0.5)))
    damaged = reader.replay_of(lambda met: 101 + met.get("replay.duplicated", 0))
    assert len(damaged) > 101
    assert not all(map(readable, damaged))
    assert reader.joined(engine), "live messages do not suffer"


def test_a_silent_replay_accepts_and_never_answers(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    publish(engine, 3)
    link.silence_replay()
    reader = Reader(context, link)
    assert reader.replay(timeout=0.1) == []
    assert link.statistics()["replay.silenced"] == 1
    reader.joined(engine)
    link.restore_replay()
    assert len(reader.replay()) == engine.published + 1


def test_a_cut_is_seen_and_heals_at_the_same_endpoint(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    reader = Reader(context, link)
    monitor = reader.live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    last = reader.joined(engine)
    for _ in range(3):
        link.cut()
        link.cut()
        assert monitor.poll(int(PATIENCE * 1000)), "the subscriber sees the disconnect"
        monitor.recv_multipart()
        publish(engine, 5)
        link.heal()
        link.heal()
        last = reader.until(engine, from_seq(engine.published))
    reader.live.disable_monitor()
    monitor.close()
    assert link.statistics()["cuts"] == 3
    assert len(reader.replay()) == last + 2


def test_an_engine_restarts_at_the_same_ports(context: Sockets) -> None:
    with FakeEngine(dp_rank=3, block_size=4) as engine:
        reader_link = FaultyLink(engine.endpoint, engine.replay_endpoint)
        with reader_link as link:
            reader = Reader(context, link)
            reader.joined(engine)
            for hard in (True, False):
                publish(engine, 50)
                before = engine.endpoint, engine.replay_endpoint
                engine.restart(hard=hard)
                assert (engine.endpoint, engine.replay_endpoint) == before
                assert len(reader.replay()) == 1, "nothing to replay"
                reader.until(engine, lambda frames: parse_live(frames).seq < 50)


def test_retarget_follows_an_engine_that_moved(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    reader = Reader(context, link)
    reader.joined(engine)
    before = engine.endpoint
    engine.restart(keep_ports=False)
    assert engine.endpoint != before
    link.retarget(engine.endpoint, engine.replay_endpoint)
    last = reader.joined(engine)
    assert len(reader.replay()) == last + 2
    with FaultyLink(engine.endpoint) as plain, pytest.raises(ConfigurationError):
        plain.retarget(engine.endpoint, engine.replay_endpoint)


def test_clients_get_their_own_replies(
    context: Sockets, engine: FakeEngine, link: FaultyLink
) -> None:
    publish(engine, 20)
    assert link.replay_endpoint is not None
    askers = [context.socket(zmq.DEALER) for _ in range(4)]
    for start, asker in enumerate(askers):
        asker.connect(link.replay_endpoint)
        asker.send_multipart(replay_request(start * 5))
    for start, asker in enumerate(askers):
        seqs = []
        while asker.poll(int(PATIENCE * 1000)):
            reply = parse_replay(asker.recv_multipart())
            if reply.end:
                break
            seqs.append(reply.seq)
        assert seqs == list(range(start * 5, 20))


def test_a_closed_link_accepts_no_commands(engine: FakeEngine) -> None:
    link = FaultyLink(engine.endpoint)
    link.close()
    link.close()
    with pytest.raises(ClosedError):
        link.cut()
    with pytest.raises(ConfigurationError, match="nonsense"):
        FaultyLink("nonsense")
