"""The waiting of the subscriber's thread: for its feeds' sockets, time, and calls from others.

The sockets' descriptors are registered with the operating system once, so that a wait costs the
same for one rank and for hundreds (`zmq.Poller` asks every socket each time). That needs care:

**ZeroMQ's descriptors report changes only.** A socket's descriptor becomes readable when a message
arrives after the socket was last found empty, not while messages are left; and any call on the
socket may clear this sign, after ZeroMQ has noted the message. So a sign can be missed only if the
socket was used for anything but finding it empty, and its owner was not called since. Hence the
rule, which makes missing one impossible:

1. an owner that `wait` returns reads each of its sockets until it is empty, or else calls
   `look_again`;
2. `look_again` follows any other use of a socket too; `add` implies it, for earlier uses of the
   socket.

**Lanes.** The short way of ordinary messages: from ZeroMQ sockets into a native index, without the
GIL. A lane belongs to a feed (`native/core/lane.hpp`). While it is armed, native code receives the
feed's messages and applies those that are exactly what the feed's sequencer expects next. Whatever
else comes is left to the feed, with all that came after it. The sequencer accepts what a lane took
before anybody asks it, so it stays the only judge of order. Lanes need Linux, pyzmq's own libzmq
and the native index.
"""

from __future__ import annotations

import ctypes
import heapq
import selectors
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import zmq

from kvindex.wire.rank import Rank
from kvindex.wire.waker import Waker

if TYPE_CHECKING:
    from kvindex.wire._native import Fingerprints, Intake, Lane

SHOW_AFTER = 0.1
"""Seconds after which the batches that lanes took show in statuses."""

Owner = TypeVar("Owner")

_CALLS = ("msg_init", "msg_recv", "msg_close", "msg_more", "msg_data", "msg_size", "getsockopt")
"""The functions of libzmq in the order of `ZmqCalls` in `native/core/lane.hpp`."""


class Lanes:
    """The lanes of one subscriber, all into one index. Owned by the subscriber's thread."""

    def __init__(
        self,
        core: Any,  # the native index
        number: Callable[[Rank], int | None],  # of a rank in it; None if there is no such rank
        fingerprints: Fingerprints,
        on_payload: Callable[[Rank, bytes], None] | None = None,  # gets what a lane took, as sent
        payload_delay: float = 0.0,  # seconds for which that may be kept back
    ) -> None:
        self.number = number
        self.on_payload = on_payload
        # Seconds after which what was taken must be collected: statuses show it, and taps get it.
        self.collects_after = SHOW_AFTER if on_payload is None else payload_delay
        self.trouble = ""  # why there are no lanes
        self._core = core
        self._fingerprints = fingerprints

    def intake(self, selector: selectors.BaseSelector) -> Intake | None:
        """Return what waits for the sockets of a selector; None if there can be no lanes."""
        if sys.platform != "linux" or not isinstance(selector, selectors.EpollSelector):
            self.trouble = "they need Linux"
            return None
        try:
            # pyzmq's own, not the system's: a socket of one libzmq means nothing to another. A
            # symbol is looked for in the libraries that pyzmq's module was linked with, too.
            library = ctypes.CDLL(import_module("zmq.backend.cython._zmq").__file__)
            functions = [getattr(library, f"zmq_{name}") for name in _CALLS]
        except (AttributeError, ImportError, OSError):
            functions = []
        calls = [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in functions]
        if not calls or 0 in calls:
            self.trouble = "the libzmq of pyzmq was not found"
            return None
        # Here, so that the package can be imported without the native module.
        from kvindex.wire._native import Intake

        return Intake(selector.fileno(), calls)

    def make(self, intake: Intake) -> Lane:
        """Return a lane for one feed."""
        from kvindex.wire._native import Lane

        return Lane(intake, self._core, self._fingerprints, self.on_payload is not None)


class Watch:
    """Waits for any of many sockets, each watched on behalf of an owner.

    Thread safety: `wake` from any thread; everything else by the waiting thread only.
    """

    def __init__(self, lanes: Lanes | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self.intake: Intake | None = None if lanes is None else lanes.intake(self._selector)
        self._descriptors: dict[zmq.Socket[bytes], int] = {}
        self._owners: dict[int, Any] = {}  # by descriptor
        self.taken: list[Any] = []  # owners whose lanes took something in the last wait
        self._again: dict[Any, None] = {}
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
        # With the waker alone: for waits that must leave the sockets as they are.
        self._calls = selectors.PollSelector()
        self._calls.register(self._waker, selectors.EVENT_READ)
        self.wake = self._waker.wake

    def add(self, watched: zmq.Socket[bytes], owner: Any) -> None:
        """Wait for this socket too; its owner is returned by the next `wait`."""
        descriptor = int(watched.get(zmq.FD))
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._descriptors[watched] = descriptor
        self._owners[descriptor] = owner
        self.look_again(owner)

    def remove(self, watched: zmq.Socket[bytes]) -> None:
        """Wait for this socket no longer; must come before it is closed. Idempotent."""
        descriptor = self._descriptors.pop(watched, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            del self._owners[descriptor]

    def descriptor(self, watched: zmq.Socket[bytes] | None) -> int:
        """Return the descriptor of a watched socket; -1 for none."""
        return -1 if watched is None else self._descriptors[watched]

    def look_again(self, owner: Any) -> None:
        """Have the next `wait` return this owner at once: its sockets may have messages left."""
        self._again[owner] = None

    def leave_to_lane(self, owner: Any) -> None:
        """Do not return this owner next, as `look_again` wanted: its lane looks."""
        self._again.pop(owner, None)

    def wait(self, seconds: float, *, collects_after: float = SHOW_AFTER) -> dict[Any, None]:
        """Return the owners whose sockets may have messages, after at most this long.

        If lanes take something, it returns `collects_after` seconds later at most.
        """
        seconds = 0.0 if self._again else max(0.0, seconds)
        if self.intake is None:
            ready = [key.fd for key, _ in self._selector.select(seconds)]
        else:
            # The second: lanes that stopped at a bound. They go on in the next wait by themselves.
            ready, _, taken = self.intake.wait(seconds, collects_after, not collects_after)
            self.taken = [self._owners[descriptor] for descriptor in taken]
        owners, self._again = self._again, {}
        for descriptor in ready:
            owner = self._owners.get(descriptor)
            if owner is not None:
                owners[owner] = None
            elif descriptor == self._waker.fileno():
                self._waker.clear()
        return owners

    def wait_for_call(self, seconds: float) -> None:
        """Wait for `wake`, at most this long, and leave the sockets as they are."""
        if self._calls.select(seconds):
            self._waker.clear()

    def close(self) -> None:
        """Close the waker and the selector; owners close the watched sockets. Idempotent."""
        self._selector.close()
        self._calls.close()
        self._waker.close()


class Deadlines(Generic[Owner]):
    """One deadline for each owner, and quick access to the nearest.

    Most deadlines are put off again and again before they come, so putting one off is free:
    the owner is called at the earlier time once, and must set its deadline anew then.

    Thread safety: none.

    Examples:
        >>> deadlines = Deadlines()
        >>> deadlines.set("a", 5.0)
        >>> deadlines.set("a", 7.0)
        >>> deadlines.nearest, deadlines.due(6.0), deadlines.nearest
        (5.0, ['a'], None)
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Owner]] = []
        self._called: dict[Owner, float] = {}  # when each will be called
        self._order = 0  # breaks ties: owners cannot be compared

    def set(self, owner: Owner, when: float | None) -> None:
        """Have the owner called at `when`, if not before. O(log n), mostly O(1)."""
        # A later time is not noted: at the earlier one the owner is asked again.
        if when is None or when >= self._called.get(owner, float("inf")):
            return
        self._called[owner] = when
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, owner))

    @property
    def nearest(self) -> float | None:
        """When the next owner is to be called."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Owner]:
        """Return the owners to be called, each once; they have no deadline until they set one."""
        owners = []
        while self._heap and self._heap[0][0] <= now:
            when, _, owner = heapq.heappop(self._heap)
            if self._called.get(owner) == when:  # else it was called earlier
                del self._called[owner]
                owners.append(owner)
        return owners

    def forget(self, owner: Owner) -> None:
        """Call this owner no more."""
        # Its entries stay in the heap until their time, and are passed over then.
        self._called.pop(owner, None)
