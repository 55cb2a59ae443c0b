"""What stands around a subscriber in its tests: publishers, sinks that block, and prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import zmq

from kvindex import BlockStored, Client, EventBatch, Rank, RankStatus
from kvindex.subscribe import RankBatch, StreamItem
from kvindex.subscribe.resumption import SavedCursor
from kvindex.subscribe.sequencer import Cursor
from kvindex.wire import live_frames
from tests.live import PATIENCE, within
from tests.publish.publish_peers import Context, Peer

RANK = Rank("engine", 0)


def prompt(number: int) -> list[int]:
    """Tokens that no other number's prompt begins with."""
    return [number * 1000 + i for i in range(64)]


def stored(number: int = 0, dp_rank: int | None = None) -> EventBatch:
    """A batch that stores the first block of a prompt; its ts is later for a higher number."""
    block = BlockStored(block_hashes=[number + 1], token_ids=prompt(number)[:16], block_size=16)
    return EventBatch(1_000.0 + number, [block], dp_rank)


def saved_cursor(dp_rank: int, *, named: int | None = None, fingerprints: str) -> bytes:
    """A cursor of the publisher at this port, whose seq tells which one that is."""
    stands = Cursor(
        epoch=0,
        seq=dp_rank,
        ts=1.0,
        next_seq=dp_rank + 1,
        complete=True,
        oldest_ts=0.0,
        kept_losses=False,
        recent={dp_rank: 5},
    )
    return SavedCursor(
        cursor=stands, dp_rank=dp_rank, named=named, fingerprints=fingerprints
    ).encode()


def publish_until(
    client: Client, publish: Callable[[int], object], reached: Callable[[RankStatus], object]
) -> int:
    """Publish until the rank's status is as it should be; return the last number published.

    Without replay, batches that were published before the subscription arrived are lost.
    """
    for number in range(1000):
        publish(number)
        if within(0.05, lambda: client.status(RANK), reached):
            return number
    raise AssertionError(client.status(RANK))


class RawPublisher(Peer):
    """A publisher that sends the frames that it is given."""

    def __init__(
        self, context: Context, endpoint: str = "tcp://127.0.0.1:*", *, hwm: int = 0
    ) -> None:
        self.socket = context.socket(zmq.XPUB)
        self.socket.sndhwm = hwm
        self.socket.bind(endpoint)
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)

    def wait_subscribed(self) -> None:
        """Wait until a subscription arrives."""
        while self.socket.poll(int(PATIENCE * 1000)):
            if self.socket.recv().startswith(b"\1"):
                return
        raise AssertionError("nobody subscribes")

    def send(self, *messages: list[bytes]) -> None:
        for frames in messages:
            self.socket.send_multipart(frames)

    def send_batches(self, seqs: range, payload: bytes) -> None:
        self.send(*(live_frames(b"", seq, payload) for seq in seqs))


class BlockingSink:
    """A sink that keeps its items, and blocks once, on the first one that `blocks_on` accepts."""

    def __init__(
        self, blocks_on: Callable[[StreamItem], bool] = lambda item: isinstance(item, RankBatch)
    ) -> None:
        self.items: list[StreamItem] = []
        self.go_on = threading.Event()
        self._blocks_on = blocks_on
        self._blocked = threading.Event()

    def __call__(self, item: StreamItem) -> None:
        self.items.append(item)
        if not self._blocked.is_set() and self._blocks_on(item):
            self._blocked.set()
            assert self.go_on.wait(PATIENCE)

    def wait_blocked(self) -> None:
        assert self._blocked.wait(PATIENCE)

    @property
    def seqs(self) -> list[int]:
        """The seqs of the batches so far."""
        return batch_seqs(self.items)


def batch_seqs(items: Iterable[StreamItem]) -> list[int]:
    """List the seqs of the batches among these items."""
    return [item.seq for item in items if isinstance(item, RankBatch)]
