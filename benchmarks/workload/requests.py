"""Requests as a serving fleet sees them: shared system prompts, conversations, long documents."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.workload.segments import BLOCK_SIZE, Segment

SYSTEM_PROMPTS: Final = 32
SYSTEM_TOKENS: Final = (512, 4_096)
DOCUMENTS: Final = 400
DOCUMENT_TOKENS: Final = (2_048, 32_768)
WITH_DOCUMENT: Final = 0.15  # of the conversations
TURNS: Final = 5  # mean number of turns of a conversation
TURN_TOKENS: Final = (180, 1.2)  # median and sigma of a log-normal length
ANSWER_TOKENS: Final = (320, 0.8)
LONGEST_TOKENS: Final = 65_536
TRACE_BLOCK: Final = 512  # tokens that one hash id of a trace stands for


class Request(NamedTuple):
    """One request: the segments of its prompt, and the answer that the engine generates."""

    prompt: tuple[Segment, ...]
    answer: Segment | None


def conversations(*, seed: int, open_at_once: int, unit: int = 1) -> Iterator[Request]:
    """Yield requests without end: turns of conversations, of which many are open at once.

    Args:
        seed: which ones.
        open_at_once: conversations from which the next turn may come.
        unit: every segment is a multiple of this many blocks.
    """
    rng = random.Random(seed)
    ids = itertools.count(1)
    text = _Text(rng, ids, unit)
    systems = [text.uniform(*SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    documents = [text.log_uniform(*DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    system_weights = _zipf(SYSTEM_PROMPTS)
    document_weights = _zipf(DOCUMENTS)
    histories: list[tuple[Segment, ...]] = []
    while True:
        if len(histories) < open_at_once:
            history = tuple(rng.choices(systems, cum_weights=system_weights))
            if rng.random() < WITH_DOCUMENT:
                history += tuple(rng.choices(documents, cum_weights=document_weights))
        else:
            history = _taken(histories, rng.randrange(len(histories)))
        request = Request(
            (*history, text.log_normal(*TURN_TOKENS)), text.log_normal(*ANSWER_TOKENS)
        )
        yield request
        assert request.answer is not None
        history = (*request.prompt, request.answer)
        if rng.random() > 1 / TURNS and _tokens(history) < LONGEST_TOKENS:
            histories.append(history)


def trace(path: Path) -> Iterator[Request]:
    """Yield the requests of a trace: JSON lines with `input_length`, `output_length`, `hash_ids`.

    Equal hash ids are equal blocks of 512 tokens after equal prefixes. What is left of a prompt
    after its last whole block of 16 tokens is left out.
    """
    answers = itertools.count(1 << 40)
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            ids: list[int] = entry["hash_ids"]
            last = (entry["input_length"] - TRACE_BLOCK * (len(ids) - 1)) // BLOCK_SIZE
            whole = [Segment(i, TRACE_BLOCK // BLOCK_SIZE) for i in ids[:-1]]
            prompt = (*whole, Segment(ids[-1], last)) if last else tuple(whole)
            blocks = entry["output_length"] // BLOCK_SIZE
            if prompt:
                yield Request(prompt, Segment(next(answers), blocks) if blocks else None)


class _Text:
    """Makes new segments of random lengths."""

    def __init__(self, rng: random.Random, ids: Iterator[int], unit: int) -> None:
        self._rng = rng
        self._ids = ids
        self._unit = unit

    def uniform(self, shortest: int, longest: int) -> Segment:
        return self._segment(self._rng.uniform(shortest, longest))

    def log_uniform(self, shortest: int, longest: int) -> Segment:
        return self._segment(shortest * (longest / shortest) ** self._rng.random())

    def log_normal(self, median: float, sigma: float) -> Segment:
        return self._segment(median * self._rng.lognormvariate(0, sigma))

    def _segment(self, tokens: float) -> Segment:
        units = max(1, round(tokens / BLOCK_SIZE / self._unit))
        return Segment(next(self._ids), units * self._unit)


def _zipf(count: int) -> list[float]:
    """Cumulative weights by which the first is asked for most."""
    return list(itertools.accumulate(1 / (place + 1) for place in range(count)))


def _taken(histories: list[tuple[Segment, ...]], place: int) -> tuple[Segment, ...]:
    histories[place], histories[-1] = histories[-1], histories[place]
    return histories.pop()


def _tokens(history: tuple[Segment, ...]) -> int:
    return sum(segment.blocks for segment in history) * BLOCK_SIZE
