"""Engines followed as they start, stop and move: sources are watched, and engines are asked."""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any

import msgspec

from kvindex.subscribe.discovery.ask import EngineReport, ask_engine
from kvindex.subscribe.discovery.sources import Source, Target, check_names
from kvindex.subscribe.discovery.tracker import Engine, Step, Tracker
from kvindex.wire.errors import ClosedError, ConfigurationError, DiscoveryError, KVIndexError
from kvindex.wire.forks import FORKED, disown_in_children

logger = logging.getLogger("kvindex.subscribe.discovery")

_ASKERS = 32
_LONGEST_PAUSE = 10.0  # seconds until a source that failed is called again
_PATIENCE = 5.0  # seconds for which `close` waits for a thread


class DiscoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How engines are asked and followed.

    Attributes:
        interval: seconds between two questions to an engine. An engine that has not answered yet
            is asked after a second, and then less and less often.
        forget_after: seconds for which an engine that no longer answers is kept.
        timeout: seconds in which an engine must have answered.
        token: the engines' API key; a function returns the present one.
        context: of TLS, for engines at https; certificates are checked as the system does.

    Raises:
        ConfigurationError: a time is not above 0.
    """

    interval: float = 10.0
    forget_after: float = 300.0
    timeout: float = 5.0
    token: str | Callable[[], str | None] | None = None
    context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        for name in ("interval", "forget_after", "timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 1e6:
                raise ConfigurationError(f"{name} must be above 0 seconds, not {value!r}")


class Discovery:
    """Follows engines, and reports which ranks to subscribe to and which no longer.

    - A new engine is added once it has reported where it publishes.
    - An engine that its source no longer lists (a deleted pod, a line removed from a file) is
      removed at once. If the source is not certain (a name server), the engine is kept for
      `forget_after` seconds, and as long as `is_alive` returns true.
    - An engine that does not answer, or no longer reports where it publishes, keeps its last known
      ranks in the same way, and is added anew when it answers again.
    - An engine that has other ranks, endpoints or settings than before is removed and added anew.
    - A source that fails removes no engine. It is called again, after longer and longer pauses.

    Each decision is logged once, by the logger "kvindex.subscribe.discovery".

    Args:
        sources: they list engines. If two list one name, the first counts.
        add: called with an engine to subscribe to, by one thread, which it may block.
        remove: called by the same thread with an engine to forget.
        options: how engines are asked, and how long they are kept.
        is_alive: whether events of a worker (by name) still arrive.
        on_change: called by the same thread when `missing` may have changed, and at the end.

    Raises:
        ConfigurationError: a value cannot work.

    Thread safety: every method may be called from any thread. It has a thread of its own, one for
    each source, and up to 32 that ask. In a forked child it is closed.

    Examples:
        >>> from kvindex.subscribe.discovery import Discovery, EngineSource
        >>> with Discovery(EngineSource(["http://127.0.0.1:1"]), print, print) as discovery:
        ...     discovery.missing()
        {'...http://127.0.0.1:1': ...}
    """

    def __init__(
        self,
        sources: Iterable[Source] | Source,
        add: Callable[[Engine], object],
        remove: Callable[[Engine], object],
        options: DiscoveryOptions | None = None,
        *,
        is_alive: Callable[[str], bool] = lambda worker: False,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        options = options or DiscoveryOptions()
        self.sources: tuple[Source, ...] = (
            (sources,) if isinstance(sources, Source) else tuple(sources)
        )
        for source in self.sources:
            if not isinstance(source, Source):
                raise ConfigurationError(f"{source!r:.200} is no source of engines")
        names = (source.name for source in self.sources)
        check_names(names, "two sources are {!r}: name each once")
        self._calls = {"add": add, "remove": remove}
        self._ask = partial(
            ask_engine, timeout=options.timeout, token=options.token, context=options.context
        )
        self._on_change = on_change
        self._lock = threading.RLock()  # `is_alive` is called with it, and may ask back
        self._tracker = Tracker(
            [(source.name, source.is_certain) for source in self.sources],
            interval=options.interval,
            forget_after=options.forget_after,
            is_alive=is_alive,
            jitter=random.random,
        )
        self._engines: Mapping[str, EngineReport] = MappingProxyType({})
        # What sources and answers call of the tracker, with the time: its owner alone calls it.
        self._inbox: SimpleQueue[Callable[[float], None] | None] = SimpleQueue()
        self._askers = _Askers(_ASKERS)
        self._ended = threading.Event()
        self._reason = "closed"
        self._threads = [
            threading.Thread(target=partial(self._watch, s), name="kvindex-source", daemon=True)
            for s in self.sources
        ] + [threading.Thread(target=self._run, name="kvindex-discovery", daemon=True)]
        disown_in_children(self, Discovery._disown)
        for thread in self._threads:
            thread.start()

    # Calls from any thread --------------------------------------------------------------------

    def missing(self) -> dict[str, str]:
        """Return why sources have listed nothing, and engines are not subscribed to yet.

        By the name of a source, and by the URL (or name) of an engine; empty when every known
        engine is added.
        """
        with self._lock:
            return self._tracker.missing()

    def engines(self) -> Mapping[str, EngineReport]:
        """Return the last report of each engine that was added, by its worker's name.

        Workers that sources list with their endpoints were not asked, and are not among them. The
        mapping is immutable, and the same object until a report differs. O(1).
        """
        return self._engines

    def refresh(self, worker: str | None = None) -> None:
        """Ask one engine again at once, by its worker's name, or every engine."""
        self._inbox.put(partial(self._tracker.refresh, worker))

    def statistics(self) -> dict[str, Any]:
        """Return plain JSON-ready values.

        `sources`: by name, how many engines it lists, how often it reported and failed, and the
        last error in words, if it stands. `engines`: by name, the source, URL, ranks, model, the
        seconds since it last answered, and what is wrong. `counters`: how often each step was done.
        """
        with self._lock:
            return self._tracker.statistics(time.monotonic())

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or the discovery ended by a failure."""
        return self._ended.is_set()

    def close(self) -> None:
        """Stop following; added ranks stay added. Idempotent.

        It waits for a call of `add` or `remove` that is under way, for up to 5 seconds.
        """
        self.end()
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            # `add` and `remove` may close it: that thread cannot wait for itself.
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def end(self) -> None:
        """Stop following soon, without waiting for it."""
        self._ended.set()
        self._inbox.put(None)  # wakes the owner
        for source in self.sources:
            source.close()

    def __enter__(self) -> Discovery:
        self.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Raise ClosedError if it is closed."""
        if self._ended.is_set():
            raise ClosedError(f"the discovery is {self._reason}")

    # The owner's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._turn()
        except ClosedError:
            pass  # of `add` or `remove`: the client was closed or dropped first
        except Exception:
            logger.exception("discovery has failed, and follows nothing any more")
            self._reason = "ended by a failure, which was logged"
        finally:
            self.end()
            self._askers.close()
            self._notify()

    def _turn(self) -> None:
        """Process one event, or the passing of time, and carry out the steps."""
        # Until the next time-out of any engine: so no thread of timers is needed.
        with self._lock:
            wait = self._tracker.next_at() - time.monotonic()
        try:
            # An hour at most: locks refuse longer times than some years.
            event = self._inbox.get(timeout=min(max(wait, 0.0), 3600.0))
        except Empty:
            event = None
        now = time.monotonic()
        with self._lock:
            if event is not None:
                event(now)
            self._tracker.tick(now)
            self._show_engines()
            due, steps = self._tracker.due(now), self._tracker.take_steps()
        for target in due:
            self._askers.run(partial(self._ask_one, target))
        for step in steps:
            if not self._ended.is_set():
                self._carry_out(step)
        # A turn that only a time began changes nothing that is missing, unless it takes steps.
        if steps or event is not None:
            self._notify()

    def _carry_out(self, step: Step) -> None:
        refusal = ""
        # Without the lock: `add` may block, and other threads go on asking what is missing.
        try:
            self._calls[step.do](step.engine)
        except ClosedError:
            raise
        except KVIndexError as error:
            refusal = str(error)
        except Exception as error:
            logger.exception("%s of %s failed", step.do, step.engine.worker.name)
            refusal = repr(error)
        with self._lock:
            self._tracker.taken(step, refusal, time.monotonic())
            self._show_engines()

    def _show_engines(self) -> None:
        """Show the reports of the engines that are added."""
        # The same object while nothing differs: the gateway compares it at each request.
        reports = self._tracker.reports()
        if reports != self._engines:
            self._engines = MappingProxyType(reports)

    def _notify(self) -> None:
        try:
            self._on_change()
        except Exception:
            logger.exception("a function that is called when discovery changes failed")

    # The other threads ------------------------------------------------------------------------

    def _ask_one(self, target: Target) -> None:
        """Ask one engine and enqueue its answer for the owner."""
        if self._ended.is_set():
            return
        answer: EngineReport | DiscoveryError
        try:
            answer = self._ask(target.url)
        except DiscoveryError as error:
            answer = error
        except Exception as error:  # else it would never be asked again
            text = str(error)
            if not isinstance(error, ConfigurationError):
                logger.exception("%s could not be asked", target.url)
                text = repr(error)[:400]
            answer = DiscoveryError(text, url=target.url, reason="content")
        self._inbox.put(partial(self._tracker.answered, target, answer))

    def _watch(self, source: Source) -> None:
        """Watch a source, until the end."""
        failures = 0

        def notify(targets: Iterable[Target]) -> None:
            nonlocal failures
            failures = 0
            self._inbox.put(partial(self._tracker.listed, source.name, tuple(targets)))

        def fail(error: str, now: float) -> None:
            self._tracker.source_failed(source.name, error)

        while not self._ended.is_set():
            try:
                source.watch(notify)
                error = "has ended"
            except DiscoveryError as failure:
                error = str(failure)
            except Exception as failure:
                logger.exception("%s failed", source.name)
                error = repr(failure)
            if self._ended.is_set():
                return
            failures += 1
            self._inbox.put(partial(fail, error))
            # Longer and longer, and at random: a fleet of routers must not strike a server that
            # comes up all at once.
            pause = min(_LONGEST_PAUSE, 0.25 * 2 ** min(failures, 10))
            self._ended.wait(pause * (0.5 + random.random() / 2))

    # Forks ------------------------------------------------------------------------------------

    def _disown(self) -> None:
        """In a forked child: its threads are the parent's."""
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._inbox, self._threads, self.sources = SimpleQueue(), [], ()
        self._reason = f"closed: {FORKED}"
        self._ended.set()


class _Askers:
    """Runs one thread's calls, which must not raise, in up to `most` others, started for work."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def run(self, call: Callable[[], None]) -> None:
        """Enqueue a call."""
        self._calls.put(call)
        # Each call that ends leaves a token: a thread that waits, or soon will.
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            # A daemon: a name server that never answers does not delay the end of the process.
            thread = threading.Thread(target=self._work, name="kvindex-ask", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads, without waiting for calls that are under way."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()
