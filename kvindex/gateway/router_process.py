"""The router process of a gateway with several proxies: it decides for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from kvindex import Rank, UnknownRankError
from kvindex.gateway.calls import CallError
from kvindex.gateway.choosing import NoRankError, Place
from kvindex.gateway.counting import added
from kvindex.gateway.link import (
    Answered,
    Ask,
    FromProxy,
    FromRouter,
    Held,
    Link,
    Placed,
    Progress,
    Refused,
    Reserve,
    Table,
    pair,
    unpacked,
)
from kvindex.gateway.models import Model, UnknownModelError
from kvindex.gateway.routers import Routers
from kvindex.gateway.waiting import ShedError

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.1  # between looks at which engines there are


class RouterProcess:
    """Serves proxies at a unix socket. A proxy that ends leaves no booking behind.

    Args:
        routers: decide.
        path: of the socket.

    Owner: one event loop.
    """

    def __init__(self, routers: Routers, path: str) -> None:
        self.routers = routers
        self._path = path
        self._sessions: set[_Session] = set()
        self._gone: dict[str, Any] = {}  # the counters of proxies that have ended
        self._table: Mapping[str, Model] = {}

    async def serve(self, ending: asyncio.Event) -> None:
        """Serve until the event is set. Proxies first hear of engines once these were asked."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _Session(self).link, self._path)
        try:
            while not ending.is_set():
                self._look()
                try:
                    await asyncio.wait_for(ending.wait(), _LOOK_SECONDS)
                except asyncio.TimeoutError:
                    pass
        finally:
            server.close()
            for session in list(self._sessions):
                session.link.close()

    def _look(self) -> None:
        """Send the proxies which engines there are, if that has changed; book what they hold."""
        table = self.routers.models.table()
        is_new = table is not self._table
        self._table = table
        for session in self._sessions:
            if is_new:
                session.send_table(table)
            session.book_held()

    def join(self, session: _Session) -> None:
        """Accept a proxy."""
        self._sessions.add(session)
        session.send_table(self._table)

    def leave(self, session: _Session) -> None:
        """Forget a proxy; what it counted stays in the sum, but what was open there."""
        self._sessions.discard(session)
        ended = {**session.counted, "open": 0} if session.counted else {}
        self._gone = added([self._gone, ended])

    def counted(self) -> dict[str, Any]:
        """Return the counters of all proxies, each as it was up to a second ago."""
        return added([self._gone, *(session.counted for session in self._sessions)])


class _Session:
    """One proxy's connection."""

    def __init__(self, process: RouterProcess) -> None:
        self.counted: dict[str, Any] = {}
        joined = partial(process.join, self)
        self.link = Link(FromProxy, self.receive, self.close, joined)
        self._process = process
        self._routers = process.routers
        self._places: dict[int, Place] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, Held] = {}  # whose rank is not known yet

    def send_table(self, table: Mapping[str, Model]) -> None:
        """Send which engines there are, once there are any."""
        models = {name: list(model.servings) for name, model in table.items()}
        if models:
            self.link.send(Table(models))

    def book_held(self) -> None:
        """Book what the proxy holds on ranks that were not known before."""
        for held in list(self._held.values()):
            self._hold(held)

    def close(self) -> None:
        """End all that the proxy has open."""
        for task in self._tasks.values():
            task.cancel()
        for place in self._places.values():
            place.cancel()
        self._places.clear()
        self._held.clear()
        self._process.leave(self)

    def receive(self, message: FromProxy) -> None:
        """Act on a message."""
        if isinstance(message, Progress):
            self._progress(message)
        elif isinstance(message, Reserve):
            self._run(message.number, self._reserve(message))
        elif isinstance(message, Held):
            self._hold(message)
        elif isinstance(message, Ask):
            self._run(-1 - message.number, self._answer(message))
        else:
            self.counted = message.statistics

    def _run(self, number: int, work: Any) -> None:
        task = self._tasks[number] = asyncio.ensure_future(work)
        task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a question of a proxy failed", exc_info=task.exception())
            self.link.close()  # it goes on without this process, and comes again

    async def _reserve(self, message: Reserve) -> None:
        number = message.number
        try:
            place = await self._routers.routing.reserve(
                message.model,
                unpacked(message.token_ids),
                prompt_tokens=message.prompt_tokens,
                salt=message.salt,
                reads_cache=message.reads_cache,
                exclude=[Rank(*each) for each in message.exclude],
                request_id=message.request_id,
                deadline=asyncio.get_running_loop().time() + message.within,
            )
        except (UnknownModelError, NoRankError, ShedError, CallError) as error:
            self.link.send(_refusal(number, error))
            return
        self._places[number] = place
        self.link.send(
            Placed(
                number=number,
                rank=pair(place.rank),
                serving=place.serving,
                reason=place.reason,
                held=place.held,
                prompt_tokens=place.prompt_tokens,
            )
        )

    def _hold(self, held: Held) -> None:
        """Book a request that a proxy has routed without this process, once its rank is known."""
        place = self._routers.routing.hold(
            held.model,
            Rank(*held.rank),
            request_id=held.request_id,
            prompt_tokens=held.prompt_tokens,
            new_tokens=held.new_tokens,
        )
        if place is None:
            self._held[held.number] = held
            return
        self._held.pop(held.number, None)
        self._places[held.number] = place
        if held.has_first_token:
            place.first_token()

    def _progress(self, message: Progress) -> None:
        number, call, argument = message.number, message.call, message.argument
        if call == "leave" and number in self._tasks:
            self._tasks[number].cancel()
            return
        held = self._held.get(number)
        if held is not None:
            if call == "first_token":
                self._held[number] = msgspec.structs.replace(held, has_first_token=True)
            elif call in ("finish", "cancel", "leave"):
                del self._held[number]
            return
        place = self._places.get(number)
        if place is None:
            return
        if call == "first_token":
            place.first_token()
        elif call == "touch":
            place.touch(argument or 0)
        else:
            del self._places[number]
            if call == "finish":
                place.finish(argument)
            else:
                place.cancel()

    async def _answer(self, message: Ask) -> None:
        answers: dict[str, Callable[[], Any]] = {
            "statistics": self._statistics,
            "metrics": lambda: self._routers.metrics(self._process.counted()),
            "drain": lambda: self._drain(message.argument, True),
            "undrain": lambda: self._drain(message.argument, False),
        }
        try:
            body = await answers[message.call]()
            self.link.send(Answered(message.number, body))
        except UnknownRankError as error:
            self.link.send(Answered(message.number, None, [str(each) for each in error.known]))

    async def _statistics(self) -> bytes:
        return msgspec.json.encode(await self._routers.statistics(self._process.counted()))

    async def _drain(self, worker: str, is_drained: bool) -> bytes:
        await self._routers.drain(worker, is_drained)
        return b""


def _refusal(
    number: int, error: UnknownModelError | NoRankError | ShedError | CallError
) -> FromRouter:
    text = str(error)
    if isinstance(error, UnknownModelError):
        return Refused(number=number, kind="model", text=error.model, known=error.known)
    if isinstance(error, NoRankError):
        return Refused(number=number, kind="rank", text=text, reasons=error.reasons)
    if isinstance(error, ShedError):
        return Refused(
            number=number,
            kind="shed",
            text=text,
            reason=error.reason,
            retry_after=error.retry_after,
        )
    return Refused(number=number, kind="call", text=text)
