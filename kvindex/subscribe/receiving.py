"""From sockets to events: the two sides of a publisher, and what their messages contain.

**The live side** is a row of SUB sockets, each for one connection. ZeroMQ would reconnect the same
socket by itself, and messages of both connections would then stand in one queue. If the engine was
restarted in between, the first of them are the dead engine's, and nothing in them says so. So after
a disconnect the link reads the socket until it is empty, and then opens a new one.

In three cases the link drops the unread messages instead (`unread_dropped`), and replay brings
those that are still needed: ZeroMQ has reconnected already; the socket is bound, and must keep its
port; or it was opened less than `pause` seconds ago. In the last case it stays, because a new
socket would dial a peer that hangs up each time without the pauses that ZeroMQ makes.

**The replay side** is a DEALER socket for each request.

**Messages.** Nearly every live message is ordinary: three frames, the wanted topic, the next seq, a
payload that can be decoded, and no news of the publisher's dp_rank. Such messages are read by the
run: one event for all of them. Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import zmq

from kvindex.subscribe.connection import Connection
from kvindex.subscribe.delivery import Decode, DecodedBatch, Fingerprint
from kvindex.subscribe.sequencer import AskReplay, Batch
from kvindex.wire import parse_live, parse_replay, replay_request
from kvindex.wire.errors import ConfigurationError, DecodeError
from kvindex.wire.log_rate import LogRate
from kvindex.wire.rank import Rank

logger = logging.getLogger(__name__)

_GRACE = 1.0  # seconds after connecting in which a wrong topic may still show
_MAX_TOPICS = 8
_MAX_TOPIC_BYTES = 64  # the network chooses the topic
_unpack_seq = struct.Struct(">Q").unpack


class Notes:
    """Counts, and remembers what was logged, and when."""

    def __init__(self, rank: Rank, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.counters: Counter[str] = Counter()
        self.shown_live = False  # whether the status shown last was LIVE
        self.was_up = False  # whether the engine was live since it was last gone
        self.logged_down = False  # whether its loss was logged, and its return not yet
        self.logged_unrepairable = False  # whether its replay endpoint was logged as useless
        self.may_log = LogRate(clock).allows

    def damaged(self, kind: str, error: DecodeError) -> None:
        """Count and log a message that cannot be read."""
        self.counters["decode_failures"] += 1
        self.counters[kind] += 1
        self.warn(kind, "%s: %s", kind, error)

    def warn(self, kind: str, text: str, *details: object) -> None:
        """Log a warning, unless one of this kind was logged just now."""
        if self.may_log(kind):
            logger.warning(f"%s: {text}", self.rank, *details)


class TopicCheck:
    """Decides whether a wanted topic is confirmed, open, or contradicted.

    A topic that matches nothing looks like an idle engine. So until the first message with the
    wanted topic, the subscriber also receives all topics, and this check notes which ones arrive.
    """

    def __init__(self, topic: bytes) -> None:
        self.topic = topic
        self.confirmed = not topic  # else by the first message with the wanted topic
        self.filtered = 0  # messages that other topics carried
        self._others: dict[bytes, None] = {}
        self._decide_at: float | None = None
        self._decided = False

    def connected(self, now: float) -> None:
        """Start the time in which a wrong topic may show."""
        if self.open:
            self._decide_at = now + _GRACE

    def fits(self, topic: bytes) -> bool:
        """Note a message's topic; return whether the message is wanted."""
        if topic.startswith(self.topic):
            self.confirmed = True
            return True
        self.filtered += 1
        # The network chooses topics: a few of them, cut, so that nobody fills memory or the log.
        if len(self._others) < _MAX_TOPICS:
            self._others[topic[:_MAX_TOPIC_BYTES]] = None
        return False

    @property
    def contradicted(self) -> bool:
        """Whether only other topics were seen so far."""
        return not self.confirmed and bool(self._others)

    @property
    def open(self) -> bool:
        """Whether no message has decided yet, and it is too early to conclude."""
        return not self.confirmed and not self._decided

    @property
    def deadline(self) -> float | None:
        """When `decide` wants to be called."""
        return self._decide_at if self.open else None

    def decide(self, now: float) -> None:
        """Accept the topic if no other one showed in the time allowed for that."""
        if self._decide_at is not None and now >= self._decide_at:
            self._decided = True

    def trouble(self) -> str:
        """Return what is wrong, for a person; "" while nothing is known."""
        if not self.contradicted:
            return ""
        others = ", ".join(repr(topic.decode("utf-8", "replace")) for topic in self._others)
        return (
            f"the topic {self.topic.decode('utf-8', 'replace')!r} filters out everything: "
            f"{self.filtered} messages came with topic {others}; engines send '' unless configured"
        )


class Connected(NamedTuple):
    """There is a new connection to the publisher's live side."""


class Disconnected(NamedTuple):
    """The connection to the live side is over, and its messages were yielded."""


class Naming(NamedTuple):
    """A batch names the publisher's dp_rank, for the first time; its event comes next."""

    dp_rank: int


class Run(NamedTuple):
    """Live batches numbered without a hole; one at least."""

    first_seq: int
    batches: list[DecodedBatch]
    timestamps: list[float]  # `ts` of each batch
    fingerprints: list[int]  # a hash of each payload
    sizes: list[int]  # bytes of each payload


class Damage(NamedTuple):
    """A live message that cannot be read; its seq, where that was legible."""

    seq: int | None


class Reply(NamedTuple):
    """A reply to a replay request; its batch is None where that cannot be decoded."""

    request: int
    seq: int
    batch: Batch | None


class ReplayEnd(NamedTuple):
    """A replay request is over: its end marker came, or it could not be sent."""

    request: int
    failed: bool


Event: TypeAlias = Connected | Disconnected | Naming | Run | Damage | Reply | ReplayEnd


class Reader:
    """Reads the messages of one publisher."""

    def __init__(
        self,
        topic: bytes,
        decode: Decode,
        fingerprint: Fingerprint,
        notes: Notes,
        time_left: Callable[[], bool],
    ) -> None:
        self.topic = TopicCheck(topic)
        self.named: int | None = None  # the dp_rank that its batches name
        self._decode = decode
        self._fingerprint = fingerprint
        self._notes = notes
        self._time_left = time_left

    def live(self, messages: deque[list[bytes]]) -> Iterator[Event]:
        """Yield the events of live messages, and remove those messages from `messages`."""
        while messages:
            was_named = self.named is not None
            # Until the topic is confirmed each message must be asked for its own.
            event: Run | Damage | None = self._run(messages) if self.topic.confirmed else None
            if event is None:
                event = self._odd(messages.popleft())
            # First: what follows belongs to the rank under its new name.
            if self.named is not None and not was_named:
                yield Naming(self.named)
            if event is not None:
                yield event

    def _run(self, messages: deque[list[bytes]]) -> Run | None:
        """Remove the ordinary messages in front; None if the first is not ordinary."""
        # The hot loop of feeds without a lane: it binds what it needs, and asks for nothing twice.
        topic, decode, fingerprint = self.topic.topic, self._decode, self._fingerprint
        time_left, named = self._time_left, self.named
        batches: list[DecodedBatch] = []
        timestamps: list[float] = []
        fingerprints: list[int] = []
        sizes: list[int] = []
        next_seq = 0
        try:
            for sent_topic, head, payload in messages:
                (seq,) = _unpack_seq(head)
                if (batches and seq != next_seq) or not sent_topic.startswith(topic):
                    break
                batch = decode(payload)
                if named is None and batch.data_parallel_rank is not None:
                    # The batches before it go out under the old name.
                    if batches:
                        break
                    self.named = named = batch.data_parallel_rank
                batches.append(batch)
                timestamps.append(batch.ts)
                fingerprints.append(fingerprint(payload))
                sizes.append(len(payload))
                next_seq = seq + 1
                if not time_left():
                    break
        except (ValueError, struct.error, DecodeError):
            # Not three frames, no seq of eight bytes, or no batch: `_odd` says which, in its turn.
            pass
        if not batches:
            return None
        for _ in batches:
            messages.popleft()
        return Run(next_seq - len(batches), batches, timestamps, fingerprints, sizes)

    def _odd(self, frames: list[bytes]) -> Run | Damage | None:
        """Read one live message, whatever it is; None for one of another topic."""
        try:
            live = parse_live(frames)
        except DecodeError as error:
            self._notes.damaged("bad_frames", error)
            return Damage(None)
        if not self.topic.fits(live.topic):
            return None
        batch = self._decoded(live.seq, live.payload)
        if batch is None:
            return Damage(live.seq)
        return Run(batch.seq, [batch.content], [batch.ts], [batch.fingerprint], [batch.size])

    def reply(self, request: int, frames: list[bytes]) -> Iterator[Event]:
        """Yield the events of a reply to a replay request: none, if it cannot be read at all."""
        try:
            reply = parse_replay(frames)
        except DecodeError as error:
            self._notes.damaged("bad_frames", error)
            return
        if reply.end:
            yield ReplayEnd(request, failed=False)
            return
        # Older engines send none. A reply is the publisher's whatever its topic: it only confirms.
        if reply.topic is not None and not self.topic.confirmed:
            self.topic.fits(reply.topic)
        was_named = self.named is not None
        batch = self._decoded(reply.seq, reply.payload)
        if self.named is not None and not was_named:
            yield Naming(self.named)
        yield Reply(request, reply.seq, batch)

    def _decoded(self, seq: int, payload: bytes) -> Batch | None:
        try:
            batch = self._decode(payload)
        except DecodeError as error:
            self._notes.damaged("undecodable", error)
            return None
        if self.named is None:
            self.named = batch.data_parallel_rank
        return Batch(seq, batch.ts, batch, self._fingerprint(payload), len(payload))


class LiveLink:
    """Yields the events of a publisher's live side, in the order in which to handle them."""

    def __init__(
        self,
        connect: Callable[[tuple[bytes, ...]], Connection],
        reader: Reader,
        notes: Notes,
        *,
        bind: bool,  # one port, which must stay bound
        hwm: int,  # messages that a socket holds at most
        pause: float,  # seconds that a socket must have been open to be replaced
    ) -> None:
        self._connect = connect
        self._reader = reader
        self._notes = notes
        self._bind = bind
        self._hwm = hwm
        self._pause = pause
        self._parting = False  # the connection broke; its messages are not all read
        self._closed = False
        self._drained = False  # whether the last look emptied the socket
        self._listens_to_all = True  # until the topic is confirmed
        self._unread: deque[list[bytes]] = deque()  # received, and not handled yet
        self._opened_at = -math.inf  # the first socket is replaced whenever it breaks
        self.connection = self._open()

    def take(self, now: float) -> Iterator[Event]:
        """Yield the events of what was received, up to a bound.

        A caller that stops in between must look again: the next `take` goes on from there.
        """
        # Messages first, then the monitor: so no message of a new connection is handled before the
        # end of the old one is known.
        parting = self._parting
        # No more while some are unread: what time there is is for those.
        if not self._unread:
            self._unread.extend(self.connection.receive())
            self._drained = self.connection.drained
        else:
            self._drained = False
        if not self._drained:
            self.connection.look_again()
        for connected in self.connection.changes(now):
            if not connected:
                self._parting = True
            elif not self._parting:
                yield Connected()
            else:
                # This socket has another connection already, and nothing shows which messages came
                # before it.
                self._drop(self._unread)
                yield from self._part(now)
                break
        for event in self._reader.live(self._unread):
            if self._listens_to_all and self._reader.topic.confirmed:
                self._listens_to_all = False
                self.connection.socket.unsubscribe(b"")
                # The call may have cleared the descriptor's sign: see `watch`.
                self.connection.look_again()
            yield event
        if parting and self._parting and self._drained:
            yield from self._part(now)
        elif self._parting:
            # The end was reported after this look at the messages. So some may have come in
            # between, and only a second look that finds none shows that all are read.
            self.connection.look_again()

    @property
    def is_ordinary(self) -> bool:
        """Whether a lane may receive: nothing is awaited but messages with the wanted topic."""
        return (
            self.connection.connected
            and self._reader.topic.confirmed
            and not (self._unread or self._parting or self._closed or self._listens_to_all)
        )

    def leave(self, messages: list[list[bytes]]) -> None:
        """Handle these messages before those that are still in the socket."""
        self._unread.extend(messages)

    def reopen(self, now: float) -> bool:
        """Replace the socket; return False if none can be opened, and try again later."""
        given_up = self.connection
        try:
            # The new one first: if none can be had, the old one goes on.
            self.connection = self._open()
        except ConfigurationError as error:
            self._notes.counters["reopen_failures"] += 1
            given_up.postpone(now)
            self._notes.warn("reopen", "%s", error)
            return False
        self._notes.counters["reopened"] += 1
        self._opened_at = now
        self._parting = False
        self._drop(self._unread)
        given_up.close()
        return True

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._closed = True
        self.connection.close()

    def _open(self) -> Connection:
        topic = self._reader.topic
        # Until a message confirms the topic, all are listened to: see `TopicCheck`.
        self._listens_to_all = not topic.confirmed
        return self._connect((topic.topic, b"") if self._listens_to_all else (topic.topic,))

    def _part(self, now: float) -> Iterator[Event]:
        self._parting = False
        yield Disconnected()
        stays = self._bind or now < self._opened_at + self._pause
        # Whoever handled the event may have closed the link.
        if self._closed or (not stays and self.reopen(now)):
            return
        # The socket stays: what is in it may be of either connection. At most a socketful is
        # dropped, for a flood of the new one would never end.
        left = self._hwm
        drained = False
        while left > 0 and not drained:
            left -= self._drop(self.connection.receive())
            drained = self.connection.drained
        self.connection.look_again()
        if self.connection.connected:
            yield Connected()

    def _drop(self, messages: deque[list[bytes]] | list[list[bytes]]) -> int:
        count = len(messages)
        self._notes.counters["unread_dropped"] += count
        messages.clear()
        return count


class ReplayLink:
    """Sends replay requests, one at a time, and yields the replies."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        reader: Reader,
        notes: Notes,
        look_again: Callable[[], None],
    ) -> None:
        self.connection: Connection | None = None  # of the open request
        self._connect = connect
        self._reader = reader
        self._notes = notes
        self._look_again = look_again
        self.request: int | None = None  # the number of the open one
        self._unread: deque[list[bytes]] = deque()

    def ask(self, ask: AskReplay) -> None:
        """Send a request on a fresh socket: no reply to an earlier one can mix in."""
        self.close()
        self.request = ask.request
        try:
            self.connection = self._connect()
            self.connection.socket.send_multipart(replay_request(ask.start_seq), zmq.NOBLOCK)
        except (ConfigurationError, zmq.ZMQError) as error:
            self._notes.counters["replay_socket_errors"] += 1
            self._notes.warn("replay_socket", "cannot ask for a replay: %s", error)
            # Not told to the sequencer here, which is in the middle of asking: `take` reports it.
            self._close_socket()
        self._look_again()

    def take(self, now: float) -> Iterator[Event]:
        """Yield the received replies, as `LiveLink.take`."""
        request, connection = self.request, self.connection
        if request is None:
            return
        if connection is None:
            self.request = None
            yield ReplayEnd(request, failed=True)
            return
        if not self._unread:
            self._unread.extend(connection.receive())
            if not connection.drained:
                self._look_again()
        # A lost connection needs no event: the request times out. Only `trouble()` cares.
        for _ in connection.changes(now):
            pass
        # An event may close the request, or make another: then there are no replies left.
        while self._unread:
            yield from self._reader.reply(request, self._unread.popleft())

    def close(self, request: int | None = None) -> None:
        """Close the socket of this request, or of any; idempotent."""
        if request is None or request == self.request:
            self.request = None
            self._unread.clear()
            self._close_socket()

    def _close_socket(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
