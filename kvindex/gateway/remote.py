"""A proxy's routing: it asks the router process, and decides by itself while there is none."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import msgspec

from kvindex import KVIndexError, Rank, TokenIds, UnknownRankError
from kvindex.gateway.calls import CallError
from kvindex.gateway.choosing import NoRankError, Place
from kvindex.gateway.link import (
    Ask,
    Counted,
    FromRouter,
    Held,
    Link,
    Placed,
    Progress,
    Refused,
    Reserve,
    Table,
    packed,
    pair,
)
from kvindex.gateway.models import Serving, UnknownModelError, pin
from kvindex.gateway.routers import NoRouterError
from kvindex.gateway.waiting import ShedError

logger = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 0.1  # between tries to reach the router process
_READY_SECONDS: Final = 10.0
_COUNTED_SECONDS: Final = 1.0  # between reports of counters


class RemoteRouting:
    """Reserves ranks in the router process at a unix socket.

    While that process is gone, requests go to the rank of their model with the fewest requests of
    this proxy; once it is back, those that are open are booked there.

    Args:
        path: of the socket.

    Owner: one event loop.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._link: Link | None = None
        self._is_ready = False  # the router process has sent which engines there are
        self._models: dict[str, list[Serving]] = {}
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._places: dict[int, _RemotePlace] = {}
        self._open: Counter[Rank] = Counter()
        self._counters: Counter[str] = Counter()
        self._closed = self._ready = asyncio.Event()

    async def run(self, statistics: Callable[[], dict[str, Any]], ready: asyncio.Event) -> None:
        """Keep the connection until it is cancelled.

        Args:
            statistics: returns the counters of this proxy.
            ready: is set once it is known which engines there are, or after 10 s.
        """
        loop = asyncio.get_running_loop()
        self._ready = ready
        loop.call_later(_READY_SECONDS, ready.set)
        while True:
            self._closed = asyncio.Event()
            link = Link(FromRouter, self._receive, self._closed.set)
            self._link = link  # messages may come before this task goes on
            try:
                await loop.create_unix_connection(partial(_itself, link), self._path)
            except OSError:
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            self._report(link, statistics)
            try:
                await self._closed.wait()  # not `wait_for`: that may swallow a cancellation
            finally:
                self._lose(link)

    def _report(self, link: Link, statistics: Callable[[], dict[str, Any]]) -> None:
        """Send the counters, again and again while the link is open."""
        if link.is_open:
            link.send(Counted(statistics()))
            loop = asyncio.get_running_loop()
            loop.call_later(_COUNTED_SECONDS, self._report, link, statistics)

    def _lose(self, link: Link) -> None:
        """Go on without the router process."""
        link.close()
        self._link, self._is_ready = None, False
        self._counters["lost"] += 1
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(NoRouterError())

    # Routing ------------------------------------------------------------------------------------

    def servings(self, model: str) -> Sequence[Serving]:
        """Return the engines of a model; raises UnknownModelError."""
        servings = self._models.get(model)
        if servings is None and not model and self._models:
            first, *others = self._models.values()
            if all(each[0].models[:1] == first[0].models[:1] for each in others):
                servings = first
        if servings is None:
            raise UnknownModelError(model, self._models)
        return servings

    def models(self) -> Mapping[str, Sequence[Serving]]:
        """Return the engines of each model and adapter, by its name."""
        return self._models

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
    ) -> Place:
        """Reserve a rank, as `Routing.reserve`."""
        if not self._is_ready:
            return self._decide(model, prompt_tokens, exclude, request_id)
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        try:
            ids = packed(token_ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise CallError(400, f"the prompt has a token that is none: {error}") from None
        message = Reserve(
            number=number,
            model=model,
            token_ids=ids,
            prompt_tokens=prompt_tokens,
            salt=salt,
            reads_cache=reads_cache,
            exclude=[pair(rank) for rank in exclude],
            request_id=request_id,
            within=max(0.0, deadline - loop.time()),
        )
        try:
            found = await self._ask(number, message)
        except NoRouterError:
            return self._decide(model, prompt_tokens, exclude, request_id)
        except asyncio.CancelledError:
            self.send(Progress(number, "leave"))
            raise
        if isinstance(found, Refused):
            raise _refused(found)
        self._counters["asked"] += 1
        return _RemotePlace(self, found, model, request_id)

    def _decide(
        self, model: str, prompt_tokens: int, exclude: Sequence[Rank], request_id: str
    ) -> Place:
        """Choose the rank with the fewest requests of this proxy."""
        ranks = {
            Rank(serving.worker, serving.first_rank + own): serving
            for serving in self.servings(model)
            for own in range(serving.ranks)
        }
        usable = [rank for rank in ranks if rank not in exclude]
        if not usable:
            raise NoRankError({"excluded": len(ranks)})
        rank = min(usable, key=lambda rank: self._open[rank])
        self._counters["decided_alone"] += 1
        placed = Placed(
            number=next(self._numbers),
            rank=pair(rank),
            serving=ranks[rank],
            reason="alone",
            held=0,
            prompt_tokens=prompt_tokens,
        )
        return _RemotePlace(self, placed, model, request_id)

    # Admin --------------------------------------------------------------------------------------

    async def statistics(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the counters of all processes, as `Admin.statistics`; raises NoRouterError."""
        read: dict[str, Any] = msgspec.json.decode((await self._ask_router(own, "statistics")).body)
        return read

    async def metrics(self, own: Mapping[str, Any]) -> bytes:
        """Return Prometheus series, as `Admin.metrics`; raises NoRouterError."""
        body: bytes = (await self._ask_router(own, "metrics")).body
        return body

    async def drain(self, worker: str, is_drained: bool) -> None:
        """Drain an engine, or end that, as `Admin.drain`; raises NoRouterError."""
        answered = await self._ask_router(None, "drain" if is_drained else "undrain", worker)
        if answered.body is None:
            raise UnknownRankError(worker, answered.known)

    async def _ask_router(
        self, own: Mapping[str, Any] | None, call: str, argument: str = ""
    ) -> Any:
        if not self._is_ready:
            raise NoRouterError
        if own is not None:
            self.send(Counted(dict(own)))
        number = next(self._numbers)
        return await self._ask(number, Ask(number, call, argument))

    # The connection -----------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return counters: ranks `asked` for and `decided_alone`; times the router was `lost`."""
        return {name: self._counters[name] for name in ("asked", "decided_alone", "lost")}

    def send(self, message: Any) -> None:
        """Send a message, if there is somebody to receive it."""
        if self._link is not None:
            self._link.send(message)

    def begin(self, number: int, place: _RemotePlace) -> None:
        """Count a place as open."""
        self._places[number] = place
        self._open[place.rank] += 1

    def end(self, number: int, place: _RemotePlace) -> None:
        """Count a place no more."""
        del self._places[number]
        self._open[place.rank] -= 1
        if not self._open[place.rank]:
            del self._open[place.rank]

    async def _ask(self, number: int, message: Any) -> Any:
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(message)
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def _receive(self, message: FromRouter) -> None:
        if isinstance(message, Table):
            self._models = message.models
            self._ready.set()
            if not self._is_ready:
                self._is_ready = True
                for number, place in self._places.items():
                    self.send(place.held_as(number))
            return
        future = self._asked.get(message.number)
        if future is not None and not future.done():
            future.set_result(message)
        elif isinstance(message, Placed):  # its request has left meanwhile
            self.send(Progress(message.number, "cancel"))


class _RemotePlace:
    """A rank that the router process has booked, or will hear of."""

    def __init__(self, routing: RemoteRouting, placed: Placed, model: str, request_id: str) -> None:
        self.rank = Rank(*placed.rank)
        self.serving = placed.serving
        self.pin = pin(placed.serving, self.rank)
        self.reason = placed.reason
        self.held = placed.held
        self.prompt_tokens = placed.prompt_tokens
        self._routing = routing
        self._number = placed.number
        self._model = model
        self._request_id = request_id
        self._has_first_token = False
        self._is_open = True
        routing.begin(self._number, self)

    def held_as(self, number: int) -> Held:
        """Return the message about it to a router process that does not know it."""
        return Held(
            number=number,
            model=self._model,
            rank=pair(self.rank),
            request_id=self._request_id,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.prompt_tokens - self.held,
            has_first_token=self._has_first_token,
        )

    def first_token(self) -> None:
        self._has_first_token = True
        self._report("first_token")

    def touch(self, output_tokens: int) -> None:
        self._report("touch", output_tokens)

    def finish(self, cached_tokens: int | None) -> None:
        self._end("finish", cached_tokens)

    def cancel(self) -> None:
        self._end("cancel")

    def _end(self, call: str, argument: int | None = None) -> None:
        if self._is_open:
            self._report(call, argument)
            self._is_open = False
            self._routing.end(self._number, self)

    def _report(self, call: str, argument: int | None = None) -> None:
        if self._is_open:
            self._routing.send(Progress(self._number, call, argument))


def _itself(link: Link) -> Link:
    return link


def _refused(found: Refused) -> KVIndexError:
    """Return the error that the router process raised."""
    if found.kind == "model":
        return UnknownModelError(found.text, found.known)
    if found.kind == "rank":
        return NoRankError(found.reasons)
    if found.kind == "shed":
        return ShedError(found.text, reason=found.reason, retry_after=found.retry_after)
    return CallError(400, found.text)
