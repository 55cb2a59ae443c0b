"""What leaves the subscriber's thread: all that its index receives, and snapshots for joiners.

The thread owns the ring's sending end, and no reader may block it for long: every reader gets every
message, or is evicted for being slow. Each place has its own patience: the time that the thread
waits for its reader reduces it, and it grows back slowly. So the thread waits for a reader that is
late once, not for one that is late again and again.

For a snapshot, each rank is copied in its turn. The thread is blocked for some milliseconds at a
time, or for one rank's copy if that takes longer; the next ranks are copied when the last ones have
been sent. Processes that join at the same time share the copies: a section counts from its own
position, so it serves every joiner that began before the copy and still lacks the rank.

```
taken   A   B   C   D   A   B
first   A   B   C   D
second          C   D   A   B      came when two ranks had been taken
```
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from kvindex.client import Client
from kvindex.replicas.messages import (
    BatchApplied,
    Begin,
    End,
    Entry,
    RingMessage,
    SectionRestored,
    StatusChanged,
    encode_message,
    follow_names,
)
from kvindex.shm.ring import RAW, Buffer, RingHandle, RingSender, ShmRingBuffer, Waiting, fragments
from kvindex.subscribe import RanksRenamed, RankStatus, StreamItem
from kvindex.wire.errors import ClosedError, QueueTimeoutError, UnknownRankError
from kvindex.wire.rank import Rank

logger = logging.getLogger(__name__)

_MAX_COUNT = 2**63 - 1  # the largest number that every reader of msgpack reads
# What an answer needs of a status, beside its reason and numbers.
_NEEDED = "rank", "state", "complete", "connected", "endpoint", "replay_endpoint", "last_event_age"
_AROUND_BYTES = 64  # of an entry around its payload, and of a name that is not unusual
_OTHER_BYTES = 512  # about what an entry without a payload takes
_HOLD = 0.005  # seconds of copying ranks: a turn of the thread under load takes longer
_REGAINED = 0.1  # of the time that passes without waiting


class Patience:
    """How many seconds the thread may still wait for one reader: at `most` so many."""

    def __init__(self, most: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._left = most
        self._since = clock()

    def left(self) -> float:
        """Return the seconds that are left now, as a wait begins."""
        now = self._clock()
        self._left = min(self._most, self._left + _REGAINED * (now - self._since))
        self._since = now
        return self._left

    def spend(self) -> bool:
        """Take off the time since `left` was called; return whether anything is left."""
        now = self._clock()
        spent, self._since = now - self._since, now
        self._left = max(0.0, self._left - spent)
        return self._left > 0.0


class MessageSink(Protocol):
    """Where a tap's messages go. Used by the subscriber's thread, but `statistics` by any."""

    chunk_bytes: int  # of a usual message: a tap begins another one before it has more

    def send(self, body: bytes) -> None:
        """Send a message to every reader."""

    def admit(self) -> None:
        """Admit the readers that have attached, from the next message on."""

    def count_readers(self) -> int:
        """Return how many readers there are: without any, a tap packs nothing."""

    def statistics(self) -> Mapping[str, float]:
        """Return counters."""

    def close(self) -> None:
        """Notify every reader that no message follows. Idempotent."""


class Outflow:
    """Sends messages to every reader of a ring that it makes.

    Owner: one thread, but `statistics`, `is_free` and `close` may be called from any.
    """

    def __init__(
        self,
        max_replicas: int,
        chunk_bytes: int,
        chunks: int,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ring = ShmRingBuffer(max_replicas, chunk_bytes, chunks)
        self.chunk_bytes = chunk_bytes
        self.evicted: set[int] = set()  # places whose readers were evicted and may not have noticed
        self._blocked = 0.0  # seconds spent waiting for room
        self._ring = ring
        self._sender = RingSender(ring, waiting=Waiting(spin=0.0, look=0.05))
        self._clock = clock
        # By place, not by reader: one that joins anew does not get its patience refilled.
        self._patiences = [Patience(patience, clock) for _ in range(max_replicas)]
        self._counters: Counter[str] = Counter()

    @property
    def handle(self) -> RingHandle:
        """The handle that readers attach with."""
        return self._ring.handle()

    def is_free(self, place: int) -> bool:
        """Return whether no living reader holds a place."""
        return not self._ring.reader_lives(place)

    def send(self, body: bytes) -> None:
        """Send a message to every reader; those that delay it for too long are evicted."""
        self._counters["messages"] += 1
        self._counters["bytes"] += len(body)
        if len(body) <= self.chunk_bytes:
            self._put(RAW, [body], len(body))
            return
        for kind, piece in fragments(RAW, [body], len(body), self.chunk_bytes):
            self._put(kind, list(piece), sum(map(len, piece)))

    def admit(self) -> None:
        """Admit the readers that have attached, from the next message on."""
        self._sender.admit()

    def count_readers(self) -> int:
        """Remove dead readers; return how many are left that every message waits for."""
        self._sender.remove_dead()
        return len(self._sender.readers())

    def statistics(self) -> dict[str, float]:
        """Return what was sent, how many readers were evicted, and how long the thread waited."""
        sender = self._sender.statistics()
        return {
            "messages": self._counters["messages"],
            "bytes": self._counters["bytes"],
            "chunks": sender["chunks"],
            "evicted": sender["readers_evicted"],
            "blocked_seconds": self._blocked,
        }

    def close(self) -> None:
        """Notify every reader that no message follows. Idempotent."""
        self._sender.close()

    def _put(self, kind: int, parts: list[Buffer], size: int) -> None:
        try:
            self._sender.send(kind, parts, size, 0.0)
        except QueueTimeoutError:
            began = self._clock()
            try:
                while not self._put_in_time(kind, parts, size):
                    pass
            finally:
                self._blocked += self._clock() - began

    def _put_in_time(self, kind: int, parts: list[Buffer], size: int) -> bool:
        """Wait as long as every late reader may; return whether it was sent."""
        late = self._sender.laggards()
        timeout = min((self._patiences[place].left() for place in late), default=0.0)
        try:
            self._sender.send(kind, parts, size, timeout)
        except QueueTimeoutError:
            for place in self._sender.laggards():
                # One that became late meanwhile was not waited for yet: the next round does.
                if place in late and not self._patiences[place].spend():
                    self.evicted.add(place)
                    if self._sender.evict(place):
                        logger.warning(
                            "the replica at place %d was too slow and was taken off; it joins "
                            "anew by itself once it runs",
                            place,
                        )
            return False
        for place in late:
            self._patiences[place].spend()
        return True


class StreamTap:
    """Forwards all that the client's index receives, in the same order, while there are readers.

    At the end of each turn of the subscriber's thread a message goes out, empty if nothing
    happened: the thread turns at least once a second, and so replicas see that it lives.

    `on_failure` is called once, when nothing more can be sent. `patience`: seconds for which
    batches may be kept back, to be sent together. Owner: the subscriber's thread; `failure` and
    `statistics` may be read by any.
    """

    def __init__(
        self,
        outflow: MessageSink,
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        patience: float = 0.0,
    ) -> None:
        self.patience = patience
        self.number = 0  # of the next message
        self.renames = 0  # how often ranks were renamed
        self.names: dict[Rank, Rank] = {}  # by the rank of a port, its present name
        self.failure: str | None = None  # why nothing more is sent
        self._outflow = outflow
        self._on_failure = on_failure
        self._clock = clock
        self._attended = False
        self._entries: list[Entry] = []
        self._bytes = 0
        self._room = outflow.chunk_bytes
        self._counters: Counter[str] = Counter()

    def batch(self, rank: Rank, payload: bytes) -> None:
        """Receive a batch that was applied."""
        if self._attended:
            # As `_add`, without its call: this runs for each batch of each engine.
            size = len(payload) + _AROUND_BYTES
            if self._bytes + size > self._room:
                self.flush()
            self._entries.append(BatchApplied(rank, payload))
            self._bytes += size

    def item(self, item: StreamItem) -> None:
        """Receive an item between two batches."""
        # Also while nobody reads: a joiner gets the names, and snapshots begin again at a renaming.
        follow_names(self.names, item)
        if isinstance(item, RanksRenamed):
            self.renames += 1
        if self._attended:
            self._add(item)  # type: ignore[arg-type]  # no RankBatch comes here

    def restored(self, rank: Rank, section: bytes) -> None:
        """Receive the contents that an added rank begins with."""
        if self._attended:
            self._add(SectionRestored(rank, section))

    def statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Receive new statuses, and send this turn's entries."""
        if self._attended:
            for status in statuses:
                self._add(StatusChanged(status))
            self._send()

    def stop(self) -> None:
        """Send the rest and notify readers of the end, as the thread ends."""
        self.flush()
        self._attended = False
        self._outflow.close()

    def attend(self) -> None:
        """Admit the readers that have attached to the ring: they get every message from now on."""
        if self.failure is not None:
            raise ClosedError(self.failure)
        # What came before is not for those that are admitted now: their first message is `number`.
        self.flush()
        self._outflow.admit()
        self._attended = True

    def recount(self) -> None:
        """Note that readers have gone: without any, nothing is packed."""
        # Not at each message: it looks at every reader's lock.
        if self._attended:
            self._attended = self._outflow.count_readers() > 0

    def flush(self) -> None:
        """Send the entries so far, so that all of them have numbers below `number`."""
        if self._entries:
            self._send()

    def statistics(self) -> dict[str, int]:
        """Return how many entries were sent, by kind."""
        return {"entries": 0, "heartbeats": 0, **self._counters}

    def _add(self, entry: Entry) -> None:
        size = _OTHER_BYTES
        if isinstance(entry, SectionRestored):
            size = len(entry.section) + _AROUND_BYTES
        if self._bytes + size > self._room:
            self.flush()
        self._entries.append(entry)
        self._bytes += size

    def _send(self) -> None:
        entries, self._entries = self._entries, []
        self._bytes = 0
        message = RingMessage(self.number, self._clock(), entries)
        try:
            try:
                body = encode_message(message)
            except Exception:  # one rank's status must not end the fan-out for all
                kept = [self._encodable(e) if isinstance(e, StatusChanged) else e for e in entries]
                body = encode_message(msgspec.structs.replace(message, entries=kept))
            self._outflow.send(body)
        except Exception as error:
            # Nothing more is sent, rather than a stream with a hole; the client goes on.
            logger.error("the fan-out failed and ends; its client goes on", exc_info=error)
            self._attended = False
            self.failure = f"the fan-out failed: {error!r}"
            self._counters["failures"] += 1
            self._outflow.close()
            self._on_failure()
            return
        self.number += 1
        self._counters["entries"] += len(entries)
        self._counters["heartbeats"] += not entries

    def _encodable(self, changed: StatusChanged) -> StatusChanged:
        """Return a status as it is; if it cannot be encoded, only what an answer needs of it."""
        try:
            msgspec.msgpack.encode(changed)
            return changed
        except Exception as error:
            status = changed.status
            if not self._counters["statuses_cut"]:
                logger.error("%s: its status cannot be encoded: %r", status.rank, error)
            self._counters["statuses_cut"] += 1
            kept = {name: getattr(status, name) for name in _NEEDED}
            reason = f"the rest of its status could not be sent on: {type(error).__name__}"
            epoch, lag = min(status.epoch, _MAX_COUNT), min(status.lag, _MAX_COUNT)
            return StatusChanged(RankStatus(**kept, reason=reason, epoch=epoch, seq=None, lag=lag))


class TakenRank(NamedTuple):
    """A rank as it was just before a message."""

    rank: Rank
    number: int  # of that message
    status: RankStatus | None  # then, if it was subscribed to
    section: bytes  # its contents, of `Index.dump`
    cursor: bytes | None  # up to where its stream was applied; None: it cannot go on from there


Part: TypeAlias = Begin | TakenRank | End


class _Order:
    """The ranks that one joiner lacks, and the unsent copies for it."""

    def __init__(self) -> None:
        self.lacks: dict[Rank, None] = {}  # in the order in which they are to be taken
        self.ready: deque[TakenRank] = deque()


class Snapshots:
    """Makes a snapshot for each joiner. Owner: one thread, which is not the subscriber's.

    For a slow joiner, the sections taken for faster ones wait: at most one snapshot, each section
    in memory once for all joiners. `hold`: seconds for which the subscriber's thread goes on with
    another rank.
    """

    def __init__(self, client: Client, tap: StreamTap, *, hold: float = _HOLD) -> None:
        self.counters: Counter[str] = Counter()
        self._client = client
        self._tap = tap
        self._hold = hold
        self._orders: list[_Order] = []

    def parts(self) -> Generator[Part, None, None]:
        """Admit the readers that have attached to the ring; then yield the parts of a snapshot."""
        call = self._client.subscriber.call
        order = _Order()
        self._orders.append(order)
        try:
            end: End | None = None
            while end is None:
                number, renames, ranks = call(self._begin)
                order.lacks = dict.fromkeys(ranks)
                yield Begin(number)
                while order.ready or (order.lacks and self._tap.renames == renames):
                    if not order.ready:
                        self._take_for(order)
                    else:
                        yield order.ready.popleft()
                # None if ranks were renamed: positions would move from name to name.
                end = call(partial(self._end, renames))
                self.counters["snapshots_begun_again"] += end is None
            yield end
        finally:
            self._orders.remove(order)

    def _take_for(self, order: _Order) -> None:
        """Copy the next ranks that a joiner lacks, for all joiners that lack them."""
        taken = self._client.subscriber.call(partial(self._take, list(order.lacks)))
        for rank, copy in taken:
            self.counters["sections_taken"] += copy is not None
            for joiner in self._orders:
                if rank in joiner.lacks:
                    del joiner.lacks[rank]
                    if copy is not None:
                        joiner.ready.append(copy)

    # On the subscriber's thread ---------------------------------------------------------------

    def _begin(self) -> tuple[int, int, tuple[Rank, ...]]:
        self._tap.attend()
        return self._tap.number, self._tap.renames, self._client.index.ranks

    def _take(self, ranks: Iterable[Rank]) -> list[tuple[Rank, TakenRank | None]]:
        """Return copies of as many ranks as the time is enough for, at least one; None: gone."""
        # What the index has must be in messages below the number that the section gets.
        self._tap.flush()
        taken: list[tuple[Rank, TakenRank | None]] = []
        subscriber, until = self._client.subscriber, time.monotonic() + self._hold
        for rank in ranks:
            try:
                section = self._client.index.dump(rank)
            except UnknownRankError:  # removed: the messages say so
                taken.append((rank, None))
                continue
            status = subscriber.find(rank)
            cursor = None if status is None else subscriber.cursor(rank)
            taken.append((rank, TakenRank(rank, self._tap.number, status, section, cursor)))
            if time.monotonic() >= until:
                break
        return taken

    def _end(self, renames: int) -> End | None:
        """Return the end; None if ranks were renamed meanwhile, so that all is to begin again."""
        self._tap.flush()
        if self._tap.renames != renames:
            return None
        return End(self._tap.number, list(self._tap.names.items()))
