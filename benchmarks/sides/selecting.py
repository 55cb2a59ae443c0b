"""Choose ranks for prompts of which all ranks, half of them or none hold a part."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from time import perf_counter, sleep
from typing import Any, Protocol

from benchmarks.sides.adapter import Fed
from benchmarks.sides.matching import load, typed
from benchmarks.workload import HELD_BY, SENTINEL, Fleet, Prompt, Source, parted, place_parts

OPEN_PER_RANK = 2  # requests that every rank has to do meanwhile
_DRAINED = 120.0  # seconds within which everything that was sent must be applied
_POLL = 0.01


class Chooser(Fed, Protocol):
    """One router under measurement."""

    def reset(self, ranks: int, fed: str) -> None:
        """Begin again: `fed` is "directly" or "zmq", if this router can be fed in both ways."""

    def held(self, tokens: list[int]) -> dict[int, int]:
        """Return the blocks of a prompt that each rank holds, where it holds any."""

    def chosen(self, tokens: list[int]) -> tuple[int, int]:
        """Return the rank that it chooses, and the blocks that it counts as held there."""

    def creditable(self, blocks: int) -> int:
        """Return how many of a whole prompt's blocks count if so many are held."""

    def occupy(self, tokens: list[int]) -> None:
        """Book a request that stays open."""

    def timed(self, call: str, prompts: list[Any], repeats: int) -> list[int]:
        """Return the nanoseconds of each call, over the prompts in turn."""


class Selecting:
    """Prompts of 8,192 tokens to choose a rank for."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._prompts: dict[str, list[Prompt]] = {}

    def prepare(
        self, source: dict[str, Any], ranks: int, entries: int, prompts: int, fed: str
    ) -> dict[str, Any]:
        """Fill the index, check its answers, open some requests; return what it holds."""
        workload, fleet = Source(**source), Fleet(ranks, seed=1)
        self._chooser.reset(ranks, fed)
        load(self._chooser, workload.changes(fleet, entries))
        kinds = {kind: parted(kind, prompts) for kind in HELD_BY}
        for kind, segments in kinds.items():
            for seed, one in enumerate(segments):
                load(self._chooser, place_parts(fleet, one, HELD_BY[kind], seed))
        load(self._chooser, fleet.place_everywhere(SENTINEL))
        self._wait(fleet.prompt(SENTINEL).depths, fleet.prompt(SENTINEL).tokens.tolist())
        self._prompts = {kind: [fleet.prompt(one) for one in kinds[kind]] for kind in kinds}
        for members in self._prompts.values():
            for prompt in members:
                self._check(prompt)
        for prompt in islice(cycle(self._prompts["none"]), OPEN_PER_RANK * ranks):
            self._chooser.occupy(prompt.tokens.tolist())
        return {"entries": fleet.entries, "unique_blocks": fleet.unique_blocks}

    def measure(self, kind: str, form: str, call: str, repeats: int) -> list[int]:
        """Return the nanoseconds of each call; every prompt comes equally often.

        Args:
            kind: which prompts.
            form: "list" or "numpy".
            call: "select", "reserve" (with what ends the booking), or another that the router has.
            repeats: how many.
        """
        prompts = [typed(prompt, form) for prompt in self._prompts[kind]]
        return self._chooser.timed(call, prompts, repeats)

    def _wait(self, depths: Mapping[int, int], tokens: list[int]) -> None:
        """Return when every rank holds its last message."""
        deadline = perf_counter() + _DRAINED
        while self._chooser.held(tokens) != depths:
            if perf_counter() > deadline:
                raise TimeoutError(f"the index has not drained within {_DRAINED} s")
            sleep(_POLL)

    def _check(self, prompt: Prompt) -> None:
        """Assert that a choice is made by the right facts."""
        tokens = prompt.tokens.tolist()
        if self._chooser.held(tokens) != prompt.depths:
            raise AssertionError("a wrong answer")
        rank, blocks = self._chooser.chosen(tokens)
        if blocks != self._chooser.creditable(prompt.depths.get(rank, 0)):
            raise AssertionError(f"rank {rank} counts for {blocks} blocks")
