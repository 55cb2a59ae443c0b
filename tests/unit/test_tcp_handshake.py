"""TCP groups: frames over one connection, and how two ranks know each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvindex.errors import ConfigurationError
from kvindex.shm.groups.tcp_frames import (
    Connection,
    ConnectionEnded,
    FrameReader,
    FrameTooLarge,
    frame,
)
from kvindex.shm.groups.tcp_handshake import (
    Applicant,
    Doorkeeper,
    Hello,
    Join,
    RefusedError,
    Seats,
    StrangerError,
    Welcome,
    read_message,
)

TOKEN = b"0123456789abcdef"


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection with a limit of 16 bytes, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours, limit=16)
    yield connection, theirs
    connection.close()
    theirs.close()


# Frames


def test_frames_are_found_however_the_bytes_are_cut() -> None:
    stream = frame(b"") + frame(b"one") + frame(b"0123456789abcdef")
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            reader, found = FrameReader(limit=16), []
            for piece in (stream[:first], stream[first:second], stream[second:]):
                reader.feed(piece)
                while (body := reader.next_frame()) is not None:
                    found.append(body)
            assert found == [b"", b"one", b"0123456789abcdef"]


def test_a_length_beyond_the_limit_is_refused_before_anything_is_held() -> None:
    reader = FrameReader(limit=16)
    reader.feed((17).to_bytes(4, "big"))
    with pytest.raises(FrameTooLarge, match="17 bytes, more than the 16"):
        reader.next_frame()


def test_a_connection_gives_what_was_sent_before_its_end(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, peer = pair
    peer.sendall(frame(b"a") + frame(b"b") + frame(b"cut")[:-1])
    peer.close()
    assert [connection.read_frame(), connection.receive(0.0)] == [b"a", b"b"]
    with pytest.raises(ConnectionEnded):
        connection.receive(time.monotonic() + 5)


def test_a_wait_for_a_frame_ends_at_its_deadline(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    peer.sendall(frame(b"cut")[:-1])
    with pytest.raises(TimeoutError):
        connection.receive(time.monotonic() + 0.01)
    peer.sendall(b"t")
    assert connection.receive(time.monotonic() + 5) == b"cut"


def test_a_connection_that_had_no_room_is_out_of_step(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, peer = pair
    connection.send(b"small", 0.0)
    assert connection.in_step
    with pytest.raises(TimeoutError):
        connection.send(bytes(16 << 20), time.monotonic() + 0.01)
    assert not connection.in_step
    peer.close()
    with pytest.raises(ConnectionEnded):
        connection.send(b"x", 0.0)


def test_closing_twice_is_as_closing_once(pair: tuple[Connection, socket.socket]) -> None:
    connection, peer = pair
    connection.close()
    connection.close()
    assert peer.recv(1) == b""


# Handshakes


def handshake(applicant: Applicant, doorkeeper: Doorkeeper) -> None:
    join = doorkeeper.check(applicant.join(doorkeeper.hello()))
    applicant.seated(doorkeeper.welcome(join))


def refusal(applicant: Applicant, doorkeeper: Doorkeeper) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        doorkeeper.check(applicant.join(doorkeeper.hello()))
    return caught.value


def test_two_that_know_the_token_find_each_other() -> None:
    handshake(Applicant(TOKEN, 2, 3, 100), Doorkeeper(TOKEN, 3, 100))


@pytest.mark.parametrize(
    ("applicant", "reason", "said"),
    [
        (Applicant(b"another token!!!", 1, 3, 100), "token", "token is not that of rank 0"),
        (Applicant(TOKEN, 1, 4, 100), "size", "world_size=4 and max_object_bytes=100.* 3 and 100"),
        (Applicant(TOKEN, 1, 3, 99), "size", "max_object_bytes=99"),
        (Applicant(TOKEN, 0, 3, 100), "rank", r"rank 0 is not in \[1, 3\)"),
        (Applicant(TOKEN, 3, 3, 100), "rank", "rank 3 is not in"),
    ],
)
def test_one_that_does_not_fit_is_refused_and_told_why(
    applicant: Applicant, reason: str, said: str
) -> None:
    doorkeeper = Doorkeeper(TOKEN, 3, 100)
    error = refusal(applicant, doorkeeper)
    assert error.reason == reason
    with pytest.raises(ConfigurationError, match=said):
        applicant.seated(doorkeeper.refuse(error))


def test_no_field_of_a_join_can_be_changed_on_its_way() -> None:
    doorkeeper = Doorkeeper(TOKEN, 3, 100)
    join = read_message(Applicant(TOKEN, 1, 3, 100).join(doorkeeper.hello()))
    assert isinstance(join, Join)
    for change in ({"rank": 2}, {"world_size": 2}, {"max_object_bytes": 9}, {"nonce": bytes(32)}):
        changed: Join = msgspec.structs.replace(join, **change)
        with pytest.raises(RefusedError, match="token"):
            doorkeeper.check(msgspec.msgpack.encode(changed))


def test_a_join_that_was_overheard_opens_no_other_connection() -> None:
    overheard = Applicant(TOKEN, 1, 3, 100).join(Doorkeeper(TOKEN, 3, 100).hello())
    with pytest.raises(RefusedError, match="token"):
        Doorkeeper(TOKEN, 3, 100).check(overheard)


def test_a_rank_0_that_does_not_know_the_token_is_found_out() -> None:
    applicant = Applicant(TOKEN, 1, 3, 100)
    join = read_message(applicant.join(Doorkeeper(TOKEN, 3, 100).hello()))
    assert isinstance(join, Join)
    for proof in (bytes(32), join.proof):  # nothing, and the rank's own words sent back
        with pytest.raises(ConfigurationError, match="does not know the token"):
            applicant.seated(msgspec.msgpack.encode(Welcome(proof)))


def test_the_token_never_crosses() -> None:
    applicant, doorkeeper = Applicant(TOKEN, 1, 3, 100), Doorkeeper(TOKEN, 3, 100)
    hello = doorkeeper.hello()
    join = applicant.join(hello)
    assert TOKEN not in hello + join + doorkeeper.welcome(doorkeeper.check(join))


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"", b"\0", b"GET / HTTP/1.1", b"\x91" * 900),
        msgspec.msgpack.encode(["join", 1, 3, 100, b"short", bytes(32)]),
        msgspec.msgpack.encode(["join", -1, 3, 100, bytes(32), bytes(32)]),
        msgspec.msgpack.encode(Seats.of([1])),
    ],
)
def test_garbage_in_a_handshake_is_a_stranger_on_both_sides(garbage: bytes) -> None:
    applicant, doorkeeper = Applicant(TOKEN, 1, 3, 100), Doorkeeper(TOKEN, 3, 100)
    with pytest.raises(StrangerError):
        doorkeeper.check(garbage)
    with pytest.raises(StrangerError):
        applicant.join(garbage)
    with pytest.raises(StrangerError):
        applicant.seated(garbage)


def test_another_version_is_named() -> None:
    hello = msgspec.msgpack.encode(Hello("kvindex-group-9", bytes(32)))
    with pytest.raises(StrangerError, match="rank 0 speaks 'kvindex-group-9'"):
        Applicant(TOKEN, 1, 3, 100).join(hello)


def test_missing_seats_are_named_up_to_a_bound() -> None:
    assert str(Seats.of([2])) == "rank 2"
    assert str(Seats.of(list(range(1, 100)))).endswith("15, 16 and 83 more")
