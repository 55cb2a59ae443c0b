"""Peers of a publisher in tests: a subscriber, an asker for replay, and waiting with a deadline."""

from __future__ import annotations

import time
from typing import Any

import zmq

from kvindex.publish import ZmqEventPublisher
from kvindex.wire import (
    BlockStored,
    EventBatch,
    LiveFrame,
    ReplayReply,
    parse_live,
    parse_replay,
    replay_request,
)
from tests.live import PATIENCE, until

Context = zmq.Context[zmq.Socket[bytes]]
ANY_PORT = "tcp://127.0.0.1:0"


def batch(number: int = 0, *, blocks: int = 1, block_size: int = 16) -> EventBatch:
    """A batch that stores blocks; its ts tells which one it is."""
    stored = BlockStored(
        block_hashes=list(range(number, number + blocks)),
        token_ids=list(range(blocks * block_size)),
        block_size=block_size,
        medium="GPU",
    )
    return EventBatch(ts=float(number), events=[stored])


def publish_many(publisher: ZmqEventPublisher, count: int) -> None:
    """Publish batches numbered from 0 by their ts."""
    for number in range(count):
        publisher.publish(batch(number))


class Peer:
    """A socket that goes with its test."""

    socket: zmq.Socket[bytes]

    def __del__(self) -> None:
        self.socket.close(linger=0)


class Live(Peer):
    """A SUB socket connected to a publisher."""

    def __init__(self, context: Context, endpoint: str | None, *, topic: bytes = b"") -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.set_hwm(0)
        self.socket.subscribe(topic)
        if endpoint is not None:
            self.socket.connect(endpoint)

    def receive(self, timeout: float = PATIENCE) -> LiveFrame:
        assert self.socket.poll(int(timeout * 1000)), f"nothing live within {timeout} s"
        return parse_live(self.socket.recv_multipart())

    def join(self, publisher: ZmqEventPublisher) -> int:
        """Publish until a batch arrives; return the next number, of which none is on its way."""
        until = time.monotonic() + PATIENCE
        publisher.publish(batch())
        while not self.socket.poll(5):
            assert time.monotonic() < until, "the subscription did not reach the publisher"
            publisher.publish(batch())
        last = publisher.next_seq - 1
        while self.receive().seq < last:
            pass
        return last + 1


class Asker(Peer):
    """A DEALER socket connected to a publisher's replay endpoint."""

    def __init__(self, context: Context, endpoint: str | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        if endpoint is not None:
            self.socket.connect(endpoint)

    def ask(self, start_seq: int) -> None:
        self.socket.send_multipart(replay_request(start_seq))

    def receive_frames(self, timeout: float = PATIENCE) -> list[bytes]:
        assert self.socket.poll(int(timeout * 1000)), f"no reply within {timeout} s"
        return self.socket.recv_multipart()

    def receive(self) -> list[ReplayReply]:
        """The replies of one replay, its end included."""
        replies = [parse_replay(self.receive_frames())]
        while not replies[-1].end:
            replies.append(parse_replay(self.receive_frames()))
        return replies

    def replay(self, start_seq: int) -> list[ReplayReply]:
        self.ask(start_seq)
        return self.receive()


def seqs(replies: list[ReplayReply]) -> list[int]:
    """The numbers of a replay, without its end."""
    assert replies[-1].end
    return [reply.seq for reply in replies[:-1]]


class Peers:
    """Publishers of one ZeroMQ context, and those that connect to them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._publishers: list[ZmqEventPublisher] = []

    def publisher(self, **arguments: Any) -> ZmqEventPublisher:
        usual: dict[str, Any] = {"endpoint": ANY_PORT, "context": self.context}
        self._publishers.append(ZmqEventPublisher(**(usual | arguments)))
        return self._publishers[-1]

    def replaying(self, published: int = 0, **arguments: Any) -> ZmqEventPublisher:
        """Make a publisher with a replay endpoint, which has sent so many batches."""
        publisher = self.publisher(**({"replay_endpoint": ANY_PORT} | arguments))
        publish_many(publisher, published)
        until(lambda: publisher.statistics()["sent"] == published)
        return publisher

    def live(self, publisher: ZmqEventPublisher, *, topic: bytes = b"") -> Live:
        return Live(self.context, publisher.endpoint, topic=topic)

    def joined(self, publisher: ZmqEventPublisher, *, topic: bytes = b"") -> tuple[Live, int]:
        """Return a subscriber that receives, and the number that comes next."""
        live = self.live(publisher, topic=topic)
        return live, live.join(publisher)

    def asker(self, publisher: ZmqEventPublisher) -> Asker:
        return Asker(self.context, publisher.replay_endpoint)

    def replayed(self, publisher: ZmqEventPublisher, start_seq: int = 0) -> list[int]:
        return seqs(self.asker(publisher).replay(start_seq))

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.shutdown(timeout=0.0)
