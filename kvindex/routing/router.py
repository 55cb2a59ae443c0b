"""The router: weighs each rank's cached blocks with its load, and books the choice."""

from __future__ import annotations

import math
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple

from kvindex.index import ExtraKeys, Hits, Lora, Match, TokenIds
from kvindex.routing.bookings import Booking, Bookings, Stage
from kvindex.routing.candidates import Candidates, Choice, Policy
from kvindex.routing.decision import Decision
from kvindex.routing.eligible import Eligible
from kvindex.routing.filters import Asked, Filter
from kvindex.routing.fleet import Fleet, Source, Standing
from kvindex.routing.funnel import Funnel
from kvindex.routing.loads import Load, LoadBoard, LoadColumns, LocalLoadBoard, gauge_until
from kvindex.routing.policies import make_policy
from kvindex.routing.predictions import Predictions, Prompt
from kvindex.routing.prefill_rate import PrefillRate
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.forks import Fork, prepare_forks
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

__all__ = ["Router"]


_BLOCK_SIZE = 16  # tokens, until some rank has stored a block
_MOST_HELD = 5.0  # seconds; no call holds the lock for longer than its filters and policy take


class Router:
    """Chooses the rank for each request by the ranks' cached blocks and loads.

    ```
    router = Router(client)
    with router.reserve(token_ids) as booking:
        send the request to booking.rank
        booking.first_token()
    ```

    `reserve` selects and books in one step. A caller that selects first and books later sends the
    requests of one moment to one rank.

    The default policy, "kvindex", chooses the rank with the least sum of three times the tokens to
    prefill, those that wait for prefill there, and 256 for each open request. Tokens to prefill
    count still more while every rank has a backlog, and on a rank that was given more of them
    lately than others (see `Weights`).

    A rank that is not live counts as one that holds nothing; it may still be chosen (see
    `OnlyLive`). One whose publisher is not connected is chosen only if there is no other: its
    engine is probably down. A prompt's last token never counts as held, since the engine computes
    it.

    Args:
        source: a `Client`, a `Replica`, or an `Index`.
        policy: a policy, or the name of one of `POLICIES`.
        filters: decide which ranks may be chosen; all must agree.
        loads: stores the load; a `LocalLoadBoard` by default.
        predict: seconds after its first token for which a prompt counts as held by the rank that
            it was sent to, before an event reports it; None: never. It helps bursts of requests
            with one prefix. Such tokens are `Decision.predicted_tokens`.
        expires_after: seconds without news of a booking after which its load is released.
        model: the model's name in statistics.
        clock: returns monotonic seconds.
        seed: of the chance that breaks ties; None for another one each time.

    Raises:
        ConfigurationError: a value that cannot work.

    Thread safety: every method may be called from any thread; one lock guards the load. No call
    waits for anything else, so asyncio code calls them directly. A signal handler or a finalizer
    may end bookings, but must not choose: an index cannot be asked in the middle of its change. A
    forked child has a router of its own, with the load as it was at the fork.

    Examples:
        >>> from kvindex import BlockStored, EventBatch, Index
        >>> index = Index()
        >>> stored = BlockStored(block_hashes=[1, 2], token_ids=list(range(32)), block_size=16)
        >>> index.apply(Rank("a"), EventBatch(ts=0.0, events=[stored]))
        >>> index.add(Rank("b"))
        >>> router = Router(index)
        >>> with router.reserve(list(range(40))) as booking:
        ...     booking.rank.worker, booking.decision.tokens, router.load("a/0")
        ('a', 32, Load(queued_tokens=8, open_requests=1, decode_blocks=3))
        >>> router.load("a/0")
        Load(queued_tokens=0, open_requests=0, decode_blocks=0)
    """

    def __init__(
        self,
        source: Source,
        *,
        policy: Policy | str = "kvindex",
        filters: Iterable[Filter] = (),
        loads: LoadBoard | None = None,
        predict: float | None = None,
        expires_after: float = 600.0,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        if not expires_after > 0:
            raise ConfigurationError(f"expires_after is {expires_after!r}; it must be over 0 s")
        if predict is not None and not predict > 0:
            raise ConfigurationError(f"predict is {predict!r}; it must be over 0 s, or None")
        self._fleet = Fleet(source)
        self._arranged: tuple[Rank, ...] | None = None  # the ranks that the other parts know of
        self.policy = make_policy(policy)
        self.model = model
        self._eligible = Eligible(tuple(filters))
        self._clock = clock
        self._random = random.Random(seed).random
        self._lock = threading.RLock()
        self._loads = LocalLoadBoard() if loads is None else loads
        self._bookings = Bookings(
            self._loads,
            self._lock,
            clock,
            expires_after,
            self._on_first_token,
            self._on_ending,
            self._on_end,
        )
        self._rate = PrefillRate()
        prepare_forks(self, Router._prepare_fork)
        self._funnel = Funnel()
        self._predictions = None if predict is None else Predictions(predict)
        self._decisions = 0
        self._old_gauges = 0
        self._block_size = _BLOCK_SIZE

    # Choosing --------------------------------------------------------------------------------

    def select(
        self,
        token_ids: TokenIds,
        *,
        lora: Lora = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        reads_cache: bool = True,
        ranks: Iterable[RankName] | RankName | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Decision:
        """Choose a rank for a request, and book nothing.

        Args:
            token_ids: the prompt, as for `Index.match`.
            lora: the request's LoRA adapter.
            salt: its cache salt.
            extra_keys: for each block what its identity covers besides tokens.
            reads_cache: False if the engine will not read its cache for this request, such as
                with `prompt_logprobs` (see `reads_cache`). Then every rank has to prefill the whole
                prompt, and the load decides.
            ranks: choose among these only. "a/0" stands for `Rank("a", 0)`, "a" for all of "a".
            labels: the labels that a rank must have, for the filter `Labels`.

        Raises:
            NoCandidateError: no rank is known, or filters refuse all.
            UnknownRankError: one of `ranks` is not known.
            TokenError, ConfigurationError: as `Index.match`.
            ClosedError: the client or replica was closed.

        Complexity: that of `Index.match`, and O(ranks) in native code.
        """
        seen = self._look(Prompt(token_ids, lora, salt, extra_keys, reads_cache))
        with self._lock:
            return self._decide(seen, ranks, labels or {}, self.policy)[0]

    def reserve(
        self,
        token_ids: TokenIds,
        *,
        request_id: str | None = None,
        lora: Lora = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        reads_cache: bool = True,
        ranks: Iterable[RankName] | RankName | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Booking:
        """Choose a rank for a request and book its load there, in one step.

        Args: as `select`, and
            request_id: the request's id, for `booking`; one is made up by default.

        Raises: as `select`, and
            DuplicateBookingError: an open booking has this id.
        """
        seen = self._look(Prompt(token_ids, lora, salt, extra_keys, reads_cache))
        with self._lock:
            return self._book(request_id, seen, ranks, labels or {}, self.policy)

    def place(
        self,
        rank: RankName,
        token_ids: TokenIds,
        *,
        request_id: str | None = None,
        lora: Lora = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        reads_cache: bool = True,
    ) -> Booking:
        """Book a request on a rank that was chosen elsewhere, such as by another router.

        Filters are not asked, and it counts as a decision of no policy.

        Args and Raises: as `reserve`, and
            UnknownRankError: the rank is not known, or a worker's name stands for several.
        """
        seen = self._look(Prompt(token_ids, lora, salt, extra_keys, reads_cache))
        with self._lock:
            self._refresh(self._clock(), seen.standing)
            one = self._fleet.ranks[self._fleet.row(rank)]
            return self._book(request_id, seen, [one], {}, _Placed())

    def book(
        self,
        rank: RankName,
        prompt_tokens: int,
        new_tokens: int,
        *,
        request_id: str | None = None,
    ) -> Booking:
        """Book a request that another router has reserved: as `place`, without the tokens.

        The booking is load only: decisions and the funnel count this router's own requests.

        Args:
            rank: the rank that it chose.
            prompt_tokens: tokens of the prompt.
            new_tokens: those that the rank has to prefill, as the other router saw it.
            request_id: as for `reserve`.

        Raises:
            UnknownRankError: the rank is not known, or a worker's name stands for several.
            DuplicateBookingError: an open booking has this id.
            ConfigurationError: more tokens are new than the prompt has, or fewer than none.
        """
        if not 0 <= new_tokens <= prompt_tokens:
            raise ConfigurationError(f"{new_tokens} of {prompt_tokens} tokens cannot be new")
        with self._lock:
            now = self._clock()
            self._refresh(now, self._fleet.standing())
            ranks, row = self._fleet.ranks, self._fleet.row(rank)
            usable, tokens = bytearray(len(ranks)), array("q", bytes(8 * len(ranks)))
            usable[row], tokens[row] = 1, prompt_tokens - new_tokens
            hits = Hits(tokens, tokens, tokens, tokens)
            decision, queued = self._choose(prompt_tokens, hits, usable, _Told(), now)
            return self._bookings.book(request_id, decision, self._block_size, queued, now)

    def booking(self, request_id: str) -> Booking:
        """Return an open booking by its request id.

        Raises:
            UnknownBookingError: there is none.
        """
        with self._lock:
            self._bookings.expire(self._clock())
            return self._bookings.get(request_id)

    def _look(self, prompt: Prompt) -> _Seen:
        """Ask the index, without the lock: first the streams' states, then the blocks."""
        self._fleet.check_open()
        standing = self._fleet.standing()
        return _Seen(prompt, standing, prompt.ask(self._fleet.index))

    def _book(
        self,
        request_id: str | None,
        seen: _Seen,
        ranks: Iterable[RankName] | RankName | None,
        labels: Mapping[str, str],
        policy: Policy,
    ) -> Booking:
        decision, queued, now = self._decide(seen, ranks, labels, policy)
        booking = self._bookings.book(request_id, decision, self._block_size, queued, now)
        if self._predictions is not None:
            try:
                self._predictions.send(booking, seen.prompt, self._block_size)
            except BaseException:  # no caller gets the booking, so none would end it
                booking.cancel()
                raise
        return booking

    def _decide(
        self,
        seen: _Seen,
        ranks: Iterable[RankName] | RankName | None,
        labels: Mapping[str, str],
        policy: Policy,
    ) -> tuple[Decision, float, float]:
        """Return the decision, the tokens that are queued on its rank before it, and the time."""
        now = self._clock()
        self._refresh(now, seen.standing)
        prompt, fleet = seen.prompt, self._fleet
        # A rank's blocks count if it is live, and if the engine will read its cache.
        counts = fleet.live if prompt.reads_cache else bytes(len(fleet.ranks))
        hits = confirmed = seen.match.hits(fleet.rows, counts)
        self._block_size = next(filter(None, hits.block_size), self._block_size)
        if self._predictions is not None:
            hits = self._predictions.added_to(confirmed, prompt, fleet.rows, counts)
        length, loads = len(prompt.token_ids), self._loads.columns(now)
        asked = Asked(fleet.ranks, fleet.live, loads, length, prompt.lora, labels)
        if not isinstance(ranks, (str, Rank, list, NoneType)):
            ranks = [*ranks]  # it may be read twice
        wanted = None if ranks is None else fleet.mask(ranks)
        placed = isinstance(policy, _Placed)
        usable = self._eligible.rows(asked, wanted, fleet.connected, placed=placed)
        if fleet.ranks is not asked.ranks:  # a filter called the router when ranks had changed
            return self._decide(seen, ranks, labels, policy)
        decision, queued = self._choose(
            length, hits, usable, policy, now, confirmed, reads_cache=prompt.reads_cache
        )
        self._decisions += 1
        return decision, queued, now

    def _choose(
        self,
        prompt_tokens: int,
        hits: Hits,
        usable: bytearray,
        policy: Policy,
        now: float,
        confirmed: Hits | None = None,
        *,
        reads_cache: bool = True,
    ) -> tuple[Decision, float]:
        """Let the policy choose; return the decision, and the tokens queued on its rank."""
        loads, fleet = self._loads.columns(now), self._fleet
        candidates = Candidates(
            fleet.ranks,
            prompt_tokens,
            hits,
            # A decision shows these later, all but the last.
            LoadColumns(loads.queued[:], loads.open[:], loads.decode[:], loads.given),
            usable,
            self._block_size,
            self._rate.tokens_per_second,
            self._random(),
        )
        choice = policy.choose(candidates)
        row = choice.row
        if not (0 <= row < len(fleet.ranks) and usable[row]):
            raise ConfigurationError(f"policy {policy.name!r} chose row {row}, which is not usable")
        predicted = 0 if confirmed is None else hits.tokens[row] - confirmed.tokens[row]
        decision = Decision(
            policy.name,
            candidates,
            choice,
            fleet.live,
            predicted_tokens=predicted,
            reads_cache=reads_cache,
        )
        return decision, loads.queued[row]

    # What is known of the ranks -----------------------------------------------------------------

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that are known, sorted; drained ones too."""
        return self._fleet.index.ranks

    @property
    def drained(self) -> frozenset[Rank]:
        """The ranks that get no more requests."""
        return self._eligible.drained

    def drain(self, rank: RankName) -> None:
        """Give a rank (or all ranks of a worker) no more requests; open requests go on.

        Raises:
            UnknownRankError: it is not known.
        """
        with self._lock:
            ranks = self._fleet.named([rank])
            self._eligible.drained |= ranks

    def undrain(self, rank: RankName) -> None:
        """Give a rank (or all ranks of a worker) requests again.

        Raises:
            UnknownRankError: it is not known.
        """
        with self._lock:
            ranks = self._fleet.named([rank])
            self._eligible.drained -= ranks

    def report(
        self,
        rank: RankName,
        *,
        queued_tokens: int | None = None,
        open_requests: int | None = None,
        age: float = 0.0,
    ) -> None:
        """Correct a rank's load by its engine's own gauges.

        The engine's load beyond our bookings counts for 0.1 seconds from when it was true. An older
        gauge makes routing worse than none: every router then sends to the same rank.

        Args:
            rank: the rank.
            queued_tokens: tokens that wait for prefill in the engine; None if not reported.
            open_requests: requests that it has, waiting or running; None if not reported.
            age: seconds since this was true.

        Raises:
            UnknownRankError: the rank is not known, or a worker's name stands for several: a gauge
                of a whole server is not each rank's.
            ConfigurationError: age is negative, or a gauge is no number from 0.
        """
        for gauge in (queued_tokens, open_requests):
            if gauge is not None and not 0 <= gauge < math.inf:
                raise ConfigurationError(f"a gauge is {gauge!r}; it must be a number from 0")
        with self._lock:
            now = self._clock()
            self._refresh(now, self._fleet.standing())
            until = gauge_until(age, now)
            one = self._fleet.ranks[self._fleet.row(rank)]
            if now < until:
                self._loads.report(one, queued_tokens, open_requests, until)
            else:
                self._old_gauges += 1

    def load(self, rank: RankName) -> Load:
        """Return a rank's load.

        Raises:
            UnknownRankError: the rank is not known, or a worker's name stands for several.
        """
        with self._lock:
            now = self._clock()
            self._refresh(now, self._fleet.standing())
            return self._loads.load(self._fleet.ranks[self._fleet.row(rank)], now)

    def statistics(self) -> dict[str, Any]:
        """Return every counter as plain JSON-ready values.

        `decisions`; `bookings`: how many are `open`, how many ended in each way (`finished`,
        `cancelled`, `expired`), and news that came `late`, after the expiry; `refused`: ranks that
        each filter refused; `old_gauges`: reports that were too old to count;
        `prefill_rate`: tokens per second; `funnel`: see `Funnel.statistics`; `predictions`: see
        `Predictions.statistics`; `ranks`: for each its load, its `funnel`, and `suspicion`: why its
        answers go wrong, or "".
        """
        with self._lock:
            now = self._clock()
            self._refresh(now, self._fleet.standing())
            return {
                "model": self.model,
                "policy": self.policy.name,
                "decisions": self._decisions,
                "bookings": self._bookings.statistics(),
                "refused": dict(self._eligible.refused),
                "old_gauges": self._old_gauges,
                "prefill_rate": self._rate.tokens_per_second,
                "funnel": self._funnel.statistics(),
                "predictions": self._predictions.statistics() if self._predictions else {},
                "ranks": {
                    str(rank): {
                        **self._loads.load(rank, now)._asdict(),
                        "drained": rank in self._eligible.drained,
                        "funnel": self._funnel.statistics(rank),
                        "suspicion": self._funnel.suspicion(rank),
                    }
                    for rank in self._fleet.ranks
                },
            }

    def _refresh(self, now: float, standing: Standing | None) -> None:
        """Follow the ranks that come, go, and change their state; end what has expired."""
        self._fleet.follow(standing)
        ranks = self._fleet.ranks
        if ranks is not self._arranged:
            self._loads.arrange(ranks)
            known = frozenset(ranks)
            self._eligible.drained &= known
            self._funnel.keep(ranks)
            if self._predictions is not None:
                self._predictions.keep(ranks)
            self._arranged = ranks  # last: an interrupted update is done again
        self._bookings.expire(now)
        if self._predictions is not None:
            self._predictions.expire(now)

    # Bookings' news -----------------------------------------------------------------------------

    def _on_first_token(self, booking: Booking, seconds: float) -> None:
        self._rate.measure(booking.work_ahead, seconds)
        if self._predictions is not None:
            self._predictions.confirm(booking, self._clock())

    def _on_ending(self, booking: Booking) -> None:
        if self._predictions is not None:
            self._predictions.end(booking, self._clock())

    def _on_end(self, booking: Booking, cached_tokens: int | None) -> None:
        decision = booking.decision
        if booking.stage is not Stage.FINISHED or decision.policy == _Told.name:
            return
        if decision.reads_cache:  # else no cache could help; engines do not count it either
            self._funnel.count(decision, cached_tokens)

    def _prepare_fork(self, fork: Fork) -> None:
        """Keep the lock free and the load whole in a forked child, whoever held the lock."""
        fork.hold(self._lock, _MOST_HELD)

    def __repr__(self) -> str:
        return (
            f"<Router of {len(self._fleet.ranks)} ranks by {self.policy.name!r}: "
            f"{len(self._bookings)} open bookings>"
        )


class _Seen(NamedTuple):
    """A prompt with the ranks' match and states, at one moment.

    Attributes:
        prompt: the prompt.
        standing: the streams' states before the index was asked; None: they are not followed.
        match: the ranks' match of it.
    """

    prompt: Prompt
    standing: Standing | None
    match: Match


class _Placed:
    """The policy of a request whose rank was chosen elsewhere: the only usable row."""

    name = "placed"

    def choose(self, candidates: Candidates) -> Choice:
        return Choice(candidates.rows()[0], why="it was placed there")


class _Told(_Placed):
    """The same for a request of another router, which counts it in its own funnel."""

    name = "told"
