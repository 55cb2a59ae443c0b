"""Prompts that every measurement asks with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from benchmarks.workload.fleet import Fleet, Prompt
from benchmarks.workload.requests import Request
from benchmarks.workload.segments import BLOCK_SIZE, Segment

PROMPT_TOKENS: Final = 8_192

EVERYWHERE: Final = (Segment(1 << 51, PROMPT_TOKENS // BLOCK_SIZE),)
"""A prompt that is placed on every rank, wholly."""

SENTINEL: Final = (Segment(1 << 50, 4),)
"""The chain in each rank's last message: who finds it on every rank has applied all messages."""


def is_long(request: Request) -> bool:
    """Whether a request's prompt has at least PROMPT_TOKENS."""
    return sum(segment.blocks for segment in request.prompt) * BLOCK_SIZE >= PROMPT_TOKENS


def long_prompts(fleet: Fleet, requests: Iterable[Request], count: int) -> list[Prompt]:
    """Return the first `count` long ones, cut to PROMPT_TOKENS, with their answers."""
    found = islice(filter(is_long, requests), count)
    return [fleet.prompt(request.prompt, cut=PROMPT_TOKENS) for request in found]
