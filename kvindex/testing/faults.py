"""Faults as values, and a lane on which messages suffer them. Knows no socket and no clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import msgspec

from kvindex.wire.errors import ConfigurationError

Frames = list[bytes]

_PROBABILITIES = ("drop", "duplicate", "reorder", "delay", "corrupt")
_NO_MSGPACK = b"\xc1"  # the one byte that msgpack never uses


class LaneFaults(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of messages going one way; probabilities from 0 to 1, decided for each message.

    Attributes:
        drop: it never arrives.
        duplicate: it arrives twice.
        reorder: up to three later messages overtake it, or `max_delay` passes.
        delay: it waits up to `max_delay`.
        corrupt: payload cut short, payload that is no msgpack, a seq of a wrong length, a frame too
            many or too few: all of them detectable.
        max_delay: seconds.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    max_delay: float = 0.05

    def __post_init__(self) -> None:
        for name in _PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}, no probability")
        if not 0 <= self.max_delay < float("inf"):
            raise ConfigurationError(f"max_delay is {self.max_delay!r}; it is seconds from 0")


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a link.

    Attributes:
        live: of messages from publisher to subscribers.
        replay: of replies to replay requests, the end marker included.
    """

    live: LaneFaults = LaneFaults()
    replay: LaneFaults = LaneFaults()


class _HeldMessage(msgspec.Struct, order=True):
    due: float
    order: int
    overtakers: int
    frames: Frames


class Lane:
    """Messages going one way: each that is pushed leaves now, later, twice, damaged or never.

    At most `max_held` messages are held back; beyond, the one due first goes early. Each fault is
    counted, by its kind, under the lane's name.
    """

    def __init__(
        self,
        name: str,
        faults: LaneFaults,
        *,
        random: random.Random,
        counters: Counter[str],
        max_held: int = 10_000,
    ) -> None:
        self.faults = faults
        self._name = name
        self._random = random
        self._counters = counters
        self._max_held = max_held
        self._held: list[_HeldMessage] = []
        self._order = 0
        self._to_drop = 0

    @property
    def deadline(self) -> float | None:
        """When the next held message is due."""
        return self._held[0].due if self._held else None

    def drop_next(self, count: int) -> None:
        """Drop that many messages, starting with the next."""
        self._to_drop += count

    def push(self, frames: Frames, now: float) -> list[Frames]:
        """Accept a message; return the messages to send now, in order."""
        if self._to_drop:  # before all draws: a `drop_next` shifts no later decision
            self._to_drop -= 1
            self._count("dropped")
            return []
        faults = self.faults
        if self._hit(faults.drop, "dropped"):
            return []
        if self._hit(faults.corrupt, "corrupted"):
            frames = self._corrupt(frames)
        copies = [frames, frames] if self._hit(faults.duplicate, "duplicated") else [frames]
        # Of a duplicate one copy leaves now: both late would be no duplicate to see.
        if self._hit(faults.reorder, "reordered"):
            self._hold(copies.pop(), now + faults.max_delay, self._random.randint(1, 3))
        elif self._hit(faults.delay, "delayed"):
            self._hold(copies.pop(), now + self._random.uniform(0, faults.max_delay), -1)
        # Only what leaves now overtakes: a message that is held back itself passes nobody.
        out = copies + self._overtaken() if copies else []
        while len(self._held) > self._max_held:
            self._count("overflowed")
            out.append(heapq.heappop(self._held).frames)
        return self._out(out)

    def due(self, now: float) -> list[Frames]:
        """Return the held messages that are due."""
        out: list[Frames] = []
        while self._held and self._held[0].due <= now:
            out.append(heapq.heappop(self._held).frames)
        return self._out(out)

    def flush(self) -> list[Frames]:
        """Return everything held, in the order of dues, and forget pending `drop_next`s."""
        self._to_drop = 0
        return self.due(float("inf"))

    def lose(self) -> None:
        """Drop everything held."""
        self._counters[f"{self._name}.dropped"] += len(self._held)
        self._held.clear()

    def _out(self, messages: list[Frames]) -> list[Frames]:
        self._counters[f"{self._name}.forwarded"] += len(messages)
        return messages

    def _count(self, what: str) -> None:
        self._counters[f"{self._name}.{what}"] += 1

    def _hit(self, probability: float, what: str) -> bool:
        # Without the fault no number is drawn: others' decisions stay those of the seed.
        if probability == 0 or self._random.random() >= probability:
            return False
        self._count(what)
        return True

    def _hold(self, frames: Frames, due: float, overtakers: int) -> None:
        self._order += 1
        heapq.heappush(self._held, _HeldMessage(due, self._order, overtakers, frames))

    def _overtaken(self) -> list[Frames]:
        """The held messages that one more message has now overtaken for the last time."""
        out: list[_HeldMessage] = []
        kept: list[_HeldMessage] = []
        for held in self._held:
            if held.overtakers > 0:
                held.overtakers -= 1
            (out if held.overtakers == 0 else kept).append(held)
        if out:
            heapq.heapify(kept)
            self._held = kept
        return [held.frames for held in sorted(out, key=lambda held: held.order)]

    def _corrupt(self, frames: Frames) -> Frames:
        """Damage the message in one of five ways; frames before seq and payload stay."""
        *head, seq, payload = frames
        short = payload[: self._random.randrange(len(payload))] if payload else _NO_MSGPACK
        damaged = [
            [*head, seq, short],
            [*head, seq, _NO_MSGPACK + payload[1:]],
            [*head, seq[:-1], payload],
            [*head, seq, payload, b"surplus"],
            [*head, seq],
        ]
        return self._random.choice(damaged)
