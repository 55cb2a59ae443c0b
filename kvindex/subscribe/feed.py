"""One publisher as the subscriber sees it: its sockets, its sequencer, its name.

A feed turns what its sockets say into the sequencer's entrances and obeys the actions that come
back. Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

import zmq

from kvindex.errors import ConfigurationError, DecodeError
from kvindex.rank import Rank
from kvindex.subscribe.actions import Action, Ask, Batch, Deliver, Drop, Lost, Restarted
from kvindex.subscribe.config import SequencerConfig
from kvindex.subscribe.connection import Connection, Link
from kvindex.subscribe.sequencer import Sequencer
from kvindex.subscribe.state import State
from kvindex.subscribe.status import RankStatus
from kvindex.subscribe.stream import RankBatch, RankLost, RankRestarted, Sink
from kvindex.subscribe.topic_check import TopicCheck
from kvindex.subscribe.watch import Watch
from kvindex.subscribe.worker import Curve, PublisherAddress, Worker
from kvindex.wire import decode_batch, parse_live, parse_replay, replay_request

__all__ = ["Feed"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 10.0  # seconds between log lines of one kind for one rank


class Feed:
    """Everything about one publisher.

    Args:
        worker: whose publisher it is.
        address: where it is.
        config: the sequencer's settings.
        link: socket settings.
        context: the ZeroMQ context.
        watch: told of every socket that is opened and closed.
        sink: where ordered items go.
        on_named: told once the publisher's batches have named its dp_rank.
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
        link: Link,
        context: zmq.Context[zmq.Socket[bytes]],
        watch: Watch,
        sink: Sink,
        on_named: Callable[[Feed], None],
        now: float,
    ) -> None:
        self.worker = worker.worker
        self.groups = worker.groups
        self.rank = Rank(worker.worker, address.dp_rank)
        self.named: int | None = None
        self.failure = ""
        self.closed = False
        self.address = address
        self.sequencer = Sequencer(config, now=now)
        self.counters: Counter[str] = Counter()
        self.topic = TopicCheck(worker.topic.encode())
        self.replay: Connection | None = None
        self._request: int | None = None
        self._epoch = 0
        self._actions: deque[Action] = deque()
        self._obeying = False
        self._context = context
        self._watch = watch
        self._link = link
        self._curve: Curve | None = worker.curve
        self._bind = worker.bind
        self._sink = sink
        self._on_named = on_named
        self._logged_at: dict[str, float] = {}
        self._last_event_at: float | None = None
        self.live = self._open_live()
        if self.live.connected:
            self._obey(self.sequencer.connected(now), now)
            self.topic.connected(now)

    def _open_live(self) -> Connection:
        wanted = {self.topic.topic, b"" if not self.topic.confirmed else self.topic.topic}
        connection = Connection(
            self._context,
            zmq.SUB,
            self.address.endpoint,
            self._link,
            self._curve,
            bind=self._bind,
            subscriptions=tuple(wanted),
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
        # Messages first, then the monitor: so a message of a new connection is never handled
        # before the end of the old one is known.
        messages = self.live.receive()
        for connected in self.live.changes(now):
            self._on_connection(connected, now)
        for frames in messages:
            self._on_live(frames, now)
        self._pump_replay(now)

    def _on_connection(self, connected: bool, now: float) -> None:
        logger.debug("%s: %s", self.rank, "connected" if connected else "disconnected")
        if connected:
            self.topic.connected(now)
            self._obey(self.sequencer.connected(now), now)
        else:
            self._obey(self.sequencer.disconnected(now), now)

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
        batch = self._decoded(live.seq, live.payload, now)
        if batch is None:
            self._obey(self.sequencer.damaged(live.seq, now), now)
        else:
            self._obey(self.sequencer.live(batch, now), now)

    def _pump_replay(self, now: float) -> None:
        connection, request = self.replay, self._request
        if connection is None or request is None:
            return
        messages = connection.receive()
        for _ in connection.changes(now):
            pass  # only `trouble()` cares
        for frames in messages:
            self._on_reply(request, frames, now)
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
            events = decode_batch(payload)
        except DecodeError as error:
            self._note_damage("undecodable", error, now)
            return None
        if self.named is None and events.data_parallel_rank is not None:
            self.named = events.data_parallel_rank
            self._on_named(self)
        return Batch(seq, events.ts, events, hash(payload), len(payload))

    def _note_damage(self, kind: str, error: DecodeError, now: float) -> None:
        self.counters["decode_failures"] += 1
        self.counters[kind] += 1
        if self._may_log(kind, now):
            logger.warning("%s: %s: %s", self.rank, kind, error)

    # What the clock says ----------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        if self.closed:
            return None
        deadlines = (self.sequencer.deadline, self.topic.deadline)
        return min((d for d in deadlines if d is not None), default=None)

    def tick(self, now: float) -> bool:
        """Let time pass: time-outs, back-off, probes, staleness; say whether any of it was due."""
        if self.live.stuck(now):
            self._reopen(now)
        deadline = self.deadline
        if deadline is None or deadline > now:
            return False
        self.topic.decide(now)
        self._obey(self.sequencer.tick(now), now)
        return True

    def _reopen(self, now: float) -> None:
        """Replace a socket that gave up; if there is none to be had, try again later."""
        given_up = self.live
        try:
            self.live = self._open_live()
        except ConfigurationError as error:
            self.counters["reopen_failures"] += 1
            given_up.postpone(now)
            if self._may_log("reopen", now):
                logger.warning("%s: %s", self.rank, error)
        else:
            self.counters["reopened"] += 1
            self._close(given_up)

    # What the sequencer wants -----------------------------------------------------------------

    def _obey(self, actions: list[Action], now: float) -> None:
        """Do what the sequencer wants, in its order, also where doing it brings more."""
        self._actions.extend(actions)
        if self._obeying:
            return
        self._obeying = True
        try:
            while self._actions:
                self._do(self._actions.popleft(), now)
        finally:
            self._obeying = False

    def _do(self, action: Action, now: float) -> None:
        if self.closed:
            return  # removed by its own sink, in the middle of a turn
        if isinstance(action, Deliver):
            self._last_event_at = now
            batch = action.batch
            self._sink(RankBatch(self.rank, self._epoch, batch.seq, batch.payload, action.replayed))
        elif isinstance(action, Ask):
            self._ask(action, now)
        elif isinstance(action, Drop):
            self._close_replay(action.request)
        elif isinstance(action, Lost):
            self._tell_lost(action, now)
        elif isinstance(action, Restarted):
            self._epoch = action.epoch
            logger.info("%s: restarted (%s): epoch %d", self.rank, action.reason, action.epoch)
            self._sink(RankRestarted(self.rank, action.epoch, action.reason))

    def _tell_lost(self, lost: Lost, now: float) -> None:
        if self._may_log("lost", now):
            logger.warning(
                "%s: lost batches %s to %s (%s)%s",
                self.rank,
                lost.first_seq,
                "?" if lost.last_seq is None else lost.last_seq,
                lost.reason,
                ": dropping what the rank held" if lost.reset else "",
            )
        self._sink(
            RankLost(self.rank, self._epoch, lost.reason, lost.first_seq, lost.last_seq, lost.reset)
        )

    def _ask(self, ask: Ask, now: float) -> None:
        """Send a replay request on a fresh socket: no reply to an earlier one can mix in."""
        self._close_replay(None)
        endpoint = self.address.replay
        assert endpoint is not None  # the sequencer was told whether there is one
        self._request = ask.request
        try:
            self.replay = Connection(self._context, zmq.DEALER, endpoint, self._link, self._curve)
            self._watch_all(self.replay)
            self.replay.socket.send_multipart(replay_request(ask.start_seq), zmq.NOBLOCK)
        except (ConfigurationError, zmq.ZMQError) as error:
            self.counters["replay_socket_errors"] += 1
            if self._may_log("replay_socket", now):
                logger.warning("%s: cannot ask for a replay: %s", self.rank, error)
            self._close_replay(None)
            self._obey(self.sequencer.replay_failed(ask.request, now), now)

    def _close_replay(self, request: int | None) -> None:
        if request is not None and request != self._request:
            return
        if self.replay is not None:
            self._close(self.replay)
            self.replay = None
        self._request = None

    def _may_log(self, kind: str, now: float) -> bool:
        if now - self._logged_at.get(kind, -_LOG_INTERVAL) < _LOG_INTERVAL:
            return False
        self._logged_at[kind] = now
        return True

    # What others may know ---------------------------------------------------------------------

    def state(self, now: float) -> State:
        """Return the stream's state; a topic that filters everything is not live."""
        state = self.sequencer.state
        if state is State.LIVE and (self.topic.contradicted or self.topic.open):
            return State.SYNCING
        return state

    def status(self, now: float) -> RankStatus:
        """Return a snapshot; `last_event_age` is the time of the last event, made an age later."""
        sequencer = self.sequencer
        counters = sequencer.counters + self.counters
        if self.topic.filtered:
            counters["filtered_by_topic"] = self.topic.filtered
        return RankStatus(
            rank=self.rank,
            state=self.state(now),
            reason=self._reason(now),
            epoch=sequencer.epoch,
            seq=sequencer.seq,
            complete=sequencer.complete,
            lag=sequencer.lag,
            connected=self.live.connected,
            endpoint=self.address.endpoint,
            replay_endpoint=self.address.replay,
            last_event_age=self._last_event_at,
            gaps=counters["gaps"],
            replays_asked=counters["replays_asked"],
            replays_filled=counters["replays_ended"],
            replays_failed=counters["replays_failed"] + counters["replay_timeouts"],
            losses=counters["losses"],
            restarts=counters["restarts"],
            duplicates=counters["duplicates"],
            decode_failures=counters["decode_failures"],
            counters=dict(counters),
        )

    def _reason(self, now: float) -> str:
        if self.failure:
            return self.failure
        if self.closed:
            return "closed"
        if not self.live.connected:
            return self._connection_trouble()
        if self.topic.contradicted:
            return self.topic.trouble()
        state = self.sequencer.state
        if state is State.LIVE:
            return "waiting for the first message, to see its topic" if self.topic.open else ""
        trouble = self.replay.trouble() if self.replay is not None else ""
        reason = self.sequencer.reason
        if trouble:
            return f"{reason}; replay: {trouble}; check replay= (its port is replay port + dp_rank)"
        if self.replay is not None and self.sequencer.counters["replay_timeouts"]:
            return (
                f"{reason}; the replay endpoint {self.address.replay} is connected but silent: "
                "is it the engine's replay_endpoint?"
            )
        return reason

    def _connection_trouble(self) -> str:
        trouble = self.live.trouble()
        if self._bind:
            return f"listening at {self.address.endpoint}: no publisher has connected; {trouble}"
        if self.live.refused_handshakes:
            return f"{trouble}: is this the PUB port (+ dp_rank), and not the replay port?"
        if self.live.retries:
            return (
                f"{trouble}: is the engine up, with KV events on, at this port (+ dp_rank)? An "
                "engine whose own endpoint names a host instead of '*' connects instead of "
                "listening: give it tcp://*:PORT, or use Worker(bind=True)"
            )
        return trouble

    def close(self, now: float) -> None:
        """Close the sockets and the sequencer; idempotent."""
        if self.closed:
            return
        self.closed = True
        self._close_replay(None)
        self._close(self.live)
        self._obey(self.sequencer.close(now), now)
