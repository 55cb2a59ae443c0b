"""Match while events come in: threads that ask, and one that applies at a given rate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle, islice
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

from benchmarks.feed import marker_tokens
from benchmarks.sides.adapter import Adapter
from benchmarks.sides.matching import check, load
from benchmarks.workload import EVERYWHERE, Fleet, Source, long_prompts, messages

PROMPTS = 32
_SLICE = 0.0005  # seconds of applying at a time


class Busy:
    """An index that is asked and fed at once, within one process."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._prompts: list[list[int]] = []
        self._incoming: list[tuple[Any, bytes, int]] = []

    def prepare(
        self, source: dict[str, Any], ranks: int, entries: int, incoming: int, event_blocks: int
    ) -> dict[str, Any]:
        """Fill the index, check its answers, and encode what is to come in."""
        workload = Source(**source)
        fleet = Fleet(ranks, seed=workload.seed)
        self._adapter.reset()
        load(self._adapter, fleet.place_everywhere(EVERYWHERE))
        load(self._adapter, workload.changes(fleet, entries))
        requests = islice(workload.requests(), 100 * PROMPTS)
        prompts = [fleet.prompt(EVERYWHERE), *long_prompts(fleet, requests, PROMPTS - 1)]
        check(self._adapter, prompts)
        self._prompts = [prompt.tokens.tolist() for prompt in prompts]
        later = Source(**{**source, "seed": workload.seed + 1})
        changes = later.changes(fleet, fleet.entries + incoming)
        encoded = messages(changes, self._adapter.encoder(), event_blocks=event_blocks)
        self._incoming = [(self._adapter.rank(m.rank), m.data, m.blocks) for m in encoded]
        return {"entries": entries, "batches": len(self._incoming)}

    def measure(
        self, seconds: float, rate: float, threads: int = 1, pause: float = 0.0
    ) -> dict[str, Any]:
        """Return the nanoseconds of each match and how many blocks came in meanwhile.

        Args:
            seconds: how long.
            rate: blocks per second that come in.
            threads: how many ask.
            pause: seconds between one thread's matches.
        """
        stop = threading.Event()
        applied: list[int] = []
        feeder = threading.Thread(target=self._feed, args=(rate, stop, applied))
        samples: list[list[int]] = [[] for _ in range(threads)]
        match = self._adapter.matcher()
        askers = [
            threading.Thread(target=ask, args=(match, self._prompts, seconds, pause, own))
            for own in samples
        ]
        feeder.start()
        started = perf_counter()
        for thread in askers:
            thread.start()
        for thread in askers:
            thread.join()
        elapsed = perf_counter() - started
        stop.set()
        feeder.join()
        flat = [sample for own in samples for sample in own]
        return {"samples": flat, "seconds": elapsed, "rate": sum(applied) / elapsed}

    def _feed(self, rate: float, stop: threading.Event, applied: list[int]) -> None:
        """Apply at a rate; what is left stays for the next measurement."""
        apply, due, done, total = self._adapter.applier(), perf_counter(), 0, 0
        for rank, data, blocks in self._incoming:
            ahead = due - perf_counter()
            if ahead > _SLICE:
                sleep(ahead)
            if stop.is_set():
                break
            apply(rank, data)
            done += 1
            total += blocks
            due += blocks / rate
        del self._incoming[:done]
        applied.append(total)


def ask(match: Any, prompts: list[Any], seconds: float, pause: float, samples: list[int]) -> None:
    """Match the prompts in turn for so long; note the nanoseconds of each."""
    end = perf_counter() + seconds
    for prompt in cycle(prompts):
        started = perf_counter_ns()
        match(prompt)
        samples.append(perf_counter_ns() - started)
        if perf_counter() >= end:
            return
        if pause:
            sleep(pause)


def listen(
    match: Callable[[Any], Any],
    is_held: Callable[[Any], bool],
    prompts: list[Any],
    seconds: float,
    markers: int,
    pause: float,
) -> dict[str, Any]:
    """Match the prompts in turn for so long, and look for one marker after the other meanwhile.

    Returns:
        `samples`: the nanoseconds of each match; `seen`: pairs of a marker and the time
        (`time.perf_counter`) at which it was found first; `since`: the time at which this began.
    """
    samples: list[int] = []
    seen: list[tuple[int, float]] = []
    wanted = [marker_tokens(number) for number in range(markers)]
    due = since = perf_counter()
    end = due + seconds
    for prompt in cycle(prompts):
        started = perf_counter_ns()
        match(prompt)
        samples.append(perf_counter_ns() - started)
        while len(seen) < markers and is_held(wanted[len(seen)]):
            seen.append((len(seen), perf_counter()))
        due += pause
        now = perf_counter()
        if now >= end:
            break
        if due > now:
            sleep(due - now)
    return {"samples": samples, "seen": seen, "since": since}
