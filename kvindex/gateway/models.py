"""Which models are served by which engines, and how a request reaches one DP rank of an engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvindex import KVIndexError, Rank
from kvindex.routing import Followed, Router
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
