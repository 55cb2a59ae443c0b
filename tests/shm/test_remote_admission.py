"""Whom the writer of a remote queue lets in, without a network."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from kvindex.shm.remote.protocol import VERSION, Bye, Hello, encode
from kvindex.shm.remote.sender import RemoteSender
from kvindex.shm.ring import Waiting

pytestmark = pytest.mark.unit


class Router:
    """Stands for the writer's socket: tests say what it received and whose connection ended."""

    def __init__(self) -> None:
        self.mail: list[list[bytes]] = []
        self.ended: set[bytes] = set()
        self.sent: list[tuple[bytes, str]] = []
        self._to = b""

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.mail:
            raise zmq.Again
        return self.mail.pop(0)

    def send(self, part: bytes, flags: int, copy: bool = True) -> None:
        if not flags & zmq.SNDMORE:
            self.sent.append((self._to, msgspec.msgpack.decode(part)[0]))
        elif part in self.ended:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        else:
            self._to = part


class Desk:
    """A sender whose socket is a `Router`, and which probes its readers each time."""

    def __init__(self, n_remote: int = 1) -> None:
        self.sender = RemoteSender(
            n_remote, "127.0.0.1", curve=None, waiting=Waiting(), window=4, linger=0.0
        )
        self.router = Router()
        self._socket, self.sender._socket = self.sender._socket, self.router  # type: ignore[assignment]

    def receives(self, name: bytes, packet: Hello | Bye) -> None:
        self.router.mail.append([name, encode(packet)])

    def serve(self) -> frozenset[int]:
        self.sender._probe_at = 0.0
        dead = self.sender.serve()
        self.router.sent = [sent for sent in self.router.sent if sent[1] != "Probe"]
        return dead

    @property
    def counted(self) -> dict[str, int]:
        return {name: count for name, count in self.sender.statistics().items() if count}

    def close(self) -> None:
        self.sender._socket = self._socket
        self.sender.close()


@pytest.fixture
def desks() -> Iterator[Any]:
    made: list[Desk] = []

    def make(n_remote: int = 1) -> Desk:
        made.append(Desk(n_remote))
        return made[-1]

    yield make
    for desk in made:
        desk.close()


def test_so_many_different_ranks_are_let_in(desks: Any) -> None:
    desk = desks(2)
    for rank in (8, 1, 2):
        desk.receives(b"%d" % rank, Hello(VERSION, rank))
    desk.serve()
    assert desk.sender.connected == {1, 8}
    assert desk.counted == {"joined": 2, "refused": 1, "connected": 2}
    assert desk.router.sent == [(b"8", "Welcome"), (b"1", "Welcome"), (b"2", "Refused")]


def test_a_rank_is_free_again_when_its_reader_left(desks: Any) -> None:
    desk = desks()
    desk.receives(b"first", Hello(VERSION, 4))
    desk.serve()
    desk.receives(b"second", Hello(VERSION, 4))
    desk.serve()
    assert desk.router.sent == [(b"first", "Welcome")]  # the other waits for its rank
    desk.receives(b"first", Bye())
    desk.receives(b"third", Hello(VERSION, 5))
    desk.serve()
    assert desk.router.sent[1:] == [(b"second", "Welcome"), (b"third", "Refused")]
    assert desk.counted == {"joined": 2, "left": 1, "refused": 1, "connected": 1}


def test_a_rank_that_stays_taken_is_refused(desks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvindex.shm.remote.sender._HANDOVER", 0.0)
    desk = desks()
    desk.receives(b"first", Hello(VERSION, 4))
    desk.serve()
    desk.receives(b"second", Hello(VERSION, 4))
    desk.serve()
    assert desk.router.sent == [(b"first", "Welcome"), (b"second", "Refused")]


def test_a_reader_that_joins_before_the_farewell_of_its_predecessor_is_read_replaces_it(
    desks: Any,
) -> None:
    desk = desks()
    desk.receives(b"first", Hello(VERSION, 4))
    desk.serve()
    desk.receives(b"second", Hello(VERSION, 4))
    desk.receives(b"first", Bye())
    assert desk.serve() == frozenset()
    assert desk.router.sent == [(b"first", "Welcome"), (b"second", "Welcome")]


def test_a_reader_that_leaves_before_admission_counts_as_no_reader(desks: Any) -> None:
    desk = desks()
    desk.receives(b"first", Hello(VERSION, 4))
    desk.receives(b"first", Bye())
    desk.serve()
    assert (desk.router.sent, desk.counted) == ([], {})


def test_a_reader_whose_connection_ends_is_dead_and_its_place_is_free(desks: Any) -> None:
    desk = desks()
    desk.receives(b"first", Hello(VERSION, 4))
    desk.serve()
    desk.receives(b"second", Hello(VERSION, 4))
    desk.router.ended = {b"first"}
    assert desk.serve() == {4}
    assert desk.serve() == frozenset()
    assert desk.router.sent == [(b"first", "Welcome"), (b"second", "Welcome")]
    assert desk.counted == {"joined": 2, "died": 1, "connected": 1}


def test_a_reader_whose_last_packet_was_a_farewell_has_left_and_did_not_die(desks: Any) -> None:
    desk = desks()
    desk.receives(b"first", Hello(VERSION, 4))
    desk.serve()
    desk.receives(b"first", Bye())
    desk.router.ended = {b"first"}
    assert desk.sender.send(0, [b"message"], 0.0) == frozenset()
    assert desk.counted["left"] == 1


def test_a_connection_that_ends_before_admission_counts_as_no_reader(desks: Any) -> None:
    desk = desks()
    desk.receives(b"first", Hello(VERSION, 4))
    desk.router.ended = {b"first"}
    assert desk.serve() == frozenset()
    assert desk.counted == {}


def test_a_reader_of_another_version_is_refused(desks: Any) -> None:
    desk = desks()
    desk.receives(b"other", Hello(VERSION + 1, 0))
    desk.serve()
    assert desk.counted == {"refused": 1}
    assert desk.router.sent == [(b"other", "Refused")]
