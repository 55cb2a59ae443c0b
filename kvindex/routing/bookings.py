"""Bookings: a request's load on a rank, from the choice to its last token."""

from __future__ import annotations

import enum
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import index
from typing import Any

from kvindex.routing.decision import Decision
from kvindex.routing.loads import Load, LoadBoard
from kvindex.wire.errors import ConfigurationError, DuplicateBookingError, UnknownBookingError
from kvindex.wire.rank import Rank

__all__ = ["Booking", "Bookings", "Stage"]


class Stage(str, enum.Enum):
    """How far a booked request has come.

    Attributes:
        CHOSEN: it waits for its first token.
        DECODING: its prefill is done.
        FINISHED: it has its answer.
        CANCELLED: it ended without one.
        EXPIRED: no news of it came for too long, and its load was released.
    """

    CHOSEN = "chosen"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    def __str__(self) -> str:
        return self.value


_NOTHING = Load()
_ENDS = (Stage.FINISHED, Stage.CANCELLED, Stage.EXPIRED)


class Booking:
    """One request's load on the rank that was chosen for it.

    A context manager: leaving it finishes the booking, or cancels it on an exception. Calls after
    the end (a second `finish`, a first token after the expiry) change nothing.

    Attributes:
        request_id: the request's id.
        decision: the router's decision.
        stage: how far it has come.
        output_tokens: tokens generated so far, as reported by `output`.

    Thread safety: every method may be called from any thread.
    """

    __slots__ = (
        "_block_size",
        "_books",
        "_counted",
        "booked_at",
        "decision",
        "output_tokens",
        "request_id",
        "stage",
        "touched_at",
        "work_ahead",
    )

    def __init__(
        self,
        books: Bookings,
        request_id: str,
        decision: Decision,
        block_size: int,
        work_ahead: float,
        now: float,
    ) -> None:
        self._books = books
        self.request_id = request_id
        self.decision = decision
        self.stage = Stage.CHOSEN
        self.output_tokens = 0
        self.booked_at = self.touched_at = now
        self.work_ahead = work_ahead
        self._block_size = block_size
        self._counted: Load | None = _NOTHING  # on the board; None: it has ended

    @property
    def rank(self) -> Rank:
        """The rank that was chosen."""
        return self.decision.rank

    def _blocks(self) -> int:
        """Return how many blocks the prompt and its answer fill."""
        length = self.decision.prompt_tokens + self.output_tokens
        return -(-length // self._block_size)

    def first_token(self) -> None:
        """Note that the prefill is done: the first token has come. Idempotent."""
        self._books.first_token(self)

    def output(self, tokens: int = 1) -> None:
        """Note that so many more tokens were generated; the first of them ends the prefill.

        Raises:
            ConfigurationError: the number is negative, or no number.
        """
        self._books.output(self, tokens)

    def finish(self, cached_tokens: int | None = None) -> None:
        """Release the load: the request has its answer. Idempotent.

        Args:
            cached_tokens: how many tokens of the prompt the engine found cached, as it reports in
                `usage.prompt_tokens_details.cached_tokens`; None if it reports none.

        Raises:
            ConfigurationError: `cached_tokens` is negative, or no number. The load is released
                all the same.
        """
        told = _count(cached_tokens)
        self._books.end(self, Stage.FINISHED, told)
        if told is None and cached_tokens is not None:
            raise ConfigurationError(f"cached_tokens is {cached_tokens!r}; give a number from 0")

    def cancel(self) -> None:
        """Release the load: the request ends without an answer. Idempotent."""
        self._books.end(self, Stage.CANCELLED, None)

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.cancel()

    def __repr__(self) -> str:
        return f"<Booking {self.request_id!r} on {self.rank}: {self.stage}>"


def _count(tokens: Any) -> int | None:
    """Return a number from 0 as a plain int; None for anything else."""
    if tokens is None:
        return None
    try:
        count = index(tokens)  # isinstance(tokens, SupportsIndex) would take 50 times as long
    except TypeError:
        return None
    return count if count >= 0 else None


Ended = Callable[[Booking, int | None], None]
"""Called when a booking ended, with the tokens that the engine found cached, if it said so."""


class Bookings:
    """The open bookings, and their load on a load board.

    Args:
        loads: where the load is kept.
        lock: guards everything here, and the board.
        clock: returns monotonic seconds.
        expires_after: seconds without news after which a booking expires.
        on_first_token: called with a booking and the seconds from the choice to its first token.
        on_ending: called when a booking is about to end; again, if that was interrupted.
        on_end: called when a booking has ended.

    Thread safety: `first_token`, `output` and `end` from any thread; the rest under the lock.
    """

    def __init__(
        self,
        loads: LoadBoard,
        lock: AbstractContextManager[object],
        clock: Callable[[], float],
        expires_after: float,
        on_first_token: Callable[[Booking, float], None],
        on_ending: Callable[[Booking], None],
        on_end: Ended,
    ) -> None:
        self._loads = loads
        self._lock = lock
        self._clock = clock
        self._expires_after = expires_after
        self._on_first_token = on_first_token
        self._on_ending = on_ending
        self._on_end = on_end
        self._open: OrderedDict[str, Booking] = OrderedDict()  # the longest without news first
        self._numbers = itertools.count(1)
        self.ended: Counter[Stage] = Counter()
        self.late = 0  # news of bookings that had expired

    def __len__(self) -> int:
        return len(self._open)

    def _new_id(self, wanted: str | None) -> str:
        if wanted is not None:
            if wanted in self._open:
                raise DuplicateBookingError(wanted)
            return wanted
        while (made := f"kvindex-{next(self._numbers)}") in self._open:
            pass
        return made

    def book(
        self, wanted: str | None, decision: Decision, block_size: int, queued: float, now: float
    ) -> Booking:
        """Book a request on the rank that was chosen, behind so many queued tokens.

        Raises:
            DuplicateBookingError: an open booking has the wanted id. This is checked here, not
                before the choice: a filter or a policy may have booked meanwhile.
        """
        ahead = queued + decision.new_tokens
        request_id = self._new_id(wanted)
        booking = Booking(self, request_id, decision, block_size, ahead, now)
        load = Load(decision.new_tokens, 1, booking._blocks())
        self._loads.give(decision.rank, decision.new_tokens, now)
        self._count(booking, load, now)
        self._open[request_id] = booking
        return booking

    def get(self, request_id: str) -> Booking:
        """Return an open booking; raises UnknownBookingError."""
        booking = self._open.get(request_id)
        if booking is None:
            raise UnknownBookingError(request_id)
        return booking

    def expire(self, now: float) -> None:
        """Release bookings without news for too long. O(1) if there are none."""
        while (booking := self._oldest()) is not None:
            if now - booking.touched_at < self._expires_after:
                return
            self._end(booking, Stage.EXPIRED, None, now)

    def _oldest(self) -> Booking | None:
        for booking in self._open.values():  # between two calls, a handler could end one
            return booking
        return None

    def statistics(self) -> dict[str, int]:
        """Return how many are open, how many ended in which way, and news after an expiry."""
        ended = {str(stage): self.ended[stage] for stage in _ENDS}
        return {"open": len(self._open), **ended, "late": self.late}

    def first_token(self, booking: Booking) -> None:
        """See `Booking.first_token`."""
        with self._lock:
            now = self._clock()
            if self._hear(booking, now):
                self._first_token(booking, now)

    def output(self, booking: Booking, tokens: int) -> None:
        """See `Booking.output`."""
        told = _count(tokens)
        if told is None:
            raise ConfigurationError(f"output of {tokens!r} tokens; give a number from 0")
        with self._lock:
            now = self._clock()
            if not self._hear(booking, now):
                return
            if told:
                self._first_token(booking, now)
            booking.output_tokens += told
            blocks, counted = booking._blocks(), booking._counted
            if counted is not None and counted.decode_blocks != blocks:
                self._count(booking, Load(counted[0], counted[1], blocks), now)

    def end(self, booking: Booking, stage: Stage, cached_tokens: int | None) -> None:
        """See `Booking.finish` and `Booking.cancel`."""
        with self._lock:
            now = self._clock()
            if self._hear(booking, now):
                self._end(booking, stage, cached_tokens, now)

    def _hear(self, booking: Booking, now: float) -> bool:
        """Note news of a booking; return whether it is open."""
        if not self._is_open(booking):
            self.late += booking.stage is Stage.EXPIRED
            return False
        booking.touched_at = now
        self._open.move_to_end(booking.request_id)
        return True

    def _is_open(self, booking: Booking) -> bool:
        open_ones, request_id = self._open, booking.request_id  # no call: no handler in between
        return request_id in open_ones and open_ones[request_id] is booking

    def _count(self, booking: Booking, load: Load | None, now: float) -> None:
        """Set a booking's load on the board; None removes it.

        All of it or, interrupted, nothing. A signal handler or a finalizer that is called in
        between, and ends the booking, sees which part is released, and releases the rest.
        """
        rank, old = booking.decision.rank, booking._counted
        if old is None:
            return
        new = _NOTHING if load is None else load
        booking._counted = load  # no call until here, so that no handler sees half of it
        try:
            self._loads.add(rank, new[0] - old[0], new[1] - old[1], new[2] - old[2], now)
        except BaseException:
            booking._counted = old
            raise

    def _first_token(self, booking: Booking, now: float) -> None:
        if booking.stage is not Stage.CHOSEN:
            return
        counted = booking._counted
        if counted is None:
            return
        self._count(booking, Load(0, counted[1], counted[2]), now)
        if booking.stage is not Stage.CHOSEN:
            return  # ended meanwhile
        booking.stage = Stage.DECODING
        self._on_first_token(booking, now - booking.booked_at)

    def _end(self, booking: Booking, stage: Stage, cached_tokens: int | None, now: float) -> None:
        booking.stage = stage
        self._on_ending(booking)
        self._count(booking, None, now)
        if not self._is_open(booking):
            return  # ended meanwhile
        del self._open[booking.request_id]
        try:
            self.ended[stage] += 1
        finally:
            self._on_end(booking, cached_tokens)
