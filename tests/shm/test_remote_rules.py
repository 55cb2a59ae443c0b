"""A remote queue without a network: its packets, credit, and whom the writer lets in."""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvindex.shm.remote.protocol import (
    MAX_READER_BYTES,
    VERSION,
    Acknowledgement,
    Bye,
    Closing,
    Eviction,
    Hello,
    Malformed,
    Message,
    Packet,
    Probe,
    Refusal,
    Welcome,
    decode,
    encode,
)
from kvindex.shm.remote.sender import RemoteSender, SendWindow
from kvindex.shm.ring import Waiting

pytestmark = pytest.mark.unit

# Packets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [
        Hello(VERSION, 3),
        Acknowledgement(2**64 - 1),
        Bye(),
        Welcome(9, 64, True),
        Refusal("why"),
        Probe(ready=True),
        Eviction(),
        Closing(12),
        Message(4, 2, []),
    ],
)
def test_a_packet_comes_out_as_it_went_in(packet: Packet) -> None:
    assert decode(encode(packet)) == packet
    assert len(encode(packet)) <= MAX_READER_BYTES


def test_a_hello_of_another_version_has_the_version() -> None:
    assert decode(msgspec.msgpack.encode(["Hello", 7])) == Hello(7)
    hello = decode(msgspec.msgpack.encode(["Hello", 7, 1, b"token", "new"]))
    assert isinstance(hello, Hello)
    assert hello.version == 7


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"A",
        msgspec.msgpack.encode(["Hello"]),
        encode(Hello(VERSION, -1)),
        encode(Hello(VERSION, 2**32)),
        encode(Hello(VERSION, 1))[:-1],
        encode(Hello(VERSION, 1)) + b"x",
        encode(Bye()) * 2,
        b"C123",
        msgspec.msgpack.encode(["Refused", 99]),
        encode(Refusal("x" * 501)),
        encode(Welcome(0, 0, False)),
        encode(Message(0, 0, [memoryview(b"whole")]))[:-1],
        encode(Message(0, 0, [memoryview(b"")] * 65_538)),
        b"HTTP/1.1 400 Bad Request",
    ],
)
def test_other_bytes_are_no_packet(part: bytes) -> None:
    with pytest.raises(Malformed):
        decode(part)


@given(seq=st.integers(0, 2**63), frames=st.lists(st.binary(max_size=40), min_size=1))
def test_a_small_message_comes_out_as_it_went_in(seq: int, frames: list[bytes]) -> None:
    decoded = decode(encode(Message(seq, 1, [memoryview(frame) for frame in frames])))
    assert isinstance(decoded, Message)
    assert (decoded.seq, [bytes(frame) for frame in decoded.frames]) == (seq, frames)


@given(st.binary(max_size=80))
def test_no_bytes_upset_the_decoder(part: bytes) -> None:
    with suppress(Malformed):
        decode(part)


# Credit ------------------------------------------------------------------------------------------


def window_of(*, messages: int = 8, size: int = 1000, first: int = 0) -> SendWindow:
    """The window of reader 0, whose first message is this one."""
    window = SendWindow(messages=messages, size=size)
    for _ in range(first):
        window.record(1)
    window.join(0)
    return window


@pytest.mark.parametrize("next_seq", [106, 101, -1, 2**64 - 1])
def test_an_impossible_acknowledgement_changes_nothing(next_seq: int) -> None:
    window = window_of(first=100)
    for _ in range(5):
        window.record(10)
    for _ in range(2):  # a repeated one is harmless
        assert window.acknowledge(0, 102)
    assert not window.acknowledge(0, next_seq)
    assert (window.unread, window.unread_bytes) == (3, 30)


def test_the_slowest_reader_decides_for_all() -> None:
    window = SendWindow(messages=3, size=1000)
    window.join(4)
    window.record(10)
    window.join(9)
    for size in (20, 30):
        window.record(size)
    assert window.slowest == 4
    assert (window.unread_by(4), window.unread_by(9)) == (3, 2)
    assert window.acknowledge(9, 3)
    assert not window.admits(0)
    assert window.acknowledge(4, 1)
    assert window.admits(0)
    assert (window.unread, window.unread_bytes) == (2, 50)
    window.leave(4)
    assert (window.slowest, window.unread, window.unread_bytes) == (9, 0, 0)
    window.leave(9)
    window.record(10)  # for nobody
    assert (window.next_seq, window.sent_bytes, window.unread) == (4, 70, 0)


@given(
    messages=st.integers(1, 20),
    size=st.integers(1, 200),
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    seed=st.integers(0, 2**32),
)
def test_a_reader_that_acknowledges_when_it_is_idle_gets_all_within_the_bounds(
    messages: int, size: int, sizes: list[int], seed: int
) -> None:
    choose = random.Random(seed)
    window = window_of(messages=messages, size=size, first=7)
    to_send, pipe = deque(sizes), deque[int]()
    read = acknowledged = 7
    while to_send or pipe:
        moves = ["send"] * (bool(to_send) and window.admits(to_send[0]))
        moves += ["read" if pipe else "idle"] * bool(pipe or read > acknowledged)
        assert moves, "both wait for ever"
        move = choose.choice(moves)
        if move == "send":
            pipe.append(to_send.popleft())
            window.record(pipe[-1])
            assert window.unread <= messages
            assert window.unread_bytes <= size or window.unread == 1
        elif move == "read":
            pipe.popleft()
            read += 1
        else:
            acknowledged = read
            assert window.acknowledge(0, acknowledged)
    assert read == window.next_seq == 7 + len(sizes)


# Admission ---------------------------------------------------------------------------------------


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


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def sender(router: Router) -> Iterator[RemoteSender]:
    """A writer for two readers, whose socket is the router."""
    sender = RemoteSender(2, "127.0.0.1", curve=None, waiting=Waiting(), window=4, linger=0.0)
    socket, sender._socket = sender._socket, router  # type: ignore[assignment]
    yield sender
    sender._socket = socket
    sender.close()


def hello(name: str, rank: int, version: int = VERSION) -> list[bytes]:
    return [name.encode(), encode(Hello(version, rank))]


def bye(name: str) -> list[bytes]:
    return [name.encode(), encode(Bye())]


FIRST, SECOND = hello("first", 4), hello("second", 4)
WELCOME, REFUSED = "Welcome", "Refused"


# The packets that arrive before each turn, and the connections that have ended by then.
@pytest.mark.parametrize(
    ("turns", "ended", "sent", "counted"),
    [
        pytest.param(
            [[hello("a", 8), hello("b", 1), hello("c", 2)]],
            [],
            [("a", WELCOME), ("b", WELCOME), ("c", REFUSED)],
            {"joined": 2, "refused": 1, "connected": 2},
            id="so many different ranks are admitted",
        ),
        pytest.param(
            [[FIRST], [SECOND]],
            [],
            [("first", WELCOME)],
            {"joined": 1, "connected": 1},
            id="another reader waits for its rank",
        ),
        pytest.param(
            [[FIRST, hello("other", 5)], [SECOND], [bye("first"), hello("third", 6)]],
            [],
            [("first", WELCOME), ("other", WELCOME), ("second", WELCOME), ("third", REFUSED)],
            {"joined": 3, "left": 1, "refused": 1, "connected": 2},
            id="a rank is free again when its reader left",
        ),
        pytest.param(
            [[FIRST], [SECOND, bye("first")]],
            [],
            [("first", WELCOME), ("second", WELCOME)],
            {"joined": 2, "left": 1, "connected": 1},
            id="a hello before the farewell of the predecessor is read",
        ),
        pytest.param(
            [[FIRST, bye("first")]], [], [], {}, id="one that leaves before admission is no reader"
        ),
        pytest.param(
            [[FIRST]], ["first"], [], {}, id="one that dies before admission is no reader"
        ),
        pytest.param(
            [[FIRST], [SECOND]],
            ["", "first"],
            [("first", WELCOME), ("second", WELCOME)],
            {"joined": 2, "died": 1, "connected": 1},
            id="the place of a dead reader is free",
        ),
        pytest.param(
            [[FIRST], [bye("first")]],
            ["", "first"],
            [("first", WELCOME)],
            {"joined": 1, "left": 1},
            id="one whose last packet was a farewell has left and did not die",
        ),
        pytest.param(
            [[hello("other", 0, VERSION + 1)]],
            [],
            [("other", REFUSED)],
            {"refused": 1},
            id="another version is refused",
        ),
    ],
)
def test_readers_are_admitted_refused_and_removed(
    sender: RemoteSender,
    router: Router,
    turns: list[list[list[bytes]]],
    ended: list[str],
    sent: list[tuple[str, str]],
    counted: dict[str, int],
) -> None:
    dead: set[int] = set()
    for number, packets in enumerate(turns):
        router.mail += packets
        router.ended = {name.encode() for name in ended[number : number + 1]}
        sender._probe_at = 0.0  # probes its readers each time
        dead |= sender.serve()
    assert sender.serve() == frozenset()
    answers = [(name.decode(), packet) for name, packet in router.sent if packet != "Probe"]
    assert answers == sent
    assert {name: count for name, count in sender.statistics().items() if count} == counted
    assert dead == ({4} if counted.get("died") else set())


def test_a_rank_that_stays_taken_is_refused(
    sender: RemoteSender, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvindex.shm.remote.sender._HANDOVER", 0.0)
    router.mail += [FIRST, SECOND]
    sender.serve()
    assert router.sent == [(b"first", WELCOME), (b"second", REFUSED)]
