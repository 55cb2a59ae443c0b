"""One joiner at the server, step by step, over a pair of sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress

import pytest

from kvindex.replicas.messages import (
    Admission,
    Attached,
    Begin,
    Frame,
    JoinRequest,
    Leave,
    RankSection,
    Refused,
    ReportRequest,
    ServerReport,
    encode_frame,
)
from kvindex.replicas.outflow import Part, TakenRank
from kvindex.replicas.server import Guest
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank
from tests.live import PATIENCE

pytestmark = pytest.mark.unit


class Party:
    """A guest that is served by a thread, and the joiner's end of its connection."""

    def __init__(self, answer: Admission | Refused, patience: float = PATIENCE) -> None:
        ours, self.joiner = socket.socketpair()
        ours.setblocking(False)
        self.joiner.settimeout(PATIENCE)
        self.taking = False
        self.joined = threading.Event()
        self.failure: Exception | None = None
        self.guest = Guest(
            ours,
            admit=lambda request: answer,
            report=lambda: b"{}",
            make_snapshot=self._parts,
            patience=patience,
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            asyncio.run(self.guest.converse(lambda guest: self.joined.set()))
        except Exception as error:
            self.failure = error
        finally:
            self.guest.connection.close()

    def _parts(self) -> Generator[Part, None, None]:
        self.taking = True
        try:
            yield BEGIN
            yield TAKEN
        finally:
            self.taking = False

    def says(self, *frames: Frame) -> None:
        self.joiner.sendall(b"".join(map(encode_frame, frames)))

    def hears(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (piece := self.joiner.recv(size - len(data))):
            data += piece
        return data

    def ends(self) -> None:
        """Wait until it is served no more; raise why, unless it has all been said."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.joiner.close()
        with suppress(OSError, DecodeError):
            self.ends()


BEGIN = Begin(7)
TAKEN = TakenRank(Rank("a", 0), 8, None, bytes(1 << 22), b"cursor")  # more than a connection holds
PARTS = (
    encode_frame(BEGIN) + encode_frame(RankSection(TAKEN.rank, 8, None, 1 << 22)) + TAKEN.section
)

REQUEST = JoinRequest(1, "native", 42)
ADMISSION = Admission(3, (1, 2, 3, "ring"), b"seed", None)


@pytest.fixture
def party() -> Iterator[Party]:
    party = Party(ADMISSION)
    yield party
    party.close()


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_joiner_is_greeted_sent_every_part_and_then_follows(
    party: Party, in_pieces: bool
) -> None:
    request = encode_frame(REQUEST)
    for at in range(0, len(request), 1 if in_pieces else len(request)):
        party.joiner.sendall(request[at : at + (1 if in_pieces else len(request))])
    admission = encode_frame(ADMISSION)
    assert party.hears(len(admission)) == admission
    assert (party.guest.following, party.guest.place, party.guest.pid) == (False, 3, 42)
    party.says(Attached())
    assert party.hears(len(PARTS)) == PARTS, "the section without its cursor"
    assert party.joined.wait(PATIENCE)
    assert party.guest.following
    assert not party.taking
    party.says(Leave())
    party.ends()
    assert party.guest.left


def test_nothing_more_is_taken_for_one_that_is_gone(party: Party) -> None:
    party.says(REQUEST, Attached())
    party.hears(len(encode_frame(ADMISSION)) + len(encode_frame(BEGIN)))
    assert party.taking
    party.joiner.close()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        party.ends()
    assert not party.taking
    assert not party.guest.following


REFUSED = Refused("full", False)


@pytest.mark.parametrize(
    ("request_frame", "answer"),
    [(REQUEST, encode_frame(REFUSED)), (ReportRequest(), encode_frame(ServerReport(2)) + b"{}")],
    ids=["refused", "report"],
)
def test_one_that_gets_its_only_answer_has_no_place(request_frame: Frame, answer: bytes) -> None:
    party = Party(REFUSED)
    party.says(request_frame)
    party.ends()
    assert party.hears(4096) == answer
    assert (party.guest.answered, party.guest.place) == (True, None)
    party.close()


@pytest.mark.parametrize(
    "frames",
    [[Attached()], [REQUEST, REQUEST], [ADMISSION]],
    ids=["attached", "request-again", "a server's"],
)
def test_what_may_not_come_now_is_refused(party: Party, frames: list[Frame]) -> None:
    party.says(*frames)
    with pytest.raises(DecodeError, match="should come"):
        party.ends()


@pytest.mark.parametrize("frames", [[REQUEST], [REQUEST, Attached()]], ids=["silent", "unread"])
def test_one_that_takes_too_long_for_a_step_is_given_up(frames: list[Frame]) -> None:
    party = Party(ADMISSION, patience=0.05)
    party.says(*frames)
    with pytest.raises(TimeoutError, match=r"0\.05 s for a step"):
        party.ends()
    assert not party.taking
    party.close()


def test_a_joiner_that_hangs_up_is_noticed(party: Party) -> None:
    party.joiner.close()
    with pytest.raises(ConnectionResetError):
        party.ends()
