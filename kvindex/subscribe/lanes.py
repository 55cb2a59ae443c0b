"""The short way of ordinary messages: from ZeroMQ sockets into a native index, without the GIL.

A lane belongs to a feed (`native/core/lane.hpp`). While it is armed, native code receives the
feed's messages and applies those that are exactly what the feed's sequencer expects next. Whatever
else comes is left to the feed, with all that came after it. The sequencer accepts what a lane took
before anybody asks it, so it stays the only judge of order.

Lanes need Linux, pyzmq's own libzmq and the native index.
"""

from __future__ import annotations

import ctypes
import selectors
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvindex.subscribe.watch import SHOW_AFTER
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from kvindex.wire._native import Fingerprints, Intake, Lane

_CALLS = ("msg_init", "msg_recv", "msg_close", "msg_more", "msg_data", "msg_size", "getsockopt")
"""The functions of libzmq in the order of `ZmqCalls` in `native/core/lane.hpp`."""


class Lanes:
    """The lanes of one subscriber, all into one index.

    Args:
        core: the native index.
        number: returns the number of a rank in it; None if there is no such rank.
        fingerprints: those of the subscriber.
        on_payload: called with each batch that a lane took, as its publisher sent it.
        payload_delay: seconds for which such a batch may be kept back.

    Attributes:
        collects_after: seconds after which what was taken must be collected.
        trouble: why there are no lanes; "" if there are.

    Thread safety: owned by the subscriber's thread.
    """

    def __init__(
        self,
        core: Any,
        number: Callable[[Rank], int | None],
        fingerprints: Fingerprints,
        on_payload: Callable[[Rank, bytes], None] | None = None,
        payload_delay: float = 0.0,
    ) -> None:
        self.number = number
        self.on_payload = on_payload
        self.collects_after = SHOW_AFTER if on_payload is None else payload_delay
        self.trouble = ""
        self._core = core
        self._fingerprints = fingerprints

    def intake(self, selector: selectors.BaseSelector) -> Intake | None:
        """Return what waits for the sockets of a selector; None if there can be no lanes."""
        if sys.platform != "linux" or not isinstance(selector, selectors.EpollSelector):
            self.trouble = "they need Linux"
            return None
        calls = _zmq_calls()
        if calls is None:
            self.trouble = "the libzmq of pyzmq was not found"
            return None
        from kvindex.wire._native import Intake

        return Intake(selector.fileno(), calls)

    def make(self, intake: Intake) -> Lane:
        """Return a lane for one feed."""
        from kvindex.wire._native import Lane

        return Lane(intake, self._core, self._fingerprints, self.on_payload is not None)


def _zmq_calls() -> list[int] | None:
    """Return the addresses of libzmq's functions; None if they cannot be found."""
    try:
        # A symbol is looked for in the libraries that pyzmq's module was linked with, too.
        library = ctypes.CDLL(import_module("zmq.backend.cython._zmq").__file__)
        found = [getattr(library, f"zmq_{name}") for name in _CALLS]
    except (AttributeError, ImportError, OSError):
        return None
    addresses = [ctypes.cast(call, ctypes.c_void_p).value for call in found]
    return None if None in addresses else [address for address in addresses if address]
