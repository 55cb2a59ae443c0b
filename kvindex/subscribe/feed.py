"""One publisher as the subscriber sees it: its sockets, its sequencer, its name.

The links' events enter the sequencer as they come. Its actions are carried out in order: items go
to the sink by the feed's `Delivery`, requests to the replay link.

**Who receives.** The feed, by its links; or its lane, while nothing but the next batches is
awaited: ::

                 _arm: all is ordinary
       the feed ───────────────────────► its lane
          ▲                                 │
          └─────────────────────────────────┘
            _settle: before anything else is done with the stream

While the lane receives, the tree is ahead of the sequencer. So whoever moves the sequencer or the
links from outside does it by `_with_stream`, which settles first and arms again afterwards. Only
`collect` goes past it: the sequencer then hears what the lane has taken, and the lane goes on.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec
import zmq
from msgspec.structs import replace

from kvindex.subscribe.connection import Connection, Contexts, HostCheck, SocketOptions
from kvindex.subscribe.delivery import Decode, Delivery, FingerprintMaker, Outlet
from kvindex.subscribe.receiving import (
    Connected,
    Damage,
    Disconnected,
    Event,
    LiveLink,
    Naming,
    Notes,
    Reader,
    ReplayEnd,
    ReplayLink,
    Run,
)
from kvindex.subscribe.resumption import Resumption, SavedCursor
from kvindex.subscribe.sequencer import (
    Action,
    AskReplay,
    Batch,
    CloseReplay,
    RankLost,
    RankRestarted,
    Sequencer,
    SequencerConfig,
)
from kvindex.subscribe.watch import Lanes, Watch
from kvindex.subscribe.worker import PublisherAddress, Worker
from kvindex.wire.rank import Rank

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class FeedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all feeds of a subscriber share; made once, never changed."""

    sequencer: SequencerConfig  # but for whether there is replay
    socket_options: SocketOptions
    decode: Decode
    fingerprints: FingerprintMaker
    clock: Callable[[], float]  # monotonic seconds
    contexts: Contexts
    outlet: Outlet
    counters: Counter[str]  # of the thread and the sink
    lanes: Lanes | None = None


class Feed:
    """Everything about one publisher; ConfigurationError where ZeroMQ refuses an endpoint."""

    def __init__(
        self,
        worker: Worker,
        address: PublisherAddress,
        settings: FeedSettings,
        watch: Watch,
        on_named: Callable[[Feed], None],  # called once batches have named the dp_rank
    ) -> None:
        self.worker = worker
        self.address = address
        self.failure = ""
        self.closed = False
        self.lost_at: float | None = None  # when the connection broke; None while connected
        self.rank = rank = Rank(worker.name, address.dp_rank)
        config = replace(settings.sequencer, has_replay=address.replay is not None)
        self.sequencer = Sequencer(rank, config, now=settings.clock())
        self.delivery = Delivery(rank, settings.outlet, settings.clock)
        self.notes = Notes(rank, settings.clock)
        self.reader = Reader(
            worker.topic.encode(),
            settings.decode,
            settings.fingerprints.of,
            self.notes,
            self.delivery.time_left,
        )
        self._fingerprints = settings.fingerprints.identity
        self._on_named = on_named
        self._named_by_cursor = False
        self._watch = watch
        self._counters = settings.counters
        self._look_again = partial(watch.look_again, self)
        self._lanes = lanes = settings.lanes
        intake = watch.intake
        self._lane = None if lanes is None or intake is None else lanes.make(intake)
        self._armed = False  # whether the lane receives
        options = settings.socket_options
        connect = partial(
            Connection,
            settings.contexts.of(address.endpoint, address.replay),
            socket_options=options,
            curve=worker.curve,
            watch=watch,
            owner=self,
        )
        # One check for all sockets of a side: a new socket need not resolve the name anew.
        hosts = HostCheck(address.endpoint), HostCheck(address.replay or "")
        self.replay = ReplayLink(
            lambda: connect(zmq.DEALER, address.replay or "", host=hosts[1]),
            self.reader,
            self.notes,
            self._look_again,
        )
        # Last, for it connects at once: an endpoint that is refused leaves nothing to be closed.
        self.live = LiveLink(
            lambda topics: connect(
                zmq.SUB, address.endpoint, bind=worker.bind, subscriptions=topics, host=hosts[0]
            ),
            self.reader,
            self.notes,
            bind=worker.bind,
            hwm=options.hwm,
            pause=options.max_reconnect,
        )

    def rename(self, rank: Rank) -> None:
        """Give the rank another name, also in items that wait to be handed over."""
        self.rank = self.notes.rank = rank
        self.sequencer.rank = rank
        self.delivery.rename(rank)

    def start(self, resumption: Resumption, now: float) -> None:
        """Begin, and resume if a state was saved; call it once, before anything else."""
        self.delivery.begin_turn()
        if resumption.restored:
            saved = resumption.saved
            if saved is not None and not resumption.refused:
                # Until the publisher has proven to be the same, its earlier name counts.
                self.reader.named = saved.named
                self._named_by_cursor = True
            cursor = None if saved is None else saved.cursor
            self._carry_out(self.sequencer.resume(cursor, now, refused=resumption.refused), now)
            applied = self.sequencer.applied
            self.delivery.epoch, self.delivery.seq = applied.epoch, applied.seq
        # An inproc connection reports nothing: it stands from the beginning.
        if self.live.connection.connected:
            self._note_change(Connected(), now)

    def cursor(self, now: float) -> SavedCursor | None:
        """Return what another process needs to go on from here; None if it cannot."""
        return self._with_stream(self._cursor, now)

    def _cursor(self, now: float) -> SavedCursor | None:
        self.delivery.hand_over_all(now)  # the cursor must stand where the sink does
        cursor = self.sequencer.cursor()
        if cursor is None:
            return None
        return SavedCursor(
            cursor=cursor,
            dp_rank=self.address.dp_rank,
            named=self.reader.named,
            fingerprints=self._fingerprints,
        )

    # Who receives -----------------------------------------------------------------------------

    def _with_stream(self, step: Callable[[float], _Result], now: float) -> _Result:
        """Do something with the stream: no lane receives meanwhile."""
        if self._armed:
            self._settle(now)
        result = step(now)
        # Not after a failure: the feed is closed then.
        self._arm()
        return result

    def _arm(self) -> None:
        """Have the lane receive, if nothing but the next batches is awaited."""
        lane, lanes, live = self._lane, self._lanes, self.live
        # What waits for the sink must reach it before what the lane would put into the tree.
        if lane is None or lanes is None or self.closed or self.delivery.waiting:
            return
        start = self.sequencer.run_start
        number = lanes.number(self.rank)
        if start is None or number is None or not live.is_ordinary:
            return
        connection, watch = live.connection, self._watch
        monitor = connection.monitor
        lane.arm(
            connection.socket.underlying,
            0 if monitor is None else monitor.underlying,
            watch.descriptor(connection.socket),
            watch.descriptor(monitor),
            number,
            self.reader.topic.topic,
            start,
            self.sequencer.applied.oldest_ts,
            self.reader.named is not None,
        )
        self._armed = True
        # The lane looks at the sockets itself first, so that no sign of theirs is missed.
        watch.leave_to_lane(self)

    def collect(self, now: float) -> None:
        """Have the sequencer accept what the lane has taken; the lane goes on."""
        lane = self._lane
        if lane is None or not lane.has_taken:
            return
        _, first_seq, timestamps, fingerprints, payloads = lane.collect()
        if timestamps:
            accepted = self.sequencer.live_run(first_seq, timestamps, fingerprints, now)
            # The tree has them already. It fails if the sequencer was moved without settling.
            assert accepted == len(timestamps), "a lane took what its sequencer did not expect"
            self._counters["lane_batches"] += accepted
            self.delivery.note_taken(first_seq + accepted - 1, payloads, now)

    def _settle(self, now: float) -> None:
        """Have the lane receive no more, and take over all that it received."""
        assert self._lane is not None
        # First, so that a failure in what follows does not come again when the feed is closed.
        self._armed = False
        self._lane.disarm()
        self.collect(now)
        # What was no ordinary message, and all that the lane had read behind it.
        self.live.leave(self._lane.collect_left())
        self._look_again()

    # Events -----------------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Process what the sockets received, up to a bound, so that other feeds get their turn."""
        self._with_stream(self._pump, now)

    def _pump(self, now: float) -> None:
        delivery, replay = self.delivery, self.replay
        delivery.begin_turn()
        # What waits since the last turn goes first. While any of it waits, nothing is received:
        # it would have to wait too, and memory would grow without a bound.
        if delivery.waiting:
            delivery.hand_over(now)
        if not delivery.waiting:
            self._process(self.live.take(now), now)
            if replay.request is not None:  # perhaps since just now
                self._process(replay.take(now), now)
        if delivery.waiting:
            self._look_again()

    def _process(self, events: Iterable[Event], now: float) -> None:
        """Process events until the turn is over; those of one message at least."""
        sequencer = self.sequencer
        for event in events:
            if isinstance(event, Run):
                self._process_run(event, now)
            elif isinstance(event, (Connected, Disconnected, Naming)):
                self._note_change(event, now)
                continue  # the next event belongs to the same message
            else:
                actions: list[Action]
                if isinstance(event, Damage):
                    actions = sequencer.damaged(event.seq, now)
                elif isinstance(event, ReplayEnd):
                    over = sequencer.replay_failed if event.failed else sequencer.replay_ended
                    actions = over(event.request, now)
                elif event.batch is None:
                    actions = sequencer.replayed_damaged(event.request, event.seq, now)
                else:
                    actions = sequencer.replayed(event.request, event.batch, now)
                if actions:
                    self._carry_out(actions, now)
            if self.delivery.is_over:
                self._look_again()
                return

    def _process_run(self, run: Run, now: float) -> None:
        """Process live batches: all at once where the result is the same as one by one."""
        first_seq, batches, timestamps, fingerprints, sizes = run
        sequencer, at = self.sequencer, 0
        while at < len(batches):
            count = 0
            if at == 0:  # nearly always the whole run, so nothing is copied
                count = sequencer.live_run(first_seq, timestamps, fingerprints, now)
            elif first_seq + at == sequencer.run_start:
                count = sequencer.live_run(first_seq + at, timestamps[at:], fingerprints[at:], now)
            if count:
                self.delivery.add_run(first_seq + at, batches[at : at + count])
                self.delivery.hand_over_in_time(now)
                at += count
            else:
                batch = Batch(
                    first_seq + at, timestamps[at], batches[at], fingerprints[at], sizes[at]
                )
                self._carry_out(sequencer.live(batch, now), now)
                at += 1

    def _note_change(self, event: Connected | Disconnected | Naming, now: float) -> None:
        """Note that the connection has begun or ended, or that batches name the publisher."""
        if isinstance(event, Naming):
            self._on_named(self)
        elif isinstance(event, Connected):
            logger.debug("%s: connected", self.rank)
            self.lost_at = None
            self.reader.topic.connected(now)
            self._carry_out(self.sequencer.connected(now), now)
        else:
            logger.debug("%s: disconnected", self.rank)
            self.lost_at = now
            self._carry_out(self.sequencer.disconnected(now), now)

    def _carry_out(self, actions: Iterable[Action], now: float) -> None:
        """Carry out the sequencer's actions; items go behind those that wait already."""
        for action in actions:
            if isinstance(action, AskReplay):
                self.replay.ask(action)
                continue
            if isinstance(action, CloseReplay):
                self.replay.close(action.request)
                continue
            if isinstance(action, RankLost):
                self.notes.warn(
                    "lost",
                    "lost batches %s to %s (%s)%s",
                    action.first_seq,
                    "?" if action.last_seq is None else action.last_seq,
                    action.reason,
                    ": dropping what the rank held" if action.reset else "",
                )
            elif isinstance(action, RankRestarted):
                if self._named_by_cursor:
                    # It is not the publisher that the cursor knew, and may have another name.
                    self._named_by_cursor, self.reader.named = False, None
                logger.info("%s: restarted (%s): epoch %d", self.rank, action.reason, action.epoch)
            self.delivery.add(action)
        self.delivery.hand_over_in_time(now)

    # Time -------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        if self.closed:
            return None
        stuck_at = self.live.connection.stuck_at
        deadlines = (self.sequencer.deadline, self.reader.topic.deadline, stuck_at)
        return min((d for d in deadlines if d is not None), default=None)

    def tick(self, now: float) -> bool:
        """Let time pass: time-outs, back-off, probes, staleness; return whether any was due."""
        deadline = self.deadline
        # Mostly it was put off since the thread noted it; then a lane is not disturbed.
        return deadline is not None and deadline <= now and self._with_stream(self._tick, now)

    def _tick(self, now: float) -> bool:
        deadline = self.deadline
        if deadline is None or deadline > now:
            return False  # what the lane had taken has put it off
        self.delivery.begin_turn()
        stuck_at = self.live.connection.stuck_at
        if stuck_at is not None and stuck_at <= now:
            self.live.reopen(now)
        self.reader.topic.decide(now)
        self._carry_out(self.sequencer.tick(now), now)
        if self.delivery.waiting:
            self._look_again()
        return True

    def close(self, now: float) -> None:
        """Close the sockets and the sequencer; idempotent."""
        if not self.closed:
            self._with_stream(self._close, now)

    def _close(self, now: float) -> None:
        self.closed = True
        self.replay.close()
        self.live.close()
        self.sequencer.close(now)
        self.delivery.close()
