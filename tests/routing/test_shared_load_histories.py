"""Boards that share load, whatever the network does with their messages, beside a plain model."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvindex import Rank
from kvindex.routing.shared_load import SharedBoard
from tests.examples import examples
from tests.routing.fleet import Clock

pytestmark = pytest.mark.property

RANKS = [Rank(name) for name in "abcd"]
GATEWAYS = 3
gateways = st.integers(0, GATEWAYS - 1)
ranks = st.sampled_from(RANKS)
counts = st.integers(0, 1_000)


@dataclass
class Gateway:
    """A board, the model of its own load, and the messages on their way to it."""

    board: SharedBoard
    loads: dict[Rank, list[int]] = field(default_factory=dict)
    given: dict[Rank, list[tuple[float, int]]] = field(default_factory=dict)
    inbox: list[bytes] = field(default_factory=list)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.gateways = [Gateway(SharedBoard()) for _ in range(GATEWAYS)]
        for gateway in self.gateways:
            gateway.board.attach(threading.RLock(), self.clock)
            gateway.board.arrange(RANKS)

    @rule(number=gateways, rank=ranks, queued=counts, opened=counts, decode=counts)
    def book(self, number: int, rank: Rank, queued: int, opened: int, decode: int) -> None:
        gateway = self.gateways[number]
        load = (queued, opened, decode)
        before = gateway.loads.get(rank, [0, 0, 0])
        gateway.loads[rank] = [a + b for a, b in zip(before, load, strict=True)]
        gateway.board.add(rank, *load, self.clock.now)
        if rank in gateway.board._rows:  # else nothing is counted
            gateway.given.setdefault(rank, []).append((self.clock.now, queued))
        gateway.board.give(rank, queued, self.clock.now)

    @rule(number=gateways, rank=ranks)
    def release(self, number: int, rank: Rank) -> None:
        gateway = self.gateways[number]
        queued, opened, decode = gateway.loads.pop(rank, (0, 0, 0))
        gateway.board.add(rank, -queued, -opened, -decode, self.clock.now)

    @rule(number=gateways, known=st.sets(ranks))
    def change_ranks(self, number: int, known: set[Rank]) -> None:
        gateway = self.gateways[number]
        for rank in set(RANKS) - known:
            gateway.given.pop(rank, None)
        gateway.board.arrange(sorted(known))

    @rule(number=gateways, whole=st.booleans())
    def publish(self, number: int, whole: bool) -> None:
        board = self.gateways[number].board
        rows = board.all_rows() if whole else board.changed_rows()
        for data in board.encode(rows, 60):  # several messages
            for other in self.gateways:
                if other.board is not board:
                    other.inbox.append(data)

    @rule(number=gateways, place=st.integers(0, 100), keep=st.booleans())
    def deliver(self, number: int, place: int, keep: bool) -> None:
        gateway = self.gateways[number]
        if gateway.inbox:
            place %= len(gateway.inbox)
            data = gateway.inbox[place] if keep else gateway.inbox.pop(place)
            assert gateway.board.receive(data) == ""

    @rule(number=gateways)
    def lose(self, number: int) -> None:
        self.gateways[number].inbox.clear()

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        for gateway in self.gateways:
            gateway.board.expire()

    @rule(number=gateways)
    def restart(self, number: int) -> None:
        """A gateway dies; another one stands in its place."""
        board = SharedBoard()
        board.attach(threading.RLock(), self.clock)
        board.arrange(RANKS)
        self.gateways[number] = Gateway(board)

    @invariant()
    def nothing_is_negative(self) -> None:
        for gateway in self.gateways:
            for column in gateway.board.columns(self.clock.now):
                assert min(column, default=0.0) >= 0.0

    def teardown(self) -> None:
        """After fair seconds, as many as rows live, boards have what all living gateways booked."""
        for _ in range(4):
            self.clock.now += 1.0
            for gateway in self.gateways:
                gateway.inbox.clear()
                gateway.board.arrange(RANKS)
            for number in range(GATEWAYS):
                self.publish(number, whole=True)
            for gateway in self.gateways:
                for data in gateway.inbox:
                    gateway.board.receive(data)
                gateway.board.expire()
        for gateway in self.gateways:
            columns = gateway.board.columns(self.clock.now)
            for row, rank in enumerate(RANKS):
                loads = [other.loads.get(rank, [0, 0, 0]) for other in self.gateways]
                expected = [sum(numbers) for numbers in zip(*loads, strict=True)]
                assert [column[row] for column in columns[:3]] == expected
            self.check_given(gateway)

    def check_given(self, gateway: Gateway) -> None:
        board = gateway.board
        for row, rank in enumerate(RANKS):
            tokens = sum(
                count * 2.0 ** (-(self.clock.now - when) / 60.0)
                for other in self.gateways
                for when, count in other.given.get(rank, ())
            )
            unit = board._weight(self.clock.now)
            counted = board.columns(self.clock.now).given[row] / unit
            # A gateway sends no row below one token.
            assert tokens - GATEWAYS <= counted <= tokens * (1 + 1e-9) + 1e-6


TestHistories = Histories.TestCase
TestHistories.settings = examples(50)
