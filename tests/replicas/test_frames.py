"""Frames of the joining, and what is none; patience as an allowance."""

from __future__ import annotations

import pytest

from kvindex.replicas.messages import (
    LENGTH,
    PROTOCOL,
    Admission,
    Attached,
    Begin,
    End,
    Frame,
    JoinRequest,
    Leave,
    RankSection,
    Refused,
    decode_frame,
    encode_frame,
    frame_bytes,
)
from kvindex.replicas.outflow import Patience
from kvindex.testing import ManualClock
from kvindex.wire.errors import DecodeError
from kvindex.wire.rank import Rank
from tests.subscribe.test_status_board import status

pytestmark = pytest.mark.unit

FRAMES: list[Frame] = [
    JoinRequest(PROTOCOL, "native", 7),
    Attached(),
    Leave(),
    Admission(3, (64, 65_536, 256, "kvindex-0-1"), b"\x01" * 16, 1000),
    Refused("full", final=False),
    Begin(5),
    RankSection(Rank("a", 1), 6, status(Rank("a", 1)), 4096),
    RankSection(Rank("a", 2), 6, None, 0),
    End(9, [(Rank("a", 0), Rank("a", 1))]),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_comes_out_as_it_went_in(frame: Frame) -> None:
    data = encode_frame(frame)
    assert frame_bytes(data[: LENGTH.size], 1 << 20) == len(data) - LENGTH.size
    assert decode_frame(data[LENGTH.size :]) == frame


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        b"\x01",
        encode_frame(FRAMES[0])[LENGTH.size :].replace(b"native", b"\xff" * 6),
    ],
    ids=["no msgpack", "empty", "a number", "no text"],
)
def test_other_bytes_are_no_frame(body: bytes) -> None:
    with pytest.raises(DecodeError, match="no frame"):
        decode_frame(body)


def test_a_frame_that_is_too_long_is_refused_before_memory_is_taken() -> None:
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
