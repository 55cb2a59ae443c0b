"""Publishers' messages, received without a filter: topics, numbers, and stored blocks by rank.

A client orders and repairs; a listener receives messages as they arrive. A listener opens two
connections to each endpoint: behind an address that balances they reach different publishers.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import zmq

from kvindex import BlockHash, BlockStored, PublisherAddress
from kvindex.wire import BlockRemoved, decode_batch, parse_live
from kvindex.wire.errors import DecodeError

_MAX_MESSAGE: Final = 8 << 20  # bytes
_MAX_MESSAGES: Final = 100_000  # of one connection in one examination
_MAX_TOPICS: Final = 64
_MAX_KEPT: Final = 4096  # numbers, hashes
_CONNECTIONS: Final = 2
_MANY_FALLS: Final = 3  # of one connection's numbers: a restart is one, and ends the connection


class Reception:
    """The messages of one connection. Owned by the thread that listens."""

    def __init__(self) -> None:
        self.messages = 0
        self.topics: Counter[str] = Counter()
        self.missing = 0
        self.falls = 0  # numbers that were lower than the one before
        self.undecodable = 0
        self.stored = 0
        self.stored_again = 0
        self.block_sizes: set[int] = set()
        self.first_hashes: dict[int, BlockHash] = {}
        self.marks: OrderedDict[int, int] = OrderedDict()  # by number, what the payload was
        self.tested = 0
        self._removed: OrderedDict[BlockHash, None] = OrderedDict()
        self._last: int | None = None

    def receive(self, frames: Sequence[bytes], wanted: bytes) -> None:
        """Receive one message, and check whether it stores blocks of the wanted tokens."""
        self.messages += 1
        try:
            live = parse_live(frames)
            batch = decode_batch(live.payload)
        except DecodeError:
            self.undecodable += 1
            return
        topic = live.topic.decode("utf-8", "replace")[:200]
        if topic in self.topics or len(self.topics) < _MAX_TOPICS:
            self.topics[topic] += 1
        # An engine that cannot encode a batch uses up its number all the same.
        if self._last is not None:
            self.missing += max(0, live.seq - self._last - 1)
            self.falls += live.seq < self._last
        self._last = live.seq
        _keep(self.marks, live.seq, zlib.crc32(live.payload))
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event, wanted)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    _keep(self._removed, block_hash, None)

    def _store(self, event: BlockStored, wanted: bytes) -> None:
        if not event.block_hashes or event.block_size < 1:
            return
        self.stored += len(event.block_hashes)
        # What is stored soon after its removal did not fit.
        for block_hash in event.block_hashes:
            if self._removed.pop(block_hash, self) is None:
                self.stored_again += 1
        if not event.token_ids:
            return
        if len(self.block_sizes) < _MAX_TOPICS:
            self.block_sizes.add(event.block_size)
        tokens = [token for token in event.token_ids if isinstance(token, int)]
        run = block_run(tokens)
        # As bytes, so that a run of blocks is found wherever in the prompt it is.
        if wanted and run and run in wanted:
            self.tested += len(tokens)
        # First blocks alone: of later ones the hash covers what is before them.
        if not event.parent_block_hash and len(self.first_hashes) < _MAX_KEPT:
            first = zlib.crc32(run[: event.block_size * 4])
            self.first_hashes.setdefault(first, event.block_hashes[0])


class Listener:
    """Subscribe to an engine's ranks, to every topic. Owned by one thread at a time.

    Raises:
        zmq.ZMQError: an endpoint cannot be used.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Iterable[PublisherAddress]
    ) -> None:
        self.received: dict[int, list[Reception]] = {}
        self._sockets: dict[zmq.Socket[bytes], Reception] = {}
        self._poller = zmq.Poller()
        self._wanted = b""
        try:
            for address in addresses:
                self.received[address.dp_rank] = [Reception() for _ in range(_CONNECTIONS)]
                for reception in self.received[address.dp_rank]:
                    sock = context.socket(zmq.SUB)
                    # At once, so that `close` finds it if a further step fails.
                    self._sockets[sock] = reception
                    sock.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
                    sock.setsockopt(zmq.IPV6, 1)
                    sock.setsockopt(zmq.LINGER, 0)
                    sock.setsockopt(zmq.SUBSCRIBE, b"")
                    sock.connect(address.endpoint)
                    self._poller.register(sock, zmq.POLLIN)
        except BaseException:
            self.close()
            raise

    def want(self, token_ids: Sequence[int]) -> None:
        """From now on count stores of these tokens, in `Reception.tested`."""
        self._wanted = block_run(token_ids)

    def listen(self, until: Callable[[], bool], seconds: float) -> bool:
        """Receive messages until a condition holds, or time is up; return whether it holds."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for sock, _ in self._poller.poll(int(left * 1000) + 1):
                reception = self._sockets[sock]
                reception.receive(sock.recv_multipart(zmq.NOBLOCK), self._wanted)
                # A publisher gone mad must not keep the doctor for ever.
                if reception.messages >= _MAX_MESSAGES:
                    self._poller.unregister(sock)
        return True

    def first(self, dp_rank: int) -> Reception:
        """Return the first connection to a rank, or the one that received more messages."""
        return max(
            self.received.get(dp_rank) or [Reception()], key=lambda reception: reception.messages
        )

    def topics(self, dp_rank: int) -> list[str]:
        """Return the topics of a rank's messages, sorted."""
        return sorted(self.first(dp_rank).topics)

    def differing(self) -> list[int]:
        """Return the ranks at whose address several publishers send.

        Two connections received different batches of one number, or one connection's numbers fall
        back again and again.
        """
        return [
            rank
            for rank, (first, second) in self.received.items()
            if max(first.falls, second.falls) >= _MANY_FALLS
            or bool(first.tested) != bool(second.tested)
            or any(second.marks.get(seq, mark) != mark for seq, mark in first.marks.items())
        ]

    def ranks_tested(self) -> int:
        """Return how many ranks' connections have all received the wanted blocks."""
        return sum(all(r.tested for r in pair) for pair in self.received.values())

    def agrees(self) -> bool:
        """Return whether each rank's connections all received the wanted blocks, or none did."""
        return all(len({bool(r.tested) for r in pair}) == 1 for pair in self.received.values())

    def close(self) -> None:
        """Hang up. Idempotent."""
        for sock in self._sockets:
            sock.close(linger=0)
        self._sockets.clear()
        self._poller = zmq.Poller()


def block_run(token_ids: Sequence[int]) -> bytes:
    """Return tokens as bytes in which runs of them can be found; b"" if one is no token id."""
    try:
        return array("I", token_ids).tobytes()
    except (OverflowError, TypeError):
        return b""


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _MAX_KEPT:
        kept.popitem(last=False)
