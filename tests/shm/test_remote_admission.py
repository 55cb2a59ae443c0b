"""Whom the writer of a remote queue lets in, without a network."""

from __future__ import annotations

import errno
from collections.abc import Iterator

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
