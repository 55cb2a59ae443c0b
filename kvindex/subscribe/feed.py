"""One publisher as the subscriber sees it: its sockets, its sequencer, its name.

A feed turns what its sockets say into the sequencer's entrances and obeys the actions that come
back. Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import zmq
from msgspec.structs import replace

from kvindex.curve import Curve
from kvindex.errors import ConfigurationError, DecodeError
from kvindex.rank import Rank
from kvindex.sequencer import (
    Action,
    AskReplay,
    Batch,
    CloseReplay,
    RankBatch,
    RankLost,
    RankRestarted,
    Sequencer,
    SequencerConfig,
    State,
)
from kvindex.subscribe.allowance import Allowance
from kvindex.subscribe.connection import Connection, SocketOptions
from kvindex.subscribe.feed_log import FeedLog
from kvindex.subscribe.feed_status import feed_status, unrepairable
from kvindex.subscribe.host_check import HostCheck
from kvindex.subscribe.live_link import LiveLink
from kvindex.subscribe.outlet import Outlet
from kvindex.subscribe.read_run import read_run
from kvindex.subscribe.resumption import Resumption, SavedCursor
from kvindex.subscribe.status import RankStatus
from kvindex.subscribe.stream import Decode, Fingerprint
from kvindex.subscribe.topic_check import TopicCheck
from kvindex.subscribe.watch import Watch
from kvindex.subscribe.worker import PublisherAddress, Worker
from kvindex.wire import parse_live, parse_replay, replay_request

__all__ = ["Feed"]

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """Live batches in order, numbered without a hole, that are still to be delivered."""

    first_seq: int
    batches: list[Any]


class Feed:
    """Everything about one publisher.

    Args:
        worker: whose publisher it is.
        address: where it is.
        config: the sequencer's settings.
        socket_options: settings of the sockets.
        context: the ZeroMQ context.
        watch: told of every socket that is opened and closed.
        decode: makes batches of payloads.
        fingerprint: makes hashes of them.
        outlet: where ordered items go.
        on_named: told once the publisher's batches have named its dp_rank.
        clock: the subscriber's clock, by which a turn is bounded.
        now: the present, in seconds of the subscriber's clock.

    Raises:
        ConfigurationError: ZeroMQ refuses an endpoint.
    """

    def __init__(
        self,
        worker: Worker,
        address: PublisherAddress,
        config: SequencerConfig,
        *,
        socket_options: SocketOptions,
        context: zmq.Context[zmq.Socket[bytes]],
        watch: Watch,
        decode: Decode,
        fingerprint: Fingerprint,
        outlet: Outlet,
        on_named: Callable[[Feed], None],
        clock: Callable[[], float],
        now: float,
    ) -> None:
        self.worker = worker.name
        self.cache = worker.cache
        self.named: int | None = None
        self.failure = ""
        self.closed = False
        self.shown_live = False
        self.lost_at: float | None = None  # when the connection broke, until there is another
        self.address = address
        self.sequencer = Sequencer(Rank(worker.name, address.dp_rank), config, now=now)
        self.counters: Counter[str] = Counter()
        self.topic = TopicCheck(worker.topic.encode())
        self.replay: Connection | None = None
        self._request: int | None = None
        self._replies: deque[list[bytes]] = deque()  # to that request, for which no time was left
        self.epoch = 0
        self.seq: int | None = None
        # What the sequencer wants and there was no time for: it is that far ahead of the sink.
        self._actions: deque[Action | Row] = deque()
        self._obeying = False
        self._allowance = Allowance(clock)
        self._context = context
        self._watch = watch
        self._socket_options = socket_options
        self._curve: Curve | None = worker.curve
        self.bind = worker.bind
        self._decode = decode
        self._fingerprint = fingerprint
        self._outlet = outlet
        self._on_named = on_named
        self._log = FeedLog()
        self.last_event_at: float | None = None
        self._named_by_cursor = False
        self._host = HostCheck(address.endpoint)
        self._replay_host = HostCheck(address.replay or "")
        self._live = LiveLink(
            self._open_live,
            self._close,
            self._look_again,
            self._note_refused,
            bind=self.bind,
            hwm=socket_options.queued(repairable=address.replay is not None),
            pause=socket_options.max_reconnect,
            counters=self.counters,
        )

    @property
    def rank(self) -> Rank:
        """The name that the rank goes by."""
        return self.sequencer.rank

    def rename(self, rank: Rank) -> None:
        """Give the rank another name, also in items that wait to be handed over."""
        self.sequencer.rank = rank
        self._actions = deque(
            replace(action, rank=rank)
            if isinstance(action, (RankBatch, RankLost, RankRestarted))
            else action
            for action in self._actions
        )

    def start(self, resumption: Resumption, now: float) -> None:
        """Begin, where something was saved from there; before anything else, and once."""
        self._allowance.begin()
        if resumption.restored:
            self._resume(resumption, now)
        if self.live.connected:
            self._obey(self.sequencer.connected(now), now)
            self.topic.connected(now)

    def _resume(self, resumption: Resumption, now: float) -> None:
        saved = resumption.saved
        if saved is not None and not resumption.refused:
            # Until it has proven to be the same, what it was named before counts.
            self.named = saved.named
            self._named_by_cursor = True
        cursor = None if saved is None else saved.cursor
        self._obey(self.sequencer.resume(cursor, now, refused=resumption.refused), now)
        self.epoch, self.seq = self.sequencer.epoch, self.sequencer.seq

    def cursor(self, fingerprints: str, now: float) -> SavedCursor | None:
        """Return all that another process must know to go on from here; None if it cannot."""
        while self._actions and not self._obeying:  # the cursor must stand where the sink does
            self._work_off(now)
        cursor = self.sequencer.cursor()
        if cursor is None:
            return None
        return SavedCursor(
            cursor=cursor,
            dp_rank=self.address.dp_rank,
            named=self.named,
            fingerprints=fingerprints,
        )

    @property
    def live(self) -> Connection:
        """The present connection to the publisher's live side."""
        return self._live.connection

    def _open_live(self) -> Connection:
        wanted = {self.topic.topic, b"" if not self.topic.confirmed else self.topic.topic}
        connection = Connection(
            self._context,
            zmq.SUB,
            self.address.endpoint,
            self._socket_options,
            self._curve,
            bind=self.bind,
            subscriptions=tuple(wanted),
            repairable=self.address.replay is not None,
            host=self._host,
        )
        self._watch_all(connection)
        return connection

    def _watch_all(self, connection: Connection) -> None:
        for socket in connection.sockets:
            self._watch.add(socket, self)

    def _close(self, connection: Connection) -> None:
        for socket in connection.sockets:
            self._watch.remove(socket)
        connection.close()

    # What the sockets say ---------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Take what the sockets have, up to a bound, so that other feeds get their turn."""
        self._allowance.begin()
        self._work_off(now)
        if self._actions:
            return
        for found in self._live.take(now):
            if isinstance(found, bool):
                self._on_connection(found, now)
            else:
                self._on_messages(found, now)
        self._pump_replay(now)

    def _on_connection(self, connected: bool, now: float) -> None:
        logger.debug("%s: %s", self.rank, "connected" if connected else "disconnected")
        self.lost_at = None if connected else now
        if connected:
            self.topic.connected(now)
            self._obey(self.sequencer.connected(now), now)
        else:
            self._obey(self.sequencer.disconnected(now), now)

    def _on_messages(self, messages: list[list[bytes]], now: float) -> None:
        """Take live messages: runs of ordinary ones at once, each other one by itself."""
        position = 0
        while position < len(messages) and not self._actions:
            position += self._take_run(messages, position, now)
            if self._actions or (position and not self._allowance.left()):
                break
            if position < len(messages):
                self._on_live(messages[position], now)
                position += 1
                if not self._allowance.left():
                    break
        self._live.give_back(messages[position:])

    def _take_run(self, messages: Sequence[list[bytes]], position: int, now: float) -> int:
        """Take the messages from `position` on that are ordinary; return how many those were."""
        first_seq = self.sequencer.run_start
        if first_seq is None or not self.topic.confirmed:
            return 0
        run = read_run(
            islice(messages, position, None),
            first_seq,
            self.topic.topic,
            self._decode,
            self._fingerprint,
            named=self.named is not None,
            time_left=self._allowance.left,
        )
        taken = self.sequencer.live_run(first_seq, run.timestamps, run.fingerprints, now)
        if taken:
            self._actions.append(Row(first_seq, run.batches[:taken]))
            self._work_off(now)
        return taken

    def _on_live(self, frames: list[bytes], now: float) -> None:
        try:
            live = parse_live(frames)
        except DecodeError as error:
            self._note_damage("bad_frames", error, now)
            self._obey(self.sequencer.damaged(None, now), now)
            return
        was_confirmed = self.topic.confirmed
        if not self.topic.fits(live.topic):
            return
        if not was_confirmed:
            self.live.socket.unsubscribe(b"")
            self._look_again()
        batch = self._decoded(live.seq, live.payload, now)
        if batch is None:
            self._obey(self.sequencer.damaged(live.seq, now), now)
        else:
            self._obey(self.sequencer.live(batch, now), now)

    def _pump_replay(self, now: float) -> None:
        connection, request = self.replay, self._request
        if connection is None or request is None or self._actions:
            return
        if not self._replies:
            self._replies.extend(connection.receive())
            if not connection.drained:
                self._look_again()
        for _ in connection.changes(now):
            pass  # only `trouble()` cares
        while self._replies:  # of another request there are none as yet
            self._on_reply(request, self._replies.popleft(), now)
            if self._actions or not self._allowance.left():
                self._look_again()
                return
            if self._request != request:  # the sequencer has turned to another request
                return

    def _on_reply(self, request: int, frames: list[bytes], now: float) -> None:
        try:
            reply = parse_replay(frames)
        except DecodeError as error:
            self._note_damage("bad_frames", error, now)
            return
        if reply.end:
            self._obey(self.sequencer.replay_ended(request, now), now)
            return
        if reply.topic is not None and not self.topic.confirmed:
            self.topic.fits(reply.topic)
        batch = self._decoded(reply.seq, reply.payload, now)
        if batch is None:
            self._obey(self.sequencer.replayed_damaged(request, reply.seq, now), now)
        else:
            self._obey(self.sequencer.replayed(request, batch, now), now)

    def _decoded(self, seq: int, payload: bytes, now: float) -> Batch | None:
        try:
            batch = self._decode(payload)
        except DecodeError as error:
            self._note_damage("undecodable", error, now)
            return None
        if self.named is None and batch.data_parallel_rank is not None:
            self.named = batch.data_parallel_rank
            self._on_named(self)
        return Batch(seq, batch.ts, batch, self._fingerprint(payload), len(payload))

    def _note_damage(self, kind: str, error: DecodeError, now: float) -> None:
        self.counters["decode_failures"] += 1
        self.counters[kind] += 1
        self._log.warn(kind, now, "%s: %s: %s", self.rank, kind, error)

    # What the clock says ----------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        if self.closed:
            return None
        deadlines = (self.sequencer.deadline, self.topic.deadline, self.live.stuck_at)
        return min((d for d in deadlines if d is not None), default=None)

    def tick(self, now: float) -> bool:
        """Let time pass: time-outs, back-off, probes, staleness; say whether any of it was due."""
        deadline = self.deadline
        if deadline is None or deadline > now:
            return False
        self._allowance.begin()
        stuck_at = self.live.stuck_at
        if stuck_at is not None and stuck_at <= now:
            self._live.reopen(now)
        self.topic.decide(now)
        self._obey(self.sequencer.tick(now), now)
        return True

    def cut_endless(self, now: float) -> None:
        """Hang up on peers that send a message without end."""
        for connection in (self.live, self.replay):
            if connection is None or self.closed:
                continue
            cut = connection.cut_endless()
            if cut:
                self.counters["endless_messages"] += cut
                self._look_again()
                self._log.warn(
                    "endless",
                    now,
                    "%s: a message from %s had no end; the connection was closed",
                    self.rank,
                    connection.endpoint,
                )

    # What the sequencer wants -----------------------------------------------------------------

    def _obey(self, actions: list[Action], now: float) -> None:
        """Do what the sequencer wants, in its order, also where doing it brings more."""
        self._actions.extend(actions)
        self._work_off(now)

    def _work_off(self, now: float) -> None:
        """Do what is to be done, as far as there is time; what is left comes first next time."""
        if self._obeying:
            return
        self._obeying = True
        try:
            while self._actions:
                self._do(self._actions.popleft(), now)
                if not self._allowance.left():
                    break
        finally:
            self._obeying = False
        if self._actions:
            self._look_again()

    @property
    def pending(self) -> int:
        """How many batches are in order but not delivered, for want of time."""
        return sum(
            len(action.batches) if isinstance(action, Row) else isinstance(action, RankBatch)
            for action in self._actions
        )

    def _do(self, action: Action | Row, now: float) -> None:
        if self.closed:
            return  # removed by its own sink, in the middle of a turn
        if isinstance(action, Row):
            self._deliver(action, now, replayed=False)
        elif isinstance(action, RankBatch):
            self._deliver(Row(action.seq, [action.batch]), now, replayed=action.replayed)
        elif isinstance(action, AskReplay):
            self._ask(action, now)
        elif isinstance(action, CloseReplay):
            self._close_replay(action.request)
        elif isinstance(action, RankLost):
            self._note_lost(action, now)
            self._outlet.put(action)
        else:
            self.epoch, self.seq = action.epoch, None
            if self._named_by_cursor:  # whoever speaks here now may have another name
                self._named_by_cursor, self.named = False, None
            logger.info("%s: restarted (%s): epoch %d", self.rank, action.reason, action.epoch)
            self._outlet.put(action)

    def _deliver(self, row: Row, now: float, *, replayed: bool) -> None:
        self.last_event_at = now
        first_seq, batches = row
        self.seq = first_seq - 1 + len(batches)
        done = self._outlet.put_batches(
            self.rank,
            self.epoch,
            first_seq,
            batches,
            replayed=replayed,
            time_left=self._allowance.left,
        )
        if done < len(batches):
            self.seq = first_seq - 1 + done
            self._actions.appendleft(Row(first_seq + done, batches[done:]))

    def _note_lost(self, lost: RankLost, now: float) -> None:
        self._log.warn(
            "lost",
            now,
            "%s: lost batches %s to %s (%s)%s",
            self.rank,
            lost.first_seq,
            "?" if lost.last_seq is None else lost.last_seq,
            lost.reason,
            ": dropping what the rank held" if lost.reset else "",
        )

    def _ask(self, ask: AskReplay, now: float) -> None:
        """Send a replay request on a fresh socket: no reply to an earlier one can mix in."""
        self._close_replay(None)
        endpoint = self.address.replay
        assert endpoint is not None  # the sequencer was told whether there is one
        self._request = ask.request
        try:
            self.replay = Connection(
                self._context,
                zmq.DEALER,
                endpoint,
                self._socket_options,
                self._curve,
                host=self._replay_host,
            )
            self._watch_all(self.replay)
            self.replay.socket.send_multipart(replay_request(ask.start_seq), zmq.NOBLOCK)
        except (ConfigurationError, zmq.ZMQError) as error:
            self.counters["replay_socket_errors"] += 1
            text = "%s: cannot ask for a replay: %s"
            self._log.warn("replay_socket", now, text, self.rank, error)
            self._close_replay(None)
            self._obey(self.sequencer.replay_failed(ask.request, now), now)

    def _close_replay(self, request: int | None) -> None:
        if request is not None and request != self._request:
            return
        if self.replay is not None:
            self._close(self.replay)
            self.replay = None
        self._request = None
        self._replies.clear()

    def _look_again(self) -> None:
        self._watch.look_again(self)

    def _note_refused(self, error: ConfigurationError, now: float) -> None:
        self._log.warn("reopen", now, "%s: %s", self.rank, error)

    # What others may know ---------------------------------------------------------------------

    def status(self, now: float) -> RankStatus:
        """Return a snapshot; `last_event_age` is the time of the last event, made an age later."""
        status = feed_status(self, now)
        self.shown_live = status.state is State.LIVE
        trouble = unrepairable(self) if self.address.replay is not None else ""
        self._log.note(status, trouble, now)
        return status

    def close(self, now: float) -> None:
        """Close the sockets and the sequencer; idempotent."""
        if self.closed:
            return
        self.closed = True
        self._close_replay(None)
        self._live.close()
        self.sequencer.close(now)
        self._actions.clear()
