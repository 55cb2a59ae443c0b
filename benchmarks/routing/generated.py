"""Requests made up from a seed: chat, questions about shared documents, sibling bursts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from typing import Final

from benchmarks.routing.traffic import BLOCK, Session, Turn


class _Names:
    """Names of blocks: the same one for the same content after the same beginning."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._shared: dict[tuple[int, str, int], int] = {}

    def shared(self, before: list[int], content: str, blocks: int) -> list[int]:
        """Return names of blocks that every prompt with this beginning and content has."""
        names: list[int] = []
        for place in range(blocks):
            key = ((names or before or [0])[-1], content, place)
            if key not in self._shared:
                self._shared[key] = next(self._numbers)
            names.append(self._shared[key])
        return names

    def fresh(self, blocks: int) -> list[int]:
        """Return names that nothing else has."""
        return list(itertools.islice(self._numbers, max(0, blocks)))


def generate(kind: str, *, requests: int, seconds: float, seed: int) -> list[Session]:
    """Return sessions of one kind that begin at random within so many seconds.

    Args:
        kind: one of `KINDS`.
        requests: how many requests in all, about; the last session is whole.
        seconds: within which the sessions begin.
        seed: of everything.
    """
    rng, names = random.Random(f"{kind} {seed}"), _Names()
    groups: list[list[tuple[Turn, ...]]] = []
    count = 0
    while count < requests:
        group = KINDS[kind](names, rng)
        groups.append(group)
        count += sum(len(turns) for turns in group)
    sessions = [
        Session(start, turns)
        for group in groups
        for start in [rng.random() * seconds]
        for turns in group
    ]
    return sorted(sessions, key=lambda session: session.start)


def _chat(names: _Names, rng: random.Random) -> list[tuple[Turn, ...]]:
    """One of 16 system prompts, 5 turns on average, some seconds of thought before each."""
    system = min(15, int(rng.expovariate(0.3)))
    head = names.shared([], f"system {system}", 2 + system % 5)
    return [
        _growing(
            names,
            head,
            (
                (rng.expovariate(1 / 8), _length(rng, 250, 1.0), _length(rng, 300, 0.8))
                for _ in range(_turns(rng, 5))
            ),
        )
    ]


def _rag(names: _Names, rng: random.Random) -> list[tuple[Turn, ...]]:
    """A system prompt, one to three of 400 documents, a question; popular documents come first."""
    prompt = names.shared([], "system", 2)
    documents = sorted({int(400 * rng.random() ** 3) for _ in range(rng.randint(1, 3))})
    for document in documents:
        size = 4 + random.Random(document).randrange(24)
        prompt += names.shared(prompt, f"document {document}", size)
    return [_growing(names, prompt, [(0.0, _length(rng, 150, 0.6), _length(rng, 200, 0.6))])]


def _bursts(names: _Names, rng: random.Random) -> list[tuple[Turn, ...]]:
    """A context that nobody has seen, and 4 to 16 requests that continue it within 50 ms."""
    head = names.fresh(rng.randint(8, 40))
    return [
        _growing(
            names, head, [(0.05 * rng.random(), _length(rng, 300, 0.8), _length(rng, 200, 0.6))]
        )
        for _ in range(rng.randint(4, 16))
    ]


KINDS: Final[dict[str, Callable[[_Names, random.Random], list[tuple[Turn, ...]]]]] = {
    "chat": _chat,
    "rag": _rag,
    "bursts": _bursts,
}
"""Each makes the sessions that begin together."""


def _growing(
    names: _Names, head: list[int], steps: Iterable[tuple[float, int, int]]
) -> tuple[Turn, ...]:
    """Return turns of which each continues the one before it: gap, new tokens, answer."""
    blocks, length, turns = list(head), len(head) * BLOCK, []
    for gap, new, answer in steps:
        prompt = length + new
        length = prompt + answer
        blocks += names.fresh(length // BLOCK - len(blocks))
        turns.append(Turn(gap, prompt, answer, tuple(blocks)))
    return tuple(turns)


def _turns(rng: random.Random, mean: float) -> int:
    return 1 + int(rng.expovariate(1 / (mean - 0.5)))


def _length(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, int(rng.lognormvariate(math.log(median), sigma)))
