"""A Ctrl-C at any moment of a call leaves no lock locked: other threads go on."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import pytest

from kvindex.publish.zmq_publisher import BatchQueue
from kvindex.subscribe.event_stream import _ItemQueue
from kvindex.subscribe.status_board import StatusBoard
from kvindex.tools.cli.fake_engine import _Ending
from kvindex.tools.cli.signals import handled
from kvindex.wire import EventBatch
from kvindex.wire.errors import ClosedError, UnknownRankError
from kvindex.wire.rank import Rank
from tests.interrupts import interrupted
from tests.subscribe.test_status_board import Followed

pytestmark = pytest.mark.unit

BATCH = EventBatch(ts=0.0, events=[])
MOMENTS = 200  # more than any of these calls has
WEAK_REFERENCES = weakref.WeakSet.add.__code__.co_filename
Call = Callable[[], object]


def counts(frame: FrameType, event: str) -> bool:
    """Whether it entered or left a function: no signal is handled before a C function runs."""
    # An object of others dies just now: what its weak references call cannot raise.
    return event != "c_call" and frame.f_code.co_filename != WEAK_REFERENCES


def queue() -> tuple[Call, Call]:
    made = BatchQueue(10, drop_when_full=False, wake=lambda: None)
    return lambda: made.put(BATCH), lambda: made.take(1)


def closed_queue() -> tuple[Call, Call]:
    made = BatchQueue(10, drop_when_full=False, wake=lambda: None)
    return lambda: made.close("it is over"), lambda: made.take(1)


def stream() -> tuple[Call, Call]:
    made = _ItemQueue(10)
    made.end()
    return lambda: made.take(1.0), made.close


def board() -> tuple[Call, Call]:
    made = StatusBoard(lambda: 0.0, 1.0)
    return lambda: made.get(Rank("gone")), lambda: made.show(())


def waiting_board() -> tuple[Call, Call]:
    made = Followed()
    return lambda: made.wait_live(1.0, ranks=["a"]), lambda: made.board.show(())


@pytest.mark.parametrize("make", [queue, closed_queue, stream, board, waiting_board])
def test_an_interrupt_at_any_moment_of_a_call_leaves_the_lock_free(
    make: Callable[[], tuple[Call, Call]],
) -> None:
    for moment in range(1, MOMENTS):
        call, from_elsewhere = make()
        came = False
        with suppress(ClosedError, UnknownRankError):
            came = interrupted(call, moment, counts)
        other = threading.Thread(target=from_elsewhere, daemon=True)
        other.start()
        other.join(5.0)
        assert not other.is_alive(), f"the lock is held after an interrupt at moment {moment}"
        if not came:
            return
    raise AssertionError("the call never came to its end")


def test_ctrl_c_ends_the_fake_engine_between_two_requests() -> None:
    before = signal.getsignal(signal.SIGINT)
    ending = _Ending()
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), ending.ask)):
        signal.raise_signal(signal.SIGINT)  # in the middle of one: nothing is cut short
        assert ending.asked
        ending.wait(60.0)  # not any more
        ending.asked = False
        main = threading.main_thread().ident
        threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGTERM]).start()
        with pytest.raises(KeyboardInterrupt):
            ending.wait(60.0)
    assert signal.getsignal(signal.SIGINT) is before
