"""The last batches that were published, and serving them a slice at a time.

Requests queue per asker, since replies of two replays of one asker would look alike; askers take
turns, so that live batches never wait long. A reply for which an asker has no room is not lost,
unlike in the engines: the replay waits and goes on, until it has stood still for too long. No
socket here: replies go through a function.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

from kvindex.wire import replay_end, replay_frames

SLICE_REPLIES: Final = 64
SLICE_BYTES: Final = 1 << 20
MAX_REPLAYS: Final = 64  # that may wait or run at once; more are refused, without an answer
STALL_TIMEOUT: Final = 10.0
_FIRST_RETRY: Final = 0.001
_LAST_RETRY: Final = 0.05


class ReplayBuffer:
    """A ring of `(seq, payload)`, seq ascending, perhaps with holes; the oldest leave first.

    Each entry has a position, counted from the first ever appended, so that a replay can go on
    where it was although the ring turned meanwhile.

    Examples:
        >>> buffer = ReplayBuffer(2)
        >>> for seq in (0, 1, 3):
        ...     buffer.append(seq, b"...")
        >>> [seq for seq, _ in buffer.held_from(buffer.position(0))]
        [1, 3]
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ring: list[tuple[int, bytes]] = []
        self._appended = 0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def oldest_position(self) -> int:
        return self._appended - len(self._ring)

    def append(self, seq: int, payload: bytes) -> None:
        """Hold one more batch; the oldest leaves if `steps` are held. O(1)."""
        # It grows as it fills: a publisher with nothing to replay holds no ring of 10,000.
        if len(self._ring) < self._steps:
            self._ring.append((seq, payload))
        elif self._steps:
            self._ring[self._appended % self._steps] = (seq, payload)
        self._appended += 1

    def position(self, start_seq: int) -> int:
        """Return the position of the first entry held with a seq from start_seq. O(log n)."""
        held = range(self.oldest_position, self._appended)
        return self.oldest_position + bisect_left(held, start_seq, key=lambda p: self._at(p)[0])

    def held_from(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Iterate over the entries held from this position on; do not append meanwhile."""
        for held in range(max(position, self.oldest_position), self._appended):
            yield self._at(held)

    def _at(self, position: int) -> tuple[int, bytes]:
        return self._ring[position % self._steps]


class SendResult(Enum):
    """The result of sending a reply."""

    SENT = "sent"
    NO_ROOM = "no_room"
    UNREACHABLE = "unreachable"


class _Asker:
    """One asker: the starts it wants, the position in the first replay, how long it stands."""

    def __init__(self, now: float) -> None:
        self.starts: deque[int] = deque()
        self.position: int | None = None
        self.moved_at = now
        self.retry_at = now
        self.retry_after = _FIRST_RETRY


class ReplayService:
    """The replays asked for and not yet ended. One thread only.

    `send` sends the frames of one reply to an asker without waiting. After `stall_timeout` seconds
    without room at an asker, its replays are given up.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        send: Callable[[list[bytes]], SendResult],
        *,
        topic: bytes,
        with_topic: bool,
        counters: Counter[str],
        stall_timeout: float = STALL_TIMEOUT,
    ) -> None:
        self._buffer = buffer
        self._send = send
        self._topic = topic
        self._with_topic = with_topic
        self._counters = counters
        self._stall_timeout = stall_timeout
        self._askers: OrderedDict[bytes, _Asker] = OrderedDict()
        self._replays = 0

    def __len__(self) -> int:
        return self._replays

    def ask(self, identity: bytes, start_seq: int, now: float) -> None:
        """Begin a replay, behind those that this asker already waits for."""
        self._counters["replays_asked"] += 1
        # Refused without a word, as the engines have none for it; the asker's time-out asks again.
        if self._replays >= MAX_REPLAYS:
            self._counters["replays_refused"] += 1
            return
        self._replays += 1
        if identity not in self._askers:
            self._askers[identity] = _Asker(now)
        self._askers[identity].starts.append(start_seq)

    def wait_time(self, now: float) -> float | None:
        """Return the seconds until a slice can be tried; None if no replay is on."""
        if not self._askers:
            return None
        return max(0.0, min(asker.retry_at for asker in self._askers.values()) - now)

    def serve_slice(self, now: float) -> None:
        """Send a slice of the replay of the next asker that may have room."""
        for identity, asker in self._askers.items():
            if asker.retry_at <= now:
                self._askers.move_to_end(identity)  # so that the next slice is another's
                self._advance(identity, asker, now)
                return

    def _advance(self, identity: bytes, asker: _Asker, now: float) -> None:
        oldest = self._buffer.oldest_position
        if asker.position is None:
            asker.position = self._buffer.position(asker.starts[0])
        elif asker.position < oldest:  # the ring turned while the asker had no room
            self._counters["replay_batches_overtaken"] += oldest - asker.position
            asker.position = oldest
        first, size = asker.position, 0
        for position, (seq, payload) in enumerate(self._buffer.held_from(first), first):
            if position - first == SLICE_REPLIES or size >= SLICE_BYTES:
                return
            frames = replay_frames(identity, self._topic, seq, payload, with_topic=self._with_topic)
            if not self._sent(identity, asker, frames, now):
                return  # the same reply is sent again when the asker has room
            asker.position = position + 1
            size += len(payload)
            self._counters["replayed_batches"] += 1
        if self._sent(identity, asker, replay_end(identity, with_topic=self._with_topic), now):
            self._counters["replays_served"] += 1
            self._replays -= 1
            asker.starts.popleft()
            asker.position = None
            if not asker.starts:
                del self._askers[identity]

    def _sent(self, identity: bytes, asker: _Asker, frames: list[bytes], now: float) -> bool:
        """Send one reply; otherwise postpone the replay or abandon it."""
        result = self._send(frames)
        if result is SendResult.SENT:
            asker.moved_at = asker.retry_at = now
            asker.retry_after = _FIRST_RETRY  # it reads again: the next wait starts short
            return True
        if result is SendResult.UNREACHABLE:
            self._give_up(identity, asker, "replays_unreachable")
        elif now - asker.moved_at >= self._stall_timeout:
            self._give_up(identity, asker, "replays_stalled")
        else:
            asker.retry_at = now + asker.retry_after
            asker.retry_after = min(2 * asker.retry_after, _LAST_RETRY)
        return False

    def _give_up(self, identity: bytes, asker: _Asker, reason: str) -> None:
        # All that it waits for: the next replay would find no room, or nobody, either.
        self._counters[reason] += len(asker.starts)
        self._replays -= len(asker.starts)
        del self._askers[identity]
