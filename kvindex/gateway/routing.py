"""Where each request goes: the engines of its model, a rank of theirs, and how that is reached.

An engine's model has a router of its own, which decides by cache and load. A request for which no
rank has room waits in its model's queue: first come, first served.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvindex import KVIndexError, Rank, TokenError, TokenIds, UnknownRankError
from kvindex.gateway.calls import CallError
from kvindex.gateway.waiting import Waiting
from kvindex.routing import Booking, Ejection, Followed, KvSource, NoCandidateError, Router
from kvindex.subscribe.discovery import EngineReport

logger = logging.getLogger(__name__)

_HEADER: Final = b"x-data-parallel-rank"
_FIELD: Final = "data_parallel_rank"
# SGLang reads the header from 0.5.10 on, and the field from 0.5.8 to then.
_SGLANG_HEADER: Final = (0, 5, 10)
_MOST_SHOWN: Final = 20  # models that a message names
_MOST_RESPONSES: Final = 1 << 16  # whose engines are remembered, some 15 MB
_MOST_ID: Final = 128  # characters of a response's id
_MOST_AWAITED: Final = 1024  # ids of responses that may still be reported
_MOST_RENUMBERING: Final = 1 << 16  # bytes of a body whose refusal may teach how ranks are counted


class UnknownModelError(KVIndexError):
    """No engine serves a model; `known` are those that are served."""

    def __init__(self, model: str, known: Collection[str]) -> None:
        self.model = model
        self.known = tuple(sorted(known))
        shown = ", ".join(self.known[:_MOST_SHOWN]) or "none"
        more = len(self.known) - _MOST_SHOWN
        text = f"{shown}, and {more} more" if more > 0 else shown
        what = f"no engine serves the model {model[:200]!r}" if model else "name a model"
        super().__init__(f"{what}; served: {text}")


class Serving(msgspec.Struct, frozen=True):
    """An engine, as the gateway sends requests to it."""

    worker: str  # its name
    url: str  # of its HTTP server
    kind: str = ""  # "vllm", "sglang", or "" if unknown
    version: str = ""
    models: tuple[str, ...] = ()  # the names of its model
    adapters: tuple[str, ...] = ()  # the LoRA adapters that it serves
    first_rank: int = 0  # the lowest of its dp_ranks
    ranks: int = 1  # how many it has
    is_silent: bool = False  # it has left two questions about itself unanswered
    listed: Mapping[str, Mapping[str, Any]] = {}  # by name, as it lists its models and adapters
    away: str = ""  # why it serves nothing now, as it says
    role: str = ""  # "prefill", "decode", or "" if it does both


class Pin(NamedTuple):
    """What makes an engine serve a request on one of its DP ranks: fields of its head and body."""

    headers: Sequence[tuple[bytes, bytes]] = ()
    body_fields: Mapping[str, Any] = {}


def pin(serving: Serving, rank: Rank, *, is_global: bool = False) -> Pin:
    """Return what pins a request to a rank of an engine. Engines count their own ranks from 0.

    Some front ends count the ranks of all engines: `is_global`.

    vLLM and SGLang from 0.5.10 on read the header X-Data-Parallel-Rank, SGLang before that a field
    of the body. An engine with one rank needs neither.

    Examples:
        >>> pin(Serving("a", "http://a", "vllm", first_rank=4, ranks=4), Rank("a", 5)).headers
        ((b'x-data-parallel-rank', b'1'),)
    """
    if serving.ranks < 2:
        return Pin()
    own = rank.dp_rank - (0 if is_global else serving.first_rank)
    release = release_of(serving.version)
    if serving.kind == "sglang" and release and release < _SGLANG_HEADER:
        return Pin(body_fields={_FIELD: own})
    return Pin(headers=((_HEADER, b"%d" % own),))


def source_fields(form: str, source: Serving, rank: Rank) -> Pin:
    """Return what makes an engine pull KV from a rank of another; forms as in `GatewaySettings`.

    "llm-d" is for its routing side-car: host and port of an endpoint, where rank r has port + r.
    "vllm:" is vLLM's own: its P2P tier listens at a port that is raised by the global number of the
    rank (kv_offload/tiering/p2p/manager.py of 0.33). The id is the puller's own.

    Examples:
        >>> source_fields("llm-d", Serving("a", "http://10.0.0.1:80"), Rank("a")).headers
        ((b'x-kv-cache-source-host-port', b'10.0.0.1:80'),)
    """
    url = urlsplit(source.url)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    host = f"[{host}]" if ":" in host else host
    if form == "llm-d":
        port += rank.dp_rank - source.first_rank
        return Pin(headers=((b"x-kv-cache-source-host-port", f"{host}:{port}".encode()),))
    base = form.removeprefix("vllm:")
    port = int(base) + rank.dp_rank + (port if base.startswith("+") else 0)
    where = {"kv_request_id": secrets.token_hex(16), "remote_host": host, "remote_port": port}
    return Pin(body_fields={"kv_transfer_params": {"remote_kv_source": where}})


def release_of(version: str) -> tuple[int, ...]:
    """Return a version's numbers; none, as of a build from source, counts as a new release.

    Examples:
        >>> release_of("0.5.10.post1"), release_of("dev")
        ((0, 5, 10), ())
    """
    return tuple(map(int, re.findall(r"\d{1,9}", version)[:3]))


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
        report.listed,
        report.away,
        report.role,
    )


class Model:
    """A model's name, or that of an adapter: its router, and the engines that serve it."""

    def __init__(self, name: str, router: Router, lora: str | None) -> None:
        self.name = name
        self.router = router  # one for all names of a model and of its adapters
        self.lora = lora  # None for the model itself
        self.servings: list[Serving] = []  # sorted by name
        self.ranks: tuple[Rank, ...] | None = ()  # that answer; None: all of the router's
        self.prefillers: tuple[Rank, ...] = ()  # that only prefill, for those with a role

    def ranks_of(self, workers: Collection[str]) -> list[Rank]:
        """Return the ranks that are on some of its engines."""
        known = self.router.ranks if self.ranks is None else self.ranks
        return [rank for rank in known if rank.worker in workers]

    def serving(self, rank: Rank) -> Serving | None:
        """Return the engine of a rank; None if it has just come."""
        return next((s for s in self.servings if s.worker == rank.worker), None)


class Models:
    """Follows which models the engines of a client serve; `make_router` is called once for each.

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
        self._contested: set[tuple[str, str]] = set()  # names and workers that were logged
        self.routers: dict[str, Router] = {}

    def find(self, name: str) -> Model:
        """Return a model by its name, "" for the only one; raises UnknownModelError."""
        models = self._current()
        model = models.get(name)
        if model is None and not name and len(self.routers) == 1 and models:
            model = next(iter(models.values()))
        if model is None and ":" in name:  # SGLang's way to name an adapter
            base, _, adapter = name.rpartition(":")
            if base in models and adapter in models and models[adapter].lora is not None:
                model = models[adapter]
        if model is None:
            raise UnknownModelError(name, models)
        return model

    def table(self) -> Mapping[str, Model]:
        """Return all models and adapters by name; the same object until they change."""
        return self._current()

    def names(self) -> Collection[str]:
        """Return the names of all models and adapters that are served."""
        return self._current().keys()

    def name_of(self, worker: str) -> str:
        """Return the name of an engine's model; "" if it is not known. From any thread."""
        serving = self.servings().get(worker)
        return serving.models[0] if serving is not None and serving.models else ""

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
        # Both are the same objects until they change, so that this costs no look at the engines.
        engines, ranks = self._engines(), self._source.index.ranks
        return (engines, ranks) != self._seen or engines is not self._seen[0]

    def _follow(self, engines: Mapping[str, EngineReport], ranks: tuple[Rank, ...]) -> None:
        servings = {
            worker: serving_of(worker, report) for worker, report in sorted(engines.items())
        }
        models: dict[str, Model] = {}
        for serving in servings.values():
            if not serving.models:
                continue
            # The names of one engine's model are names of one model, whichever engine was first; an
            # adapter belongs to the model of its engine, since it shares that one's cache and load.
            name = serving.models[0]
            if name in models:
                router = models[name].router
            else:
                if name not in self.routers:  # replaced, since another thread may iterate over them
                    self.routers = {**self.routers, name: self._make_router(name)}
                router = self.routers[name]  # kept while its engines are away, with its load
            for name in serving.models:
                self._serve(models, Model(name, router, None), serving)
        # Behind all models: who loads an adapter must not get the requests of a model.
        for serving in servings.values():
            if serving.models:
                router = models[serving.models[0]].router
                for name in serving.adapters:
                    self._serve(models, Model(name, router, name), serving)
        for model in models.values():
            roles = {serving.worker: serving.role for serving in model.servings if not serving.away}
            own = tuple(rank for rank in ranks if roles.get(rank.worker, "prefill") != "prefill")
            model.ranks = None if own == ranks else own  # None spares each request a mask
            # Others can do without: so not one that does not answer, which costs a time-out.
            silent = {serving.worker for serving in model.servings if serving.is_silent}
            model.prefillers = tuple(
                rank
                for rank in ranks
                if roles.get(rank.worker) == "prefill" and rank.worker not in silent
            )
        self._models, self._servings = models, servings

    def _serve(self, models: dict[str, Model], named: Model, serving: Serving) -> None:
        """Note that an engine serves a model by a name, unless the name is another one's."""
        model = models.setdefault(named.name, named)
        if (model.router, model.lora) == (named.router, named.lora):
            model.servings.append(serving)
        elif (named.name, serving.worker) not in self._contested:
            if len(self._contested) > 4096:  # engines come and go
                self._contested.clear()
            self._contested.add((named.name, serving.worker))
            logger.warning(
                "%s serves something else by the name %.200s than %s: requests for that name go to "
                "%s alone",
                *(serving.worker, named.name, *[model.servings[0].worker] * 2),
            )


# A rank for each request --------------------------------------------------------------------------


class NoRankError(KVIndexError):
    """A request can be sent nowhere; `reasons` counts the refused ranks."""

    def __init__(self, reasons: Mapping[str, int]) -> None:
        self.reasons = dict(reasons)
        shown = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        super().__init__(f"no rank can serve this request: {shown or 'no rank is known yet'}")


class Routing:
    """Reserves ranks with the routers of the models. Owner: one event loop."""

    def __init__(
        self,
        models: Models,
        most_waiting: int,
        ejection: Ejection | None = None,
        ask_again: Callable[[str], Awaitable[None]] | None = None,
        kv_source: str | None = None,
    ) -> None:
        self._models = models
        self._kv_source = kv_source  # the form in which engines are told of sources of KV
        self._ask_again = ask_again
        self.ejection = ejection or Ejection()
        # No router's filter: else those that prefill would count among the half that is left out.
        self.prefill_ejection = Ejection(share=1.0)
        self._seen_media: OrderedDict[bytes, Rank] = OrderedDict()
        self._makers: OrderedDict[str, str] = OrderedDict()  # workers, by their responses' ids
        self._awaited: dict[str, asyncio.Event] = {}  # ids of responses that are asked for
        self.made_within = 0.0  # seconds after an answer in which its id may still be reported
        self.counting_globally: set[str] = set()  # workers; see `pin`
        self._waiting: defaultdict[Router, Waiting] = defaultdict(partial(Waiting, most_waiting))

    def servings(self, model: str) -> Sequence[Serving]:
        """Return the engines of a model; raises UnknownModelError."""
        return self._models.find(model).servings

    async def known(self, model: str) -> Sequence[Serving]:
        """As `servings`; engines are asked again first: an adapter may have been loaded since."""
        try:
            return self.servings(model)
        except UnknownModelError:
            if self._ask_again is not None:
                await self._ask_again(model)
            return self.servings(model)

    def models(self) -> Mapping[str, Sequence[Serving]]:
        """Return the engines of each model and adapter, by its name. O(models)."""
        return {name: model.servings for name, model in self._models.table().items()}

    def listed(self) -> list[dict[str, Any]]:
        """Return all models, behind them all adapters, as their engines list them. O(models)."""
        entries = []
        models = self._models.table().values()
        for model in sorted(models, key=lambda model: (model.lora is not None, model.name)):
            servings = [s for s in model.servings if _answers(s)]
            if servings:  # else nobody would answer
                entry = servings[0].listed.get(model.name, {"owned_by": "kvindex", "created": 0})
                entries.append({"object": "model", **entry, "id": model.name})
        return entries

    @property
    def is_ready(self) -> bool:
        """Whether some engine would answer. O(engines)."""
        drained = self.drained()
        return any(
            _answers(serving) and serving.worker not in drained
            for serving in self._models.servings().values()
        )

    def note_made(self, response_id: str, worker: str) -> None:
        """Note which engine has made a response: it alone has it."""
        if 0 < len(response_id) <= _MOST_ID:
            self._makers[response_id] = worker
            if len(self._makers) > _MOST_RESPONSES:
                self._makers.popitem(last=False)
        if (made := self._awaited.pop(response_id, None)) is not None:
            made.set()

    async def maker(self, response_id: str) -> Serving | None:
        """Return the engine that has made a response; None if it is not known, or has gone."""
        # Clients may ask for any ids: many of them must not cost those that are made.
        may_wait = self.made_within and len(self._awaited) < _MOST_AWAITED
        if response_id not in self._makers and may_wait:
            made = self._awaited.setdefault(response_id, asyncio.Event())
            try:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(made.wait(), self.made_within)
            finally:
                self._awaited.pop(response_id, None)
        return self._models.servings().get(self._makers.get(response_id, ""))

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
        media: bytes = b"",
        may_pull: bool = False,
    ) -> Reservation:
        """Reserve a rank for a request; wait for one if none has room.

        Args:
            model: its name, or that of an adapter; "": the only one.
            token_ids: the prompt; None if its tokens are not known.
            prompt_tokens: how many there are in all prompts of the request, perhaps as an estimate.
            salt: the request's cache salt.
            reads_cache: whether the engine reads its cache for it.
            exclude: the ranks that were tried before.
            request_id: of the booking; no two open requests have the same.
            deadline: until when it may wait, in seconds of the event loop.
            workers: names of the engines that count; None: all.
            media: a name of what the prompt shows and its tokens do not say. It goes where it went
                before, unless that rank has much more to do than others.
            may_pull: whether its engine may be told where to pull KV from.

        Raises:
            UnknownModelError, NoRankError, ShedError: it has no rank.
            CallError: a token is none.
        """
        waiting = self._waiting[self._models.find(model).router]
        ticket = None
        try:
            while True:
                # Who waits is first come, first served: a new request does not pass the queue.
                if not len(waiting) if ticket is None else waiting.is_first(ticket):
                    served = self._models.find(model)  # anew: engines come and go meanwhile
                    before = self._rank_of(media, served, workers, exclude)
                    booking = _book(
                        served,
                        token_ids,
                        served.ranks if workers is None else served.ranks_of(workers),
                        exclude,
                        before,
                        request_id=request_id,
                        salt=salt,
                        reads_cache=reads_cache,
                        prompt_tokens=prompt_tokens,
                    )
                    serving = None if booking is None else served.serving(booking.rank)
                    if booking is not None and media:
                        self._seen_media[media] = booking.rank
                        self._seen_media.move_to_end(media)
                        if len(self._seen_media) > _MOST_RESPONSES:
                            self._seen_media.popitem(last=False)
                    if booking is not None and serving is not None:
                        reservation = Reservation(booking, serving, waiting, self)
                        reservation.has_seen = booking.rank == before
                        if may_pull and self._kv_source is not None:
                            reservation.tell(self._kv_source, served)
                        return reservation
                    if booking is not None:  # the rank has come since `find`
                        booking.cancel()
                        continue
                ticket = ticket or waiting.join()
                await waiting.turn(ticket, deadline)
        finally:
            if ticket is not None:
                waiting.leave(ticket)

    def reserve_prefill(
        self, model: str, token_ids: TokenIds | None, *, exclude: Sequence[Rank], **options: Any
    ) -> Reservation | None:
        """Reserve a rank that prefills a request for another one; None if there is none now.

        Arguments as for `reserve`; it waits for nothing, and tries no engine that was ejected.
        """
        is_out = self.prefill_ejection.is_out
        try:
            served = self._models.find(model)
            ranks = [rank for rank in served.prefillers if not is_out(rank.worker)]
            booking = _book(served, token_ids, ranks, exclude, None, **options) if ranks else None
        except (UnknownModelError, NoRankError):  # it may have been unloaded just now
            return None
        serving = None if booking is None else served.serving(booking.rank)
        if booking is None or serving is None:
            return None
        return Reservation(booking, serving, self._waiting[served.router], self)

    def _rank_of(
        self,
        media: bytes,
        model: Model,
        workers: Collection[str] | None,
        exclude: Sequence[Rank],
    ) -> Rank | None:
        """Return the rank that has seen a prompt's media, if it may serve the prompt again."""
        rank = self._seen_media.get(media) if media else None
        known = model.router.ranks if model.ranks is None else model.ranks
        if rank is None or rank in exclude or rank not in known:
            return None
        if workers is not None and rank.worker not in workers:
            return None
        opened = [model.router.load(other).open_requests for other in known]
        is_busy = model.router.load(rank).open_requests > 2 * (sum(opened) / len(opened)) + 2
        return None if is_busy else rank

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
            **self.ejected(),
            "routers": {name: router.statistics() for name, router in routers.items()},
            "waiting": {
                name: self._waiting[router].statistics()
                for name, router in routers.items()
                if router in self._waiting
            },
        }

    def ejected(self) -> dict[str, Any]:
        """Return what `Ejection.statistics` does, of engines that get no requests for it."""
        ejections = (self.ejection, self.prefill_ejection)
        told, apart = (each.statistics(self._models.servings()) for each in ejections)
        ejected, drained = told["ejected"], self.drained()
        for model in self._models.table().values():
            if model.lora is not None:
                continue
            left = [
                s.worker
                for s in model.servings
                if not s.away and s.worker not in drained and s.role != "prefill"
            ]
            if all(worker in ejected for worker in left):  # some failing engine is better than none
                for worker in left:
                    del ejected[worker]
        return {
            "ejections": told["ejections"] + apart["ejections"],
            "ejected": ejected | apart["ejected"],
        }

    def _each(self, worker: str, change: Any) -> None:
        if worker not in self._models.servings():
            raise UnknownRankError(worker, self._models.servings())
        # All: an engine may serve another model after its restart.
        for router in self._models.routers.values():
            change(router, worker)


def _answers(serving: Serving) -> bool:
    """Return whether clients' requests are answered by an engine, as it stands."""
    return not (serving.is_silent or serving.away or serving.role == "prefill")


def _book(
    model: Model,
    token_ids: TokenIds | None,
    ranks: Sequence[Rank] | None,
    exclude: Sequence[Rank],
    only: Rank | None,
    **options: Any,
) -> Booking | None:
    """Reserve a rank, `only` this one if it may be chosen; None if none has room."""
    router = model.router
    known = router.ranks
    if only is not None:
        with suppress(NoCandidateError, UnknownRankError):
            return router.reserve((), ranks=only, lora=model.lora, **options)
    try:
        return router.reserve(
            () if token_ids is None else token_ids,
            ranks=ranks,
            # A rank that was tried and has gone since is no rank any more.
            exclude=[rank for rank in exclude if rank in known],
            lora=model.lora,
            **options,
        )
    except NoCandidateError as error:
        if "capacity" in error.refused:  # the only reason that passes by itself
            return None
        raise NoRankError(error.refused) from None
    except UnknownRankError:  # a rank has gone just now
        raise NoRankError({"gone": 1}) from None
    except TokenError as error:
        raise CallError(400, f"the prompt has a token that is none: {error}") from None


# Such as "data_parallel_rank 0 is out of range", "no such DP rank" and "ranks here are 4 to 7".
_ABOUT_RANKS: Final = re.compile(rb"(?<![a-z])ranks?(?![a-z])|dp_?ranks?", re.IGNORECASE)
_TELLS_RANKS: Final = re.compile(rb"rank|\\u", re.IGNORECASE)
_DOWN: Final = frozenset({"refused", "unreachable", "timeout_connect"})


class Reservation:
    """A rank that is reserved for a request. Calls after its end change nothing."""

    def __init__(
        self,
        booking: Booking,
        serving: Serving,
        waiting: Waiting,
        routing: Routing,
    ) -> None:
        is_apart = serving.role == "prefill"
        self._ejection = routing.prefill_ejection if is_apart else routing.ejection
        self._sent = self._ejection.sent(serving.worker)
        self.rank = booking.rank
        self.serving = serving
        self._is_global = serving.worker in routing.counting_globally
        self.pin = pin(serving, booking.rank, is_global=self._is_global)
        self.has_seen = False  # the media of this prompt before
        self.source: KvSource | None = None  # that the engine is told to pull from
        self.told = Pin()  # by which fields
        self.prompt_tokens = booking.decision.prompt_tokens
        self._booking = booking
        self._waiting = waiting
        self._routing = routing

    def tell(self, form: str, model: Model) -> None:
        """Have the engine told which rank to pull KV from, if another holds more of the prompt."""
        source = self._booking.decision.source
        serving = None if source is None else model.serving(source.rank)
        if source is None or serving is None:
            return
        # vLLM's field means nothing to other engines, and only vLLM answers its tier.
        if form == "llm-d" or serving.kind == self.serving.kind == "vllm":
            self.source, self.told = self._booking.pull(), source_fields(form, serving, source.rank)

    def fetch(self) -> None:
        """Have another rank prefill the prompt, which this one fetches."""
        self._booking.fetch()

    def fetched(self) -> None:
        """Report that the other rank has done it: this one pulls from no other source."""
        self.source, self.told = None, Pin()
        self._booking.touch()

    def compute(self) -> None:
        """Have this rank prefill the prompt by itself after all."""
        self._booking.compute()

    def prefilled(self) -> None:
        """Report that the prompt is prefilled, and its blocks wait for another rank."""
        self._booking.pin()
        self._waiting.notify()

    @property
    def missing(self) -> int:
        """The tokens of the prompt that the rank lacks; none if it has seen its media."""
        # Such a prompt's tokens are not known; but it alone holds the turns before.
        return 0 if self.has_seen else self._booking.decision.new_tokens

    @property
    def attainable(self) -> int:
        """The most tokens that any rank held of the prompt. O(ranks)."""
        return self._booking.decision.attainable

    @property
    def held(self) -> int:
        """The tokens of the prompt that the rank will find cached."""
        return self._booking.decision.tokens

    @property
    def reason(self) -> str:
        """Why this rank: by its "cache", by its "load", or there were "no_tokens" to look up."""
        if not self._booking.decision.reads_cache:
            return "no_tokens"
        return "cache" if self.held else "load"

    @property
    def explained(self) -> dict[str, str]:
        """Where the request goes, and why, as fields of its answer."""
        return {
            "x-kvindex-rank": str(self.rank),
            "x-kvindex-held": str(self.held),
            "x-kvindex-reason": self.reason,
        }

    def failed(self, reason: str) -> None:
        """Report that the engine failed the request."""
        if reason == "no_descriptor":  # it is this process that lacks them
            return
        self._ejection.failed(self.rank.worker, self._sent, is_down=reason in _DOWN, reason=reason)

    def answered(self) -> None:
        """Report that the engine has answered the request, or refuses it for what it asks."""
        self._ejection.succeeded(self.rank.worker, self._sent)

    def made(self, response_id: str) -> None:
        """Report the id of the response that the engine makes."""
        self._routing.note_made(response_id, self.rank.worker)

    def is_misnumbered(self, refusal: bytes, body: bytes) -> bool:
        """Return whether the engine counts its ranks otherwise, by its 400; note that it does."""
        if self.serving.ranks < 2 or not self.serving.first_rank:
            return False
        # Refusals repeat what a client has sent, and no client may renumber ranks. It may have
        # written them with escapes; the next plain request teaches it.
        is_plain = len(body) <= _MOST_RENUMBERING and not _TELLS_RANKS.search(body)
        if not is_plain or not _ABOUT_RANKS.search(refusal):
            return False
        # Should that have been about something else, the next 400 turns it back. By how this one
        # was sent: several such requests may have been on their way.
        if self._is_global:
            self._routing.counting_globally.discard(self.serving.worker)
        else:
            self._routing.counting_globally.add(self.serving.worker)
        return True

    def move(self, serving: Serving) -> None:
        """Count the request on another engine, which serves it instead."""
        worker = serving.worker
        ranks = [rank for rank in self._booking.decision.ranks if rank.worker == worker]
        if ranks:
            # A proxy tries again with the same head: so it is the rank with the same number there.
            own = self.rank.dp_rank - self.serving.first_rank
            if worker != self.rank.worker:
                self.failed("moved")
                self._sent = self._ejection.sent(worker)
            self.rank = ranks[min(own, len(ranks) - 1)]
            self._booking.move(self.rank)
            self.serving, self.source = serving, None

    def first_token(self) -> None:
        """Report the first token."""
        self._ejection.begun(self.rank.worker, self._sent)
        self._booking.first_token()
        self._waiting.notify()

    def touch(self, output_tokens: int) -> None:
        """Report how many tokens were generated so far."""
        # Usage may report fewer than the events did: a booking's tokens only grow.
        more = output_tokens - self._booking.output_tokens
        if more > 0:
            self._booking.output(more)
        else:
            self._booking.touch()

    def finish(self, cached_tokens: int | None, *, counts: bool) -> None:
        """Release the rank: the request has its answer; arguments as for `Booking.finish`."""
        self._booking.finish(cached_tokens, counts=counts)
        self._waiting.notify()

    def cancel(self) -> None:
        """Release the rank: the request ends without an answer."""
        self._booking.cancel()
        self._waiting.notify()
