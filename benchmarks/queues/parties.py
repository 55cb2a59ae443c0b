"""What the writer's and the readers' processes do: fill and empty the queue, or keep a pace."""

from __future__ import annotations

import gc
import time
from itertools import cycle, islice
from typing import Any, Final

from benchmarks.queues.adapter import Queues, Ring
from benchmarks.queues.payloads import Payloads

_STRIDE_BYTES: Final = 1 << 20  # between looks at the clock
_STRIDE: Final = 64  # messages between them, at most
_STOP: Final = -1  # in the place of the time when a paced message was sent


class _Party:
    """A process's end of the one queue that there is at a time."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._end: Any = None

    def ready(self) -> None:
        """Return when writer and readers have found each other."""
        self._end.wait_until_ready()

    def close(self) -> None:
        """Leave the queue."""
        self._end.close()
        self._end = None
        gc.collect()


class Sending(_Party):
    """The writer's process."""

    def open(self, ring: Ring) -> Any:
        """Make a queue; return its handle."""
        self._end = self._queues.writer(ring)
        return self._end.handle

    def warm(self, size: int, chunks: int) -> None:
        """Send whole turns of the payloads."""
        for message in Payloads(size).warm_up(chunks):
            self._end.send(message)

    def flood(self, size: int, seconds: float) -> tuple[int, int]:
        """Send as fast as it goes; return how many messages, and when the first went out."""
        payloads, send = Payloads(size), self._end.send
        turn = cycle(payloads.turn)
        stride = max(1, min(_STRIDE, _STRIDE_BYTES // max(1, size)))
        sent, started = 0, time.monotonic_ns()
        stop = started + int(seconds * 1e9)
        while time.monotonic_ns() < stop:
            for message in islice(turn, stride):
                send(message)
            sent += stride
        send(payloads.end)
        return sent, started

    def pace(self, size: int, rate: float, messages: int) -> None:
        """Send at a rate, asleep between two messages; each says when it was sent."""
        payload, send, clock = Payloads(size).turn[0], self._end.send, time.monotonic_ns
        period, due = int(1e9 / rate), clock()
        for _ in range(messages):
            ahead = due - clock()
            if ahead > 0:
                time.sleep(ahead / 1e9)
            send([clock(), payload])
            due += period
        send([_STOP, b""])


class Receiving(_Party):
    """A reader's process."""

    def join(self, handle: Any, rank: int, ring: Ring) -> None:
        """Make the end of this number."""
        self._end = self._queues.reader(handle, rank, ring)

    def warm(self, size: int, chunks: int) -> None:
        """Receive what the writer sends to warm up; assert that all of it is right."""
        for place, expected in enumerate(Payloads(size).warm_up(chunks)):
            if self._end.receive() != expected:
                raise AssertionError(f"message {place} of the warm-up is not what was sent")

    def drain(self, size: int) -> tuple[int, int]:
        """Receive until the end; return how many messages, and when the last had come."""
        payloads, receive = Payloads(size), self._end.receive
        key = payloads.key
        place, places, turns = 0, len(payloads.turn), 0
        while True:
            message = receive()
            if message[key] != place:
                break
            place += 1
            if place == places:
                place, turns = 0, turns + 1
        finished, received = time.monotonic_ns(), turns * places + place
        if not payloads.is_end(message):
            raise AssertionError(f"message {received} is out of order: {message[key]!r}")
        return received, finished

    def stamp(self) -> list[int]:
        """Receive until the end of the pace; return the nanoseconds that each message took."""
        receive = self._end.receive
        clock, samples = time.monotonic_ns, list[int]()
        while True:
            sent, _ = receive()
            came = clock()
            if sent == _STOP:
                return samples
            samples.append(came - sent)
