"""A server's answers, without HTTP: the registered ranks, and their match of a prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from kvindex import (
    Client,
    Hits,
    Rank,
    RankRows,
    RankStatus,
    State,
    Trust,
)
from kvindex.replicas import Replica
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.queries import AnswerForm
from kvindex.service.registry import FollowedRegistry, Registry
from kvindex.service.traffic import Traffic
from kvindex.wire.errors import RegistrationError

_PATIENCE = 30.0  # seconds after the start that ranks are waited for
_STANDING_FOR = 0.5  # seconds for which one standing answers all callers


class Standing(NamedTuple):
    """How the registered ranks stand: those that are not live each with a reason."""

    ready: bool  # queries are to be sent here
    live: bool  # each rank is live now
    waiting: Mapping[Rank, str]  # never been live: the server waits for them before it is ready
    given_up: Mapping[Rank, str]  # never been live: the server is ready without them
    behind: Mapping[Rank, str]  # were live, and are not now
    missing: Mapping[str, str]  # engines and sources that have not reported their endpoints


class Ranks:
    """A partition's ranks at one moment, and the forms that its answers are written in.

    Immutable but for caches.
    """

    def __init__(
        self,
        partition: Partition,
        instances: list[tuple[int | str, list[Rank]]],
    ) -> None:
        self.partition = partition
        self.instances = instances
        self.rows = RankRows(rank for _, ranks in instances for rank in ranks)
        self._forms: dict[str, AnswerForm] = {}

    def only(self, instance: str) -> Ranks:
        """Return those of one instance: none, if it is not among them."""
        instances = [(name, ranks) for name, ranks in self.instances if str(name) == instance]
        return Ranks(self.partition, instances)

    def form(self, dialect: str) -> AnswerForm:
        """Return the form of answers in a dialect."""
        form = self._forms.get(dialect)
        if form is None:
            form = self._forms[dialect] = AnswerForm(
                self.instances, dialect, tenant=self.partition.routing_group
            )
        return form


class Service:
    """Answers for the instances that are registered, and for no others.

    Args:
        source: has the index: a client, whose workers are registered here and nowhere else, or a
            replica, whose ranks are all registered.
        registry: made of a client by default.
        dialect: "auto", or the only one in which queries are read: "dynamo" or "rfc".
        max_tokens: most tokens of a query.
        patience: seconds after the start for which ranks that were never live, and engines that
            are missing, keep the server from being ready.
        clock: monotonic seconds.

    Thread safety: `match` on one thread (the event loop's); the rest from any.
    """

    def __init__(
        self,
        source: Client | Replica,
        registry: Registry | FollowedRegistry | None = None,
        *,
        dialect: str = "auto",
        max_tokens: int = 1 << 20,
        patience: float = _PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        if registry is None:
            assert isinstance(source, Client)
            registry = Registry(source)
        self._registry = registry
        self.dialect = dialect
        self.max_tokens = max_tokens
        self._clock = clock
        self._patience = patience
        self._began = clock()
        self._was_ready = False  # with ranks that were live: later ranks are not waited for
        self._stood: tuple[float, Catalog, Standing] | None = None  # when, for which, and how
        self._standing_lock = threading.Lock()
        self._was_live: set[Rank] = set()
        was_live = self._was_live

        def note_live(status: RankStatus) -> None:
            if status.state is State.LIVE:
                was_live.add(status.rank)

        # A rank may be live between two requests that ask how the ranks stand. The callback has the
        # set only, so that the source does not keep this object alive.
        source.on_change(note_live)
        # Returns engines and sources that have not reported their endpoints: a discovery sets it.
        self.missing: Callable[[], Mapping[str, str]] = dict
        # Of which catalog and which ranks of the index it was made, and what.
        self._made: tuple[object, object, dict[Partition, Ranks]] = (None, None, {})
        self.traffic = Traffic()

    # Registrations ----------------------------------------------------------------------------

    @property
    def registry(self) -> Registry:
        """The registry. RegistrationError: this server follows a relay's."""
        if isinstance(self._registry, Registry):
            return self._registry
        raise RegistrationError(
            f"this server follows {self._registry.address}: register engines with the relay",
            reason="invalid",
        )

    @property
    def catalog(self) -> Catalog:
        """The present registrations. Immutable; another one after each change."""
        return self._registry.catalog

    # Answers ----------------------------------------------------------------------------------

    def ranks_of(self, partition: Partition) -> Ranks | None:
        """Return the ranks to answer for, or None if none is registered for this partition.

        Complexity: O(1) while ranks and registrations stay the same, else O(ranks) once.
        """
        # Both are other objects after each change, so identity shows that nothing has changed.
        catalog, known = self.catalog, self.source.index.ranks
        made = self._made
        if made[0] is not catalog or made[1] is not known:
            # By the worker: a rank belongs to its instance whatever dp_rank its batches name.
            by_worker: dict[str, list[Rank]] = {}
            for rank in known:
                if rank.worker in catalog.instances:
                    by_worker.setdefault(rank.worker, []).append(rank)
            by_partition = {
                members: Ranks(
                    members,
                    [(name, by_worker.get(worker, [])) for worker, name in instances.items()],
                )
                for members, instances in catalog.partitions.items()
            }
            made = self._made = catalog, known, by_partition
        return made[2].get(partition)

    def match(
        self, ranks: Ranks, token_ids: memoryview, *, lora: str | None, salt: str | None
    ) -> tuple[Hits, Mapping[Rank, Trust]]:
        """Return the match of each of these ranks, with its trust; raises as `Index.match`."""
        began = time.perf_counter_ns()
        # Before the match: a rank that is repaired between the two must not be trusted for a match
        # that lacked something.
        trusts = self.source.trusts()
        hits = self.source.index.match(token_ids, lora=lora, salt=salt).hits(ranks.rows)
        best = max(hits.tokens, default=0)
        took = time.perf_counter_ns() - began
        self.traffic.query(ranks.partition, len(token_ids), best, took)
        return hits, trusts

    # How the ranks stand ----------------------------------------------------------------------

    def statuses(self) -> list[tuple[Registration, RankStatus | None]]:
        """Return each registration with the status of its rank, None if it has none. O(ranks)."""
        return self._registry.statuses()

    def with_block_sizes(self) -> list[tuple[Registration, RankStatus | None]]:
        """Return the same with the tokens per block that events state, where none is registered."""
        statuses = self.statuses()
        # An empty prompt matches nothing, and tells each rank's block size all the same.
        rows = RankRows({status.rank for _, status in statuses if status is not None})
        block_sizes = self.source.index.match([]).hits(rows).block_size
        sizes = dict(zip(rows, block_sizes, strict=True))
        return [
            (entry, status)
            if entry.block_size or status is None
            else (msgspec.structs.replace(entry, block_size=sizes[status.rank]), status)
            for entry, status in statuses
        ]

    def standing(self) -> Standing:
        """Return how the registered ranks stand; all calls within half a second share it.

        The server is ready once each rank was live and no engine is missing, or once `patience` is
        over. A rank that is registered afterwards, and is not live yet, changes nothing. O(ranks).
        """
        with self._standing_lock:
            now, catalog, stood = self._clock(), self.catalog, self._stood
            if stood is None or stood[1] is not catalog or now - stood[0] >= _STANDING_FOR:
                stood = self._stood = now, catalog, self._look(now)
            return stood[2]

    def _look(self, now: float) -> Standing:
        """Return how the ranks stand now, and note which are live."""
        never: dict[Rank, str] = {}
        behind: dict[Rank, str] = {}
        statuses = self.statuses()
        for registration, status in statuses:
            if status is None or status.state is not State.LIVE:
                rank = (
                    Rank(registration.worker, registration.dp_rank)
                    if status is None
                    else status.rank
                )
                reasons = behind if rank in self._was_live else never
                if status is None:
                    reasons[rank] = "it is not subscribed to yet, or not any more"
                else:
                    reasons[rank] = status.reason or f"its state is {status.state}"
            else:
                self._was_live.add(status.rank)
        # Ranks come and go for weeks; and seldom, since it costs a look at all ranks.
        if len(self._was_live) > 2 * len(statuses) + 64:
            self._was_live.intersection_update(self.source.index.ranks)
        missing = self.missing()
        # Once ready it stays so: one engine that is added or lost must not take the whole server
        # out of a balancer. Without any rank it is ready, too, but only as long as that lasts.
        is_ready = not (never or missing)
        self._was_ready = self._was_ready or (is_ready and bool(statuses))
        is_ready = is_ready or self._was_ready or now - self._began >= self._patience
        waiting, given_up = ({}, never) if is_ready else (never, {})
        return Standing(
            is_ready, not (never or behind or missing), waiting, given_up, behind, missing
        )
