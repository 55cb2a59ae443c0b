"""Whom the writer of a remote queue lets in, without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import zmq

from kvindex.errors import ConfigurationError
from kvindex.shm.remote.credits import SendWindow
from kvindex.shm.remote.frames import VERSION, Bye, Hello, Refusal, encode
from kvindex.shm.remote.readers import Readers

TOKEN = bytes(range(32))


class Desk:
    """Stands for the connections: tests say what is heard and who hangs up."""

    def __init__(self) -> None:
        self.mail: list[tuple[bytes, list[zmq.Frame]]] = []
        self.hung_up: list[tuple[bytes, bool]] = []
        self.connected = True
        self.said: list[tuple[bytes, Any]] = []

    def hear(self) -> tuple[bytes, list[zmq.Frame]] | None:
        return self.mail.pop(0) if self.mail else None

    def send(self, name: bytes, parts: Sequence[bytes]) -> bool:
        self.said.append((name, msgspec.msgpack.decode(parts[0])[0]))
        return self.connected

    def introduce(self, name: bytes, frame: zmq.Frame) -> bool:
        return self.connected

    def ended(self) -> Iterator[tuple[bytes, bool]]:
        while self.hung_up:
            yield self.hung_up.pop(0)


def readers_of(desk: Any, n_remote: int = 1) -> Readers:
    window = SendWindow(messages=4, size=100)
    return Readers(desk, window, n_remote=n_remote, token=TOKEN)


def says(desk: Desk, name: bytes, word: Hello | Bye) -> None:
    desk.mail.append((name, [zmq.Frame(encode(word))]))


def hello(rank: int, token: bytes = TOKEN, version: int = VERSION) -> Hello:
    return Hello(version, rank, token)


def refused(readers: Readers) -> dict[str, int]:
    counters = readers.statistics()
    return {name[8:]: n for name, n in counters.items() if name.startswith("refused_") and n}


def test_so_many_different_ranks_are_let_in() -> None:
    desk = Desk()
    readers = readers_of(desk, 2)
    for rank in (8, 1, 2):
        says(desk, b"%d" % rank, hello(rank))
    readers.serve()
    assert set(readers.ranks.values()) == {1, 8}
    assert (readers.awaited, readers.absent) == (0, 0)
    assert refused(readers) == {"unknown_rank": 1}
    assert desk.said == [(b"8", "Welcome"), (b"1", "Welcome"), (b"2", "Refused")]


def test_a_rank_is_free_again_when_its_reader_left() -> None:
    desk = Desk()
    readers = readers_of(desk)
    says(desk, b"first", hello(4))
    readers.serve()
    says(desk, b"second", hello(4))
    readers.serve()
    assert refused(readers) == {Refusal.RANK_TAKEN.name.lower(): 1}
    says(desk, b"first", Bye())
    readers.serve()
    assert (readers.awaited, readers.absent) == (0, 1)
    says(desk, b"third", hello(5))
    says(desk, b"second", hello(4))
    readers.serve()
    assert readers.ranks == {b"second": 4}
    assert refused(readers) == {"rank_taken": 1, "unknown_rank": 1}


def test_who_comes_before_the_farewell_of_its_predecessor_is_read_takes_its_place() -> None:
    desk = Desk()
    readers = readers_of(desk)
    says(desk, b"first", hello(4))
    readers.serve()
    says(desk, b"second", hello(4))
    says(desk, b"first", Bye())
    readers.serve()
    assert readers.ranks == {b"second": 4}
    assert readers.take_dead() == frozenset()


def test_who_hangs_up_is_dead_and_its_place_is_free() -> None:
    desk = Desk()
    readers = readers_of(desk)
    says(desk, b"first", hello(4))
    readers.serve()
    says(desk, b"second", hello(4))
    desk.hung_up = [(b"first", False), (b"", True), (b"", False)]
    readers.serve()
    assert readers.ranks == {b"second": 4}
    assert readers.take_dead() == {4}
    assert readers.take_dead() == frozenset()
    assert refused(readers) == {"handshake": 1, "cut_off": 1}


def test_who_hung_up_before_it_was_let_in_never_was_there() -> None:
    desk = Desk()
    readers = readers_of(desk)
    says(desk, b"first", hello(4))
    desk.connected = False
    readers.serve()
    assert (readers.ranks, readers.awaited) == ({}, 1)
    assert refused(readers) == {"cut_off": 1}


def test_a_connection_that_cannot_be_sent_to_is_dead() -> None:
    desk = Desk()
    readers = readers_of(desk)
    says(desk, b"first", hello(4))
    readers.serve()
    desk.connected = False
    readers.say(b"first", [encode(Bye())])
    readers.serve()
    assert readers.take_dead() == {4}


@pytest.mark.parametrize("token", [bytes(32), b"", TOKEN[:-1]])
def test_a_reader_shows_the_token(token: bytes) -> None:
    desk = Desk()
    readers = readers_of(desk)
    says(desk, b"one", hello(0, token))
    says(desk, b"other", hello(0, TOKEN, VERSION + 1))
    readers.serve()
    assert readers.ranks == {}
    assert refused(readers) == {"wrong_token": 1, "version": 1}


@pytest.mark.parametrize("n_remote", [0, -1])
def test_a_queue_for_nobody_is_refused(n_remote: int) -> None:
    with pytest.raises(ConfigurationError):
        readers_of(Desk(), n_remote)
