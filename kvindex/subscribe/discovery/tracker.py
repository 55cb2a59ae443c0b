"""Decides which engines to ask, add and remove as they start, stop, change and fall silent.

A state machine without threads, sockets or clocks: it receives the sources' lists and the engines'
answers, and returns which engines to ask and which workers to add and to remove. Owned by the
thread of a `Discovery`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from kvindex.subscribe import Worker
from kvindex.subscribe.discovery.engine import EngineReport
from kvindex.subscribe.discovery.targets import Engine, Target, described, shape_of
from kvindex.wire.errors import DiscoveryError

logger = logging.getLogger("kvindex.subscribe.discovery")

MAX_ENGINES = 4096
"""Most engines that are followed; further engines are refused, with a log line."""

_SILENT_AFTER = 2  # questions that an engine leaves unanswered
_FIRST_RETRY = 1.0  # seconds until an engine that did not answer is asked again; then it doubles


class Step(msgspec.Struct, frozen=True):
    """One thing to do: add an engine, or remove it."""

    do: Literal["add", "remove"]
    engine: Engine


class _Source(msgspec.Struct):
    """The last report of one source."""

    is_certain: bool
    targets: tuple[Target, ...] | None = None
    error: str = ""
    reports: int = 0
    failures: int = 0


class _Followed(msgspec.Struct):
    """One engine that is followed."""

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
    """Follows engines.

    Args:
        sources: their names, each with whether it is certain; the first that lists a name wins.
        interval: seconds between two questions to an engine.
        forget_after: seconds for which an engine that does not answer is kept.
        is_alive: whether events of a worker still arrive: then it is kept, answers or not.
        jitter: returns 0 to 1: questions are spread over time.
    """

    def __init__(
        self,
        sources: Iterable[tuple[str, bool]],
        *,
        interval: float,
        forget_after: float,
        is_alive: Callable[[str], bool],
        jitter: Callable[[], float],
    ) -> None:
        self._sources = {name: _Source(is_certain) for name, is_certain in sources}
        self._engines: dict[str, _Followed] = {}
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
        for name, engine in list(self._engines.items()):
            if name in wanted:
                continue
            if self._sources[engine.source].is_certain:
                self._drop(name, engine, f"{engine.source} no longer lists it")
            elif engine.absent_since is None:
                engine.absent_since = now
        for name, (owner, target) in wanted.items():
            known = self._engines.get(name)
            engine = self._engines[name] = known or _Followed(target, owner, now)
            is_new = known is None or known.target != target
            if engine.target.place != target.place:
                engine.ask_at, engine.is_asking = now, False
                engine.answered_at, engine.failures = None, 0
            engine.target, engine.source, engine.absent_since = target, owner, None
            if is_new and not target.url:
                self._accept(engine, target.worker, now)

    def source_failed(self, source: str, error: str) -> None:
        """Note that a source failed; its last list stays valid."""
        state = self._sources[source]
        state.failures += 1
        if error != state.error:
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
        engine.report = msgspec.structs.replace(answer, answers={}, failures={})
        engine.ask_at = now + self._interval * (0.9 + 0.2 * self._jitter())
        notes = "; ".join(answer.notes)
        if notes:
            self._log_once(engine, logging.WARNING, notes)
        engine.reason = notes
        self._accept(engine, worker, now, answer.model)

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
            engine.subscribed = None
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
            if engine.is_asking or engine.ask_at > now:
                continue
            if engine.target.url:
                engine.is_asking = True
                self.counters["asked"] += 1
                targets.append(engine.target)
            else:  # adding it failed: try again
                self._accept(engine, engine.target.worker, now)
        return targets

    def tick(self, now: float) -> None:
        """Forget engines that were silent, or not listed, for too long."""
        for name, engine in list(self._engines.items()):
            if now < self._forget_at(engine):
                continue
            if engine.subscribed is not None and self._is_alive(name):
                engine.look_at = now + self._interval
            else:
                self._forget(name, engine)

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

    def _drop(self, name: str, engine: _Followed, why: str) -> None:
        del self._engines[name]
        if engine.subscribed is not None:
            self._unsubscribe(engine)
            logger.info("removes %s: %s", name, why)

    def _forget_at(self, engine: _Followed) -> float:
        """Return when an engine will have been silent, or not listed, for too long."""
        since = engine.absent_since
        if since is None and engine.failures and engine.subscribed is not None:
            since = engine.answered_at  # if it never answered, its source alone counts
        return math.inf if since is None else max(since + self._forget_after, engine.look_at)

    def _forget(self, name: str, engine: _Followed) -> None:
        self.counters["forgotten"] += 1
        after = self._forget_after
        if engine.absent_since is not None:
            self._drop(name, engine, f"{engine.source} has not listed it for {after:g} s")
        else:
            self._unsubscribe(engine)
            why = engine.reason
            logger.warning("removes %s until it answers again, after %g s: %s", name, after, why)

    def _unanswered(self, engine: _Followed, error: DiscoveryError, now: float) -> None:
        target = engine.target
        self.counters["unanswered"] += 1
        engine.reason = str(error)
        wait = min(self._interval, _FIRST_RETRY * 2 ** min(engine.failures, 16))
        engine.failures += 1
        engine.ask_at = now + wait * (0.9 + 0.2 * self._jitter())
        is_known = engine.subscribed is not None and engine.place == target.place
        if is_known:
            if error.reason != "unsaid":
                self._log_once(engine, logging.WARNING, f"{error}; what is known of it is kept")
        elif target.worker is not None and error.reason != "off":
            self._log_once(engine, logging.INFO, f"{error}; its usual ports are assumed")
            self._accept(engine, target.worker, now)
        else:
            self._log_once(engine, logging.WARNING, str(error))
            self._unsubscribe(engine)  # from an earlier engine of this name

    def _unsubscribe(self, engine: _Followed) -> None:
        if engine.subscribed is not None:
            self._steps.append(Step("remove", engine.subscribed))
            engine.subscribed, engine.is_added = None, False

    def _accept(
        self, engine: _Followed, worker: Worker | None, now: float, model: str = ""
    ) -> None:
        """Set an engine's ranks."""
        assert worker is not None  # a target has a URL or a worker
        target = engine.target
        if worker.name != target.name:
            worker = msgspec.structs.replace(worker, name=target.name)
        if not target.url:
            engine.ask_at, engine.reason = math.inf, ""
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
            logger.info("adds %s", described(latest))
        elif shape_of(before) != shape_of(latest):
            # As a whole: which ranks it has, and where, must never be a mixture of two answers.
            self.counters["moved"] += 1
            engine.is_added = False
            self._steps += [Step("remove", before), Step("add", latest)]
            logger.info(
                "removes %s and adds it anew: it has changed to %s", target.name, described(latest)
            )

    def _log_once(self, engine: _Followed, level: int, text: str) -> None:
        """Log a line about an engine, unless it was the last line about it."""
        if text != engine.logged:
            engine.logged = text
            logger.log(level, "%s: %s", engine.target.name, text)
