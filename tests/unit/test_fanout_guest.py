"""One joiner at the server, step by step, over a pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator

import pytest

from kvindex.errors import DecodeError
from kvindex.fanout.frames import (
    Ask,
    Attached,
    Hello,
    Leave,
    Refused,
    Report,
    Welcome,
    encode_frame,
)
from kvindex.fanout.guest import Guest, Stage


class Party:
    """A guest, the joiner's end of its connection, and what its snapshot is made of."""

    def __init__(self, answer: Welcome | Refused) -> None:
        ours, self.joiner = socket.socketpair()
        ours.setblocking(False)
        self.taking = False
        self.parts = self._parts()
        self.guest = Guest(
            ours,
            welcome=lambda hello: answer,
            report=lambda: b"{}",
            make_snapshot=lambda: self.parts,
            patience=10.0,
            now=0.0,
        )

    def _parts(self) -> Generator[bytes, None, None]:
        self.taking = True
        try:
            yield b"first"
            yield b"second"
        finally:
            self.taking = False

    def says(self, *frames: Hello | Attached | Leave | Ask) -> bool:
        self.joiner.sendall(b"".join(map(encode_frame, frames)))
        return self.guest.receive(1.0)

    def close(self) -> None:
        self.joiner.close()
        self.guest.close()


HELLO = Hello(1, "native", 42)
WELCOME = Welcome(3, (1, 2, 3, "ring"), b"seed", None)


@pytest.fixture
def party() -> Iterator[Party]:
    party = Party(WELCOME)
    yield party
    party.close()


def test_a_joiner_is_greeted_sent_every_part_and_then_follows(party: Party) -> None:
    guest = party.guest
    assert not guest.wants_to_send
    assert party.says(HELLO)
    assert (guest.stage, guest.place, guest.pid) == (Stage.ATTACHING, 3, 42)
    assert guest.send(1.0)
    assert not guest.wants_to_send
    assert party.joiner.recv(4096) == encode_frame(WELCOME)
    assert party.says(Attached())
    assert guest.wants_to_send
    assert guest.deadline == 11.0
    while guest.wants_to_send:
        assert guest.send(2.0)
    assert party.joiner.recv(4096) == b"firstsecond"
    assert (guest.stage, guest.deadline) == (Stage.FOLLOWING, None)
    assert not party.taking
    assert not party.says(Leave())
    assert guest.left


def test_nothing_more_is_taken_for_one_that_is_gone(party: Party) -> None:
    party.says(HELLO)
    party.guest.send(1.0)
    party.says(Attached())
    party.guest.send(1.0)
    assert party.taking
    party.guest.close()
    assert not party.taking
    party.guest.close()


def test_one_that_is_refused_is_told_why_and_that_is_all() -> None:
    refused = Refused("full", False)
    party = Party(refused)
    assert party.says(HELLO)
    assert not party.guest.send(1.0)
    assert party.joiner.recv(4096) == encode_frame(refused)
    assert party.guest.answered
    party.close()


def test_one_that_asks_gets_one_answer_and_no_place(party: Party) -> None:
    assert party.says(Ask())
    assert not party.guest.send(1.0)
    assert party.joiner.recv(4096) == encode_frame(Report(2)) + b"{}"
    assert (party.guest.answered, party.guest.place) == (True, None)
    for further in (Ask(), HELLO):
        with pytest.raises(DecodeError, match="after the answer"):
            party.says(further)


@pytest.mark.parametrize("frame", [Attached(), HELLO], ids=["attached", "hello-again"])
def test_what_may_not_come_now_is_refused(party: Party, frame: Attached | Hello) -> None:
    if isinstance(frame, Hello):
        party.says(HELLO)
    with pytest.raises(DecodeError, match="while"):
        party.says(frame)


def test_a_joiner_that_hangs_up_is_noticed(party: Party) -> None:
    assert party.guest.receive(1.0), "nothing has come yet"
    party.joiner.close()
    assert not party.guest.receive(1.0)
