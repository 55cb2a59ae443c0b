"""Frames of the joining, and what is none; patience as an allowance."""

from __future__ import annotations

import pytest

from kvindex.index.replicas.messages import (
    LENGTH,
    PROTOCOL,
    Admission,
    Attached,
    Begin,
    End,
    JoinersFrame,
    JoinRequest,
    Leave,
    RankSection,
    Refused,
    decode_joiners,
    decode_servers,
    encode_frame,
    frame_bytes,
)
from kvindex.index.replicas.outflow import Patience
from kvindex.testing import ManualClock
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank
from tests.subscribe.test_status_board import status

pytestmark = pytest.mark.unit

SAID: list[JoinersFrame] = [JoinRequest(PROTOCOL, "native", 7), Attached(), Leave()]
ANSWERS = [
    Admission(3, (64, 65_536, 256, "kvindex-0-1"), b"\x01" * 16, 1000),
    Refused("full", final=False),
    Begin(5),
    RankSection(Rank("a", 1), 6, status(Rank("a", 1)), 4096),
    RankSection(Rank("a", 2), 6, None, 0),
    End(9, [(Rank("a", 0), Rank("a", 1))]),
]


@pytest.mark.parametrize("frame", SAID, ids=lambda frame: type(frame).__name__)
def test_a_joiner_is_understood(frame: JoinersFrame) -> None:
    assert decode_joiners(encode_frame(frame)[LENGTH.size :]) == frame


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_a_server_is_understood(answer: Begin) -> None:
    data = encode_frame(answer)
    assert frame_bytes(data[: LENGTH.size], 1 << 20) == len(data) - LENGTH.size
    assert decode_servers(data[LENGTH.size :]) == answer


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        encode_frame(Begin(1))[LENGTH.size :],  # only a server says that
        encode_frame(JoinRequest(PROTOCOL, "native", 7))[LENGTH.size :].replace(
            b"native", b"\xff" * 6
        ),
    ],
    ids=["no msgpack", "empty", "not a joiner's", "no text"],
)
def test_what_no_joiner_says_is_refused(body: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_joiners(body)


def test_what_no_server_says_is_refused() -> None:
    with pytest.raises(DecodeError, match="no frame"):
        decode_servers(encode_frame(Leave())[LENGTH.size :])
    with pytest.raises(DecodeError, match="at most 100"):
        frame_bytes(LENGTH.pack(101), 100)


def test_patience_is_used_up_and_comes_back_at_a_tenth() -> None:
    clock = ManualClock()
    allowance = Patience(2.0, clock)
    assert allowance.left() == 2.0
    clock.advance(1.5)
    assert allowance.spend()
    assert allowance.left() == pytest.approx(0.5)
    clock.advance(1.0)
    assert not allowance.spend()
    assert allowance.left() == 0.0
    clock.advance(5.0)  # without waiting
    assert allowance.left() == pytest.approx(0.5)
    clock.advance(1000.0)
    assert allowance.left() == 2.0
