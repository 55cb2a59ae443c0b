"""From frames to events: reads a feed's messages, and reports what is wrong with them.

Nearly every live message is ordinary: three frames, the wanted topic, the next seq, a payload that
can be decoded, and no news of the publisher's dp_rank. Such messages are read by the run: one event
for all of them, with what a sequencer needs of each.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from kvindex.subscribe.notes import Notes
from kvindex.subscribe.sequencer import Batch
from kvindex.subscribe.stream import Decode, DecodedBatch, Fingerprint
from kvindex.wire import parse_live, parse_replay
from kvindex.wire.errors import DecodeError

__all__ = [
    "Connected",
    "Damaged",
    "Disconnected",
    "Event",
    "Named",
    "Reader",
    "ReplayOver",
    "Replied",
    "Run",
    "TopicCheck",
]

_unpack_seq = struct.Struct(">Q").unpack
_GRACE = 1.0  # seconds after connecting in which a wrong topic may still show
_MAX_SEEN = 8
_MAX_SHOWN = 64  # bytes of a topic, which the network chooses


class Connected(NamedTuple):
    """There is a new connection to the publisher's live side."""


class Disconnected(NamedTuple):
    """The connection to the live side is over, and its messages were yielded."""


class Named(NamedTuple):
    """A batch names the publisher's dp_rank, for the first time; its event comes next."""

    dp_rank: int


class Run(NamedTuple):
    """Live batches numbered without a hole; one at least.

    Attributes:
        first_seq: seq of the first.
        batches: the decoded payloads.
        timestamps: their `ts`.
        fingerprints: a hash of each payload.
        sizes: bytes of each payload.
    """

    first_seq: int
    batches: list[DecodedBatch]
    timestamps: list[float]
    fingerprints: list[int]
    sizes: list[int]

    def batch(self, position: int) -> Batch:
        """Return one batch of the run."""
        return Batch(
            self.first_seq + position,
            self.timestamps[position],
            self.batches[position],
            self.fingerprints[position],
            self.sizes[position],
        )


class Damaged(NamedTuple):
    """A live message that cannot be read; its seq, where that was legible."""

    seq: int | None


class Replied(NamedTuple):
    """A reply to a replay request; its batch is None where that cannot be decoded."""

    request: int
    seq: int
    batch: Batch | None


class ReplayOver(NamedTuple):
    """A replay request is over: its end marker came, or it could not be sent."""

    request: int
    failed: bool


Event: TypeAlias = Connected | Disconnected | Named | Run | Damaged | Replied | ReplayOver


class TopicCheck:
    """Decides whether a wanted topic is confirmed, open, or contradicted.

    A topic that matches nothing looks like an idle engine. So until the first message with the
    wanted topic, the subscriber also receives all topics, and this check notes which ones come.

    Attributes:
        filtered: messages that other topics carried.
        confirmed: whether a message with the wanted topic was seen (or all topics are wanted).
    """

    def __init__(self, topic: bytes) -> None:
        self.topic = topic
        self.confirmed = not topic
        self.filtered = 0
        self._seen: dict[bytes, None] = {}
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
        if len(self._seen) < _MAX_SEEN:
            self._seen[topic[:_MAX_SHOWN]] = None
        return False

    @property
    def contradicted(self) -> bool:
        """Whether only other topics were seen so far."""
        return not self.confirmed and bool(self._seen)

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
        seen = ", ".join(repr(topic.decode("utf-8", "replace")) for topic in self._seen)
        return (
            f"the topic {self.topic.decode('utf-8', 'replace')!r} filters out everything: "
            f"{self.filtered} messages came with topic {seen}; engines send '' unless configured"
        )


class Reader:
    """Reads the messages of one publisher.

    Attributes:
        topic: whether the topic is right.
        named: the dp_rank that batches name; None while they have named none.
    """

    def __init__(
        self,
        topic: bytes,
        decode: Decode,
        fingerprint: Fingerprint,
        notes: Notes,
        time_left: Callable[[], bool],
    ) -> None:
        self.topic = TopicCheck(topic)
        self.named: int | None = None
        self._decode = decode
        self._fingerprint = fingerprint
        self._notes = notes
        self._time_left = time_left

    def live(self, messages: deque[list[bytes]]) -> Iterator[Event]:
        """Yield the events of live messages, and remove those messages from `messages`."""
        while messages:
            was_named = self.named is not None
            run = self._run(messages) if self.topic.confirmed else None
            event = self._odd(messages.popleft()) if run is None else run
            if self.named is not None and not was_named:
                yield Named(self.named)
            if event is not None:
                yield event

    def _run(self, messages: deque[list[bytes]]) -> Run | None:
        """Take out the ordinary messages in front; None if the first is not ordinary.

        The message that ends a run is left: the next call reads it.
        """
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
            pass  # not three frames, no seq of eight bytes, or no batch
        if not batches:
            return None
        for _ in batches:
            messages.popleft()
        return Run(next_seq - len(batches), batches, timestamps, fingerprints, sizes)

    def _odd(self, frames: list[bytes]) -> Run | Damaged | None:
        """Read one live message, whatever it is; None for one of another topic."""
        try:
            live = parse_live(frames)
        except DecodeError as error:
            self._note_damage("bad_frames", error)
            return Damaged(None)
        if not self.topic.fits(live.topic):
            return None
        batch = self._decoded(live.seq, live.payload)
        if batch is None:
            return Damaged(live.seq)
        return Run(batch.seq, [batch.content], [batch.ts], [batch.fingerprint], [batch.size])

    def reply(self, request: int, frames: list[bytes]) -> Iterator[Event]:
        """Yield the events of a reply to a replay request: none, if it cannot be read at all."""
        try:
            reply = parse_replay(frames)
        except DecodeError as error:
            self._note_damage("bad_frames", error)
            return
        if reply.end:
            yield ReplayOver(request, failed=False)
            return
        if reply.topic is not None and not self.topic.confirmed:
            self.topic.fits(reply.topic)
        was_named = self.named is not None
        batch = self._decoded(reply.seq, reply.payload)
        if self.named is not None and not was_named:
            yield Named(self.named)
        yield Replied(request, reply.seq, batch)

    def _decoded(self, seq: int, payload: bytes) -> Batch | None:
        try:
            batch = self._decode(payload)
        except DecodeError as error:
            self._note_damage("undecodable", error)
            return None
        if self.named is None:
            self.named = batch.data_parallel_rank
        return Batch(seq, batch.ts, batch, self._fingerprint(payload), len(payload))

    def _note_damage(self, kind: str, error: DecodeError) -> None:
        self._notes.counters["decode_failures"] += 1
        self._notes.counters[kind] += 1
        self._notes.warn(kind, "%s: %s", kind, error)
