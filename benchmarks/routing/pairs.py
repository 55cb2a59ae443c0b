"""Prefill and decode apart: some engines prefill prompts, others fetch the blocks and answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.routing.engine import Job
from benchmarks.routing.simulation import Place, Simulation
from benchmarks.routing.traffic import tokens_of

if TYPE_CHECKING:
    from kvindex.routing import Booking


@dataclass(frozen=True)
class Pairs:
    """How a fleet is divided, and how blocks come from one engine (P) to another (D).

    The link is an assumption: 100 Gb/s for each engine, and 128 KiB a token, as Llama 3.1 8B has in
    16 bits (2 × 32 layers × 8 heads × 128 × 2 bytes).

    Attributes:
        prefill: how many ranks, the first ones, are P; the others are D.
        local_tokens: D prefills by itself what it lacks, if it is at most so many tokens.
        hop: seconds of each transfer beside those of its tokens.
        link: tokens per second over an engine's link.
    """

    prefill: int
    local_tokens: float
    hop: float = 0.005
    link: float = 12.5e9 / 131_072


class PairSimulation(Simulation):
    """A simulation of pairs, driven as `kvindex gateway` does; no engine dies in it."""

    def __init__(self, *args: Any, pairs: Pairs, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pairs = pairs
        ranks = [place.rank for place in self.places]
        self._prefill, self._decode = ranks[: pairs.prefill], ranks[pairs.prefill :]
        self._givers: dict[int, tuple[Booking, Job]] = {}  # of P, until D's first token
        self._free = [0.0] * len(ranks)  # when each engine's link is free again

    def _send(self, number: int) -> None:
        """Reserve D; if it lacks too much, have P prefill first."""
        request = self.requests[number]
        prompt, router = tokens_of(request.turn), self._routers[request.gateway]
        booking = router.reserve(prompt, request_id=f"{number}", ranks=self._decode)
        self._bookings[number] = booking
        request.rank = self._place_of(booking.rank).number
        request.predicted = booking.decision.tokens
        request.sent = 1
        request.apart = booking.decision.new_tokens > self._pairs.local_tokens
        if not request.apart:
            self._submit(request.rank, Job(request.turn, number))
            return
        booking.fetch()
        giver = router.reserve(prompt, ranks=self._prefill)
        request.predicted = giver.decision.tokens
        job = Job(replace(request.turn, output=1), number, gives=True)
        self._givers[number] = giver, job
        self._submit(self._place_of(giver.rank).number, job)

    def _submit(self, rank: int, job: Job) -> None:
        place = self.places[rank]
        place.standing.submit(job, self.now)
        self._expect(place)

    def _expect(self, place: Place) -> None:
        """Begin the transfers for which D has made room; each has both links for itself."""
        super()._expect(place)
        while place.standing.to_fetch:
            job = place.standing.to_fetch.popleft()
            giver, _ = self._givers[job.request]
            ends = place.number, self._place_of(giver.rank).number
            done = max(self.now, *(self._free[end] for end in ends)) + job.left / self._pairs.link
            for end in ends:
                self._free[end] = done
            self.at(done + self._pairs.hop, self._fetched, place, job)

    def _fetched(self, place: Place, job: Job) -> None:
        giver, given = self._givers[job.request]
        self._publish(place, place.standing, place.standing.receive(job, self.now))
        self._expect(place)
        source = self._place_of(giver.rank)
        source.standing.release(given, self.now)
        self._expect(source)

    def _first_token(self, job: Job) -> None:
        if job.gives:
            return
        super()._first_token(job)
        if job.fetches:
            giver, given = self._givers.pop(job.request)
            self.requests[job.request].hit = given.hit
            giver.finish(cached_tokens=given.hit)

    def _finish(self, job: Job) -> None:
        if not job.gives:
            super()._finish(job)
            return
        giver, _ = self._givers[job.request]
        giver.first_token()
        request = self.requests[job.request]
        self._submit(request.rank, Job(request.turn, job.request, fetches=True))
