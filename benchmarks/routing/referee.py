"""The same requests in a second simulator, NVIDIA Dynamo's: do both say the same of policies?"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import venvs
from benchmarks.bench import Bench
from benchmarks.results import Result
from benchmarks.routing import replay
from benchmarks.routing.runs import Fleet, Run, Traffic, simulate
from benchmarks.routing.traffic import BLOCK, Session

SPEEDS = (2.0, 4.0)
POLICIES = ("round-robin", "dynamo", "dynamo-agentic")


def referee(bench: Bench, seeds: Sequence[int]) -> list[Result]:
    """Return what both simulators make of each trace under the policies that both have."""
    python = venvs.python_of("dynamo-replay", bench.folder)
    return [
        result
        for file in bench.request_traces
        for speed in SPEEDS
        for result in _compared(
            Traffic(file.stem, speed, bench.scale.routing_trace, file), python, seeds[0]
        )
    ]


def _compared(traffic: Traffic, python: str, seed: int) -> list[Result]:
    fleet = Fleet()
    theirs = _replayed(traffic.sessions(fleet, seed), python, fleet)
    note = (
        "The same requests at the same moments in both, one seed, 8 ranks with equal caches. The "
        "engines' models of time differ (Dynamo's prefills about three times as fast), so compare "
        "the order and the hits, not the milliseconds."
    )
    results = []
    for policy in POLICIES:
        ours = simulate(Run(traffic, policy, seed, fleet))
        values = {
            "ours: mean": ours.mean,
            "ours: p99": ours.p99,
            "ours: hit": 100 * ours.hit,
            **{f"Dynamo's: {name}": value for name, value in theirs[policy].items()},
        }
        results.append(
            Result(
                group=f"two simulators, {traffic}",
                measure=policy,
                unit="ms, %",
                values=values,
                notes=[note],
            )
        )
    return results


def _replayed(sessions: Sequence[Session], python: str, fleet: Fleet) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        file.write_text("".join(map(_line, sessions, itertools.count())))
        sizes = [str(fleet.ranks), str(fleet.model.cache)]
        command = [python, replay.__file__, str(file), *sizes]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def _line(session: Session, number: int) -> str:
    """Write a request in Mooncake's format; a last block that is not whole is its own."""
    (turn,) = session.turns
    whole = turn.prompt // BLOCK
    names = list(turn.blocks[:whole])
    if turn.prompt % BLOCK:
        names.append(2**31 + number)
    row = {
        "timestamp": 1e3 * session.start,
        "input_length": turn.prompt,
        "output_length": turn.output,
        "hash_ids": names,
    }
    return json.dumps(row) + "\n"
