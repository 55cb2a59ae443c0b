"""The sending end while a process is stopped inside the ring's lock: it waits, says so, counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvindex.errors import ClosedError, QueueTimeoutError
from kvindex.fanout.outflow import Outflow
from kvindex.testing import ManualClock


class Locked:
    """A ring's sender whose lock is not to be had for some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.sent: list[bytes] = []
        self.closed = False

    def _lock(self) -> None:
        if self.closed:
            raise ClosedError("closed")
        if self.calls:
            self.calls -= 1
            raise QueueTimeoutError("a party seems stopped inside it", timeout=5.0)

    def send(self, kind: int, parts: list[bytes], size: int, timeout: float) -> None:
        self._lock()
        self.sent.append(b"".join(parts))

    def laggards(self) -> list[int]:
        self._lock()
        return []

    def statistics(self) -> dict[str, int]:
        return {"chunks": len(self.sent), "readers_evicted": 0}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def outflow(clock: ManualClock) -> Iterator[Outflow]:
    made = Outflow(2, 64, 2, 1.0, clock)
    sender = made._sender
    yield made
    sender.close()


def locked(outflow: Outflow, calls: int) -> Locked:
    sender = outflow._sender = Locked(calls)  # type: ignore[assignment]
    return sender


def test_a_message_is_sent_once_when_the_lock_is_to_be_had_again(
    outflow: Outflow, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    sender = locked(outflow, 4)  # `send`, and then `laggards`
    outflow.send(b"one")
    assert sender.sent == [b"one"]
    assert outflow.statistics()["lock_waits"] == 3
    assert caplog.text.count("stopped inside it") == 1, "warned at a limited rate"
    sender.calls = 2
    clock.advance(11.0)
    outflow.send(b"two" * 50)
    assert b"two" * 50 in b"".join(sender.sent)
    assert outflow.statistics()["lock_waits"] == 4
    assert caplog.text.count("stopped inside it") == 2


def test_who_closes_does_not_wait_for_it(outflow: Outflow) -> None:
    sender = locked(outflow, 10**6)
    outflow.stop_waiting()
    with pytest.raises(QueueTimeoutError):
        outflow.send(b"one")
    sender.closed = True
    with pytest.raises(ClosedError):
        outflow.send(b"one")
    assert sender.sent == []
