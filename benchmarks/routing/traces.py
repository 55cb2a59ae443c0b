"""Requests from a file in Mooncake's format."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from benchmarks.routing.traffic import BLOCK, Session, Turn

_GRID: Final = 3_000.0  # ms; what was written within so many has one timestamp


def mooncake(file: Path, *, speed: float, seed: int, most: int | None = None) -> list[Session]:
    """Return each request of a trace as a session of its own.

    Requests with the same timestamp are spread at random up to the next timestamp, because traces
    are written on a grid: otherwise every policy sees bursts that were none.

    Args:
        file: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
        speed: how many times faster than they were recorded the requests come.
        seed: of the spread.
        most: at most so many requests, the first ones.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()[:most]]
    rng = random.Random(seed)
    return [Session(arrival / 1e3 / speed, (_turn(row),)) for row, arrival in _spread(rows, rng)]


def _turn(row: dict[str, Any]) -> Turn:
    whole = row["input_length"] // BLOCK
    names = tuple(name + 1 for name in row["hash_ids"][:whole])
    return Turn(0.0, row["input_length"], max(1, row["output_length"]), names)


def _spread(rows: list[dict[str, Any]], rng: random.Random) -> list[tuple[dict[str, Any], float]]:
    together: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        together[row["timestamp"]].append(row)
    times = sorted(together)
    spread = []
    for begin, end in zip(times, [*times[1:], times[-1] + _GRID], strict=True):
        width = min(end - begin, _GRID)
        # The order of the file is kept: a conversation's turns are in it one after the other.
        offsets = sorted(rng.random() * width for _ in together[begin])
        spread += [(row, begin + o) for row, o in zip(together[begin], offsets, strict=True)]
    return spread
