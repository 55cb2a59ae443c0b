"""Which connection is which, from a monitor's events, and when one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvindex.shm.remote.connections import Callers, Connection

ACCEPTED = int(zmq.EVENT_ACCEPTED)
CONNECTED = int(zmq.EVENT_CONNECTED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
RETRIED = int(zmq.EVENT_CONNECT_RETRIED)
FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


class Monitored:
    """Stands for a socket whose monitor tells what a test says."""

    socket = None

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def tell(self, *events: tuple[int, int]) -> None:
        self.told += events

    def events(self) -> Iterator[tuple[int, int]]:
        while self.told:
            yield self.told.pop(0)


class Frame:
    """A frame that came over this descriptor; None for ZeroMQ's first protocol."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        if self.descriptor is None:
            raise zmq.ZMQError
        return self.descriptor


def callers() -> tuple[Any, Monitored]:
    watched: Any = Monitored()
    return Callers(watched), watched


def test_the_end_of_a_named_connection_tells_its_name_once() -> None:
    known, watched = callers()
    watched.tell((ACCEPTED, 7), (ACCEPTED, 8))
    assert list(known.ended()) == []
    assert known.introduce(b"a", Frame(7))
    watched.tell((DISCONNECTED, 8), (DISCONNECTED, 7), (ACCEPTED, 7), (DISCONNECTED, 7))
    assert list(known.ended()) == [(b"", False), (b"a", False), (b"", False)]


def test_who_hung_up_before_it_was_named_is_not_there() -> None:
    known, watched = callers()
    watched.tell((ACCEPTED, 7), (DISCONNECTED, 7))
    assert list(known.ended()) == [(b"", False)]
    assert not known.introduce(b"a", Frame(7))


def test_a_descriptor_that_is_used_again_belongs_to_who_has_it_now() -> None:
    known, watched = callers()
    watched.tell((ACCEPTED, 7))
    assert list(known.ended()) == []
    assert known.introduce(b"first", Frame(7))
    watched.tell((DISCONNECTED, 7), (ACCEPTED, 7))
    assert list(known.ended()) == [(b"first", False)]
    assert known.introduce(b"second", Frame(7))
    watched.tell((DISCONNECTED, 7))
    assert list(known.ended()) == [(b"second", False)]


def test_a_failed_handshake_is_told_with_the_end_of_its_connection() -> None:
    known, watched = callers()
    watched.tell((ACCEPTED, 7), (ACCEPTED, 8), (FAILED, 0))
    assert list(known.ended()) == []
    watched.tell((DISCONNECTED, 7), (DISCONNECTED, 8))
    assert list(known.ended()) == [(b"", True), (b"", False)]


def test_a_peer_without_a_descriptor_cannot_be_named() -> None:
    known, _ = callers()
    assert not known.introduce(b"a", Frame(None))


def connection() -> tuple[Connection, Monitored]:
    watched: Any = Monitored()
    return Connection(watched), watched


@pytest.mark.parametrize("last", [(RETRIED, 0), (FAILED, zmq.PROTOCOL_ERROR_ZMTP_UNSPECIFIED)])
def test_a_connection_is_lost_at_once_when_all_has_come_or_the_handshake_failed(
    last: tuple[int, int],
) -> None:
    line, watched = connection()
    assert not line.is_lost()
    watched.tell((CONNECTED, 7))
    assert not line.is_lost()
    assert line.made
    watched.tell(last)
    assert line.is_lost()
    assert line.handshake_failure == (last[1] if last[0] == FAILED else None)


def test_a_connection_that_broke_is_lost_once_its_last_words_had_time_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvindex.shm.remote.connections.time.monotonic", lambda: now[0])
    line, watched = connection()
    watched.tell((CONNECTED, 7), (DISCONNECTED, 7))
    assert not line.is_lost()
    now[0] += 0.4
    assert not line.is_lost()
    now[0] += 0.2
    assert line.is_lost()
