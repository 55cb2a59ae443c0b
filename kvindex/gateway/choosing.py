"""The rank of each request: reserved with the model's router, or waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from kvindex import KVIndexError, Rank, TokenError, TokenIds, UnknownRankError
from kvindex.gateway.calls import CallError
from kvindex.gateway.models import Model, Models, Serving, pin
from kvindex.gateway.waiting import Waiting
from kvindex.routing import Booking, NoCandidateError, Router


class NoRankError(KVIndexError):
    """A request can be sent nowhere.

    Attributes:
        reasons: how many ranks are refused for which reason.
    """

    def __init__(self, reasons: Mapping[str, int]) -> None:
        self.reasons = dict(reasons)
        shown = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        super().__init__(f"no rank can serve this request: {shown or 'no rank is known yet'}")


class Routing:
    """Reserves ranks with the routers of the models.

    Args:
        models: which engines serve which model.
        most_waiting: requests of one model that may wait for room.

    Owner: one event loop.
    """

    def __init__(self, models: Models, most_waiting: int) -> None:
        self._models = models
        self._waiting: defaultdict[Router, Waiting] = defaultdict(partial(Waiting, most_waiting))

    def servings(self, model: str) -> Sequence[Serving]:
        """Return the engines of a model; raises UnknownModelError."""
        return self._models.find(model).servings

    def models(self) -> Mapping[str, Sequence[Serving]]:
        """Return the engines of each model and adapter, by its name. O(models)."""
        return {name: model.servings for name, model in self._models.table().items()}

    async def reserve(
        self,
        model: str,
        token_ids: TokenIds | None,
        *,
        prompt_tokens: int,
        salt: str | None,
        reads_cache: bool,
        exclude: Sequence[Rank],
        request_id: str,
        deadline: float,
        workers: Collection[str] | None = None,
    ) -> Place:
        """Reserve a rank for a request; wait for one if none has room.

        Args:
            model: its name, or that of an adapter; "": the only one.
            token_ids: the prompt; None if its tokens are not known.
            prompt_tokens: how many there are, perhaps as an estimate.
            salt: the request's cache salt.
            reads_cache: whether the engine reads its cache for it.
            exclude: the ranks that were tried before.
            request_id: of the booking; no two open requests have the same.
            deadline: until when it may wait, in seconds of the event loop.
            workers: names of the engines that count; None: all.

        Raises:
            UnknownModelError: no engine serves the model.
            NoRankError: no rank can serve it, however long it waits.
            ShedError: no rank has room in time.
            CallError: a token is none.
        """
        waiting = self._waiting[self._models.find(model).router]
        options: dict[str, Any] = {"salt": salt, "reads_cache": reads_cache}
        if token_ids is None:
            options["prompt_tokens"] = prompt_tokens
        ticket = None
        try:
            while True:
                if not len(waiting) if ticket is None else waiting.is_first(ticket):
                    found = self._models.find(model)
                    ranks = found.ranks if workers is None else found.ranks_of(workers)
                    booking = _booked(found, ranks, token_ids, request_id, exclude, options)
                    serving = None if booking is None else found.serving(booking.rank)
                    if booking is not None and serving is not None:
                        return Place(booking, serving, waiting)
                    if booking is not None:  # the rank has come since `find`
                        booking.cancel()
                        continue
                ticket = ticket or waiting.join()
                await waiting.turn(ticket, deadline)
        finally:
            if ticket is not None:
                waiting.leave(ticket)

    def drain(self, worker: str) -> None:
        """Send an engine no more requests; open ones go on. Raises UnknownRankError."""
        self._each(worker, Router.drain)

    def drained(self) -> set[str]:
        """Return the engines that are drained."""
        routers = self._models.routers.values()
        return {rank.worker for router in routers for rank in router.drained}

    def undrain(self, worker: str) -> None:
        """Send an engine requests again. Raises UnknownRankError."""
        self._each(worker, Router.undrain)
        self.notify()

    def notify(self) -> None:
        """Let requests that wait try again: ranks may have come or become live."""
        for waiting in self._waiting.values():
            waiting.notify()

    def statistics(self) -> dict[str, Any]:
        """Return the routers' counters, and those of requests that wait, by model."""
        self._models.names()
        routers = self._models.routers
        return {
            "routers": {name: router.statistics() for name, router in routers.items()},
            "waiting": {
                name: self._waiting[router].statistics()
                for name, router in routers.items()
                if router in self._waiting
            },
        }

    def _each(self, worker: str, change: Any) -> None:
        if worker not in self._models.servings():
            raise UnknownRankError(worker, self._models.servings())
        for router in self._models.routers.values():
            change(router, worker)


def _booked(
    model: Model,
    ranks: Sequence[Rank] | None,
    token_ids: TokenIds | None,
    request_id: str,
    exclude: Sequence[Rank],
    options: Mapping[str, Any],
) -> Booking | None:
    """Reserve a rank; None if none has room."""
    router = model.router
    known = router.ranks
    try:
        return router.reserve(
            () if token_ids is None else token_ids,
            request_id=request_id,
            ranks=ranks,
            exclude=[rank for rank in exclude if rank in known],
            lora=model.lora,
            **options,
        )
    except NoCandidateError as error:
        if "capacity" in error.refused:
            return None
        raise NoRankError(error.refused) from None
    except UnknownRankError:  # a rank has gone just now
        raise NoRankError({"gone": 1}) from None
    except TokenError as error:
        raise CallError(400, f"the prompt has a token that is none: {error}") from None


class Place:
    """A rank that is reserved for a request. Calls after its end change nothing.

    Attributes:
        rank: which.
        serving: its engine.
        pin: what makes the engine use this rank.
        reason: "cache": it holds some of the prompt; "load": no rank does; "no_tokens": that is
            not known.
        held: tokens of the prompt that it will find cached.
        prompt_tokens: of the prompt.
    """

    def __init__(self, booking: Booking, serving: Serving, waiting: Waiting) -> None:
        self.rank = booking.rank
        self.serving = serving
        self.pin = pin(serving, booking.rank)
        self.held = booking.decision.tokens
        self.prompt_tokens = booking.decision.prompt_tokens
        self.reason = "cache" if self.held else "load"
        if not booking.decision.reads_cache:
            self.reason = "no_tokens"
        self._booking = booking
        self._waiting = waiting

    @property
    def attainable(self) -> int:
        """The most tokens that any rank held of the prompt. O(ranks)."""
        return self._booking.decision.attainable

    def move(self, worker: str) -> None:
        """Count the request on another engine, which serves it instead."""
        ranks = [rank for rank in self._booking.decision.ranks if rank.worker == worker]
        if ranks:
            own = self.rank.dp_rank - self.serving.first_rank
            self.rank = ranks[min(own, len(ranks) - 1)]
            self._booking.move(self.rank)

    def first_token(self) -> None:
        """Report the first token."""
        self._booking.first_token()
        self._waiting.notify()

    def touch(self, output_tokens: int) -> None:
        """Report how many tokens were generated so far."""
        more = output_tokens - self._booking.output_tokens
        if more > 0:
            self._booking.output(more)
        else:
            self._booking.touch()

    def finish(self, cached_tokens: int | None) -> None:
        """Release the rank: the request has its answer, for which so many tokens were cached."""
        self._booking.finish(cached_tokens)
        self._waiting.notify()

    def cancel(self) -> None:
        """Release the rank: the request ends without an answer."""
        self._booking.cancel()
        self._waiting.notify()
