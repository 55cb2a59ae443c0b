"""Connections that bring more than any message has are shut down."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from kvindex.subscribe import peer
from kvindex.subscribe.peer import EndlessMessages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")

LIMIT = 2 * 1_000 + 4_000


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    monkeypatch.setattr(peer, "_SLACK", 4_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            yield sender, receiver


def send(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    sender, receiver = pair
    sender.sendall(bytes(size))
    while size:
        size -= len(receiver.recv(size))


def test_a_connection_is_cut_when_it_brought_too_much_without_a_message(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    watcher = EndlessMessages(1_000)
    descriptors = [pair[1].fileno()]
    send(pair, LIMIT)
    assert watcher.cut(descriptors, lambda: True) == 0
    send(pair, 1)
    assert watcher.cut(descriptors, lambda: False) == 0, "it may be another one's by now"
    assert watcher.cut(descriptors, lambda: True) == 1
    assert pair[1].recv(1) == b""


def test_what_came_before_a_whole_message_does_not_count(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    watcher = EndlessMessages(1_000)
    descriptors = [pair[1].fileno()]
    for _ in range(3):
        send(pair, LIMIT)
        watcher.note_whole()
        assert watcher.cut(descriptors, lambda: True) == 0
    send(pair, LIMIT)
    assert watcher.cut(descriptors, lambda: True) == 0
    send(pair, 1)
    assert watcher.cut(descriptors, lambda: True) == 1


def test_what_is_no_tcp_connection_is_left_alone() -> None:
    watcher = EndlessMessages(1_000)
    one, other = socket.socketpair()
    with one, other:
        assert watcher.cut([one.fileno(), 10**6], lambda: True) == 0
