"""What several gateways learn of each other's bookings, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.routing.simulation import Simulation
from kvindex import Rank
from kvindex.routing import LoadBoard, LocalLoadBoard
from kvindex.routing.shared_load import FLUSH_SECONDS, WHOLE_SECONDS, LoadRow, SharedBoard


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


class Exchange:
    """Boards that share as `SharedLoad` does, with a network that delays each message.

    Args:
        count: how many gateways.
        transit: seconds for which a message is under way.
    """

    def __init__(self, count: int, transit: float) -> None:
        self._transit = transit
        self._boards = [SharedBoard(partial(self._wake, number)) for number in range(count)]
        self._ticking: set[int] = set()
        self._simulation: Simulation | None = None

    def __iter__(self) -> Iterator[LoadBoard]:
        return iter(self._boards)

    def start(self, simulation: Simulation) -> None:
        """Share from now on, in the virtual time of a simulation."""
        self._simulation = simulation

    def _wake(self, number: int) -> None:
        self._later(FLUSH_SECONDS, self._flush, number)
        if number not in self._ticking:
            self._ticking.add(number)
            self._later(WHOLE_SECONDS, self._tick, number)

    def _flush(self, number: int) -> None:
        self._send(number, self._boards[number].changed_rows())

    def _tick(self, number: int) -> None:
        for board in self._boards:
            board.expire()
        rows = self._boards[number].all_rows()
        self._send(number, rows)
        if any(any(row[2:5]) for row in rows):  # else until it books again, or no run would end
            self._later(WHOLE_SECONDS, self._tick, number)
        else:
            self._ticking.remove(number)

    def _send(self, number: int, rows: Sequence[LoadRow]) -> None:
        for data in self._boards[number].encode(rows):
            self._later(self._transit, self._deliver, number, data)

    def _deliver(self, number: int, data: bytes) -> None:
        for other, board in enumerate(self._boards):
            if other != number and (reason := board.receive(data)):
                raise AssertionError(reason)

    def _later(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        assert self._simulation is not None
        self._simulation.at(self._simulation.now + seconds, do, *arguments)


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
