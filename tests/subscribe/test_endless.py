"""Connections that bring more than any message has, or than may wait to be read."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from kvindex.subscribe import SocketOptions, peer
from kvindex.subscribe.connection import Room
from kvindex.subscribe.peer import Inflow

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's"),
]

LIMIT = 2 * 1_000 + 4_000

Pair: TypeAlias = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(peer, "_SLACK", 4_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            yield sender, receiver


def send(pair: Pair, size: int) -> None:
    sender, receiver = pair
    sender.sendall(bytes(size))
    while size:
        size -= len(receiver.recv(size))


def test_a_connection_is_cut_when_it_brought_too_much_without_a_message(pair: Pair) -> None:
    watcher = Inflow(1_000)
    descriptors = [pair[1].fileno()]
    send(pair, LIMIT)
    assert watcher.cut(descriptors, lambda: True) == 0
    send(pair, 1)
    assert watcher.cut(descriptors, lambda: False) == 0, "it may be another one's by now"
    assert watcher.cut(descriptors, lambda: True) == 1
    assert pair[1].recv(1) == b""


def test_what_came_before_a_whole_message_does_not_count(pair: Pair) -> None:
    watcher = Inflow(1_000)
    descriptors = [pair[1].fileno()]
    for _ in range(3):
        send(pair, LIMIT)
        watcher.note_read([0])
        assert watcher.cut(descriptors, lambda: True) == 0
    send(pair, LIMIT)
    assert watcher.cut(descriptors, lambda: True) == 0
    send(pair, 1)
    assert watcher.cut(descriptors, lambda: True) == 1


def test_what_is_no_tcp_connection_is_left_alone() -> None:
    watcher = Inflow(1_000)
    near, far = socket.socketpair()
    with near, far:
        assert watcher.cut([near.fileno(), 10**6], lambda: True) == 0


def test_what_was_brought_and_not_read_is_known_to_the_byte(pair: Pair) -> None:
    watcher = Inflow(1_000_000)
    descriptors = [pair[1].fileno()]
    send(pair, 1_000)  # a handshake
    watcher.note_read([0])
    watcher.cut(descriptors, lambda: True)  # nothing is left to be read
    assert watcher.unread(descriptors) == 0
    send(pair, 3 * (2 + 8) + 9 + 300)
    assert watcher.unread(descriptors) == 3 * (2 + 8) + 9 + 300
    watcher.note_read([8, 8, 8])
    assert watcher.unread(descriptors) == 9 + 300
    watcher.note_read([300])
    assert watcher.unread(descriptors) == 0


def test_a_look_at_connections_that_may_have_changed_does_not_count_all_that_was_read() -> None:
    watcher = Inflow(1_000)
    watcher.note_read([10**9])
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as other:
            watcher.cut([other.fileno()], lambda: False)
            assert watcher.unread([other.fileno()]) == 0


def test_a_connection_that_is_hung_up_can_still_be_read(pair: Pair) -> None:
    pair[0].sendall(b"brought")
    Inflow(1_000).hang_up([pair[1].fileno()])
    assert pair[1].recv(7, socket.MSG_WAITALL) == b"brought"
    assert pair[1].recv(1) == b""


def test_room_is_exceeded_by_one_socket_or_by_all_together() -> None:
    mib = 1024 * 1024
    room = Room(SocketOptions(max_unread_bytes=10 * mib, max_unread_bytes_in_all=15 * mib))
    assert not room.is_exceeded(0, 10 * mib)
    assert room.is_exceeded(10 * mib, 10 * mib + 1)
    assert room.is_exceeded(0, 6 * mib), "more than its share, and others are full"
    assert not room.is_exceeded(0, mib), "its share is left to each"
    assert not room.is_exceeded(10 * mib + 1, 0)
    assert not room.is_exceeded(6 * mib, 6 * mib)
