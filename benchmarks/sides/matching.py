"""Match prompts of the workload, one after the other."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from time import perf_counter_ns
from typing import Any

import numpy as np

from benchmarks.sides.adapter import Adapter, Fed
from benchmarks.workload import (
    BLOCK_SIZE,
    EVERYWHERE,
    PROMPT_TOKENS,
    Change,
    Fleet,
    Prompt,
    Source,
    long_prompts,
    messages,
)

LONGEST_NS = 1_000_000_000  # of calling one thing again and again


class Matching:
    """Prompts of 8,192 tokens against an index of the workload.

    Kinds of prompts: "everywhere", one prompt that every rank holds wholly; "conversation",
    resident prompts of the workload in turn, held by one or a few ranks and begun by many; "new",
    requests to come, of which at most the beginning is known.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._prompts: dict[str, list[Prompt]] = {}
        self._fleet = Fleet(1, seed=0)

    def prepare(
        self, source: dict[str, Any], ranks: int, entries: int, prompts: int
    ) -> dict[str, Any]:
        """Fill the index, check its answers, and return what it holds."""
        workload = Source(**source)
        fleet = Fleet(ranks, seed=workload.seed)
        self._adapter.reset()
        load(self._adapter, fleet.place_everywhere(EVERYWHERE))
        requests, resident = workload.requests(), []
        target = fleet.entries + entries
        for request in requests:
            resident.append(request)
            load(self._adapter, fleet.serve(request))
            if fleet.entries >= target:
                break
        coming = long_prompts(fleet, islice(requests, 100 * prompts), 4 * prompts)
        self._prompts = {
            "everywhere": [fleet.prompt(EVERYWHERE)],
            "conversation": long_prompts(fleet, reversed(resident), prompts),
            "new": [prompt for prompt in coming if not _is_held(prompt)][:prompts],
        }
        for prompts_of_kind in self._prompts.values():
            check(self._adapter, prompts_of_kind)
        return {
            "entries": fleet.entries,
            "unique_blocks": fleet.unique_blocks,
            "prompts": {kind: len(prompts) for kind, prompts in self._prompts.items()},
        }

    def measure(self, kind: str, form: str, repeats: int, call: str = "match") -> list[int]:
        """Return the nanoseconds of each match; every prompt is asked about equally often.

        Args:
            kind: which prompts.
            form: "list", "array" or "numpy".
            repeats: how many matches.
            call: "match"; "best" also reads which rank is best; "hash" is a peer's hash alone.
        """
        prompts = [typed(prompt, form) for prompt in self._prompts[kind]]
        return timed(self._call(call), prompts, repeats)

    def _call(self, call: str) -> Callable[[Any], Any]:
        if call == "hash":
            hasher: Callable[[Any], Any] = self._adapter.hasher()  # type: ignore[attr-defined]
            return hasher
        match, best = self._adapter.matcher(), self._adapter.best
        return match if call == "match" else lambda tokens: best(match(tokens))


def load(adapter: Fed, changes: Iterable[Change]) -> None:
    """Apply changes, outside any clock."""
    apply = adapter.applier()
    for message in messages(changes, adapter.encoder()):
        apply(adapter.rank(message.rank), message.data)


def check(adapter: Adapter, prompts: Iterable[Prompt]) -> None:
    """Assert that every answer is the right one."""
    adapter.drain()
    match = adapter.matcher()
    for prompt in prompts:
        depths = adapter.depths(match(prompt.tokens.tolist()))
        if depths != prompt.depths:
            raise AssertionError(f"a wrong answer: {_difference(depths, prompt.depths)}")


def typed(prompt: Prompt, form: str) -> Any:
    """Return a prompt's tokens in the form of a query."""
    if form == "list":
        return prompt.tokens.tolist()
    return array("I", prompt.tokens.tobytes()) if form == "array" else np.copy(prompt.tokens)


def timed(call: Callable[[Any], Any], prompts: list[Any], repeats: int) -> list[int]:
    """Return the nanoseconds of each call, over the prompts in turn, garbage collection off.

    After a round over all of them to warm up; fewer than `repeats` if they take too long.
    """
    for prompt in prompts:
        call(prompt)
    samples: list[int] = []
    with collected():
        latest = perf_counter_ns() + LONGEST_NS
        while len(samples) < repeats and perf_counter_ns() < latest:
            for prompt in prompts:
                started = perf_counter_ns()
                call(prompt)
                samples.append(perf_counter_ns() - started)
    return samples


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage, and not again within the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_held(prompt: Prompt) -> bool:
    return max(prompt.depths.values(), default=0) > PROMPT_TOKENS // BLOCK_SIZE // 2


def _difference(answer: dict[int, int], right: dict[int, int]) -> str:
    ranks = sorted(answer.keys() | right.keys())
    wrong = [rank for rank in ranks if answer.get(rank) != right.get(rank)]
    shown = [f"rank {r}: {answer.get(r, 0)}, not {right.get(r, 0)} blocks" for r in wrong[:3]]
    return f"{len(wrong)} of {len(ranks)} ranks ({'; '.join(shown)})"
