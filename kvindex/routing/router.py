"""The router: weighs each rank's cached blocks with its load, and books the choice."""

from __future__ import annotations

import math
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvindex.index import Hits, Index, Match, TokenIds
from kvindex.routing.bookings import OTHER_ROUTER, Booking, Bookings, Predictions
from kvindex.routing.contexts import Contexts
from kvindex.routing.fleet import (
    Eligible,
    Filter,
    Fleet,
    PromptOptions,
    RequestOptions,
    RoutedRequest,
    Source,
    Standing,
    ask,
    look,
)
from kvindex.routing.kv_source import Holders
from kvindex.routing.load import GAUGE_LIFE, Load, LoadBoard, LocalLoadBoard
from kvindex.routing.policies import Candidates, Choice, Decision, Policy, make_policy
from kvindex.wire.errors import ConfigurationError, UnknownRankError, check_options
from kvindex.wire.forks import PARENTS, disown_in_children
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BLOCK_SIZE = 16  # tokens, until some rank has stored a block


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
    prefill, those that wait for prefill there, 256 for each open request, and 0.3 times
    the tokens that do not fit beside the contexts that the rank should keep (see `Weights`).

    A rank that is not live counts as one that holds nothing; it may still be chosen (see
    `OnlyLive`). One whose publisher is not connected is chosen only if there is no other: its
    engine is probably down. A prompt's last token never counts as held: the engine computes it.

    A rank is named by "a/0", or by its worker's name if that has one rank. `UnknownRankError` is
    raised for a name that stands for no rank, or for several where one is meant.

    Args:
        source: a `Client`, a `Replica`, or an `Index`.
        policy: a policy, or the name of one of `POLICIES`.
        filters: decide which ranks may be chosen; all must agree.
        loads: stores the load; a `LocalLoadBoard` by default, or a `SharedLoad`.
        predict: seconds after its first token for which a prompt counts as held by its rank before
            an event reports it (`Decision.predicted_tokens`); None: never. It helps bursts of
            requests with one prefix.
        min_tokens: how many more tokens of the prompt than the chosen rank another one must hold
            to be named as `Decision.source`.
        pull_rate: tokens per second that a rank pulls from another, if all can and are told to
            (`Booking.pull`): then a token that can be pulled costs only the time of that. None: the
            choice does not reckon with pulls. It is not learnt: a first token does not show which
            part of its time was a pull.
        expires_after: seconds without news of a booking after which its load is released.
        model: the model's name in statistics.
        clock: returns monotonic seconds.
        seed: of the chance that breaks ties; None for another one each time.

    Raises:
        ConfigurationError: a value that cannot work.

    Thread safety: any thread may call every method; one lock guards the load. No call waits for
    anything else, so asyncio code calls them directly. Signal handlers and finalizers must not use
    a router or its bookings. An interrupt (Ctrl-C) at any moment leaves no lock held and no booking
    half made. In a forked child every call raises ClosedError.

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
        min_tokens: int = 512,
        pull_rate: float | None = None,
        expires_after: float = 600.0,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        if not isinstance(source, Index) and not hasattr(source, "live_ranks"):
            raise ConfigurationError(
                "a router asks a client (`connect` returns one), a replica or an index, not"
                f" {type(source).__name__}"
            )
        if not expires_after > 0:
            raise ConfigurationError(f"expires_after is {expires_after!r}; it must be over 0 s")
        if predict is not None and not predict > 0:
            raise ConfigurationError(f"predict is {predict!r}; it must be over 0 s, or None")
        if not min_tokens >= 1:
            raise ConfigurationError(f"min_tokens is {min_tokens!r}; it must be 1 or more")
        if pull_rate is not None and not 0 < pull_rate < math.inf:
            raise ConfigurationError(f"pull_rate is {pull_rate!r}; it must be over 0 tokens/s")
        self.policy = make_policy(policy)
        self._min_tokens = min_tokens
        self._pull_rate = pull_rate
        self.model = model
        self._source = source
        self._fleet = Fleet(look(source))
        self._eligible = Eligible(filters)
        self._loads = LocalLoadBoard() if loads is None else loads
        self._predictions = Predictions(predict)
        self._lock = threading.RLock()
        self._clock = clock
        self._loads.attach(self._lock, clock)
        self._contexts = Contexts(self._loads, self._blocks)
        self._bookings = Bookings(
            self._loads, self._predictions, self._contexts, self._lock, clock, expires_after
        )
        self._bookings.arrange(self._fleet.ranks)
        self._random = random.Random(seed).random
        self._block_size = _BLOCK_SIZE
        self._decisions = self._old_gauges = 0
        disown_in_children(self, Router._disown)

    def select(self, token_ids: TokenIds, **options: Unpack[RequestOptions]) -> Decision:
        """Choose a rank for a request, and book nothing.

        Args:
            token_ids: the prompt, as for `Index.match`.
            options: see `RequestOptions`.

        Raises:
            NoCandidateError: no rank is known, or filters refuse all.
            TokenError, ConfigurationError: as `Index.match`.
            ClosedError: the client or replica was closed.

        Complexity: that of `Index.match`, and O(ranks) in native code.
        """
        check_options("select", options, RequestOptions)
        request = RoutedRequest(token_ids, **options).checked()
        standing, match = ask(self._source, request)
        with self._lock:
            fleet, now = self._refresh(standing)
            return self._decide(request, match, fleet, now)

    def reserve(
        self,
        token_ids: TokenIds,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Booking:
        """Choose a rank for a request and book its load there, in one step.

        Args: as `select`, and
            request_id: the request's id, for `booking`; a new id by default.

        Raises: as `select`, and
            DuplicateBookingError: an open booking has this id.
        """
        check_options("reserve", options, RequestOptions)
        request = RoutedRequest(token_ids, **options).checked()
        standing, match = ask(self._source, request)  # before the lock: it takes longest
        with self._lock:
            fleet, now = self._refresh(standing)
            decision = self._decide(request, match, fleet, now)
            return self._bookings.book(request_id, decision, request, now)

    def place(
        self,
        rank: RankName,
        token_ids: TokenIds,
        *,
        request_id: str | None = None,
        **options: Unpack[PromptOptions],
    ) -> Booking:
        """Book a request on a rank that was chosen elsewhere; filters do not judge it.

        Args and Raises: as `reserve`.
        """
        check_options("place", options, PromptOptions)
        request = RoutedRequest(token_ids, **options)
        standing, match = ask(self._source, request)
        with self._lock:
            fleet, now = self._refresh(standing)
            hits, confirmed = self._hits(request, match, fleet)
            candidates = self._candidates(len(token_ids), hits, fleet, now)
            holders = Holders(confirmed, candidates.usable, self._min_tokens)
            placed = _placed("placed", rank, candidates, fleet, holders, request.reads_cache)
            self._decisions += 1
            return self._bookings.book(request_id, placed, request, now)

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
            rank: where the request is.
            prompt_tokens: tokens of the prompt.
            new_tokens: those that the rank has to prefill, by the other router's decision.
            request_id: as for `place`.

        Raises:
            DuplicateBookingError: an open booking has this id.
            ConfigurationError: more tokens are new than the prompt has, or fewer than none.
        """
        if not 0 <= new_tokens <= prompt_tokens:
            raise ConfigurationError(f"{new_tokens} of {prompt_tokens} tokens cannot be new")
        with self._lock:
            fleet, now = self._refresh(look(self._source))
            tokens = array("q", bytes(8 * len(fleet.ranks)))
            tokens[fleet.row(rank)] = prompt_tokens - new_tokens
            # On which tier they are does not matter here: no cost is weighed any more.
            hits = Hits(tokens, tokens, tokens, tokens)
            candidates = self._candidates(prompt_tokens, hits, fleet, now)
            holders = Holders(hits, candidates.usable, self._min_tokens)
            placed = _placed(OTHER_ROUTER, rank, candidates, fleet, holders, reads_cache=True)
            return self._bookings.book(request_id, placed, None, now)

    def booking(self, request_id: str) -> Booking:
        """Return an open booking by its request id; raises UnknownBookingError."""
        with self._lock:
            self._bookings.expire(self._clock())
            return self._bookings.get(request_id)

    def _decide(self, request: RoutedRequest, match: Match, fleet: Fleet, now: float) -> Decision:
        """Let the policy choose among the eligible ranks."""
        hits, confirmed = self._hits(request, match, fleet)
        candidates = self._candidates(request.length, hits, fleet, now)
        eligible, usable = self._eligible, candidates.usable
        givers: bytes | bytearray = usable
        # Without anything to narrow by, all rows stay usable, and no mask is made.
        is_narrowed = (
            request.ranks is not None or request.exclude or eligible.filters or eligible.drained
        )
        if is_narrowed or fleet.connected is not None or not usable:
            usable, givers = eligible.rows(request, fleet, candidates.loads)
            candidates = candidates._replace(usable=usable)
        holders = Holders(confirmed, givers, self._min_tokens)
        if self._pull_rate is None:
            choice = self.policy.choose(candidates)
        else:  # what could be pulled is not held: the decision shows the true hits
            choice = self.policy.choose(holders.discounted(candidates, self._pull_rate))
            choice = choice._replace(attainable=None)
        name = self.policy.name
        # It may be a user's own policy.
        if not (0 <= choice.row < len(usable) and usable[choice.row]):
            raise ConfigurationError(f"policy {name!r} chose row {choice.row}, which is not usable")
        self._decisions += 1
        return _decision(name, candidates, choice, fleet, holders, request.reads_cache)

    def _hits(self, request: RoutedRequest, match: Match, fleet: Fleet) -> tuple[Hits, Hits]:
        """Return the ranks' hits, with predicted tokens and without."""
        # A rank's blocks count if it is live, and if the engine will read its cache.
        counts = fleet.live if request.reads_cache else bytes(len(fleet.ranks))
        confirmed = match.hits(fleet.rows, counts)
        # Of any rank that has stored a block: loads are counted in blocks of one size.
        self._block_size = next(filter(None, confirmed.block_size), self._block_size)
        return self._predictions.added_to(confirmed, request, fleet.rows, counts), confirmed

    def _candidates(self, prompt_tokens: int, hits: Hits, fleet: Fleet, now: float) -> Candidates:
        """Return all ranks as candidates; a decision keeps them to show them later."""
        return Candidates(
            fleet.ranks,
            prompt_tokens,
            hits,
            self._loads.columns(now).kept(),
            b"\1" * len(fleet.ranks),
            self._block_size,
            self._bookings.rate.tokens_per_second,
            self._random(),
        )

    def _blocks(self, rank: Rank) -> int | None:
        """Return how many blocks a rank holds; None if it has gone."""
        try:
            return len(look(self._source).index.tree(rank))
        except UnknownRankError:
            return None

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that are known, sorted; drained ones too."""
        return look(self._source).index.ranks

    @property
    def drained(self) -> frozenset[Rank]:
        """The ranks that get no more requests."""
        return self._eligible.drained

    def drain(self, rank: RankName) -> None:
        """Send a rank (or all ranks of a worker) no more requests; open requests go on."""
        self._change_drained(frozenset.union, rank)

    def undrain(self, rank: RankName) -> None:
        """Send a rank (or all ranks of a worker) requests again."""
        self._change_drained(frozenset.difference, rank)

    def _change_drained(self, change: Callable[..., frozenset[Rank]], rank: RankName) -> None:
        with self._lock:
            fleet, _ = self._refresh(look(self._source))
            self._eligible.drained = change(self._eligible.drained, fleet.named(rank))

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
            rank: a rank; a gauge of a whole server is not each rank's.
            queued_tokens: tokens that wait for prefill in the engine; None if not reported.
            open_requests: requests that wait or run there; None if not reported.
            age: seconds since this was true.

        Raises:
            ConfigurationError: age is negative, or a gauge is no number from 0.
        """
        for gauge in (queued_tokens, open_requests):
            if gauge is not None and not 0 <= gauge < math.inf:
                raise ConfigurationError(f"a gauge is {gauge!r}; it must be a number from 0")
        if not age >= 0.0:
            raise ConfigurationError(f"age is {age!r}; it must be 0 seconds or more")
        with self._lock:
            fleet, now = self._refresh(look(self._source))
            row = fleet.row(rank)
            if age < GAUGE_LIFE:  # older ones make every router send to the same rank
                until = now + GAUGE_LIFE - age
                self._loads.report(fleet.ranks[row], queued_tokens, open_requests, until)
            else:
                self._old_gauges += 1

    def load(self, rank: RankName) -> Load:
        """Return a rank's load."""
        with self._lock:
            fleet, now = self._refresh(look(self._source))
            return self._loads.load(fleet.ranks[fleet.row(rank)], now)

    def statistics(self) -> dict[str, Any]:
        """Return every counter as plain JSON-ready values.

        `decisions`; `bookings`: how many are `open`, how many ended in each way (`finished`,
        `cancelled`, `expired`), and news that came `late`, after the expiry; `refused`: ranks that
        each filter refused; `old_gauges`: reports that were too old to count;
        `load`: of a board that shares its load, see `SharedLoad.statistics`, else empty;
        `prefill_rate`: tokens per second; `funnel`: see `Funnel.statistics`; `predictions`: see
        `Predictions.statistics`; `contexts`: see `Contexts.statistics`; `ranks`: for each its load,
        the `context_tokens` that it should keep, the `cache_tokens` that it has room for (None if
        not known), its `funnel`, and `suspicion`: why its answers go wrong, or "".
        """
        with self._lock:
            fleet, now = self._refresh(look(self._source))
            funnel = self._bookings.funnel
            columns = self._loads.columns(now)
            return {
                "model": self.model,
                "policy": self.policy.name,
                "decisions": self._decisions,
                "bookings": self._bookings.statistics(),
                "refused": dict(self._eligible.refused),
                "old_gauges": self._old_gauges,
                "load": self._loads.statistics(),
                "prefill_rate": self._bookings.rate.tokens_per_second,
                "funnel": funnel.statistics(),
                "predictions": self._predictions.statistics(),
                "contexts": self._contexts.statistics(),
                "ranks": {
                    str(rank): {
                        **self._loads.load(rank, now)._asdict(),
                        "context_tokens": int(columns.contexts[row]),
                        "cache_tokens": int(cache) if (cache := columns.cache[row]) > 0.0 else None,
                        "drained": rank in self._eligible.drained,
                        "funnel": funnel.statistics(rank),
                        "suspicion": funnel.suspicion(rank),
                    }
                    for row, rank in enumerate(fleet.ranks)
                },
            }

    def _refresh(self, standing: Standing) -> tuple[Fleet, float]:
        """Follow the ranks, end what has expired, and return the fleet with the time."""
        now, fleet = self._clock(), self._fleet.follow(standing)
        if fleet is not self._fleet:
            if fleet.ranks is not self._fleet.ranks:
                self._bookings.arrange(fleet.ranks)
                # An engine that comes back is another one: nobody has drained it.
                self._eligible.drained = self._eligible.drained.intersection(fleet.ranks)
            self._fleet = fleet  # last: an interrupted update is done again
        self._bookings.expire(now)
        return fleet, now

    def _disown(self) -> None:
        # In a forked child: another thread of the parent may hold the lock.
        self._lock = PARENTS
        self._bookings.disown()

    def __repr__(self) -> str:
        ranks, bookings = len(self._fleet.ranks), len(self._bookings)
        return f"<Router of {ranks} ranks by {self.policy.name!r}: {bookings} open bookings>"


def _decision(
    policy: str,
    candidates: Candidates,
    choice: Choice,
    fleet: Fleet,
    holders: Holders,
    reads_cache: bool,
) -> Decision:
    predicted = candidates.hits.tokens[choice.row] - holders.hits.tokens[choice.row]
    return Decision(policy, reads_cache, predicted, candidates, choice, fleet.live, holders)


def _placed(
    policy: str,
    rank: RankName,
    candidates: Candidates,
    fleet: Fleet,
    holders: Holders,
    reads_cache: bool,
) -> Decision:
    """Return the decision for a rank that was chosen elsewhere: the only usable one."""
    choice = Choice(fleet.row(rank), why="it was placed there")
    candidates = candidates._replace(usable=fleet.mask(rank))
    return _decision(policy, candidates, choice, fleet, holders, reads_cache)
