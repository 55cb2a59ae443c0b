"""Bookings: a request's load on a rank, from the choice to its last token, and its prediction."""

from __future__ import annotations

import enum
import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import index, sub
from typing import Any, Final, NamedTuple

from kvindex.index import Hits, Index, RankRows
from kvindex.index.tokens import Prompt
from kvindex.routing.contexts import Contexts
from kvindex.routing.fleet import RoutedRequest
from kvindex.routing.funnel import Funnel, PrefillRate
from kvindex.routing.kv_source import KvSource
from kvindex.routing.load import Load, LoadBoard
from kvindex.routing.policies import Decision
from kvindex.wire import BlockRemoved, BlockStored, EventBatch
from kvindex.wire.errors import (
    ConfigurationError,
    DuplicateBookingError,
    TokenError,
    UnknownBookingError,
)
from kvindex.wire.forks import PARENTS
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, find_rank


class Stage(str, enum.Enum):
    """How far a booked request has come.

    Attributes:
        CHOSEN: it waits for its first token.
        DECODING: its prefill is done.
        FINISHED: it is answered.
        CANCELLED: it ended without an answer.
        EXPIRED: nothing was reported of it for too long, and its load was released.
    """

    CHOSEN = "chosen"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    def __str__(self) -> str:
        return self.value


OTHER_ROUTER: Final = "another router"
"""The policy of decisions that another router made: it counts them in its own funnel."""

_NOTHING: Final = Load()


@dataclass(slots=True, eq=False, repr=False)
class Booking:
    """One request's load on the rank that was chosen for it.

    A context manager: leaving it finishes the booking, or cancels it on an exception. Calls after
    the end (a second `finish`, a first token after the expiry) change nothing.

    Attributes:
        request_id: the request's id.
        decision: the router's decision.
        stage: how far it has come.
        output_tokens: tokens generated so far, as reported by `output`.

    Thread safety: any thread may call every method.
    """

    _bookings: Bookings
    request_id: str
    decision: Decision
    _prediction: Prediction | None  # until its end is scheduled
    _booked_at: float
    _touched_at: float
    stage: Stage = Stage.CHOSEN
    output_tokens: int = 0
    _load: Load = _NOTHING  # as the board counts it
    _source: KvSource | None = None  # that the engine was told of
    _is_fetched: bool = False  # another rank computes what the engine lacks

    @property
    def rank(self) -> Rank:
        """The rank that was chosen."""
        return self.decision.rank

    def pull(self) -> KvSource | None:
        """Return `Decision.source`, and note that the engine is told to pull from there.

        The funnel then counts whether it did; what it finds beyond the prediction is no surprise.
        """
        self._source = self.decision.source
        return self._source

    def fetch(self) -> None:
        """Report that another rank prefills the prompt, and the engine fetches what it lacks.

        Then nothing waits for prefill here. Neither the prefill rate nor the funnel counts the
        request: what its engine reports as cached is the other's hit. Idempotent; without effect
        after the first token.
        """
        self._bookings.report(self, self._bookings.fetch)

    def compute(self) -> None:
        """Take `fetch` back: the engine begins only now to prefill the prompt by itself."""
        self._bookings.report(self, self._bookings.compute)

    def pin(self) -> None:
        """Report that the request is answered, but another rank still fetches its blocks.

        Until the end these count, and nothing else of it. Idempotent.
        """
        self._bookings.report(self, self._bookings.pin)

    def first_token(self) -> None:
        """Report the first token: the prefill is done. Idempotent."""
        self._bookings.report(self, self._bookings.end_prefill)

    def output(self, tokens: int = 1) -> None:
        """Report that so many more tokens were generated; the first of them ends the prefill.

        Raises:
            ConfigurationError: the number is negative, or no number.
        """
        count = _token_count(tokens)
        if count is None:
            raise ConfigurationError(f"output of {tokens!r} tokens; give a number from 0")
        self._bookings.report(self, self._bookings.add_output, count)

    def touch(self) -> None:
        """Report that the request goes on: the booking does not expire. O(1)."""
        self._bookings.report(self, lambda booking, now: None)  # the report itself counts

    def move(self, rank: RankName) -> None:
        """Report that another rank serves the request: load and funnel follow.

        What the request will find cached there is what that rank held at the time of the decision.

        Raises:
            UnknownRankError: it was no candidate then, or the name stands for several ranks.
        """
        moved = self.decision.moved(find_rank(rank, self.decision.ranks))
        self._bookings.report(self, self._bookings.move, moved)

    def finish(self, cached_tokens: int | None = None, *, counts: bool = True) -> None:
        """Release the load: the request has its answer. Idempotent.

        Args:
            cached_tokens: how many tokens of the prompt the engine found cached, as it reports in
                `usage.prompt_tokens_details.cached_tokens`; None if it reports none. Of more than
                the prompt has, the prompt's tokens count; `statistics()["bookings"]` counts such
                reports, `cached_above_prompt`.
            counts: whether the funnel counts the request. False if it had several prompts, or
                several answers (`n`): what its engine reports then is not the hit of one of them.

        Raises:
            ConfigurationError: `cached_tokens` is negative, or no number. The load is released
                all the same.
        """
        count = _token_count(cached_tokens)
        self._bookings.report(self, self._bookings.end, Stage.FINISHED, count, counts)
        if count is None and cached_tokens is not None:
            raise ConfigurationError(f"cached_tokens is {cached_tokens!r}; give a number from 0")

    def cancel(self) -> None:
        """Release the load: the request ends without an answer. Idempotent."""
        self._bookings.report(self, self._bookings.end, Stage.CANCELLED, None, False)

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.cancel()

    def __repr__(self) -> str:
        return f"<Booking {self.request_id!r} on {self.rank}: {self.stage}>"


def _token_count(tokens: Any) -> int | None:
    """Return a number from 0 as a plain int; None for anything else."""
    if tokens is None:
        return None
    try:
        count = index(tokens)  # isinstance(tokens, SupportsIndex) would take 50 times as long
    except TypeError:
        return None
    return count if count >= 0 else None


class Bookings:
    """The open bookings; their loads, predictions, prefill rate and funnel follow each report.

    An interrupt (Ctrl-C) at any moment leaves a booking open with the load that the board counts
    for it, or ended with none: each step is done as a whole or not at all, and the rest of an
    interrupted call is done when the booking ends or expires.

    Thread safety: any thread may call `report`; the rest runs under the lock.
    """

    def __init__(
        self,
        loads: LoadBoard,
        predictions: Predictions,
        contexts: Contexts,
        lock: AbstractContextManager[object],
        clock: Callable[[], float],
        expires_after: float,
    ) -> None:
        self.rate = PrefillRate()
        self.funnel = Funnel()
        self._loads = loads
        self._predictions = predictions
        self._contexts = contexts
        self._lock = lock
        self._clock = clock
        self._expires_after = expires_after
        self._open: OrderedDict[str, Booking] = OrderedDict()  # the longest without a report first
        self._numbers = itertools.count(1)
        self._ended = dict.fromkeys((Stage.FINISHED, Stage.CANCELLED, Stage.EXPIRED), 0)
        self._late = 0  # reports on bookings that had expired

    def __len__(self) -> int:
        return len(self._open)

    def book(
        self, request_id: str | None, decision: Decision, request: RoutedRequest | None, now: float
    ) -> Booking:
        """Book a request, None if another router has it, on the rank that was chosen.

        Raises:
            DuplicateBookingError: an open booking has this id.
            TokenError: as `Predictions.prepare`.
        """
        if request_id is None:
            # A caller may have taken such an id for a request of its own.
            request_id = f"kvindex-{next(self._numbers)}"
            while request_id in self._open:
                request_id = f"kvindex-{next(self._numbers)}"
        elif request_id in self._open:  # a filter or a policy may have booked before the choice
            raise DuplicateBookingError(request_id)
        sent = None
        if request is not None:
            sent = self._predictions.prepare(decision.rank, request, decision.block_size)
            self._contexts.note(request, decision, now)  # it may raise: before there is a booking
        prediction = None if sent is None else sent[0]
        booking = Booking(self, request_id, decision, prediction, now, now)
        self._open[request_id] = booking  # first, so that all that follows ends with it
        new_tokens = decision.new_tokens
        self._loads.give(decision.rank, new_tokens, now)
        self._count(booking, Load(new_tokens, 1, _blocks(booking)), now)
        if sent is not None:
            self._predictions.add(*sent)
        return booking

    def get(self, request_id: str) -> Booking:
        """Return an open booking; raises UnknownBookingError."""
        if (booking := self._open.get(request_id)) is None:
            raise UnknownBookingError(request_id)
        return booking

    def arrange(self, ranks: Sequence[Rank]) -> None:
        """Follow a change of the ranks: the loads' rows, and what is kept for each of them."""
        self._contexts.keep(ranks)  # first: of rows that are new, none may be left to release
        self._loads.arrange(ranks)
        self.funnel.keep(ranks)
        self._predictions.keep(ranks)

    def expire(self, now: float) -> None:
        """Release bookings that are due, and end predictions. O(1) if none are due."""
        while self._open:  # each report moves its booking to the end
            oldest = next(iter(self._open.values()))
            if now - oldest._touched_at < self._expires_after:
                break
            self.end(oldest, now, Stage.EXPIRED, None, False)
        self._predictions.expire(now)
        self._contexts.expire(now)

    def statistics(self) -> dict[str, int]:
        """Return how many are open, how many ended in which way, and reports of two odd kinds."""
        ended = {str(stage): count for stage, count in self._ended.items()}
        counts = {"late": self._late, "cached_above_prompt": self.funnel.longer}
        return {"open": len(self._open), **ended, **counts}

    def disown(self) -> None:
        """In a forked child: another thread of the parent may hold the lock."""
        self._lock = PARENTS

    def report(self, booking: Booking, change: Callable[..., None], *details: Any) -> None:
        """Call `change(booking, now, *details)` if the booking is open."""
        with self._lock:
            now = self._clock()
            # Not by its stage: another booking may have the id of one that has ended.
            if self._open.get(booking.request_id) is not booking:
                self._late += booking.stage is Stage.EXPIRED
                return
            booking._touched_at = now
            self._open.move_to_end(booking.request_id)
            change(booking, now, *details)

    def _count(self, booking: Booking, load: Load, now: float) -> None:
        """Set a booking's load on the board: all of it or, interrupted, nothing."""
        before, booking._load = booking._load, load
        queued, opened, decode = map(sub, load, before)
        try:
            self._loads.add(booking.decision.rank, queued, opened, decode, now)
        except BaseException:
            booking._load = before
            raise

    def end_prefill(self, booking: Booking, now: float) -> None:
        """Release a booking's queued tokens, at its first token."""
        if booking.stage is not Stage.CHOSEN:
            return
        # Whichever step an interrupt comes after: a second first token changes nothing, and the end
        # releases what is left.
        self._count(booking, booking._load._replace(queued_tokens=0), now)
        booking.stage = Stage.DECODING
        # Else it is not known how much was computed.
        if booking._source is None and not booking._is_fetched:
            self.rate.measure(booking.decision.work_ahead, now - booking._booked_at)
        self._end_prediction(booking, now, at_once=False)

    def fetch(self, booking: Booking, now: float) -> None:
        """Release a booking's queued tokens: another rank prefills them."""
        # What was given stays: blocks that are fetched evict others, as computed ones do.
        if booking.stage is Stage.CHOSEN:
            booking._is_fetched = True
            self._count(booking, booking._load._replace(queued_tokens=0), now)

    def compute(self, booking: Booking, now: float) -> None:
        """Queue the tokens that `fetch` has released."""
        if booking.stage is Stage.CHOSEN and booking._is_fetched:
            booking._is_fetched, booking._booked_at = False, now
            new_tokens = booking.decision.new_tokens
            self._count(booking, booking._load._replace(queued_tokens=new_tokens), now)

    def pin(self, booking: Booking, now: float) -> None:
        """Release a booking's load, but for its blocks."""
        self.end_prefill(booking, now)
        self._count(booking, Load(decode_blocks=booking._load.decode_blocks), now)

    def add_output(self, booking: Booking, now: float, tokens: int) -> None:
        """Count the blocks of more generated tokens."""
        if tokens:
            self.end_prefill(booking, now)
        booking.output_tokens += tokens
        load, blocks = booking._load, _blocks(booking)
        # Not for each token: the board may be shared, and what changes there is sent.
        if blocks != load.decode_blocks:
            self._count(booking, load._replace(decode_blocks=blocks), now)

    def move(self, booking: Booking, now: float, decision: Decision) -> None:
        """Count a booking on another rank."""
        load = booking._load
        queued = decision.new_tokens if booking.stage is Stage.CHOSEN else 0
        self._count(booking, _NOTHING, now)  # first: it is counted by the decision's rank
        self._end_prediction(booking, now, at_once=True)
        booking.decision, booking._source = decision, None  # it was found for the other rank
        booking._is_fetched = False
        self._loads.give(decision.rank, decision.new_tokens, now)
        self._count(booking, load._replace(queued_tokens=queued), now)

    def end(
        self,
        booking: Booking,
        now: float,
        stage: Stage,
        cached_tokens: int | None,
        counts: bool,
    ) -> None:
        """Release a booking's load, and count how it ended."""
        self._count(booking, _NOTHING, now)
        self._end_prediction(booking, now, at_once=stage is not Stage.FINISHED)
        booking.stage = stage
        del self._open[booking.request_id]
        self._ended[stage] += 1
        decision = booking.decision
        # Without reading, no cache could help; engines do not count such requests either.
        is_own = decision.policy != OTHER_ROUTER and decision.reads_cache
        if counts and is_own and not booking._is_fetched:
            self.funnel.count(decision, cached_tokens, booking._source)

    def _end_prediction(self, booking: Booking, now: float, *, at_once: bool) -> None:
        if booking._prediction is not None:
            self._predictions.end(booking._prediction, now, at_once=at_once)
            booking._prediction = None


def _blocks(booking: Booking) -> int:
    """Return how many blocks a request's prompt and its answer fill."""
    length = booking.decision.prompt_tokens + booking.output_tokens
    return -(-length // booking.decision.block_size)


# Predictions --------------------------------------------------------------------------------------


_MASK = 2**64 - 1


class Prediction(NamedTuple):
    """The blocks of one prompt that was sent to a rank, by names of our own."""

    rank: Rank
    block_hashes: list[int]


class Predictions:
    """The blocks of prompts that were sent to ranks a moment ago, in an index of their own.

    A prediction lasts from the booking until so many `seconds` after its first token (by then, the
    engine must have sent its event), or until the booking is cancelled. With None, there are none.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._index = Index()
        self._ending: deque[tuple[float, Prediction]] = deque()  # the earliest first
        self._made = 0

    def prepare(
        self, rank: Rank, request: RoutedRequest, block_size: int
    ) -> tuple[Prediction, BlockStored] | None:
        """Return the prediction of a prompt's whole blocks, and their event for `add`. O(tokens).

        None if there are none. Raises TokenError: an index checks only the tokens that it needs.
        """
        blocks = len(request.token_ids) // block_size
        if not blocks or self._seconds is None:
            return None
        tokens = _packed(request, blocks * block_size)
        extras: list[Any] = [item and tuple(item) for item in request.extra_keys or ()][:blocks]
        extras += [None] * (blocks - len(extras))
        if request.salt:
            extras[0] = (*(extras[0] or ()), request.salt)
        # A block's name is the same for the same block after the same prefix.
        names = []
        data, step = memoryview(tokens).cast("B"), block_size * tokens.itemsize
        name = hash(request.lora)
        for block, extra in enumerate(extras):
            content = bytes(data[block * step : (block + 1) * step])
            # By its text: extra keys may contain what cannot be hashed.
            name = hash((name, content, repr(extra))) & _MASK
            names.append(name)
        stored = BlockStored(
            block_hashes=[*names],
            parent_block_hash=None,
            token_ids=tokens.tolist(),
            block_size=block_size,
            lora_name=request.lora if isinstance(request.lora, str) else None,
            lora_id=request.lora if isinstance(request.lora, int) else None,
            extra_keys=extras if any(extras) else None,
        )
        return Prediction(rank, names), stored

    def add(self, prediction: Prediction, stored: BlockStored) -> None:
        """Let a prediction count from now on."""
        self._index.apply(prediction.rank, EventBatch(ts=0.0, events=[stored]))
        self._made += 1

    def end(self, prediction: Prediction, now: float, *, at_once: bool) -> None:
        """Schedule the end of a prediction: now, or `seconds` from now. O(1)."""
        if at_once or self._seconds is None:
            self._ending.appendleft((now, prediction))
        else:
            self._ending.append((now + self._seconds, prediction))

    def expire(self, now: float) -> None:
        """End the predictions whose time is over. O(1) if there are none."""
        while self._ending and self._ending[0][0] <= now:
            rank, block_hashes = self._ending[0][1]
            removed = BlockRemoved(block_hashes=list(block_hashes))
            self._index.apply(rank, EventBatch(ts=0.0, events=[removed]))
            self._ending.popleft()  # only now: an interrupted step is done again

    def keep(self, ranks: Collection[Rank]) -> None:
        """Forget the predictions of ranks that are not among these. O(ranks)."""
        for rank in set(self._index.ranks).difference(ranks):
            self._index.remove(rank)

    def added_to(
        self, confirmed: Hits, request: RoutedRequest, rows: RankRows, counts: bytes
    ) -> Hits:
        """Return each rank's hit by events or by prediction, whichever is more."""
        if not len(self._index):
            return confirmed
        try:
            match = request.match(self._index)
        except TokenError:  # text, of which this index has seen none yet
            packed = _packed(request, len(request.token_ids))
            match = request._replace(token_ids=packed).match(self._index)
        columns = zip(confirmed[:3], match.hits(rows, counts)[:3], strict=True)
        device, host, tokens = (array("q", map(max, *pair)) for pair in columns)
        return Hits(device, host, tokens, confirmed.block_size)

    def statistics(self) -> dict[str, int]:
        """Return how many predictions were `made`, and how many `blocks` are predicted now."""
        if self._seconds is None:
            return {}
        return {"made": self._made, "blocks": len(self._index)}


def _packed(request: RoutedRequest, length: int) -> array[int]:
    """Return a prompt's first tokens as 64-bit ints, whatever form they have: text, too."""
    return array("q", Prompt(request.token_ids).packed(0, length))
