"""Bookings without end: many open at once, ended in every way that there is."""

from __future__ import annotations

import gc
import random
from collections import deque
from itertools import cycle
from time import process_time
from typing import Any

from benchmarks.sides.kvindex_index import KVIndex
from benchmarks.sides.matching import load, typed
from benchmarks.sides.remembering import resident_bytes
from benchmarks.workload import HELD_BY, Fleet, parted, place_parts
from kvindex.routing import Booking, Router

_PROMPTS = 8
_OUTPUT = 40  # tokens that each answer has when it is statistics of
_CANCELLED = 0.05  # of the bookings
_FORGOTTEN = 0.01
_STEP = 0.001  # seconds of the router's clock for each booking


class Booked:
    """One router, whose clock goes on by a millisecond with each booking."""

    def measure(self, ranks: int, bookings: int, open_at_once: int) -> dict[str, Any]:
        """Book and end; return the CPU seconds of that, what it left, and bytes of memory.

        Each booking hears of its first token and of its output. Most finish, 5 % are cancelled, and
        1 % forgotten, so that they expire.
        """
        fed, fleet = KVIndex(), Fleet(ranks, seed=1)
        for seed, one in enumerate(parted("half", _PROMPTS)):
            load(fed, place_parts(fleet, one, HELD_BY["half"], seed))
        prompts = cycle([typed(fleet.prompt(one), "numpy") for one in parted("half", _PROMPTS)])
        now = [0.0]
        expires_after = 2.0 * open_at_once * _STEP
        router = Router(fed.index, expires_after=expires_after, clock=lambda: now[0], seed=1)
        rng = random.Random(1)

        def book() -> Booking:
            now[0] += _STEP
            return router.reserve(next(prompts))

        router.reserve(next(prompts)).finish()  # what it makes once is no booking's
        gc.collect()
        before = resident_bytes()
        still_open: deque[Booking] = deque(book() for _ in range(open_at_once))
        gc.collect()
        full = resident_bytes()
        halves = []
        for _ in range(2):
            started = process_time()
            for _ in range((bookings - open_at_once) // 2):
                _end(still_open.popleft(), rng.random())
                still_open.append(book())
            seconds = process_time() - started
            gc.collect()
            halves.append((seconds, resident_bytes()))
        for booking in still_open:
            booking.finish()
        still_open.clear()
        now[0] += expires_after
        statistics = router.statistics()
        gc.collect()
        return {
            "seconds": sum(seconds for seconds, _ in halves),
            "open_bytes": (full - before) / open_at_once,
            "grown_bytes": halves[1][1] - halves[0][1],
            "left": _left(statistics),
            "ended": statistics["bookings"],
        }


def _end(booking: Booking, chance: float) -> None:
    booking.first_token()
    booking.output(_OUTPUT)
    if chance < _FORGOTTEN:
        return
    if chance < _FORGOTTEN + _CANCELLED:
        booking.cancel()
    else:
        booking.finish(cached_tokens=booking.decision.tokens)


def _left(statistics: dict[str, Any]) -> int:
    """The load that is still booked: tokens, requests and blocks together."""
    loads = ("queued_tokens", "open_requests", "decode_blocks")
    left: int = statistics["bookings"]["open"] + sum(
        rank[load] for rank in statistics["ranks"].values() for load in loads
    )
    return left
