"""Bookings of requests that Ray Serve sends, by the events that its request router receives."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from kvindex.routing import Booking, Router, Stage
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

_Sent: TypeAlias = tuple[Booking, asyncio.TimerHandle]


class RequestBookings:
    """Keeps each request's booking where Ray sends it, until Ray reports its end.

    A request is booked when a replica is chosen. Its future then shows which replica Ray chose, or
    that the request was abandoned. From there on, Ray names a request by its replica and its id.

    Args:
        router: books.
        prefill_rate: tokens per second that a rank prefills. Ray shows no first token: the prefill
            counts as done when its tokens, and those before it, have taken their time.
        ranks_of: returns the ranks behind a replica.

    Thread safety: of Ray's event loop for the router.
    """

    def __init__(
        self,
        router: Router,
        prefill_rate: float,
        ranks_of: Callable[[RunningReplica], Collection[Rank]],
    ) -> None:
        self.prefill_rate = prefill_rate
        self._router = router
        self._ranks_of = ranks_of
        self._chosen: dict[asyncio.Future[RunningReplica], Booking] = {}
        self._sent: dict[tuple[ReplicaID, str], deque[_Sent]] = {}

    def book(
        self, request: PendingRequest, prompt: Mapping[str, Any], among: Collection[Rank]
    ) -> Booking:
        """Choose among known ranks for a request of Ray, and book it there.

        Raises: as `Router.reserve`, whose arguments `prompt` has.
        """
        before = self._chosen.pop(request.future, None)
        if before is not None:  # Ray asks again, since no replica could take the request
            before.cancel()
        else:
            request_id = request.metadata.internal_request_id
            request.future.add_done_callback(lambda done: self._place(done, prompt, request_id))
        ranks = None if all(rank in among for rank in self._router.ranks) else among
        booking = self._chosen[request.future] = self._router.reserve(ranks=ranks, **prompt)
        return booking

    def end(self, replica_id: ReplicaID, request_id: str) -> None:
        """Release the oldest booking that a request has with a replica, if it has one."""
        sent = self._sent.get((replica_id, request_id))
        if sent:
            booking, timer = sent.popleft()
            timer.cancel()
            booking.finish()
            if not sent:
                del self._sent[replica_id, request_id]

    def end_all(self, replica_id: ReplicaID) -> None:
        """Release all bookings with a replica, which died."""
        for key in [key for key in self._sent if key[0] == replica_id]:
            for booking, timer in self._sent.pop(key):
                timer.cancel()
                booking.cancel()

    def _place(
        self, future: asyncio.Future[RunningReplica], prompt: Mapping[str, Any], request_id: str
    ) -> None:
        if (booking := self._chosen.pop(future, None)) is None:
            return
        if future.cancelled():
            booking.cancel()
            return
        replica = future.result()
        ranks = self._ranks_of(replica)
        if booking.rank not in ranks:  # Ray took another replica
            booking.cancel()
            if not ranks:
                return
            booking = self._router.reserve(ranks=ranks, **prompt)
        seconds = booking.decision.work_ahead / self.prefill_rate
        timer = future.get_loop().call_later(seconds, booking.first_token)
        # A chain of calls has one id, and a request that was refused may come back to its replica.
        sent = self._sent.setdefault((replica.replica_id, request_id), deque())
        sent.append((booking, timer))
        self._forget_expired()

    def _forget_expired(self) -> None:
        """Forget requests of which Ray reported nothing for too long: at most the oldest two."""
        for key in list(islice(self._sent, 2)):
            if all(booking.stage is Stage.EXPIRED for booking, _ in self._sent[key]):
                del self._sent[key]
