"""Requests, in sessions: each turn of a session waits for the answer to the one before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK: Final = 512
"""Tokens in a block: a trace names its prompts by blocks of so many tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        gap: seconds from the end of the turn before it (from the session's start, for the first).
        prompt: tokens of the prompt.
        output: tokens that are generated, at least one.
        blocks: a name from 1 on for each whole block of the prompt, and for those of its answer
            that may be asked for again. Equal names mean equal tokens and equal beginnings.
    """

    gap: float
    prompt: int
    output: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, one after the other.

    Attributes:
        start: seconds after the run's beginning; of a branch, after the session's.
        branches: sessions that begin while it runs: the sub-agents of an agent.
    """

    start: float
    turns: tuple[Turn, ...]
    branches: tuple[Session, ...] = ()


def tokens_of(turn: Turn) -> memoryview:
    """Return a prompt's token ids: every token of a block is the block's name."""
    full, tail = divmod(turn.prompt, BLOCK)
    packed = [name.to_bytes(4, "little") * BLOCK for name in turn.blocks[:full]]
    packed.append(bytes(4 * tail))
    return memoryview(b"".join(packed)).cast("I")
