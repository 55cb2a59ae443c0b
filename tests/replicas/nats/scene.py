"""A relay driven by hand, its log in memory, and places at it."""

from __future__ import annotations

import threading
from typing import Any

from kvindex import Rank
from kvindex.replicas.messages import ReceivedMessage
from kvindex.replicas.nats.following import LogMembership
from tests.replicas.nats.hand_relay import HandRelay, MemoryLog, held, membership

A, B = Rank("a"), Rank("b")
STOP = threading.Event()  # never set


class Scene:
    """A relay, its log, and one place at it."""

    def __init__(self) -> None:
        self.relay = HandRelay()
        self.log = MemoryLog()
        self.notes: list[str] = []
        self.epoch = "e-1"
        self.log.append(self.epoch, b"")
        self.relay.add(A)
        self.relay.store(A)
        self.relay.show(A)
        self.snapshot()
        self.places: list[LogMembership] = []

    def snapshot(self) -> str:
        position = self.log.last + 1
        name, data = self.relay.snapshot(self.epoch, position)
        self.turn()
        self.log.put(name, data)
        return name

    def turn(self) -> None:
        self.log.append(self.epoch, self.relay.body())

    def store(self, rank: Rank = A) -> None:
        self.relay.store(rank)
        self.turn()

    def place(self, **options: Any) -> LogMembership:
        place = membership(self.log, self.notes, **options)
        self.places.append(place)
        return place

    def joined(self, **options: Any) -> LogMembership:
        place = self.place(**options)
        place.join()
        return place

    def assert_same(self, place: LogMembership) -> None:
        assert held(place.copy.index) == held(self.relay.index)
        assert place.copy.statuses.keys() == self.relay.shown.keys()
        assert place.copy.names == self.relay.tap.names

    def close(self) -> None:
        for place in self.places:
            place.close()


def receive(place: LogMembership) -> ReceivedMessage:
    """Receive the next message, and apply it."""
    message = place.receive(3.0, STOP)
    place.copy.apply(message)
    return message


def follow(scene: Scene, place: LogMembership) -> None:
    """Receive all that the log has, and compare."""
    while place._waiting or place._expected <= scene.log.last:
        receive(place)
    scene.assert_same(place)


def damaged(data: bytes) -> bytes:
    return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
