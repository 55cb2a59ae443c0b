"""What several gateways learn of each other's bookings, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.routing.simulation import Simulation
from kvindex import Rank
from kvindex.routing import LoadBoard, LocalLoadBoard


class Boards:
    """A load board for each gateway; they share nothing until `share` is called.

    Args:
        count: how many gateways.
    """

    def __init__(self, count: int) -> None:
        self._boards = [_Board(self) for _ in range(count)]
        self._simulation: Simulation | None = None
        self._delay: float | None = None
        self._period: float | None = None
        self._kept: list[tuple[_Board, _Entry]] = []

    def __iter__(self) -> Iterator[LoadBoard]:
        return iter(self._boards)

    def share(self, simulation: Simulation, *, delay: float | None, period: float | None) -> None:
        """Have each board notify the others of its bookings.

        Args:
            simulation: whose virtual time counts.
            delay: seconds until the others know one entry; None: they are not notified.
            period: or all entries at once, each time so many seconds have passed.
        """
        self._simulation, self._delay, self._period = simulation, delay, period

    def notify(self, board: _Board, entry: _Entry) -> None:
        """Let the other boards know of an entry, sooner or later."""
        if self._simulation is None or len(self._boards) == 1:
            return
        if self._delay == 0.0:
            self._learn([(board, entry)])
        elif self._delay is not None:
            self._simulation.at(entry.now + self._delay, self._learn, [(board, entry)])
        elif self._period is not None:
            if not self._kept:
                turn = math.floor(entry.now / self._period) + 1
                self._simulation.at(turn * self._period, self._learn_all)
            self._kept.append((board, entry))

    def _learn_all(self) -> None:
        kept, self._kept = self._kept, []
        self._learn(kept)

    def _learn(self, entries: list[tuple[_Board, _Entry]]) -> None:
        for author, entry in entries:
            for board in self._boards:
                if board is not author:
                    board.learn(entry)


class _Entry(NamedTuple):
    """An entry of a board: arguments of `LoadBoard.add`, or of `give`."""

    rank: Rank
    load: tuple[int, int, int] | None
    new_tokens: int
    now: float


class _Board(LocalLoadBoard):
    def __init__(self, boards: Boards) -> None:
        super().__init__()
        self._boards = boards

    def add(
        self, rank: Rank, queued_tokens: int, open_requests: int, decode_blocks: int, now: float
    ) -> None:
        super().add(rank, queued_tokens, open_requests, decode_blocks, now)
        load = (queued_tokens, open_requests, decode_blocks)
        self._boards.notify(self, _Entry(rank, load, 0, now))

    def give(self, rank: Rank, new_tokens: int, now: float) -> None:
        super().give(rank, new_tokens, now)
        self._boards.notify(self, _Entry(rank, None, new_tokens, now))

    def learn(self, entry: _Entry) -> None:
        """Add an entry of another board."""
        if entry.load is None:
            super().give(entry.rank, entry.new_tokens, entry.now)
        else:
            super().add(entry.rank, *entry.load, entry.now)
