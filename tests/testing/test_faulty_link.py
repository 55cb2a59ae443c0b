"""A faulty link between real sockets: each fault does what its name says, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import le

import pytest
import zmq

from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults, ManualClock
from kvindex.wire import decode_batch, parse_live, parse_replay
from kvindex.wire.errors import ClosedError, ConfigurationError, DecodeError
from tests.live import PATIENCE, until
from tests.publish.publish_peers import Asker, Context, Peer
from tests.publish.publish_peers import seqs as replied_seqs

pytestmark = pytest.mark.e2e


class Reader(Peer):
    """A subscriber without any cleverness, and the engine that it reads through a link."""

    def __init__(
        self, context: Context, engine: FakeEngine, link: FaultyLink, topic: bytes = b""
    ) -> None:
        self.context = context
        self.engine = engine
        self.link = link
        self.socket = context.socket(zmq.SUB)
        self.socket.reconnect_ivl = 10
        self.socket.subscribe(topic)
        self.socket.connect(link.endpoint)

    def next(self, timeout: float = PATIENCE) -> list[bytes] | None:
        if not self.socket.poll(int(timeout * 1000)):
            return None
        return self.socket.recv_multipart()

    def seq(self) -> int:
        frames = self.next()
        assert frames is not None, "nothing arrived"
        return parse_live(frames).seq

    def seqs(self, count: int) -> list[int]:
        return [self.seq() for _ in range(count)]

    def joined(self) -> int:
        """Publish until something arrives: only then is the subscription known to be in force."""
        return self.until(lambda seq: True)

    def until(self, wanted: Callable[[int], bool]) -> int:
        """Publish until a wanted seq arrives, and read what was published; return the last."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self.publish()
            frames = self.next(timeout=0.02)
            if frames is not None and wanted(last := parse_live(frames).seq):
                while last < self.engine.published - 1:
                    last = self.seq()
                return last
        raise AssertionError("nothing wanted arrived")

    def publish(self, count: int = 1) -> None:
        """Publish batches, each of a prompt not seen before."""
        for _ in range(count):
            self.engine.serve([self.engine.published] * 4)

    def replay_of(self, count: Callable[[dict[str, int]], int]) -> list[list[bytes]]:
        """Return the replies once as many came as follows from the link's statistics."""
        asker, replies = self._asker(), list[list[bytes]]()

        def received() -> int:
            if asker.socket.poll(5):
                replies.append(asker.socket.recv_multipart())
            return len(replies)

        until(received, lambda number: number == count(self.link.statistics()))
        return replies

    def replay(self, timeout: float = PATIENCE) -> list[list[bytes]]:
        """Ask from 0; return the replies until the end marker, or until none comes any more."""
        asker, replies = self._asker(), list[list[bytes]]()
        while asker.socket.poll(int(timeout * 1000)):
            replies.append(asker.socket.recv_multipart())
            if readable(replies[-1]) and parse_replay(replies[-1]).end:
                break
        return replies

    def _asker(self) -> Asker:
        asker = Asker(self.context, self.link.replay_endpoint)
        asker.ask(0)
        return asker


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(block_size=4, num_blocks=1000) as made:
        yield made


@pytest.fixture
def link(engine: FakeEngine) -> Iterator[FaultyLink]:
    with FaultyLink(engine.endpoint, engine.replay_endpoint, seed=1) as made:
        yield made


@pytest.fixture
def reader(context: Context, engine: FakeEngine, link: FaultyLink) -> Reader:
    return Reader(context, engine, link)


@pytest.fixture
def last(reader: Reader) -> int:
    """The last seq that the reader received, in force of its subscription."""
    return reader.joined()


def readable(frames: list[bytes]) -> bool:
    try:
        parse_replay(frames)
    except DecodeError:
        return False
    return True


def test_without_faults_everything_passes_unchanged(
    reader: Reader, last: int, link: FaultyLink
) -> None:
    reader.publish(50)
    assert reader.seqs(50) == list(range(last + 1, last + 51))
    replies = [parse_replay(frames) for frames in reader.replay()]
    assert [reply.seq for reply in replies[:-1]] == list(range(last + 51))
    assert replies[-1].end
    assert decode_batch(replies[0].payload).events
    assert link.statistics()["replay.forwarded"] == len(replies)


def test_topics_pass_through_to_the_publisher(context: Context) -> None:
    with FakeEngine(topic="kv@a", block_size=4) as engine, FaultyLink(engine.endpoint) as link:
        assert link.replay_endpoint is None
        stranger = Reader(context, engine, link, b"kv@b")
        Reader(context, engine, link, b"kv@").joined()
        assert stranger.next(timeout=0.0) is None


def test_drop_next_drops_exactly_so_many(reader: Reader, last: int, link: FaultyLink) -> None:
    link.drop_next(3)
    reader.publish(5)
    assert reader.seqs(2) == [last + 4, last + 5]
    assert link.statistics()["live.dropped"] == 3
    assert len(reader.replay()) == last + 7, "dropped live messages can be replayed"


def test_live_messages_are_duplicated_reordered_delayed_and_corrupted(
    reader: Reader, last: int, link: FaultyLink
) -> None:
    link.set_faults(Faults(live=LaneFaults(duplicate=1.0)))
    reader.publish(2)
    assert reader.seqs(4) == [last + 1, last + 1, last + 2, last + 2]

    link.set_faults(Faults(live=LaneFaults(reorder=0.4, delay=0.4, max_delay=0.02)))
    reader.publish(100)
    seqs = reader.seqs(100)
    assert sorted(seqs) == list(range(last + 3, last + 103))
    assert seqs != sorted(seqs)

    link.set_faults(Faults(live=LaneFaults(corrupt=1.0)))
    reader.publish(40)
    for _ in range(40):
        frames = reader.next()
        assert frames is not None
        with pytest.raises(DecodeError):
            decode_batch(parse_live(frames).payload)


def test_a_delay_follows_the_given_clock_and_quiesce_sends_on_what_is_held(
    context: Context, engine: FakeEngine
) -> None:
    clock = ManualClock()
    with FaultyLink(engine.endpoint, clock=clock) as link:
        reader = Reader(context, engine, link)
        last = reader.joined()
        link.set_faults(Faults(live=LaneFaults(delay=1.0, max_delay=60.0)))
        reader.publish()
        assert reader.next(timeout=0.05) is None
        clock.advance(60.0)
        assert reader.seq() == last + 1
        reader.publish(10)
        until(lambda: link.statistics().get("live.delayed") == 11)
        link.quiesce()
        assert sorted(reader.seqs(10)) == list(range(last + 2, last + 12))
        reader.publish()
        assert reader.seq() == last + 12


def test_replay_has_faults_of_its_own(reader: Reader, link: FaultyLink) -> None:
    reader.publish(100)
    link.set_faults(Faults(replay=LaneFaults(drop=0.3)))
    replies = reader.replay_of(lambda met: 101 - met.get("replay.dropped", 0))
    assert 30 < len(replies) < 95
    link.set_faults(Faults(replay=LaneFaults(corrupt=0.5, duplicate=0.5)))
    damaged = reader.replay_of(lambda met: 101 + met.get("replay.duplicated", 0))
    assert len(damaged) > 101
    assert not all(map(readable, damaged))
    assert reader.joined(), "live messages do not suffer"


def test_a_silent_replay_accepts_and_never_answers(reader: Reader, link: FaultyLink) -> None:
    reader.publish(3)
    link.silence_replay()
    assert reader.replay(timeout=0.1) == []
    assert link.statistics()["replay.silenced"] == 1
    reader.joined()
    link.restore_replay()
    assert len(reader.replay()) == reader.engine.published + 1


def test_a_cut_is_seen_and_heals_at_the_same_endpoint(reader: Reader, link: FaultyLink) -> None:
    monitor = reader.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    last = reader.joined()
    for _ in range(3):
        link.cut()
        link.cut()
        assert monitor.poll(int(PATIENCE * 1000)), "the subscriber sees the disconnect"
        monitor.recv_multipart()
        reader.publish(5)
        link.heal()
        link.heal()
        last = reader.until(partial(le, reader.engine.published))
    reader.socket.disable_monitor()
    monitor.close()
    assert link.statistics()["cuts"] == 3
    assert len(reader.replay()) == last + 2


def test_an_engine_restarts_at_the_same_ports(context: Context) -> None:
    with FakeEngine(dp_rank=3, block_size=4) as engine:
        with FaultyLink(engine.endpoint, engine.replay_endpoint) as link:
            reader = Reader(context, engine, link)
            reader.joined()
            for hard in (True, False):
                reader.publish(50)
                before = engine.endpoint, engine.replay_endpoint
                engine.restart(hard=hard)
                assert (engine.endpoint, engine.replay_endpoint) == before
                assert len(reader.replay()) == 1, "nothing to replay"
                reader.until(lambda seq: seq < 50)


def test_retarget_follows_an_engine_that_moved(
    reader: Reader, last: int, engine: FakeEngine, link: FaultyLink
) -> None:
    before = engine.endpoint
    engine.restart(keep_ports=False)
    assert engine.endpoint != before
    link.retarget(engine.endpoint, engine.replay_endpoint)
    last = reader.joined()
    assert len(reader.replay()) == last + 2
    with FaultyLink(engine.endpoint) as plain, pytest.raises(ConfigurationError):
        plain.retarget(engine.endpoint, engine.replay_endpoint)


def test_clients_get_their_own_replies(context: Context, reader: Reader) -> None:
    reader.publish(20)
    askers = [Asker(context, reader.link.replay_endpoint) for _ in range(4)]
    for start, asker in enumerate(askers):
        asker.ask(start * 5)
    for start, asker in enumerate(askers):
        assert replied_seqs(asker.receive()) == list(range(start * 5, 20))


def test_a_closed_link_accepts_no_commands(engine: FakeEngine) -> None:
    link = FaultyLink(engine.endpoint)
    link.close()
    link.close()
    with pytest.raises(ClosedError):
        link.cut()
    with pytest.raises(ConfigurationError, match="nonsense"):
        FaultyLink("nonsense")
