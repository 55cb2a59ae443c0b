"""Items and statuses on their way to the sink: in order, as fast as the sink accepts them.

`Outlet` and `Delivery` are owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from kvindex.subscribe.sequencer import RankBatch, RankLost, RankRestarted, State
from kvindex.wire import CacheSettings, EventBatch
from kvindex.wire.rank import Rank, Trust

logger = logging.getLogger(__name__)

TURN = 0.05
"""Seconds for one feed in one turn; what takes longer is done in the next turns."""

_Item: TypeAlias = RankBatch[Any] | RankLost | RankRestarted


class DecodedBatch(Protocol):
    """The part of a decoded payload that a subscriber reads; the rest is its consumer's.

    Attributes:
        ts: the publisher's clock when it made the batch, in seconds.
        data_parallel_rank: the dp_rank that the batch names, or None.
    """

    @property
    def ts(self) -> float: ...

    @property
    def data_parallel_rank(self) -> int | None: ...


Decode: TypeAlias = Callable[[bytes], DecodedBatch]
"""From payload to batch; raises DecodeError, and nothing else, for what is no batch."""

Fingerprint: TypeAlias = Callable[[bytes], int]
"""A hash of a payload, of 64 bits."""


class FingerprintMaker(Protocol):
    """A function for fingerprints that are the same in every process.

    Attributes:
        identity: names the function; fingerprints of different identities cannot be compared.
        of: the function.
    """

    @property
    def identity(self) -> str: ...

    @property
    def of(self) -> Fingerprint: ...


class RankAdded(msgspec.Struct, frozen=True, tag=True):
    """A rank is subscribed to from now on.

    Attributes:
        rank: which rank.
        cache: what its `Worker` states about its cache.
    """

    rank: Rank
    cache: CacheSettings = CacheSettings()


class RanksRenamed(msgspec.Struct, frozen=True, tag=True):
    """Ranks have other names from now on, because their batches name them so.

    Attributes:
        names: pairs of the old and the new rank; two may have changed places.
    """

    names: tuple[tuple[Rank, Rank], ...]


class RankRemoved(msgspec.Struct, frozen=True, tag=True):
    """A rank is no longer subscribed to."""

    rank: Rank


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one rank's stream.

    Attributes:
        rank: which rank.
        state: what the stream is doing.
        reason: why it is not live, or what it waits for, and what to try; of a live rank, why
            gaps cannot be repaired (no replay endpoint, or none that answers); "" if all is well.
        epoch: counts the publisher's restarts, from 0.
        seq: number of the last applied batch, None before the first.
        complete: whether every batch since the publisher's first was applied.
        lag: batches known of but not applied yet.
        connected: whether there is a connection to the PUB socket.
        endpoint: the PUB socket.
        replay_endpoint: the ROUTER socket, or None.
        last_event_age: seconds since the last batch was applied, None before the first.
        gaps: holes found in the numbering.
        replays_asked, replays_filled, replays_failed: replay requests, those that reached their
            end, and those that did not.
        losses: holes that could not be filled.
        restarts: changes of publisher.
        duplicates: batches that came again.
        decode_failures: messages or batches that could not be decoded.
        orphans: blocks that wait for their parent (through a client; else 0).
        ignored: blocks left out by the index, by reason (through a client; else empty).
        counters: every counter of the stream by name.
    """

    rank: Rank
    state: State
    reason: str
    epoch: int
    seq: int | None
    complete: bool
    lag: int
    connected: bool
    endpoint: str
    replay_endpoint: str | None
    last_event_age: float | None
    gaps: int = 0
    replays_asked: int = 0
    replays_filled: int = 0
    replays_failed: int = 0
    losses: int = 0
    restarts: int = 0
    duplicates: int = 0
    decode_failures: int = 0
    orphans: int = 0
    ignored: dict[str, int] = {}
    counters: dict[str, int] = {}

    @property
    def trust(self) -> Trust:
        """The part that shows how far to trust an answer."""
        return Trust(self.state, self.complete, self.lag)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {**plain, "rank": str(self.rank)}


StreamItem: TypeAlias = (
    RankAdded | RankBatch[EventBatch] | RankLost | RankRestarted | RanksRenamed | RankRemoved
)
"""An item of an `EventStream`: a batch, or an event of a rank between two batches."""

Sink: TypeAlias = Callable[[StreamItem], None]
"""Called on the subscriber's thread, one item at a time, in order for each rank."""
BatchSink: TypeAlias = Callable[[Rank, Any], None]
"""As `Sink`, but called with rank and decoded batch, without an envelope around them."""
StatusSink: TypeAlias = Callable[[Sequence[RankStatus]], None]
"""Called on the subscriber's thread with the statuses that others see from now on: at the end of
each turn (with none, if none is new), and when ranks were added or renamed."""


class Tap(Protocol):
    """Receives all that a client's index receives, in the same order, on the subscriber's thread.

    It must not raise, and delays everything while it runs.

    Attributes:
        patience: seconds for which batches may be kept back, so that it receives more of them at
            once, which costs less.
    """

    patience: float

    def batch(self, rank: Rank, payload: bytes) -> None:
        """Receive a batch that was applied, as its publisher sent it."""

    def item(self, item: StreamItem) -> None:
        """Receive an item between two batches."""

    def restored(self, rank: Rank, section: bytes) -> None:
        """Receive the contents that an added rank begins with, as `Index.dump` returned them."""

    def statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Receive the ranks' new statuses, at the end of each turn; perhaps none."""


class Outlet:
    """Hands items to the sink; an exception in the sink is counted, logged, and not raised."""

    def __init__(
        self,
        sink: Sink,
        on_batch: BatchSink | None,  # receives the batches instead
        counters: Counter[str],
        on_statuses: StatusSink | None = None,
        has_room: Callable[[], bool] | None = None,  # None: always
        on_payload: Callable[[Rank, bytes], None] | None = None,  # batches that lanes have applied
    ) -> None:
        self.has_room = has_room
        self.shut = False  # set by any thread; from then on the sink is not called
        # Set in a child that a sink has forked. The thread ends there by a SystemExit when the sink
        # returns: its next step would use the parent's sockets.
        self.forked = False
        self._on_payload = on_payload
        self._sink = sink
        self._on_batch = on_batch
        self._on_statuses = on_statuses
        self._counters = counters

    def put(self, item: StreamItem) -> None:
        """Hand over one item."""
        if isinstance(item, RankBatch) and self._on_batch is not None:
            self._call(RankBatch, self._on_batch, item.rank, item.batch)
        else:
            self._call(type(item), self._sink, item)

    def put_run(
        self,
        rank: Rank,
        epoch: int,
        first_seq: int,
        batches: Sequence[Any],
        time_left: Callable[[], bool] = lambda: True,
    ) -> int:
        """Hand over live batches numbered without a hole; return how many: one, and all in time."""
        # As `put` for each; an index needs no item. Nearly all batches come this way.
        sink, on_batch = self._sink, self._on_batch
        for count, batch in enumerate(batches):
            if self.shut:
                break
            try:
                if on_batch is None:
                    sink(RankBatch(rank, epoch, first_seq + count, batch, False))
                else:
                    on_batch(rank, batch)
            except Exception as error:
                self._note_failure(RankBatch, error)
            if self.forked:
                raise SystemExit
            if not time_left():
                return count + 1
        return len(batches)

    def put_payloads(self, rank: Rank, payloads: Sequence[bytes]) -> None:
        """Pass on batches that a lane has applied, to whoever else wants them."""
        on_payload = self._on_payload
        if on_payload is None:
            return
        for payload in payloads:  # as `_call`, for many
            if self.shut:
                return
            try:
                on_payload(rank, payload)
            except Exception as error:
                self._note_failure(RankBatch, error)
            if self.forked:
                raise SystemExit

    def put_statuses(self, statuses: Sequence[RankStatus]) -> None:
        """Hand over the statuses that are new on the board, perhaps none."""
        if self._on_statuses is not None:
            self._call(RankStatus, self._on_statuses, statuses)

    def _call(self, kind: type, sink: Callable[..., None], *args: object) -> None:
        if self.shut:
            return
        try:
            sink(*args)
        except Exception as error:
            self._note_failure(kind, error)
        if self.forked:
            raise SystemExit

    def _note_failure(self, kind: type, error: Exception) -> None:
        self._counters["sink_failures"] += 1
        logger.error("the sink failed on %s", kind.__name__, exc_info=error)


class _Row(NamedTuple):
    """Live batches numbered without a hole."""

    first_seq: int
    batches: Sequence[Any]


class Delivery:
    """One feed's turns, its items in order, and how far the sink has received them.

    A turn is over when its time is, when the sink has no room, or when an item waits for either.
    The feed then leaves all else to its next turn, which begins with what waits. Whoever asks
    `time_left` has done one thing before, so each turn makes progress.
    """

    def __init__(self, rank: Rank, outlet: Outlet, clock: Callable[[], float]) -> None:
        # Of the last batch that was handed over; no seq before the first.
        self.epoch = 0
        self.seq: int | None = None
        self.batch_at: float | None = None
        self.waiting: deque[_Item | _Row] = deque()
        self._rank = rank
        self._outlet = outlet
        self._clock = clock
        self._has_room = outlet.has_room
        self._until = clock()
        self._handing_over = False

    # The turn ---------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Begin a turn of the feed."""
        self._until = self._clock() + TURN

    def time_left(self) -> bool:
        """Return whether the sink has room, and the turn any time."""
        if self._has_room is not None and not self._has_room():
            return False
        return self._clock() < self._until

    @property
    def is_over(self) -> bool:
        """Whether the feed must leave what follows to its next turn."""
        return bool(self.waiting) or not self.time_left()

    # The items --------------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """How many batches wait."""
        return sum(
            len(item.batches) if isinstance(item, _Row) else isinstance(item, RankBatch)
            for item in self.waiting
        )

    def add(self, item: _Item) -> None:
        """Enqueue an item behind all others."""
        self.waiting.append(item)

    def add_run(self, first_seq: int, batches: Sequence[Any]) -> None:
        """Enqueue live batches behind all other items."""
        self.waiting.append(_Row(first_seq, batches))

    def note_taken(self, seq: int, payloads: Sequence[bytes], now: float) -> None:
        """Note that a lane has applied the batches up to `seq`."""
        self.seq, self.batch_at = seq, now
        self._outlet.put_payloads(self._rank, payloads)

    def rename(self, rank: Rank) -> None:
        """Rename the items that wait, and all later ones."""
        self._rank = rank
        self.waiting = deque(
            item if isinstance(item, _Row) else replace(item, rank=rank) for item in self.waiting
        )

    def hand_over_in_time(self, now: float) -> None:
        """Hand over waiting items if there is time; else the next turn begins with them."""
        if self.time_left():
            self.hand_over(now)

    def hand_over(self, now: float) -> None:
        """Hand over waiting items: one at least, and all if there is time."""
        if self._handing_over:
            return  # within a call of the sink: its item must not be overtaken
        self._handing_over = True
        try:
            while self.waiting:
                item = self.waiting.popleft()
                # Each number is set first: the sink may ask how far its rank is.
                if isinstance(item, _Row):
                    first_seq, batches = item
                    self.seq, self.batch_at = first_seq + len(batches) - 1, now
                    done = self._outlet.put_run(
                        self._rank, self.epoch, first_seq, batches, self.time_left
                    )
                    if done < len(batches):
                        self.seq = first_seq + done - 1
                        self.waiting.appendleft(_Row(first_seq + done, batches[done:]))
                else:
                    if isinstance(item, RankBatch):
                        self.seq, self.batch_at = item.seq, now
                    elif isinstance(item, RankRestarted):
                        self.epoch, self.seq = item.epoch, None
                    self._outlet.put(item)
                if not self.waiting or not self.time_left():
                    break
        finally:
            self._handing_over = False

    def hand_over_all(self, now: float) -> None:
        """Hand over every waiting item, however long it takes."""
        while self.waiting and not self._handing_over:
            self.hand_over(now)

    def close(self) -> None:
        """Drop the waiting items."""
        self.waiting.clear()
