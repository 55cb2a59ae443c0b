"""A gateway that books and releases at a rate, and watches how late it sees others' bookings."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from heapq import heappop, heappush
from threading import RLock
from typing import Any

from kvindex import Rank
from kvindex.routing import LoadBoard, LocalLoadBoard, SharedLoad

_RANKS = 64
_TOKENS, _BLOCKS = 512, 32  # of each request
_LOOK = 0.001  # seconds between looks at the columns
_WARM = 1.0  # seconds before anything counts
_POOL = "bench"


class Sharing:
    """One gateway: a board, used as a router does.

    Besides the ranks there is a mark for each gateway: a rank whose queued tokens are the time of
    its gateway's last booking, in µs since a common start. So others see how old a booking is.
    """

    def connect(self, url: str | None, me: int, gateways: int) -> None:
        """Make the board: a shared one, or without a URL a local one."""
        self._ranks = [Rank(f"engine-{number:02}") for number in range(_RANKS)]
        self._marks = [Rank(f"mark-{number}") for number in range(gateways)]
        self._me = me
        self._lock = RLock()
        self._board: LoadBoard = SharedLoad(url, _POOL) if url else LocalLoadBoard()
        self._board.attach(self._lock, time.monotonic)
        self._board.arrange([*self._ranks, *self._marks])

    def heard(self) -> int:
        """Return how many other gateways are heard."""
        return int(self._board.statistics().get("gateways", 0))

    def book(self, rate: float, seconds: float, start: float) -> dict[str, Any]:
        """Book for so long; return seconds of CPU, lags in seconds, and the board's statistics."""
        rng, board, lock = random.Random(self._me), self._board, self._lock
        ends: list[tuple[float, int]] = []
        lags: list[float] = []
        seen = [0.0] * len(self._marks)
        shown = marked = booked = 0
        now = due = time.monotonic()
        begin, cpu = now + _WARM, 0.0
        while now < begin + seconds:
            if not cpu and now >= begin:
                cpu, booked = time.process_time(), 0
                lags.clear()
            time.sleep(_LOOK)
            now = time.monotonic()
            while due <= now:
                due += rng.expovariate(rate)
                booked += 1
                with lock:
                    queued = board.columns(now).queued
                    row = min(rng.sample(range(_RANKS), 4), key=queued.__getitem__)
                    board.give(self._ranks[row], _TOKENS, now)
                    board.add(self._ranks[row], _TOKENS, 1, _BLOCKS, now)
                    marked = int(1e6 * (time.time() - start))
                    board.add(self._marks[self._me], marked - shown, 0, 0, now)
                    shown = marked
                heappush(ends, (now + rng.uniform(0.05, 0.5), row))
            while ends and ends[0][0] <= now:
                _, row = heappop(ends)
                with lock:
                    board.add(self._ranks[row], -_TOKENS, 0, 0, now)
                    board.add(self._ranks[row], 0, -1, -_BLOCKS, now)
            with lock:
                others = board.columns(now).queued[_RANKS:]
            for gateway, value in enumerate(others):
                if gateway != self._me and value != seen[gateway]:
                    seen[gateway] = value
                    lags.append(time.time() - start - value / 1e6)
        return {
            "cpu": time.process_time() - cpu,
            "booked": booked,
            "lags": lags,
            "board": board.statistics(),
        }

    def cost(self, calls: int) -> dict[str, float]:
        """Return the seconds of CPU of one `add` and of one `columns`, alone on this thread."""
        board, rank = self._board, self._ranks[0]
        costs = {}
        started = time.thread_time()
        for _ in range(calls):
            board.add(rank, 1, 0, 0, 0.0)
        costs["add"] = (time.thread_time() - started) / calls
        started = time.thread_time()
        for _ in range(calls):
            board.columns(0.0)
        costs["columns"] = (time.thread_time() - started) / calls
        return costs

    def close(self) -> None:
        """End the sharing."""
        with suppress(AttributeError):
            self._board.close()
