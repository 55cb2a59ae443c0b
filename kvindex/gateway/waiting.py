"""Requests that wait for a rank with room: a bounded queue, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from kvindex import KVIndexError


class ShedError(KVIndexError):
    """A request that found no room in time; after `retry_after` seconds it may come again."""

    def __init__(self, message: str, *, reason: str, retry_after: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class Ticket:
    """A request in the queue. Owner: one event loop."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()


class Waiting:
    """A bounded queue of requests.

    Only the first one tries to get a rank, whenever the load has fallen; so later ones neither
    overtake it nor all try at once.

    Owner: one event loop. Complexity: O(1), but O(waiting) for one that leaves from the middle.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tickets: deque[Ticket] = deque()
        self._waited = 0
        self._shed = {"full": 0, "deadline": 0}

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self) -> Ticket:
        """Enqueue a request; raises ShedError if too many wait."""
        if len(self._tickets) >= self._most:
            self._shed["full"] += 1
            text = f"no rank has room, and {len(self._tickets)} requests wait, the most that may"
            raise ShedError(text, reason="full", retry_after=1.0)
        ticket = Ticket()
        self._tickets.append(ticket)
        self._waited += 1
        return ticket

    async def turn(self, ticket: Ticket, deadline: float) -> None:
        """Return once the request is the first and the load has fallen; raises ShedError.

        It may also return for nothing: who is woken tries, and comes back.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        ticket.woken.clear()
        timer = loop.call_at(deadline, ticket.woken.set)
        try:
            await ticket.woken.wait()  # by the load or by the timer: then the time tells which
        finally:
            timer.cancel()
        if loop.time() >= deadline:
            self._shed["deadline"] += 1
            text = f"no rank had room for {loop.time() - began:.1f} s"
            raise ShedError(text, reason="deadline", retry_after=1.0)

    def leave(self, ticket: Ticket) -> None:
        """Forget a request, which has a rank or has given up; the next one may try."""
        self._tickets.remove(ticket)
        self.notify()  # it may have been woken, and left before it tried

    def is_first(self, ticket: Ticket) -> bool:
        """Return whether no other request waits before this one."""
        return self._tickets[0] is ticket

    def notify(self) -> None:
        """Wake the first request: the load may have fallen."""
        if self._tickets:
            self._tickets[0].woken.set()

    def statistics(self) -> dict[str, Any]:
        """Return how many requests wait now, how many have waited, and those shed by reason."""
        return {"waiting": len(self._tickets), "waited": self._waited, "shed": dict(self._shed)}
