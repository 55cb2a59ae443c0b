"""Prompts of which each of some ranks holds a part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, TypeAlias

from benchmarks.workload.fleet import Change, Fleet
from benchmarks.workload.prompts import PROMPT_TOKENS
from benchmarks.workload.segments import BLOCK_SIZE, Segment

HELD_BY: Final = {"all": 1.0, "half": 0.5, "none": 0.0}
"""Kinds of prompts: which part of the ranks holds any of it."""

Parted: TypeAlias = tuple[Segment, ...]
"""A prompt in as many pieces as there are different parts to hold."""

_PIECES: Final = 8
_FIRST_ID: Final = 1 << 52  # of the segments; the workload's own ids are smaller


def parted(kind: str, count: int) -> list[Parted]:
    """Return prompts of 8,192 tokens, the same for every fleet."""
    first = _FIRST_ID + (list(HELD_BY).index(kind) << 32)
    blocks = PROMPT_TOKENS // BLOCK_SIZE // _PIECES
    return [
        tuple(Segment(first + _PIECES * prompt + piece, blocks) for piece in range(_PIECES))
        for prompt in range(count)
    ]


def place_parts(fleet: Fleet, prompt: Parted, held_by: float, seed: int) -> Iterator[Change]:
    """Make a part of a prompt, an eighth to all of it, resident on this part of the ranks."""
    rng = random.Random(seed)
    for rank in sorted(rng.sample(range(fleet.ranks), round(held_by * fleet.ranks))):
        yield from fleet.place_segments(rank, prompt[: rng.randint(1, _PIECES)])
