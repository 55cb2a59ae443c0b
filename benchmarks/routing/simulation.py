"""Requests come, routers choose, engines work: one run, event by event, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.routing.engine import Engine, Job, Model, Progress
from benchmarks.routing.payloads import payload
from benchmarks.routing.traffic import Session, Turn, tokens_of
from kvindex import Index, Rank

if TYPE_CHECKING:
    from kvindex.routing import Booking, Router


@dataclass(frozen=True)
class Loss:
    """An engine that dies and comes back with nothing.

    Attributes:
        rank: its number.
        at: seconds from the start of the run until it dies.
        notice: seconds until the gateways notice; what it had is then sent elsewhere.
        back: seconds until a new one is there in its place.
    """

    rank: int
    at: float
    notice: float = 1.0
    back: float = 30.0


class Clock:
    """The virtual time, in seconds; call it as a router calls its clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False, slots=True)
class Request:
    """What became of one request.

    Attributes:
        turn: its prompt and answer.
        arrival: when, in seconds.
        first: when its first token came.
        finished: when its last token came.
        predicted: tokens that the router expected to be cached.
        hit: tokens that the engine found cached.
        rank: the number of the rank that served it.
        sent: how often it was sent.
        apart: whether one engine prefilled it and another one decoded.
    """

    turn: Turn
    arrival: float
    gateway: int
    session: tuple[int, int]  # its number, in the order of their beginnings, and the turn's
    first: float | None = None
    finished: float | None = None
    predicted: int = 0
    hit: int = 0
    rank: int = -1
    sent: int = 0
    apart: bool = False


class Place:
    """A rank, and the engine that stands there now."""

    def __init__(self, number: int, rank: Rank, engine: Engine) -> None:
        self.number = number
        self.rank = rank
        self.engine: Engine | None = engine
        self.lost: list[int] = []  # requests that a dead engine had

    @property
    def standing(self) -> Engine:
        """The engine, where none dies."""
        assert self.engine is not None
        return self.engine


class Simulation:
    """A fleet behind one or more routers.

    Args:
        index: what the routers ask; it is empty.
        routers: one for each gateway, over this index and this clock.
        clock: the time, which the run moves on.
        ranks: how many engines.
        model: what each can do.
        event_delay: seconds until the index learns what an engine did.
        seed: of which gateway takes a request.

    Attributes:
        requests: all that have arrived, in the order of their arrival.
        refused: requests that no engine has room for.
        places: the ranks, with the engines that stand there now.
    """

    def __init__(
        self,
        index: Index,
        routers: Sequence[Router],
        clock: Clock,
        *,
        ranks: int,
        model: Model,
        event_delay: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.requests: list[Request] = []
        self.refused = 0
        self._index = index
        self._routers = routers
        self._clock = clock
        self._model = model
        self._event_delay = event_delay
        self._rng = random.Random(seed)
        self._bookings: dict[int, Booking] = {}
        self._sessions: list[Session] = []  # that have begun, or will at a known time
        self._later: Iterator[Session] = iter(())
        self._open = 0  # sessions, branches among them
        self._at_once = 0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.places = [
            Place(number, Rank(f"engine-{number:02}"), Engine(model)) for number in range(ranks)
        ]
        for place in self.places:
            index.add(place.rank)

    def run(self, sessions: Sequence[Session], at_once: int | None = None) -> list[Request]:
        """Serve every request to its end and return them.

        Args:
            sessions: which sessions, each with its start.
            at_once: how many are open at a time: so many begin at their start, and each of the
                others at the end of one; None for all at their start.
        """
        self._at_once = len(sessions) if at_once is None else at_once
        self._later = iter(sessions[self._at_once :])
        for session in sessions[: self._at_once]:
            self._open += 1
            self._begin(session, session.start)
        while self._agenda:
            self._clock.now, _, do, arguments = heapq.heappop(self._agenda)
            do(*arguments)
        return self.requests

    def lose(self, losses: Iterable[Loss]) -> None:
        """Have engines die in the run to come."""
        for loss in losses:
            self.at(loss.at, self._lose, loss)

    def at(self, when: float, do: Callable[..., None], *arguments: Any) -> None:
        """Have something done at a moment of the virtual time."""
        heapq.heappush(self._agenda, (when, next(self._numbers), do, arguments))

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._clock.now

    @property
    def busy(self) -> float:
        """Seconds of work that the engines have done, those that died left out."""
        return sum(place.engine.busy for place in self.places if place.engine)

    # A request's way ---------------------------------------------------------------------------

    def _begin(self, session: Session, when: float) -> None:
        number = len(self._sessions)
        self._sessions.append(session)
        self.at(when + session.turns[0].gap, self._arrive, number, 0)
        for branch in session.branches:
            self.at(when + branch.start, self._branch, branch)

    def _branch(self, branch: Session) -> None:
        self._open += 1
        self._begin(branch, self.now)

    def _go_on(self, session: int, turn: int) -> None:
        """Let a session's next turn come; after the last one, another session."""
        turns = self._sessions[session].turns
        if turn + 1 < len(turns):
            self.at(self.now + turns[turn + 1].gap, self._arrive, session, turn + 1)
            return
        self._open -= 1
        if self._open < self._at_once and (following := next(self._later, None)) is not None:
            self._open += 1
            self._begin(following, self.now)

    def _arrive(self, session: int, turn: int) -> None:
        wanted = self._sessions[session].turns[turn]
        gateway = self._rng.randrange(len(self._routers))
        request = Request(wanted, self._clock.now, gateway, (session, turn))
        if self._model.cache < wanted.prompt + wanted.output:
            self.refused += 1
            self._go_on(session, turn)
            return
        self.requests.append(request)
        self._send(len(self.requests) - 1)

    def _send(self, number: int) -> None:
        request = self.requests[number]
        router = self._routers[request.gateway]
        booking = router.reserve(tokens_of(request.turn), request_id=f"{number}")
        self._bookings[number] = booking
        place = self._place_of(booking.rank)
        request.predicted = booking.decision.tokens
        request.rank = place.number
        request.sent += 1
        if place.engine is None:
            place.lost.append(number)
            return
        place.engine.submit(Job(request.turn, number), self._clock.now)
        self._expect(place)

    def _place_of(self, rank: Rank) -> Place:
        return self.places[int(rank.worker.rpartition("-")[2])]

    def _expect(self, place: Place) -> None:
        engine = place.engine
        if engine is not None and engine.due is not None:
            self.at(engine.due, self._advance, place, engine)

    def _advance(self, place: Place, engine: Engine) -> None:
        if engine is not place.engine or engine.due != self._clock.now:
            return  # it died, or its step was cut short meanwhile
        progress = engine.advance()
        self._publish(place, engine, progress)
        for job in progress.first:
            self._first_token(job)
        for job in progress.finished:
            self._finish(job)
        self._expect(place)

    def _first_token(self, job: Job) -> None:
        request = self.requests[job.request]
        request.hit = job.hit
        if request.first is None:
            request.first = self._clock.now
        self._bookings[job.request].first_token()

    def _finish(self, job: Job) -> None:
        request = self.requests[job.request]
        request.finished = self._clock.now
        self._bookings.pop(job.request).finish(cached_tokens=job.hit)
        self._go_on(*request.session)

    # Events and faults -------------------------------------------------------------------------

    def _publish(self, place: Place, engine: Engine, progress: Progress) -> None:
        message = payload(progress, self._clock.now)
        if message is None:
            return
        if self._event_delay:
            when = self._clock.now + self._event_delay
            self.at(when, self._apply, place, engine, message)
        else:
            self._index.apply(place.rank, message)

    def _apply(self, place: Place, engine: Engine, message: bytes) -> None:
        if engine is place.engine:  # else the index has dropped what came of it
            self._index.apply(place.rank, message)

    def _lose(self, loss: Loss) -> None:
        place = self.places[loss.rank]
        assert place.engine is not None
        place.lost = [job.request for job in place.engine.sequences]
        place.engine = None
        self.at(self._clock.now + loss.notice, self._notice, place)
        self.at(self._clock.now + loss.back, self._restart, place)

    def _notice(self, place: Place) -> None:
        self._index.tree(place.rank).clear()
        for router in self._routers:
            router.drain(place.rank)
        lost, place.lost = place.lost, []
        for number in lost:
            self._bookings.pop(number).cancel()
            self._send(number)

    def _restart(self, place: Place) -> None:
        place.engine = Engine(self._model)
        for router in self._routers:
            router.undrain(place.rank)
