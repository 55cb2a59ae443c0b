"""Decides which engines to ask, add and remove as they start, stop, change and fall silent.

A state machine without threads, sockets or clocks: it receives the sources' lists and the engines'
answers, and returns which engines to ask and which workers to add and to remove. Owned by the
thread of a `Discovery`.

An engine is in one of four states: listed and not answered yet; added; added but silent, or no
longer listed by a source that is not certain, until `forget_after` has passed; and removed until it
answers again. What is known of an engine stays valid while it is silent: one with an overloaded
HTTP front end still publishes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from kvindex.subscribe import Worker
from kvindex.subscribe.discovery.ask import EngineReport
from kvindex.subscribe.discovery.sources import Target
from kvindex.wire.errors import DiscoveryError

logger = logging.getLogger("kvindex.subscribe.discovery")

MAX_ENGINES = 4096
"""Most engines that are followed; further engines are refused, with a log line."""

_SILENT_AFTER = 2  # questions that an engine leaves unanswered
_FIRST_RETRY = 1.0  # seconds until an engine that did not answer is asked again; then it doubles


class Engine(msgspec.Struct, frozen=True):
    """An engine to subscribe to.

    Attributes:
        worker: the engine and where its ranks publish.
        model: the model that it serves; "" if unknown.
        url: of its HTTP server, or None.
        routing_group, labels: as for `Target`.
        source: the source that listed it.
    """

    worker: Worker
    model: str = ""
    routing_group: str = "default"
    url: str | None = None
    labels: dict[str, str] = {}
    source: str = ""


class Step(msgspec.Struct, frozen=True):
    """One thing to do: add an engine, or remove it."""

    do: Literal["add", "remove"]
    engine: Engine


class _SourceState(msgspec.Struct):
    """The last report of one source."""

    is_certain: bool
    targets: tuple[Target, ...] | None = None
    error: str = ""
    reports: int = 0
    failures: int = 0


class _EngineState(msgspec.Struct):
    """What is known of one engine."""

    target: Target
    source: str
    ask_at: float
    is_asking: bool = False
    subscribed: Engine | None = None  # the engine that was to be added
    place: str = ""  # the target's URL and version then
    is_added: bool = False  # whether it was
    answered_at: float | None = None
    absent_since: float | None = None
    failures: int = 0
    reason: str = "was not asked yet"
    logged: str = ""  # the last log line about it
    look_at: float = 0.0  # before this it is not forgotten
    report: EngineReport | None = None  # the last, without the JSON


class Tracker:
    """Follows engines, as the module describes."""

    def __init__(
        self,
        sources: Iterable[tuple[str, bool]],  # names, and whether each is certain
        *,
        interval: float,
        forget_after: float,
        is_alive: Callable[[str], bool],
        jitter: Callable[[], float],  # returns 0 to 1
    ) -> None:
        self._sources = {name: _SourceState(is_certain) for name, is_certain in sources}
        self._engines: dict[str, _EngineState] = {}
        self._interval = interval
        self._forget_after = forget_after
        self._is_alive = is_alive
        self._jitter = jitter
        self._steps: list[Step] = []
        self._refused: dict[str, str] = {}
        self.counters = dict.fromkeys(
            ("asked", "unanswered", "added", "removed", "moved", "forgotten"), 0
        )

    # What happens -----------------------------------------------------------------------------

    def listed(self, source: str, targets: Iterable[Target], now: float) -> None:
        """Receive all engines that a source lists."""
        state = self._sources[source]
        state.targets, state.error = tuple(targets), ""
        state.reports += 1
        wanted = self._wanted()
        # Removals before additions: another engine may be listed under an old one's name or port.
        for name, engine in list(self._engines.items()):
            if name in wanted:
                continue
            if self._sources[engine.source].is_certain:
                self._drop(name, engine, f"{engine.source} no longer lists it")
            elif engine.absent_since is None:
                # A name server leaves addresses out: it may be back in the next answer.
                engine.absent_since = now
        for name, (owner, target) in wanted.items():
            known = self._engines.get(name)
            engine = self._engines[name] = known or _EngineState(target, owner, now)
            is_new = known is None or known.target != target
            if engine.target.place != target.place:
                # Another engine has the name now. An answer of the first that is under way does
                # not count (`answered` compares the places), so this one is asked at once.
                engine.ask_at, engine.is_asking = now, False
                engine.answered_at, engine.failures = None, 0
            engine.target, engine.source, engine.absent_since = target, owner, None
            if is_new and not target.url:
                self._accept(engine, target.worker)

    def source_failed(self, source: str, error: str) -> None:
        """Note that a source failed; its last list stays valid."""
        state = self._sources[source]
        state.failures += 1
        if error != state.error:  # else each attempt of a day's outage would be a line
            kept = len(state.targets or ())
            logger.warning("%s: %s; %d engines known from it are kept", source, error, kept)
            state.error = error

    def answered(self, target: Target, answer: EngineReport | DiscoveryError, now: float) -> None:
        """Receive an engine's report, or why it did not report where it publishes."""
        engine = self._engines.get(target.name)
        if engine is None or engine.target.place != target.place:
            return  # it has gone, or another engine has its name now
        engine.is_asking = False
        try:
            if isinstance(answer, DiscoveryError):
                raise answer
            worker = answer.worker(target.name, cache=target.cache)
        except DiscoveryError as error:
            self._unanswered(engine, error, now)
            return
        if engine.failures and engine.logged:
            logger.info("%s: answers again", target.name)
            engine.logged = ""
        engine.answered_at, engine.failures = now, 0
        # Without the JSON: it has fields that differ in each answer, and may have megabytes. vLLM
        # lists each model as created just now: then the time before stays.
        known = {} if engine.report is None else engine.report.listed
        listed = {
            name: {**card, "created": known[name]["created"]}
            if "created" in card and "created" in known.get(name, {})
            else card
            for name, card in answer.listed.items()
        }
        engine.report = msgspec.structs.replace(
            answer, listed=listed, answers={}, failures={}, role=engine.target.role
        )
        # Spread: the pods of a deployment start at once, and would be asked at once for ever.
        engine.ask_at = now + self._interval * (0.9 + 0.2 * self._jitter())
        notes = "; ".join(answer.notes)
        if notes:
            self._log_once(engine, logging.WARNING, notes)
        engine.reason = notes
        self._accept(engine, worker, answer.model)

    def taken(self, step: Step, refusal: str, now: float) -> None:
        """Note that a step was taken, or why not; an engine that was not added is tried again."""
        name = step.engine.worker.name
        engine = self._engines.get(name)
        if not refusal:
            self.counters["added" if step.do == "add" else "removed"] += 1
            if engine is not None and step.do == "add":
                engine.is_added = True
        elif engine is None or step.do == "remove":
            logger.warning("%s could not be removed: %s", name, refusal)
        else:
            engine.subscribed = None  # so that the next answer adds it
            engine.reason = f"cannot be added: {refusal}"
            engine.ask_at = now + self._interval
            self._log_once(engine, logging.ERROR, engine.reason)

    def refresh(self, worker: str | None, now: float) -> None:
        """Ask one engine again at once, or every engine."""
        for name, engine in self._engines.items():
            if engine.target.url and worker in (None, name):
                engine.ask_at = now

    def reports(self) -> dict[str, EngineReport]:
        """Return the last reports of the engines that are added, by name, without their JSON."""
        return {
            name: engine.report
            if engine.failures < _SILENT_AFTER
            else msgspec.structs.replace(engine.report, is_silent=True)
            for name, engine in self._engines.items()
            if engine.is_added and engine.report is not None
        }

    # What to do -------------------------------------------------------------------------------

    def due(self, now: float) -> list[Target]:
        """Return the engines to be asked now; each is to be answered by one call."""
        targets = []
        for engine in self._engines.values():
            # One question at a time: a server that hangs would take all threads that ask.
            if engine.is_asking or engine.ask_at > now:
                continue
            if engine.target.url:
                engine.is_asking = True
                self.counters["asked"] += 1
                targets.append(engine.target)
            else:  # adding it failed: try again
                self._accept(engine, engine.target.worker)
        return targets

    def tick(self, now: float) -> None:
        """Forget engines that were silent, or not listed, for too long."""
        for name, engine in list(self._engines.items()):
            if now < self._forget_at(engine):
                continue
            if engine.subscribed is not None and self._is_alive(name):
                # Its events arrive, so only its HTTP front end or the name server is ill.
                engine.look_at = now + self._interval
                continue
            self.counters["forgotten"] += 1
            after = self._forget_after
            if engine.absent_since is not None:
                self._drop(name, engine, f"{engine.source} has not listed it for {after:g} s")
                continue
            self._unsubscribe(engine)
            logger.warning(
                "removes %s until it answers again, after %g s: %s", name, after, engine.reason
            )

    def next_at(self) -> float:
        """Return when a step is due if no event arrives, by the same clock."""
        times = [math.inf]
        for engine in self._engines.values():
            if not engine.is_asking:
                times.append(engine.ask_at)
            times.append(self._forget_at(engine))
        return min(times)

    def take_steps(self) -> list[Step]:
        """Return the steps that are due, in order, each once."""
        steps, self._steps = self._steps, []
        return steps

    # Where it stands ----------------------------------------------------------------------------

    def missing(self) -> dict[str, str]:
        """Return the sources, then the engines, that are not subscribed to yet, and why."""
        missing = {
            name: source.error or "has not listed its engines yet"
            for name, source in self._sources.items()
            if source.targets is None
        }
        for name, engine in self._engines.items():
            if not engine.is_added:
                missing[engine.target.url or name] = engine.reason
        return missing

    def statistics(self, now: float) -> dict[str, Any]:
        """Return every counter, source and engine as plain JSON-ready values."""
        sources = {
            name: {
                "engines": len(source.targets or ()),
                "reports": source.reports,
                "failures": source.failures,
                "error": source.error or None,
            }
            for name, source in self._sources.items()
        }
        engines = {
            name: {
                "source": engine.source,
                "url": engine.target.url or None,
                "ranks": len(engine.subscribed.worker.publishers()) if engine.subscribed else 0,
                "is_added": engine.is_added,
                "model": engine.subscribed.model if engine.subscribed else engine.target.model,
                "answered": None if engine.answered_at is None else now - engine.answered_at,
                "failures": engine.failures,
                "reason": engine.reason or None,
            }
            for name, engine in self._engines.items()
        }
        counters = {**self.counters, "refused": len(self._refused)}
        return {"sources": sources, "engines": engines, "counters": counters}

    # One engine -------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, tuple[str, Target]]:
        """Return the source of each engine; a name belongs to the first source that lists it."""
        wanted: dict[str, tuple[str, Target]] = {}
        refused: dict[str, str] = {}
        for source, state in self._sources.items():
            for target in state.targets or ():
                if target.name in wanted:
                    first = wanted[target.name][0]
                    refused[f"{source} {target.name}"] = f"{first} lists that name already"
                elif len(wanted) >= MAX_ENGINES:
                    refused[source] = f"more than {MAX_ENGINES} engines"
                else:
                    wanted[target.name] = source, target
        for what in refused.keys() - self._refused.keys():
            logger.error("%s is left out: %s", what, refused[what])
        self._refused = refused
        return wanted

    def _drop(self, name: str, engine: _EngineState, why: str) -> None:
        del self._engines[name]
        if engine.subscribed is not None:
            self._unsubscribe(engine)
            logger.info("removes %s: %s", name, why)

    def _forget_at(self, engine: _EngineState) -> float:
        """Return when an engine will have been silent, or not listed, for too long."""
        since = engine.absent_since
        if since is None and engine.failures and engine.subscribed is not None:
            # None where it never answered, and its usual ports are assumed: then its source alone
            # counts, which still lists it.
            since = engine.answered_at
        return math.inf if since is None else max(since + self._forget_after, engine.look_at)

    def _unanswered(self, engine: _EngineState, error: DiscoveryError, now: float) -> None:
        target = engine.target
        self.counters["unanswered"] += 1
        engine.reason = str(error)
        # Soon at first, since it may be starting, and then less and less often.
        wait = min(self._interval, _FIRST_RETRY * 2 ** min(engine.failures, 16))
        engine.failures += 1
        engine.ask_at = now + wait * (0.9 + 0.2 * self._jitter())
        is_known = engine.subscribed is not None and engine.place == target.place
        if is_known:
            # "unsaid": an engine without a path that says so, whose usual ports are assumed.
            if error.reason != "unsaid":
                self._log_once(engine, logging.WARNING, f"{error}; what is known of it is kept")
        elif target.worker is not None and error.reason != "off":
            # Only its own word that events are off speaks against the usual ports.
            self._log_once(engine, logging.INFO, f"{error}; its usual ports are assumed")
            self._accept(engine, target.worker)
        else:
            self._log_once(engine, logging.WARNING, str(error))
            self._unsubscribe(engine)  # from an earlier engine of this name

    def _unsubscribe(self, engine: _EngineState) -> None:
        if engine.subscribed is not None:
            self._steps.append(Step("remove", engine.subscribed))
            engine.subscribed, engine.is_added = None, False

    def _accept(self, engine: _EngineState, worker: Worker | None, model: str = "") -> None:
        """Set an engine's ranks."""
        assert worker is not None  # a target has a URL or a worker
        target = engine.target
        if worker.name != target.name:
            worker = msgspec.structs.replace(worker, name=target.name)
        if not target.url:
            engine.ask_at, engine.reason = math.inf, ""  # its source alone says what changes
        # An answer without a model (`/v1/models` failed) is no change of model.
        was_here = engine.subscribed is not None and engine.place == target.place
        known_model = engine.subscribed.model if engine.subscribed and was_here else ""
        latest = Engine(
            worker,
            target.model or model or known_model,
            target.routing_group,
            target.url or None,
            target.labels,
            engine.source,
        )
        before, engine.subscribed, engine.place = engine.subscribed, latest, target.place
        if before is None:
            self._steps.append(Step("add", latest))
            logger.info("adds %s", _describe(latest))
        elif _shape(before) != _shape(latest):
            # As a whole: which ranks it has, and where, is never a mixture of two answers.
            self.counters["moved"] += 1
            engine.is_added = False
            self._steps += [Step("remove", before), Step("add", latest)]
            logger.info(
                "removes %s and adds it anew: it has changed to %s", target.name, _describe(latest)
            )

    def _log_once(self, engine: _EngineState, level: int, text: str) -> None:
        """Log a line about an engine, unless it was the last line about it."""
        if text != engine.logged:
            engine.logged = text
            logger.log(level, "%s: %s", engine.target.name, text)


def _shape(engine: Engine) -> tuple[object, ...]:
    """Return all that a subscription to an engine depends on."""
    worker = engine.worker
    return (
        *(worker.publishers(), worker.topic, worker.bind, worker.curve, worker.cache),
        *(engine.model, engine.routing_group),
    )


def _describe(engine: Engine) -> str:
    addresses = engine.worker.publishers()
    more = f" and {len(addresses) - 1} more ranks" if len(addresses) > 1 else ""
    replay = "" if addresses[0].replay else ", without replay"
    return f"{engine.worker.name} at {addresses[0].endpoint}{more}{replay} ({engine.source})"
