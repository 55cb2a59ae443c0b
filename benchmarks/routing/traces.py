"""Requests from files: in Mooncake's format, or the sessions of agents."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks.routing.traffic import BLOCK, Session, Turn

_GRID: Final = 3_000.0  # ms; what was written within so many has one timestamp
_LONGEST_PAUSE: Final = 300.0  # s; a replay would learn nothing from hours until a user is back
_SPREAD: Final = 60.0  # s
_IDS: Final = BLOCK // 64  # ids in a block

_Names: TypeAlias = "defaultdict[tuple[int, ...], int]"


def has_sessions(file: Path) -> bool:
    """Return whether a trace has the sessions of agents, and not requests with their times."""
    with file.open() as lines:
        return "requests" in json.loads(next(lines))


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


# Agents -------------------------------------------------------------------------------------------


def agents(file: Path, *, seed: int, most: int | None = None) -> list[Session]:
    """Return the sessions of a trace of agents, in an order drawn by a seed.

    Each begins when there is a place for it (see `Simulation.run`); the first ones, spread over a
    minute.

    Args:
        file: JSON lines, one for each session: `tool_tokens` and `system_tokens` (sessions with the
            same two have a prefix of so many tokens in common), and `requests`, each with `in`,
            `out` (tokens), `t` (s from the session's start), `think` (s that the client waited
            before it), and `ids`: the first and the last of each run of ids, an id for each 64
            tokens. An entry with `requests` of its own is a sub-agent that begins at its `t`.
        seed: of the order, and of when the first ones begin.
        most: about so many requests, in whole sessions.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rng = random.Random(seed)
    rng.shuffle(rows)
    names: _Names = defaultdict(itertools.count(1).__next__)
    sessions: list[Session] = []
    requests = 0
    for number, row in enumerate(rows):
        if most is not None and requests >= most:
            break
        sessions.append(_agent(row, rng.random() * _SPREAD, number, names))
        requests += len(row["requests"])
    return sessions


def _agent(row: dict[str, Any], start: float, number: int, names: _Names) -> Session:
    requests = [entry for entry in row["requests"] if "requests" not in entry]
    sizes, first = (row["tool_tokens"], row["system_tokens"]), _last_ids(requests[0])
    common = sum(sizes) // BLOCK
    turns = []
    for request in requests:
        blocks = tuple(
            # Ids are a session's own; only of the common prefix is known that others have it.
            names[(*sizes, place) if place < common and last == first[place] else (number, last)]
            for place, last in enumerate(_last_ids(request))
        )
        turns.append(Turn(_pause(request), request["in"], max(1, request["out"]), blocks))
    branches = tuple(
        _agent(entry, _begin(entry["t"], requests), number, names)
        for entry in row["requests"]
        if "requests" in entry
    )
    return Session(start, tuple(turns), branches)


def _last_ids(request: dict[str, Any]) -> list[int]:
    """Return the last id of each whole block, which stands for all that is before it, too."""
    ends = iter(request["ids"])
    ids = [i for first, last in zip(ends, ends, strict=True) for i in range(first, last + 1)]
    return ids[_IDS - 1 : request["in"] // BLOCK * _IDS : _IDS]


def _pause(request: dict[str, Any]) -> float:
    return min(request["think"] or 0.0, _LONGEST_PAUSE)


def _begin(moment: float, requests: list[dict[str, Any]]) -> float:
    """Return when a sub-agent begins, once the pauses before it are no longer than ours."""
    before = [request for request in requests if request["t"] <= moment]
    cut = sum((request["think"] or 0.0) - _pause(request) for request in before)
    since = moment - before[-1]["t"]
    return float(moment - cut - max(0.0, since - _LONGEST_PAUSE))
