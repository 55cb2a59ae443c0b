"""Sessions of text, made up from a seed: chats, questions about shared documents, agents."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchmarks.fronts import MODEL

ANSWER: Final = 64  # tokens
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_WORDS: Final = 4_000


@dataclass(frozen=True)
class Kind:
    """What sessions are like; sizes in tokens.

    Attributes:
        heads: different beginnings; the first ones are asked for more often if `is_skewed`.
        head: tokens of each.
        turns: requests of a session, one after the other's answer.
        new: what each adds, in the median.
        active: sessions at any time, about.
    """

    heads: int
    head: int
    turns: int
    new: int
    active: int
    is_skewed: bool = False


# Each has more in use than one engine's cache of 60,000 tokens, and less than four of them.
KINDS: Final = {
    "chats": Kind(heads=4, head=1_500, turns=6, new=700, active=36),
    "documents": Kind(heads=40, head=3_000, turns=1, new=100, active=36, is_skewed=True),
    "agents": Kind(heads=1, head=3_000, turns=12, new=500, active=24),
}


class Request(NamedTuple):
    """One request of a session."""

    session: int
    at: float  # seconds after the run's beginning, at the earliest
    body: bytes


class Texts:
    """Text of so many tokens.

    Args:
        tokens_per_word: of the engines' tokenizer.
        share: by what sizes are divided: a dry run needs no long prompts.
    """

    def __init__(self, tokens_per_word: float, share: int = 1) -> None:
        self._per_token = 1 / tokens_per_word / share
        self._words = words()

    def text(self, rng: random.Random, tokens: float) -> str:
        """Return words of about so many tokens."""
        count = max(1, round(tokens * self._per_token))
        return " ".join(rng.choices(self._words, k=count))


def words() -> list[str]:
    """Return the words that all texts are made of."""
    rng = random.Random(0)
    return ["".join(rng.choices(_LETTERS, k=rng.randint(2, 9))) for _ in range(_WORDS)]


def sessions(
    kind: Kind, texts: Texts, *, seed: int, label: str, rate: float, seconds: float
) -> list[list[Request]]:
    """Return sessions that arrive at random; those that began before the run join midway.

    Args:
        kind: what they are like.
        texts: makes their text.
        seed: of everything.
        label: begins each prompt: runs of different labels share nothing in the caches.
        rate: requests a second, in all.
        seconds: how long.
    """
    rng, gap = random.Random(seed), kind.active / rate
    heads = [f"{label} {texts.text(rng, kind.head)}" for _ in range(kind.heads)]
    found: list[list[Request]] = []
    at = -1.5 * gap * kind.turns
    while (at := at + rng.expovariate(rate / kind.turns)) < seconds:
        own = random.Random(rng.random())
        head = heads[int(kind.heads * own.random() ** (3 if kind.is_skewed else 1))]
        when, requests = at, []
        for body in _bodies(kind, texts, own, head):
            if 0 <= when < seconds:
                requests.append(Request(len(found), when, body))
            when += gap * (0.25 + 0.75 * own.expovariate(1.0))
        if requests:
            found.append(requests)
    return found


def _bodies(kind: Kind, texts: Texts, rng: random.Random, head: str) -> Iterator[bytes]:
    """Yield a session's requests; its answers are from the seed, so that all routers get these."""
    messages = [{"role": "system", "content": head}]
    for _ in range(kind.turns):
        new = kind.new * min(3.6, max(0.2, math.exp(rng.gauss(0.0, 0.5))))
        messages.append({"role": "user", "content": texts.text(rng, new)})
        body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER, "stream": True}
        more = {"temperature": 0.0, "stream_options": {"include_usage": True}, "ignore_eos": True}
        yield json.dumps({**body, **more}).encode()
        messages.append({"role": "assistant", "content": texts.text(rng, ANSWER)})
