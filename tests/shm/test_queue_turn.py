"""Whose turn it is at an end: one thread's, until somebody closes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvindex.shm.turn import Turn
from kvindex.wire.errors import ClosedError, InUseError, WaitCancelledError

pytestmark = pytest.mark.unit


def use(turn: Turn) -> None:
    with turn.taken():
        pass


def test_a_second_thread_is_refused_until_the_first_is_through() -> None:
    turn = Turn()
    with ThreadPoolExecutor(1) as other:
        with turn.taken():
            with pytest.raises(InUseError, match="one at a time"):
                other.submit(use, turn).result()
        other.submit(use, turn).result()


def test_whoever_waits_is_told_that_another_closes_and_nobody_comes_after() -> None:
    turn = Turn()
    closed: list[bool] = []

    def wait() -> None:
        with turn.taken() as ending:
            other.submit(turn.end, lambda: closed.append(True))
            assert ending.wait(10.0)
            assert not closed  # before its turn is over
            raise WaitCancelledError("as a wait does when it is ended")

    with ThreadPoolExecutor(1) as other:
        with pytest.raises(ClosedError, match="closed"):
            wait()
    assert closed
    with pytest.raises(ClosedError, match="closed"):
        use(turn)


def test_who_comes_while_another_closes_is_told_so() -> None:
    turn = Turn()
    with ThreadPoolExecutor(1) as other:

        def close() -> None:
            with pytest.raises(ClosedError, match="closed"):
                other.submit(use, turn).result()

        turn.end(close)


def test_a_wait_ends_by_its_own_cancel_too() -> None:
    cancel = threading.Event()
    with Turn().taken(cancel) as ending:
        assert not ending.is_set()
        cancel.set()
        assert ending.is_set()
