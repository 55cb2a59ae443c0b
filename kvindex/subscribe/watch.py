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
"""

from __future__ import annotations

import heapq
import selectors
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import zmq

from kvindex.wire.waker import Waker

if TYPE_CHECKING:
    from kvindex.subscribe.lanes import Lanes
    from kvindex.wire._native import Intake

SHOW_AFTER = 0.1
"""Seconds after which the batches that lanes took show in statuses, where nobody waits for them."""

Owner = TypeVar("Owner")


class Watch:
    """Waits for any of many sockets, each watched on behalf of an owner.

    Args:
        lanes: take ordinary messages while this waits, if given.

    Attributes:
        wake: makes the waiting thread return from `wait`.
        intake: what lanes belong to; None if there are none.
        taken: of the last wait: the owners whose lanes have taken something, not collected yet.

    Thread safety: `wake` from any thread; everything else by the waiting thread only.
    """

    def __init__(self, lanes: Lanes | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self.intake: Intake | None = None if lanes is None else lanes.intake(self._selector)
        self._descriptors: dict[zmq.Socket[bytes], int] = {}
        self._owners: dict[int, Any] = {}  # by descriptor
        self.taken: list[Any] = []
        self._again: dict[Any, None] = {}
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
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
        of = self._owners
        if self.intake is None:
            ready = [key.fd for key, _ in self._selector.select(seconds)]
        else:
            ready, _, taken = self.intake.wait(seconds, collects_after, not collects_after)
            self.taken = [of[d] for d in taken]
        owners, self._again = self._again, {}
        for descriptor in ready:
            owner = of.get(descriptor)
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
        self._order = 0

    def set(self, owner: Owner, when: float | None) -> None:
        """Have the owner called at `when`, if not before. O(log n), mostly O(1)."""
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
        self._called.pop(owner, None)
