"""What is sent: objects that differ from one to the next, so that a wrong order is seen."""

from __future__ import annotations

import random
from typing import Any, Final

OBJECT: Final = 0
"""The size that stands for a small object with fields instead of bytes."""

_MOST_BYTES: Final = 32 << 20  # of all payloads together
_END: Final = 255
_TURN: Final = (61, 7)  # how many differ: primes, so no ring's turn is theirs
_TOKENS: Final = 64


class Payloads:
    """Messages to send in turn, and the one that ends them.

    Args:
        size: bytes of each; OBJECT for dicts of a few fields and 64 token ids.

    Attributes:
        key: where a message has its place in the turn: `message[key]`.
        turn: the messages.
        end: what is sent after the last one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        count = next((n for n in _TURN if n * size <= _MOST_BYTES), _TURN[-1])
        rng = random.Random(size)
        self.key: Any
        self.turn: list[Any]
        self.end: Any
        if size == OBJECT:
            self.key = "seq"
            self.turn = [_fields(place, rng) for place in range(count)]
            self.end = {"seq": _END}
        else:
            body = rng.randbytes(size - 1)
            self.key = 0
            self.turn = [bytes([place]) + body for place in range(count)]
            self.end = bytes([_END])

    def is_end(self, message: Any) -> bool:
        """Return whether this is what is sent after the last message."""
        return bool(message == self.end)

    def warm_up(self, chunks: int) -> list[Any]:
        """Return whole turns that go round the ring at least twice."""
        return self.turn * -(-2 * chunks // len(self.turn))


def object_bytes() -> int:
    """Return about how many bytes an OBJECT takes when encoded."""
    return 5 * _TOKENS


def _fields(place: int, rng: random.Random) -> dict[str, Any]:
    tokens = [rng.randrange(128_256) for _ in range(_TOKENS)]
    return {"rank": place % 8, "seq": place, "tokens": tokens}
