"""Where each request goes: the engines of its model, a rank of theirs, and how that is reached.

An engine's model has a router of its own, which decides by cache and load. A request for which no
rank has room waits in its model's queue: first come, first served.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from kvindex import KVIndexError, Rank, TokenError, TokenIds, UnknownRankError
from kvindex.gateway.calls import CallError
from kvindex.routing import Booking, Followed, NoCandidateError, Router
from kvindex.subscribe.discovery import EngineReport

_HEADER: Final = b"x-data-parallel-rank"
_FIELD: Final = "data_parallel_rank"
# SGLang reads the header from 0.5.10 on, and the field from 0.5.8 to then.
_SGLANG_HEADER: Final = (0, 5, 10)
_MOST_SHOWN: Final = 20  # models that a message names


class UnknownModelError(KVIndexError):
    """No engine serves a model.

    Attributes:
        model: its name.
        known: the models that are served.
    """

    def __init__(self, model: str, known: Collection[str]) -> None:
        self.model = model
        self.known = tuple(sorted(known))
        shown = ", ".join(self.known[:_MOST_SHOWN]) or "none"
        more = len(self.known) - _MOST_SHOWN
        text = f"{shown}, and {more} more" if more > 0 else shown
        what = f"no engine serves the model {model[:200]!r}" if model else "name a model"
        super().__init__(f"{what}; served: {text}")


class Serving(msgspec.Struct, frozen=True):
    """An engine, as the gateway sends requests to it.

    Attributes:
        worker: its name.
        url: of its HTTP server.
        kind: "vllm", "sglang", or "" if unknown.
        version: its release; "" if unknown.
        models: the names of its model.
        adapters: the LoRA adapters that it serves.
        first_rank: the lowest of its dp_ranks.
        ranks: how many it has.
        is_silent: whether it has left two questions about itself unanswered.
    """

    worker: str
    url: str
    kind: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    first_rank: int = 0
    ranks: int = 1
    is_silent: bool = False


class Pin(NamedTuple):
    """What makes an engine serve a request on one of its DP ranks.

    Attributes:
        headers: fields of the request's head.
        body_fields: fields of its JSON.
    """

    headers: Sequence[tuple[bytes, bytes]] = ()
    body_fields: Mapping[str, Any] = {}


def pin(serving: Serving, rank: Rank) -> Pin:
    """Return what pins a request to a rank of an engine. Engines count their own ranks from 0.

    vLLM and SGLang from 0.5.10 on read the header X-Data-Parallel-Rank, SGLang before that a field
    of the body. An engine with one rank needs neither.

    Examples:
        >>> pin(Serving("a", "http://a", "vllm", first_rank=4, ranks=4), Rank("a", 5)).headers
        ((b'x-data-parallel-rank', b'1'),)
    """
    if serving.ranks < 2:
        return Pin()
    own = rank.dp_rank - serving.first_rank
    if serving.kind == "sglang" and _numbers(serving.version) < _SGLANG_HEADER:
        return Pin(body_fields={_FIELD: own})
    return Pin(headers=((_HEADER, b"%d" % own),))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version; of an unknown one those of a new release."""
    numbers = tuple(map(int, re.findall(r"\d{1,9}", version)[:3]))
    return numbers or _SGLANG_HEADER


def serving_of(worker: str, report: EngineReport) -> Serving:
    """Return an engine by its report."""
    return Serving(
        worker,
        report.url,
        report.kind,
        report.version,
        tuple(name for name in report.models if name not in report.adapters),
        report.adapters,
        report.first_rank,
        max(1, len(report.ranks)),
        report.is_silent,
    )


class Model:
    """A model's name, or that of an adapter: its router, and the engines that serve it.

    Attributes:
        name: as requests name it.
        router: of all names of the model and of its adapters.
        lora: the adapter; None for the model itself.
        servings: its engines, sorted by name.
        ranks: those of the engines; None: all that the router knows.
    """

    def __init__(self, name: str, router: Router, lora: str | None) -> None:
        self.name = name
        self.router = router
        self.lora = lora
        self.servings: list[Serving] = []
        self.ranks: tuple[Rank, ...] | None = ()

    def ranks_of(self, workers: Collection[str]) -> list[Rank]:
        """Return the ranks that are on some of its engines."""
        known = self.router.ranks if self.ranks is None else self.ranks
        return [rank for rank in known if rank.worker in workers]

    def serving(self, rank: Rank) -> Serving | None:
        """Return the engine of a rank; None if it has just come."""
        return next((each for each in self.servings if each.worker == rank.worker), None)


class Models:
    """Follows which models the engines of a client serve.

    The names of one engine's model are names of one model. An adapter belongs to the model of its
    engine.

    Args:
        source: the ranks and what they hold.
        engines: returns the engines' reports by worker; the same object until they change.
        make_router: makes the router of a model; called once for each.

    Owner: one event loop; `servings` and `names` may be called from any thread.
    Complexity: O(1) for a call while nothing changes, else O(engines).
    """

    def __init__(
        self,
        source: Followed,
        engines: Callable[[], Mapping[str, EngineReport]],
        make_router: Callable[[str], Router],
    ) -> None:
        self._source = source
        self._engines = engines
        self._make_router = make_router
        self._seen: tuple[object, object] = (None, None)
        self._following = threading.Lock()  # or two threads would make two routers of a model
        self._models: dict[str, Model] = {}
        self._servings: dict[str, Serving] = {}
        self.routers: dict[str, Router] = {}

    def find(self, name: str) -> Model:
        """Return a model by its name; "" stands for the only one.

        Raises:
            UnknownModelError: no engine serves it.
        """
        models = self._current()
        model = models.get(name)
        if model is None and not name and len(self.routers) == 1 and models:
            model = next(iter(models.values()))
        if model is None:
            raise UnknownModelError(name, models)
        return model

    def table(self) -> Mapping[str, Model]:
        """Return all models and adapters by name; the same object until they change."""
        return self._current()

    def names(self) -> Collection[str]:
        """Return the names of all models and adapters that are served."""
        return self._current().keys()

    def servings(self) -> Mapping[str, Serving]:
        """Return all engines, by worker."""
        self._current()
        return self._servings

    def _current(self) -> dict[str, Model]:
        if self._has_changed():
            with self._following:
                if self._has_changed():
                    seen = engines, ranks = self._engines(), self._source.index.ranks
                    self._follow(engines, ranks)
                    self._seen = seen
        return self._models

    def _has_changed(self) -> bool:
        engines, ranks = self._engines(), self._source.index.ranks
        return (engines, ranks) != self._seen or engines is not self._seen[0]

    def _follow(self, engines: Mapping[str, EngineReport], ranks: tuple[Rank, ...]) -> None:
        servings = [serving_of(worker, report) for worker, report in sorted(engines.items())]
        models: dict[str, Model] = {}
        for serving in servings:
            if not serving.models:
                continue
            router = self._router(serving.models[0], models)
            for name in serving.models:
                models.setdefault(name, Model(name, router, None)).servings.append(serving)
            for name in serving.adapters:
                models.setdefault(name, Model(name, router, name)).servings.append(serving)
        for model in models.values():
            workers = {serving.worker for serving in model.servings}
            own = tuple(rank for rank in ranks if rank.worker in workers)
            model.ranks = None if own == ranks else own
        self._models, self._servings = models, {each.worker: each for each in servings}

    def _router(self, name: str, models: Mapping[str, Model]) -> Router:
        """Return the router of the model of this name; a router is kept, with its load."""
        if name in models:
            return models[name].router
        if name not in self.routers:  # replaced, since another thread may iterate over them
            self.routers = {**self.routers, name: self._make_router(name)}
        return self.routers[name]


# A rank for each request --------------------------------------------------------------------------


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


# Requests that wait -------------------------------------------------------------------------------


class ShedError(KVIndexError):
    """A request that found no room in time.

    Attributes:
        reason: "full": too many requests wait; "deadline": it has waited long enough.
        retry_after: seconds after which to send it again.
    """

    def __init__(self, message: str, *, reason: str, retry_after: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class Ticket:
    """A request's place among those that wait. Owner: one event loop."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()


class Waiting:
    """A bounded queue of requests.

    Only the first one tries to get a rank, whenever the load has fallen; so later ones neither
    overtake it nor all try at once.

    Args:
        most: requests that may wait; 0: none.

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
        """Enqueue a request.

        Raises:
            ShedError: too many wait.
        """
        if len(self._tickets) >= self._most:
            self._shed["full"] += 1
            text = f"no rank has room, and {len(self._tickets)} requests wait, the most that may"
            raise ShedError(text, reason="full", retry_after=1.0)
        ticket = Ticket()
        self._tickets.append(ticket)
        self._waited += 1
        return ticket

    async def turn(self, ticket: Ticket, deadline: float) -> None:
        """Return once the load has fallen and the request is the first.

        Args:
            ticket: from `join`.
            deadline: in seconds of the event loop.

        Raises:
            ShedError: the deadline has passed.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        ticket.woken.clear()
        timer = loop.call_at(deadline, ticket.woken.set)
        try:
            await ticket.woken.wait()
        finally:
            timer.cancel()
        if loop.time() >= deadline:
            self._shed["deadline"] += 1
            text = f"no rank had room for {loop.time() - began:.1f} s"
            raise ShedError(text, reason="deadline", retry_after=1.0)

    def leave(self, ticket: Ticket) -> None:
        """Forget a request, which has a rank or has given up; the next one may try."""
        self._tickets.remove(ticket)
        self.notify()

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
